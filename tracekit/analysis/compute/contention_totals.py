"""Contention totals over all kinds of work: by phase, and the calls that lost most."""

import polars as pl

from tracekit.analysis.compute import collective_contention, contention
from tracekit.analysis.compute.concurrency import COMMUNICATION, COMPUTE, PREPARATION
from tracekit.model import schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact

PHASE_COLUMNS = schema.columns("rank phase kind concurrent_kind calls overlapped_ns judged_ns lost_ns")
CALL_COLUMNS = schema.columns("kind concurrent_kind lost_ns dur_ns alone_ns name unit phase step window rank start_ns")
FACTS: tuple[TraceFact, ...] = (
    contention.by_step, contention.by_kernel, contention.preparation, collective_contention.calls,
)  # fmt: skip
"""The facts that the run tables of this module read."""
MAX_CALLS = 100


@run_fact
def by_phase(run: Run) -> pl.DataFrame:
    """Time in which each kind of work of a rank overlapped another in each phase, and the loss.

    Columns PHASE_COLUMNS, as `contention.by_step`, including collectives with concurrent compute; summed over steps,
    units, devices and windows. Use ``run.run_table``.
    """
    key = ["rank", "phase", "kind", "concurrent_kind"]
    both = pl.concat(
        part.select(*key, "calls", "overlapped_ns", "judged_ns", "lost_ns")
        for part in (run.table(contention.by_step), run.table(collective_contention.by_step))
    )
    summed = both.group_by(key).agg(pl.col("calls", "overlapped_ns", "judged_ns", "lost_ns").sum())
    return schema.select(summed, PHASE_COLUMNS).sort(key)


@run_fact
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
    kernels = run.scan(contention.by_kernel).filter(pl.col("kind") == COMPUTE).collect()
    calls = (
        run.table(collective_contention.compared_calls)
        .filter("judged")
        .sort("dur_ns", "rank")
        .unique(["window", "instance"], keep="first", maintain_order=True)
        .with_columns(kind=pl.lit(COMMUNICATION), concurrent_kind=pl.lit(COMPUTE), lost_ns=pl.col("excess_ns"))
    )
    lost_ns = pl.col("dur_ns") - pl.col("alone_ns")
    parts = (prepared.with_columns(lost_ns=lost_ns), kernels.with_columns(lost_ns=lost_ns), calls)
    return (
        pl.concat(schema.conform(part, CALL_COLUMNS) for part in parts)
        .filter(pl.col("lost_ns") > 0)
        .sort("lost_ns", "start_ns", descending=[True, False])
        .head(MAX_CALLS)
    )
