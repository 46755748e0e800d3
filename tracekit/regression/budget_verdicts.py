"""Budgets held against what a run measures."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.checkpoint import saves
from tracekit.analysis.compute import unit_work
from tracekit.model import escaping, units
from tracekit.model.run import Run
from tracekit.model.trace import Fact
from tracekit.regression.budgets import CHECKPOINT_OVERHEAD, OF_RANKS_TOGETHER, Budget
from tracekit.regression.change import MIN_SAMPLES, Values
from tracekit.regression.comparison import job_samples
from tracekit.regression.gate import BudgetOutcome, BudgetResult
from tracekit.regression.quantities import is_share
from tracekit.regression.recording_test import student_t, variance_of_median
from tracekit.regression.samples import samples, samples_across

FACTS: tuple[Fact, ...] = (samples, unit_work.unit_samples)
"""What budgets are held against, beside the facts of saves."""

_SURE = 0.975
_FEW_SAMPLES = 3
_NO_METRIC = {
    "checkpoint": "the run saves no checkpoint, or its log is not beside the traces (tracekit.capture records it)",
    "peak": "no memory events were recorded (profile_memory=True, or tracekit.capture)",
    "allocat": "no memory events were recorded (profile_memory=True, or tracekit.capture)",
    "tokens": "no log tells the tokens of a step (tracekit.capture: Recorder.step(tokens=…))",
    "cpu_time": "no log tells the time of processors (tracekit.capture records it)",
    "data_wait": "no log tells the wait for data (tracekit.capture records it)",
}


@dataclass(frozen=True)
class _Measured:
    """What a budget is held against at one place: a rank, a unit, or the run ('')."""

    place: str
    value: float
    samples: Values
    """What the value is the median of; empty where it is known as it is."""


def judge(run: Run, budgets: Sequence[Budget]) -> tuple[BudgetResult, ...]:
    """Return what becomes of each budget in a run, in the order given.

    A time, a share or a count is that of the median step, of the rank on which it is worst; a peak is the highest. A
    budget is broken where the median is past it and its 95% interval too (or all of three samples and more are); where
    only the median is, these steps cannot tell. The share that saves take is the median over the steps that something
    is saved after, of all of it together. Of a budget for several ranks or units the worst place is told.
    """
    return tuple(_judge(run, budget) for budget in budgets)


def _judge(run: Run, budget: Budget) -> BudgetResult:
    found = list(_measured(run, budget))
    if not found:
        return BudgetResult(
            budget.name, budget.metric, budget.limit, None, BudgetOutcome.CANNOT_TELL, _lacking(run, budget)
        )
    least = budget.is_minimum
    worst = (min if least else max)(found, key=lambda each: each.value)
    outcomes = [_outcome(budget, each) for each in found]
    if BudgetOutcome.BROKEN in outcomes:
        broken = [each for each, outcome in zip(found, outcomes, strict=True) if outcome is BudgetOutcome.BROKEN]
        worst = (min if least else max)(broken, key=lambda each: each.value)
        outcome, others = BudgetOutcome.BROKEN, len(broken) - 1
    else:
        outcome, others = _outcome(budget, worst), 0
    message = _message(budget, worst, outcome, others)
    return BudgetResult(budget.name, budget.metric, budget.limit, worst.value, outcome, message)


def _outcome(budget: Budget, measured: _Measured) -> BudgetOutcome:
    if not budget.is_beyond(measured.value):
        return BudgetOutcome.KEPT
    values = measured.samples
    if not len(values) or (len(values) >= _FEW_SAMPLES and all(budget.is_beyond(value) for value in values)):
        return BudgetOutcome.BROKEN
    low, high = _interval(measured)
    sure = len(values) >= MIN_SAMPLES and budget.is_beyond(high if budget.is_minimum else low)
    return BudgetOutcome.BROKEN if sure else BudgetOutcome.CANNOT_TELL


def _interval(measured: _Measured) -> tuple[float, float]:
    degrees = max(3, len(measured.samples) - 1)
    reach = student_t(_SURE, degrees) * float(np.sqrt(variance_of_median(measured.samples)))
    return measured.value - reach, measured.value + reach


def _measured(run: Run, budget: Budget) -> Iterator[_Measured]:
    if budget.metric == CHECKPOINT_OVERHEAD:
        ratios = saves.by_training_step(run.run_table(saves.by_save), run.run_table(saves.by_rank))[
            "overhead_ratio"
        ].drop_nulls()
        if len(ratios):
            yield _Measured("", float(np.median(ratios.to_numpy())), np.empty(0))
        return
    if budget.units:
        yield from _of_units(run, budget)
        return
    table = run.run_table(samples_across) if budget.metric in OF_RANKS_TOGETHER else run.table(samples)
    mine = table.filter(pl.col("metric") == budget.metric).drop_nulls("value")
    if budget.ranks:
        for (rank,), rows in mine.group_by("rank", maintain_order=True):
            if isinstance(rank, int) and budget.applies_to_rank(rank):
                yield from _of_samples(budget, rows, f"rank {rank}")
    else:
        yield from _of_samples(budget, mine, "")


def _of_samples(budget: Budget, rows: pl.DataFrame, place: str) -> Iterator[_Measured]:
    if rows.is_empty():
        return
    if budget.metric.startswith("peak_"):
        yield _Measured(place, float(rows["value"].to_numpy().max()), np.empty(0))
        return
    values = job_samples(rows)[budget.metric]
    yield _Measured(place, float(np.median(values)), values)


def _of_units(run: Run, budget: Budget) -> Iterator[_Measured]:
    mine = run.table(unit_work.unit_samples).filter(pl.col("metric") == budget.metric)
    worst = mine.group_by("unit", "window", "step").agg(pl.col("value").max()).sort("unit", "window", "step")
    for (unit,), rows in worst.group_by("unit", maintain_order=True):
        if isinstance(unit, str) and budget.applies_to_unit(unit):
            values = rows["value"].to_numpy()
            yield _Measured(f"unit {unit}" if unit else "the root unit", float(np.median(values)), values)


def _lacking(run: Run, budget: Budget) -> str:
    if budget.units:
        return f"cannot be told: no unit of the run is called {budget.units}."
    if budget.ranks and not any(budget.applies_to_rank(rank) for rank in run.ranks):
        return f"cannot be told: the run has ranks {units.ranges(run.ranks)}, not {budget.ranks}."
    why = next((words for start, words in _NO_METRIC.items() if budget.metric.startswith(start)), None)
    return f"cannot be told: {why or 'the traces mark no steps'}."


def _message(budget: Budget, measured: _Measured, outcome: BudgetOutcome, others: int) -> str:
    words = _words(budget.metric)
    where = f" on {measured.place}" if measured.place.startswith("rank") else ""
    where = where or (f" in {measured.place}" if measured.place else "")
    more = f", and {others} more are past it" if others else ""
    bound = "at least" if budget.is_minimum else "at most"
    told = f"{words(measured.value)}{where}, {bound} {words(budget.limit)} are allowed{more}"
    if outcome is not BudgetOutcome.CANNOT_TELL:
        return f"{told}."
    if len(measured.samples) < MIN_SAMPLES:
        return f"{told}: of {len(measured.samples)} samples that may be chance, record {MIN_SAMPLES} or more."
    low, high = _interval(measured)
    count = len(measured.samples)
    return f"{told}: by {count} samples it is from {words(low)} to {words(high)}, which cannot tell; record more."


def _words(metric: str) -> Callable[[float], str]:
    if metric.endswith("_ns"):
        return units.duration
    if metric.endswith("_bytes"):
        return units.size
    return units.share if is_share(metric) else lambda value: escaping.cell(metric, value)
