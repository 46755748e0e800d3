"""The parallelism strategy of a trace, recognized by the annotations of its wrapper."""

import numpy as np
import polars as pl

from tracekit.analysis.time import trace_columns
from tracekit.conventions import strategies
from tracekit.model.fact import trace_fact
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.model.trace import Trace

DDP, FSDP1, FSDP2, YAFSDP = (
    strategy.name for strategy in (strategies.DDP, strategies.FSDP1, strategies.FSDP2, strategies.YAFSDP)
)
_PREFIXES = {
    strategy.name: strategy.span_prefix
    for strategy in tuple(strategies.STRATEGIES.values())[::-1]
    if strategy.span_prefix
}
COLUMNS = {"strategy": pl.String, "marks": pl.Int64}


@trace_fact
def marks(trace: Trace) -> pl.DataFrame:
    """Number of annotations that each wrapper left in the trace.

    Columns strategy (ddp, fsdp1, fsdp2, yafsdp), marks; one row per wrapper that left any.
    """
    names, code = trace_columns.op_names(trace)
    counts = np.bincount(code[trace_columns.is_kind(trace, "annotation")], minlength=len(names)).tolist()
    rows = [
        (strategy, sum(count for name, count in zip(names, counts, strict=True) if name.startswith(prefix)))
        for strategy, prefix in _PREFIXES.items()
    ]
    return pl.DataFrame([row for row in rows if row[1]], schema=COLUMNS, orient="row")


def of_run(run: Run) -> str | None:
    """Return the strategy in the manifest, else the one whose wrapper left most annotations; None where neither."""
    stated = Manifest.of(run.manifest).strategy
    if stated in _PREFIXES:
        return str(stated)
    totals = run.table(marks).group_by("strategy").agg(pl.col("marks").sum())
    ranking = totals.sort("marks", "strategy", descending=[True, False])
    return None if ranking.is_empty() else str(ranking["strategy"][0])
