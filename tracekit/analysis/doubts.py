"""What makes the numbers of a trace doubtful."""

import polars as pl

from tracekit import schema
from tracekit.trace import Trace


def doubts(trace: Trace) -> pl.DataFrame:
    """Return the reasons to doubt this trace: those of its reading, and work that nothing is known to have launched.

    Columns of `schema.DOUBTS`; one row per reason.
    """
    rows = []
    if trace.activities.is_empty():
        rows.append(("no_work", "No compute, communication or copy was recorded: nothing can be measured.", 1.0))
    elif trace.on_device and not trace.steps["step"].is_null().all():
        placed = trace.activities.select(
            pl.col("dur_ns").filter(pl.col("step").is_null()).sum() / pl.col("dur_ns").sum()
        ).item()
        if placed and placed > 0.1:
            message = f"{100 * placed:.0f}% of device time belongs to no profiled step: its launch was not recorded."
            rows.append(("outside_steps", message, placed))
    measured = pl.DataFrame(rows, schema=schema.DOUBTS.schema, orient="row")
    return pl.concat([trace.doubts, measured])
