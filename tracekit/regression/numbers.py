"""Numbers of two trainings, loss and gradient norm: up to which step they agree, and where they first differ."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.model.fact import trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace

LOGGED = (conventions.LOSS_METRIC, conventions.GRADIENT_NORM_METRIC)
LEAST_RATIO = 1e-6
"""Smaller differences are rounding in any case: sums in fp32 in another order differ by some 1e-7."""
_GROWTH = 30.0
"""A difference is no rounding if it is so many times the largest of all earlier steps. Rounding of one step is carried
on by the weights and grows from step to step, by less than that: 2 to 5 times in our trainers with fp32 and SGD."""
NUMBER_COLUMNS = {"step": pl.Int64, "name": pl.String, "rank": pl.Int64, "value": pl.Float64, "order": pl.Int64}
_LEAST_EXACT_RATIO, _EXACT_STEPS = 1e-12, 2
"""After so many steps whose checksums, sums of many values in fp64, are equal to the last bit, kernels are
deterministic, and differences below rounding are of the training: a learning rate of 1.0001 times changes sums of
weights by 1e-7 in a step."""
_OTHER_TRAINING_RATIO = 0.01
"""Trainings that differ by more in their first common step have other weights or data from the start."""


@dataclass(frozen=True)
class Difference:
    """The first difference beyond rounding: a metric of a rank in a step, in both trainings.

    Of a step in which checksums differ it is the first one that was computed (outputs of modules, their gradients on
    the rank, the gradients after reduction, the weights after the step), else the largest difference.
    """

    metric: str
    rank: int
    step: int
    reference: float | None
    candidate: float | None
    """None where this side has no such value in the step: the rank did not run the module."""
    ratio: float
    """Difference over the larger value; infinite where one of them is missing or not finite."""
    ranks: tuple[int, ...] = ()
    """All ranks whose value of the metric differs in the step."""
    is_of_all_ranks: bool = False
    """Whether these are all ranks that logged it."""
    other_modules: int = 0
    """How many other modules' checksums of the same kind differ in the step."""


@dataclass(frozen=True)
class Agreement:
    """How far the numbers of two trainings agree.

    `steps` are those that both logged, `agreed_steps` those before the first difference, and `rounding_ratio` is the
    largest difference in these.
    """

    steps: int
    agreed_steps: int
    rounding_ratio: float
    metrics: tuple[str, ...]
    first: Difference | None = None

    @property
    def is_other_training(self) -> bool:
        """Whether the numbers differ from the first step on by more than a mistake in a formula makes of them."""
        return self.first is not None and not self.agreed_steps and self.first.ratio > _OTHER_TRAINING_RATIO


@trace_fact
def logged_numbers(trace: Trace) -> pl.DataFrame:
    """Loss, gradient norm and checksums of modules of each step by a rank's metrics log.

    Columns as METRICS, and order: the place of the metric among those of the step, modules in the order of their calls.
    """
    is_number = pl.col("name").is_in(LOGGED) | _is_checksum()
    rows = trace.metrics.filter(is_number, pl.col("step").is_not_null())
    return rows.with_columns(order=pl.int_range(pl.len()).over("step"))


def _is_checksum() -> pl.Expr:
    return _kind_of_checksum().is_not_null()


def _kind_of_checksum() -> pl.Expr:
    """Place of a metric's kind in the order in which a step computes checksums; null for other metrics."""
    kinds = enumerate(conventions.CHECKSUM_PREFIXES)
    name = pl.col("name").str
    return pl.coalesce(pl.when(name.starts_with(prefix)).then(pl.lit(kind)) for kind, prefix in kinds)


def agreement(reference: pl.DataFrame, candidate: pl.DataFrame) -> Agreement | None:
    """How far the `run_numbers` of two trainings agree, from the first step that both logged; None where none did.

    Metrics are compared by rank and step. The first step counts in which one is further apart than rounding.
    """
    rows = _compared_values(reference, candidate)
    if rows.is_empty():
        return None
    by_step = rows.group_by("step", maintain_order=True).agg(pl.col("ratio").max())
    rounding = 0.0
    names = rows.filter(~_is_checksum())["name"].unique().sort().to_list()
    names += ["checksums"] if len(names) < rows["name"].n_unique() else []
    for number, (step, largest) in enumerate(by_step.iter_rows()):
        is_exact = "checksums" in names and number >= _EXACT_STEPS and not rounding
        if largest > (least_ratio := _LEAST_EXACT_RATIO if is_exact else max(LEAST_RATIO, _GROWTH * rounding)):
            first = _first_difference(rows.filter(step=step), least_ratio)
            return Agreement(by_step.height, number, rounding, tuple(names), first)
        rounding = max(rounding, largest)
    return Agreement(by_step.height, by_step.height, rounding, tuple(names))


def _compared_values(reference: pl.DataFrame, candidate: pl.DataFrame) -> pl.DataFrame:
    """Values of both trainings and how far they are apart: columns of `_BOTH`, by step, the largest ratio first.

    A checksum that one training lacks in a step that both logged, though not in others, has a value on one side only:
    the rank skipped the module. Other metrics may be logged every few steps.
    """
    sides = []
    for side, other in ((reference, candidate), (candidate, reference)):
        common = side.join(other.select("step", "rank").unique(), on=["step", "rank"], how="semi")
        sides.append(common.join(other.select("name", "rank").unique(), on=["name", "rank"], how="semi"))
    key = ["step", "name", "rank"]
    both = sides[0].join(sides[1], on=key, how="full", coalesce=True, suffix="_after")
    is_one_missing = pl.col("value").is_null() | pl.col("value_after").is_null()
    both = both.filter(~is_one_missing | _is_checksum())
    before, after = (both[name].to_numpy() for name in ("value", "value_after"))
    are_finite = np.isfinite(before) & np.isfinite(after)
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.abs(after - before) / np.maximum(np.maximum(np.abs(before), np.abs(after)), np.finfo(float).tiny)
    agree = (before == after) | (np.isnan(before) & np.isnan(after))
    ratio = np.where(agree, 0.0, np.where(are_finite, apart, np.inf))
    order = pl.coalesce("order", "order_after")
    return both.with_columns(order, ratio=ratio).select(*_BOTH).sort("step", "ratio", descending=[False, True])


_BOTH = ("step", "name", "rank", "value", "value_after", "order", "ratio")


def _first_difference(rows: pl.DataFrame, least_ratio: float) -> Difference:
    """Difference of a step whose largest ratio is above `least_ratio`: that of the first checksum, else the largest."""
    apart = rows.filter(pl.col("ratio") > least_ratio)
    checksums = apart.filter(_is_checksum()).with_columns(kind=_kind_of_checksum()).sort("kind", "order", "rank")
    same_kind = checksums.filter(pl.col("kind") == pl.col("kind").min())
    row = (apart if same_kind.is_empty() else _not_rescaled(same_kind, least_ratio)).row(0, named=True)
    ranks = apart.filter(name=row["name"])["rank"].unique().sort()
    return Difference(
        row["name"],
        row["rank"],
        row["step"],
        row["value"],
        row["value_after"],
        row["ratio"],
        ranks=tuple(ranks),
        is_of_all_ranks=len(ranks) == rows.filter(name=row["name"])["rank"].n_unique(),
        other_modules=max(same_kind["name"].n_unique() - 1, 0),
    )


def _not_rescaled(checksums: pl.DataFrame, least_ratio: float) -> pl.DataFrame:
    """Checksums that differ by another factor than most of their rank do; all of them where none does.

    One gradient that is wrong changes the gradient norm, and clipping multiplies all others by another factor.
    """
    factors = checksums.with_columns(factor=pl.col("value_after") / pl.col("value"))
    is_same = (pl.col("factor") / pl.col("factor").median().over("rank") - 1).abs() <= max(least_ratio, LEAST_RATIO)
    is_common = 2 * factors.select(is_same.sum()).item() > checksums.height
    others = factors.filter(~is_same | is_same.is_null())
    return others if is_common and not others.is_empty() else checksums


def agreement_with_any(recordings: Sequence[pl.DataFrame], candidate: pl.DataFrame) -> Agreement | None:
    """The agreement with the recording of the same training that agrees longest; None where none logged a common step.

    Recordings of one training may have other seeds.
    """
    agreements = (agreement(recording, candidate) for recording in recordings)
    return max(
        (numbers for numbers in agreements if numbers is not None),
        key=lambda numbers: (numbers.first is None, numbers.agreed_steps),
        default=None,
    )


def run_numbers(run: Run) -> pl.DataFrame:
    """Logged numbers of a run, with NUMBER_COLUMNS; of a step that was logged twice (a resumed training) the last."""
    rows = run.table(logged_numbers).drop_nulls("value").select(*NUMBER_COLUMNS)
    return rows.unique(["step", "name", "rank"], keep="last", maintain_order=True)
