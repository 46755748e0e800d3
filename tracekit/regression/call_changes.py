"""Why a step takes longer than in another run: extra calls, larger shapes, slower or later calls; they sum to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import polars as pl

from tracekit.analysis.compute import excess_time, step_charges
from tracekit.analysis.time import breakdown
from tracekit.model.run import Run
from tracekit.regression.metrics import STEP_TIME
from tracekit.regression.samples import job_series
from tracekit.regression.step_weights import median_weights, slowest_devices

COLLECTIVES, REST = "collectives", "rest"
KINDS = (*excess_time.KINDS, COLLECTIVES)
"""Those of `excess_time`, and the same collectives, which take longer for a network or for ranks that come late."""
_STEP = ("window", "step")


@dataclass(frozen=True, eq=False)
class CallChanges:
    """By how much the calls of one rank changed the compared step."""

    rows: pl.DataFrame
    """Columns of `excess_time.COLUMNS`, kind of KINDS; the largest change first, negative where the candidate has less.

    Of calls that only one run has, count_change is how many more the candidate has in a step.
    """
    rest_ns: int
    """What the step of the rank differs from that of the slowest rank."""
    ranks: tuple[int, int]
    """The ranks that are compared."""

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Change by kind in ns, the largest first and the rest last; they sum to that of the step."""
        sums = dict(self.rows.group_by("kind").agg(pl.col("excess_ns").sum()).iter_rows())
        changes = {kind: int(sums[kind]) for kind in KINDS if kind in sums}
        return dict(sorted(changes.items(), key=lambda item: -abs(item[1]))) | {REST: self.rest_ns}


def call_changes(
    runs: tuple[Run, Run],
    samples: tuple[pl.DataFrame, pl.DataFrame],
    chosen: tuple[int, int],
    *,
    ranks: Sequence[int] | None,
    change_ns: int,
) -> CallChanges:
    """Split the change of the median step by the calls of one rank of each run.

    `samples` are those of `samples.run_samples`, `ranks` those that are compared (None for all). Steps have the weights
    of the contributions. Collectives are matched apart: what they take longer for is no larger or slower kernel.
    """
    sides = [
        _weighted_charges(run.of_ranks([rank]), table, ranks)
        for run, table, rank in zip(runs, samples, chosen, strict=True)
    ]
    is_wait = excess_time.is_wait()
    before, after = ([_mean_step(side.filter(rows)) for rows in (~is_wait, is_wait)] for side in sides)
    own, between = (excess_time.split(b, a).rows for a, b in zip(before, after, strict=True))
    is_other_call = pl.col("kind").is_in((excess_time.EXTRA, excess_time.LARGER))
    kind = pl.when(is_other_call).then("kind").otherwise(pl.lit(COLLECTIVES)).alias("kind")
    rows = pl.concat([own, between.with_columns(kind)])
    rows = rows.sort(pl.col("excess_ns").abs(), descending=True, maintain_order=True)
    return CallChanges(rows, change_ns - int(rows["excess_ns"].sum()), chosen)


def _weighted_charges(run: Run, samples: pl.DataFrame, ranks: Sequence[int] | None) -> pl.DataFrame:
    """The rows of `step_charges` of each step's slowest device, with the step's weight in the median step."""
    steps, times = job_series(samples.filter(pl.col("metric") == STEP_TIME), ranks)[STEP_TIME]
    weights = pl.DataFrame({"step": steps, "weight": median_weights(times)}).unnest("step").filter(pl.col("weight") > 0)
    devices = slowest_devices(run.table(breakdown.by_step)).drop("duration_ns")
    charges = run.table(step_charges.step_charges)
    located = charges.join(devices, on=devices.columns, how="semi", nulls_equal=True, maintain_order="left")
    return located.join(weights, on=_STEP, nulls_equal=True, maintain_order="left")


def _mean_step(charges: pl.DataFrame) -> pl.DataFrame:
    """Charges whose mean over the steps that have any is their weighted mean."""
    cells = charges.select(pl.struct(excess_time.CELL).n_unique()).item()
    measures = pl.col("calls", "count", "work_ns", "dur_ns")
    return charges.with_columns(measures * pl.col("weight") * cells).drop("weight")
