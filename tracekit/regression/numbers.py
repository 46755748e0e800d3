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
_OTHER_TRAINING_RATIO = 0.01
"""Trainings that differ by more in their first common step have other weights or data from the start."""


@dataclass(frozen=True)
class Difference:
    """The first difference beyond rounding: a metric of a rank in a step, in both trainings.

    Of a step in which checksums of modules differ it is the first module that was called, else the largest difference.
    """

    metric: str
    rank: int
    step: int
    reference: float
    candidate: float
    ratio: float
    """Difference over the larger value; infinite where one of them is not finite."""


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
    is_number = pl.col("name").is_in(LOGGED) | pl.col("name").str.starts_with(conventions.CHECKSUM_PREFIX)
    rows = trace.metrics.filter(is_number, pl.col("step").is_not_null())
    return rows.with_columns(order=pl.int_range(pl.len()).over("step"))


def agreement(reference: pl.DataFrame, candidate: pl.DataFrame) -> Agreement | None:
    """How far the `run_numbers` of two trainings agree, from the first step that both logged; None where none did.

    Metrics are compared by rank and step. The first step counts in which one is further apart than rounding.
    """
    both = reference.join(candidate, on=["step", "name", "rank"], suffix="_after")
    if both.is_empty():
        return None
    before, after = (both[name].to_numpy() for name in ("value", "value_after"))
    are_finite = np.isfinite(before) & np.isfinite(after)
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.abs(after - before) / np.maximum(np.maximum(np.abs(before), np.abs(after)), np.finfo(float).tiny)
    agree = (before == after) | (np.isnan(before) & np.isnan(after))
    ratio = np.where(agree, 0.0, np.where(are_finite, apart, np.inf))
    rows = both.with_columns(ratio=ratio).sort("step", "ratio", descending=[False, True])
    by_step = rows.group_by("step", maintain_order=True).agg(pl.col("ratio").max())
    rounding = 0.0
    is_checksum = pl.col("name").str.starts_with(conventions.CHECKSUM_PREFIX)
    names = both.filter(~is_checksum)["name"].unique().sort().to_list()
    names += ["checksums"] if len(names) < both["name"].n_unique() else []
    for number, (step, largest) in enumerate(by_step.iter_rows()):
        if largest > (least_ratio := max(LEAST_RATIO, _GROWTH * rounding)):
            apart_rows = rows.filter(pl.col("step") == step, pl.col("ratio") > least_ratio)
            modules = apart_rows.filter(is_checksum).sort("order", "rank")
            row = (apart_rows if modules.is_empty() else modules).row(0, named=True)
            values = (row["value"], row["value_after"], row["ratio"])
            return Agreement(
                by_step.height, number, rounding, tuple(names), Difference(row["name"], row["rank"], step, *values)
            )
        rounding = max(rounding, largest)
    return Agreement(by_step.height, by_step.height, rounding, tuple(names))


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
