"""Budgets: what a step, a rank or a unit may take at most, as settings state it, compared with what a run measures.

    [tool.tracekit.budget]
    step_time = "412ms"
    exposed_communication_ratio = 0.15

    [[tool.tracekit.budget.where]]
    unit = "layers.*"  # or rank = "0-3"
    compute = "9ms"

A budget of a metric of which more is better, such as tokens_per_second, is the least that is allowed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import polars as pl

from tracekit.analysis.compute import step_charges
from tracekit.errors import ConfigError
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.regression import metrics
from tracekit.regression.metrics import Metric, Scope, metric_of
from tracekit.regression.samples import Values, job_samples, samples, samples_across
from tracekit.regression.significance import MIN_SAMPLES, student_t, variance_of_median
from tracekit.regression.thresholds import Limit

FACTS: tuple[TraceFact, ...] = (samples, step_charges.unit_samples)
"""What budgets are compared with, except for what several ranks measure together."""

_STRICT, _WHERE, _RANK, _UNIT = "strict", "where", "rank", "unit"
_PROBABILITY = 0.975  # of the upper end of a 95% interval
_FEW_SAMPLES = 3


@dataclass(frozen=True)
class Budgets:
    """All budgets of a project, and whether an inconclusive one fails too."""

    budgets: tuple[Limit, ...] = ()
    is_strict: bool = False


class BudgetOutcome(StrEnum):
    """What became of a budget."""

    MET = "met"
    BROKEN = "broken"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class BudgetResult:
    """A budget and what was measured, both in the metric's own unit."""

    budget: str
    """As the settings name it: ``step_time``, or with the rank or unit that it is for."""
    metric: str
    limit: float
    measured: float | None
    outcome: BudgetOutcome
    message: str
    """One sentence with both numbers in words, or why there is no result."""


@dataclass(frozen=True)
class _Measurement:
    """What one rank, one unit, or the run ('') measured."""

    location: str
    value: float
    samples: Values
    """What the value is the median of; empty where it is exact."""


def parse(value: object) -> Budgets:
    """Return the budgets of a settings table. Raises ConfigError naming the key within it."""
    if not isinstance(value, Mapping):
        raise ConfigError(f'expected a table such as step_time = "412ms", not {value!r}')
    strict = value.get(_STRICT, False)
    if not isinstance(strict, bool):
        raise ConfigError(f"{_STRICT}: expected true or false, not {strict!r}")
    amounts = {key: amount for key, amount in value.items() if key not in (_STRICT, _WHERE)}
    limits = _limits(amounts, "", metrics.all_metrics().values())
    where = value.get(_WHERE, [])
    if not isinstance(where, list):
        raise ConfigError(f"{_WHERE}: expected [[budget.where]] tables with unit or rank, not {where!r}")
    for number, table in enumerate(where):
        limits += _local_limits(table, f"{_WHERE}[{number}]")
    return Budgets(tuple(limits), strict)


def check(run: Run, budgets: Sequence[Limit]) -> tuple[BudgetResult, ...]:
    """Return the outcome of each budget in a run, in the order given.

    A time, a share or a count is that of the median step, of the rank on which it is worst; a peak is the highest. A
    budget is broken where the median is past it and its 95% interval too (or all of three samples and more are); where
    only the median is, the steps are inconclusive. Of a budget for several ranks or units the worst one is reported.
    """
    return tuple(_check(run, budget) for budget in budgets)


def _local_limits(table: object, key: str) -> list[Limit]:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{key}: expected a table with unit or rank, not {table!r}")
    if (_RANK in table) == (_UNIT in table):
        raise ConfigError(f'{key}: expected either unit = "layers.*" or rank = "0-3"')
    limits = {name: amount for name, amount in table.items() if name not in (_RANK, _UNIT)}
    if not limits:
        raise ConfigError(f"{key}: it contains no budget")
    if _UNIT in table:
        unit = table[_UNIT]
        if not isinstance(unit, str) or not unit:
            raise ConfigError(f'{key}: unit: expected a pattern such as "layers.*", not {unit!r}')
        return _limits(limits, f"{key}: ", [metric_of(name) for name in step_charges.UNIT_METRICS], units=unit)
    per_rank = [metric for metric in metrics.all_metrics().values() if metric.has_rank_values]
    return _limits(limits, f"{key}: ", per_rank, ranks=_ranks(table[_RANK], key))


def _limits(
    table: Mapping[str, object], where: str, candidates: Iterable[Metric], *, ranks: str = "", units: str = ""
) -> list[Limit]:
    limits = []
    for name, amount in table.items():
        try:
            metric = metrics.find(name, candidates)
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from None
        try:
            limits.append(Limit(metric.key, metric.unit.amount(amount), ranks=ranks, units=units))
        except ConfigError as error:
            raise ConfigError(f"{where}{name}: {error}") from None
    return limits


def _ranks(value: object, key: str) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str):
        text = text.replace(" ", "")
        spans = [part.partition("-") for part in text.split(",")]
        if text == "*" or all(a.isdecimal() and (b.isdecimal() if dash else not b) for a, dash, b in spans):
            return text
    raise ConfigError(f'{key}: rank: expected a rank, ranks such as "0-3,8", or "*", not {value!r}')


def _check(run: Run, budget: Limit) -> BudgetResult:
    measurements = list(_measurements(run, budget))
    if not measurements:
        reason = _why_missing(run, budget)
        return BudgetResult(budget.name, budget.metric, budget.limit, None, BudgetOutcome.INCONCLUSIVE, reason)
    outcomes = [_outcome(budget, measurement) for measurement in measurements]
    broken = [m for m, outcome in zip(measurements, outcomes, strict=True) if outcome is BudgetOutcome.BROKEN]
    worst = (min if budget.is_minimum else max)(broken or measurements, key=lambda measurement: measurement.value)
    outcome = _outcome(budget, worst)
    message = _message(budget, worst, outcome, len(broken) - 1)
    return BudgetResult(budget.name, budget.metric, budget.limit, worst.value, outcome, message)


def _outcome(budget: Limit, measured: _Measurement) -> BudgetOutcome:
    if not budget.is_beyond(measured.value):
        return BudgetOutcome.MET
    values = measured.samples
    if not len(values) or (len(values) >= _FEW_SAMPLES and all(budget.is_beyond(value) for value in values)):
        return BudgetOutcome.BROKEN
    low, high = _interval(measured)
    is_sure = len(values) >= MIN_SAMPLES and budget.is_beyond(high if budget.is_minimum else low)
    return BudgetOutcome.BROKEN if is_sure else BudgetOutcome.INCONCLUSIVE


def _interval(measured: _Measurement) -> tuple[float, float]:
    degrees = max(3, len(measured.samples) - 1)
    margin = student_t(_PROBABILITY, degrees) * float(np.sqrt(variance_of_median(measured.samples)))
    return measured.value - margin, measured.value + margin


def _measurements(run: Run, budget: Limit) -> Iterator[_Measurement]:
    metric = metric_of(budget.metric)
    if metric.scope is Scope.RUN:
        values = metric.of_run(run)["value"].drop_nulls() if metric.of_run else pl.Series([])
        if len(values):
            yield _Measurement("", float(np.median(values.to_numpy())), np.empty(0))
        return
    if budget.units:
        yield from _of_units(run, budget)
        return
    table = run.table(samples_across) if metric.of_run else run.table(samples)
    metric_rows = table.filter(pl.col("metric") == budget.metric).drop_nulls("value")
    if budget.ranks:
        for (rank,), rows in metric_rows.group_by("rank", maintain_order=True):
            if isinstance(rank, int) and budget.applies_to_rank(rank):
                yield from _of_samples(metric, rows, f"rank {rank}")
    else:
        yield from _of_samples(metric, metric_rows, "")


def _of_samples(metric: Metric, rows: pl.DataFrame, location: str) -> Iterator[_Measurement]:
    if rows.is_empty():
        return
    if metric.is_peak:
        yield _Measurement(location, float(rows["value"].to_numpy().max()), np.empty(0))
        return
    values = job_samples(rows)[metric.key]
    yield _Measurement(location, float(np.median(values)), values)


def _of_units(run: Run, budget: Limit) -> Iterator[_Measurement]:
    unit_rows = run.table(step_charges.unit_samples).filter(pl.col("metric") == budget.metric)
    worst = unit_rows.group_by("unit", "window", "step").agg(pl.col("value").max()).sort("unit", "window", "step")
    for (unit,), rows in worst.group_by("unit", maintain_order=True):
        if isinstance(unit, str) and budget.applies_to_unit(unit):
            values = rows["value"].to_numpy()
            yield _Measurement(f"unit {unit}" if unit else "the root unit", float(np.median(values)), values)


def _why_missing(run: Run, budget: Limit) -> str:
    if budget.units:
        return f"not measured: the run has no unit {budget.units}."
    if budget.ranks and not any(budget.applies_to_rank(rank) for rank in run.ranks):
        return f"not measured: the run has ranks {units.ranges(run.ranks)}, not {budget.ranks}."
    return f"not measured: {metric_of(budget.metric).if_missing}."


def _message(budget: Limit, measured: _Measurement, outcome: BudgetOutcome, other_count: int) -> str:
    text = metric_of(budget.metric).text
    preposition = "on" if measured.location.startswith("rank") else "in"
    where = f" {preposition} {measured.location}" if measured.location else ""
    more = f", and {other_count} more exceed it" if other_count > 0 else ""
    bound = "at least" if budget.is_minimum else "at most"
    message = f"{text(measured.value)}{where}, {bound} {text(budget.limit)} is allowed{more}"
    if outcome is not BudgetOutcome.INCONCLUSIVE:
        return f"{message}."
    count = len(measured.samples)
    if count < MIN_SAMPLES:
        return f"{message}: with {count} samples that may be chance, record {MIN_SAMPLES} or more."
    low, high = _interval(measured)
    return f"{message}: inconclusive, the interval of {count} samples is {text(low)} to {text(high)}; record more."
