"""Code locations: the Python functions that ran meanwhile, where the trace recorded stacks."""

import numpy as np
import polars as pl

from tracekit.model import intervals
from tracekit.model.trace import Trace

COLUMNS = {"file": pl.String, "line": pl.Int64, "function": pl.String, "inside_ns": pl.Int64}
# torch.profiler's name of a Python function: "src/train.py(12): main", with the line at which it was entered.
_NAME = r"^(?<file>.+\.py)\((?<line>\d+)\): (?<function>.+)$"


def functions(trace: Trace, evidence: pl.DataFrame) -> pl.DataFrame:
    """Return the Python functions that ran while the work in `evidence` was done or launched, the longest first.

    `evidence` has columns start_ns and dur_ns, on the clock of the trace. Columns file, line, function, inside_ns; one
    row per function. The time of a function includes its callees, and it comes before them. No rows where the trace has
    no stacks.
    """
    python = trace.ops.lazy().filter(pl.col("kind") == "python").select("id", "name", "start_ns", "dur_ns")
    named = pl.col("name").str.extract_groups(_NAME).struct.unnest()
    calls = python.with_columns(named).drop_nulls("file").with_columns(pl.col("line").cast(pl.Int64)).collect()
    spans = _on_host(trace, evidence)
    if calls.is_empty() or not len(spans):
        return pl.DataFrame(schema=COLUMNS)
    inside_ns = intervals.coverage(intervals.from_table(calls), spans)
    return (
        calls.with_columns(pl.Series("inside_ns", inside_ns))
        .filter(pl.col("inside_ns") > 0)
        .group_by("file", "line", "function")
        # Recursion must not exceed the total time.
        .agg(pl.col("inside_ns").sum().clip(upper_bound=intervals.length(spans)), pl.col("id").min())
        .sort("inside_ns", "id", descending=[True, False])
        .select(list(COLUMNS))
    )


def _on_host(trace: Trace, evidence: pl.DataFrame) -> intervals.Spans:
    """Return when the host did the work in the evidence: for device work, when it launched that work."""
    rows = evidence.select("start_ns", "dur_ns").drop_nulls()
    if trace.on_device:
        work = trace.activities.select("start_ns", "dur_ns", "launch_id")
        calls = trace.ops.select(launch_id="id", launched_ns="start_ns", call_ns="dur_ns")
        found = rows.join(work, on=["start_ns", "dur_ns"], how="left").join(calls, on="launch_id", how="left")
        rows = found.select(start_ns=pl.coalesce("launched_ns", "start_ns"), dur_ns=pl.coalesce("call_ns", "dur_ns"))
    # An instant has no duration, but still lies inside a function.
    return intervals.union(intervals.from_columns(rows["start_ns"], np.maximum(rows["dur_ns"].to_numpy(), 1)))
