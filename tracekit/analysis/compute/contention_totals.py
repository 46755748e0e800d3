"""Contention totals over all kinds of work: by phase, and the calls that lost most."""

import polars as pl

from tracekit.analysis.compute import collective_contention, contention
from tracekit.analysis.compute.concurrency import COMMUNICATION, COMPUTE, PREPARATION
from tracekit.model.run import Run
from tracekit.model.trace import Fact

PHASE_COLUMNS = {
    "rank": pl.Int64, "phase": pl.String, "kind": pl.String, "concurrent_kind": pl.String, "calls": pl.Int64,
    "overlapped_ns": pl.Int64, "judged_ns": pl.Int64, "lost_ns": pl.Int64,
}  # fmt: skip
CALL_COLUMNS = {
    "kind": pl.String, "concurrent_kind": pl.String, "lost_ns": pl.Int64, "dur_ns": pl.Int64, "alone_ns": pl.Int64,
    "name": pl.String, "unit": pl.String, "phase": pl.String, "step": pl.Int64, "window": pl.Int64, "rank": pl.Int64,
    "start_ns": pl.Int64,
}  # fmt: skip
FACTS: tuple[Fact, ...] = (
    contention.by_step, contention.by_kernel, contention.preparation, collective_contention.calls,
)  # fmt: skip
"""The facts that the run tables of this module read."""
MAX_CALLS = 100


def by_phase(run: Run) -> pl.DataFrame:
    """Return how long each kind of work of a rank overlapped another in each phase, and the loss.

    Columns PHASE_COLUMNS, as `contention.by_step`, including collectives with concurrent compute; summed over steps,
    units, devices and windows. Use ``run.run_table``.
    """
    key = ["rank", "phase", "kind", "concurrent_kind"]
    both = pl.concat(
        part.select(*key, "calls", "overlapped_ns", "judged_ns", "lost_ns")
        for part in (run.table(contention.by_step), run.run_table(collective_contention.by_step))
    )
    summed = both.group_by(key).agg(pl.col("calls", "overlapped_ns", "judged_ns", "lost_ns").sum())
    return summed.select(pl.col(name).cast(dtype) for name, dtype in PHASE_COLUMNS.items()).sort(key)


def costliest_calls(run: Run) -> pl.DataFrame:
    """Return the calls with the largest loss to concurrent work, at most MAX_CALLS; use ``run.run_table``.

    Columns CALL_COLUMNS: kind and concurrent_kind (of `concurrency.KINDS`), lost_ns (duration less alone_ns, the solo
    duration of the same work), start_ns (on the clock of the rank's trace). Of each compute kernel only the costliest
    call counts; each preparation kernel counts; each collective counts once, on the rank that waited least.
    """
    prepared = run.table(contention.preparation).drop_nulls("alone_ns")
    prepared = prepared.filter(pl.col("overlapped_ns") * 2 > pl.col("dur_ns")).with_columns(
        kind=pl.lit(PREPARATION), concurrent_kind=pl.lit(COMPUTE)
    )
    kernels = run.table(contention.by_kernel).filter(pl.col("kind") == COMPUTE)
    calls = (
        run.run_table(collective_contention.compared_calls)
        .filter("judged")
        .sort("dur_ns", "rank")
        .unique(["window", "instance"], keep="first", maintain_order=True)
        .with_columns(kind=pl.lit(COMMUNICATION), concurrent_kind=pl.lit(COMPUTE), lost_ns=pl.col("excess_ns"))
    )
    lost_ns = pl.col("dur_ns") - pl.col("alone_ns")
    parts = (prepared.with_columns(lost_ns=lost_ns), kernels.with_columns(lost_ns=lost_ns), calls)
    return (
        pl.concat(_conformed(part) for part in parts)
        .filter(pl.col("lost_ns") > 0)
        .sort("lost_ns", "start_ns", descending=[True, False])
        .head(MAX_CALLS)
    )


def _conformed(part: pl.DataFrame) -> pl.DataFrame:
    return part.select(
        (pl.col(name) if name in part.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in CALL_COLUMNS.items()
    )
