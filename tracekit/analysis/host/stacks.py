"""Code locations: the Python functions that ran meanwhile, where the trace recorded stacks."""

import numpy as np
import polars as pl

from tracekit.analysis.time import host_state, trace_columns
from tracekit.model import intervals, nesting, schema
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace

COLUMNS = {"file": pl.String, "line": pl.Int64, "function": pl.String, "inside_ns": pl.Int64}
# torch.profiler's name of a Python function: "src/train.py(12): main", with the line at which it was entered.
_NAME = r"^(?<file>.+\.py)\((?<line>\d{1,9})\): (?<function>.+)$"
_FRAMEWORK = r"^(torch/|<)|/torch/|^threading\.py|^queue\.py"
_MAX_DEPTH = 200


def functions(trace: Trace, evidence: pl.DataFrame) -> pl.DataFrame:
    """Return the Python functions that ran while the work in `evidence` was done or launched, the longest first.

    `evidence` has columns start_ns and dur_ns, on the clock of the trace. Columns file, line, function, inside_ns; one
    row per function. The time of a function includes its callees, and it comes before them. No rows where the trace has
    no stacks.
    """
    python = trace.ops.lazy().filter(pl.col("kind") == "python").select("id", "name", "start_ns", "dur_ns")
    name_fields = pl.col("name").str.extract_groups(_NAME).struct.unnest()
    calls = python.with_columns(name_fields).drop_nulls("file").with_columns(pl.col("line").cast(pl.Int64)).collect()
    spans = _host_spans(trace, evidence)
    if calls.is_empty() or not len(spans):
        return schema.empty(COLUMNS)
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


def locations_at(trace: Trace, at_ns: Ints) -> pl.Series:
    """Return the innermost function of the program (not of torch) in which a launching thread is at each time.

    Column stack: "train.py(12): main"; null where no such function runs, or no stacks were recorded.
    """
    is_python = trace_columns.is_kind(trace, "python")
    if not is_python.any():
        return pl.Series("stack", [None] * len(at_ns), pl.String)
    names = trace.ops["name"].filter(pl.Series(is_python)).unique()
    names = names.filter(names.str.contains(_NAME) & ~names.str.contains(_FRAMEWORK))
    if names.is_empty():
        return pl.Series("stack", [None] * len(at_ns), pl.String)
    is_own = (pl.col("kind") == "python") & pl.col("name").is_in(names.implode())
    ops = trace.ops.join(host_state.launching_threads(trace), on="lane", how="semi").with_columns(own=is_own)
    if ops.is_empty():
        return pl.Series("stack", [None] * len(at_ns), pl.String)
    ops = ops.sort("start_ns", "id").with_row_index("at")
    row_of = ops.select(parent_id="id", row=pl.col("at").cast(pl.Int64))
    parent = ops.join(row_of, on="parent_id", how="left", maintain_order="left")["row"].fill_null(-1).to_numpy()
    nearest = nesting.nearest(parent, ops["own"].to_numpy())
    innermost = np.full(len(at_ns), -1, np.int64)
    for (_,), thread in ops.select("at", "lane", "start_ns").group_by("lane"):
        rows = np.append(thread["at"].to_numpy().astype(np.int64), -1)  # the last one for times before the first slice
        row = rows[np.searchsorted(thread["start_ns"].to_numpy(), at_ns, side="right") - 1]
        row = _around(row, at_ns, parent, (ops["start_ns"] + ops["dur_ns"]).to_numpy())
        innermost = np.maximum(innermost, np.where(row >= 0, nearest[np.maximum(row, 0)], -1))  # the one entered last
    located = pl.DataFrame({"name": ops["name"].gather(np.maximum(innermost, 0)), "known": innermost >= 0})
    return located.select(stack=pl.when("known").then("name")).to_series()


def _around(row: Ints, at_ns: Ints, parent: Ints, end_ns: Ints) -> Ints:
    """Return the innermost slice that still runs at each time: `row` or one around it; -1 for none."""
    for _ in range(_MAX_DEPTH):
        ended = (row >= 0) & (end_ns[np.maximum(row, 0)] <= at_ns)
        if not ended.any():
            return row
        row = np.where(ended, parent[np.maximum(row, 0)], row)
    return np.where(ended, -1, row)


def _host_spans(trace: Trace, evidence: pl.DataFrame) -> intervals.Spans:
    """Spans in which the host did the work in the evidence: for device work, those in which it launched that work."""
    rows = evidence.select("start_ns", "dur_ns").drop_nulls()
    if trace.on_device:
        work = trace.activities.select("start_ns", "dur_ns", "launch_id")
        calls = trace.ops.select(launch_id="id", launched_ns="start_ns", call_ns="dur_ns")
        launched = rows.join(work, on=["start_ns", "dur_ns"], how="left").join(calls, on="launch_id", how="left")
        rows = launched.select(start_ns=pl.coalesce("launched_ns", "start_ns"), dur_ns=pl.coalesce("call_ns", "dur_ns"))
    # An instant has no duration, but still lies inside a function.
    return intervals.union(intervals.from_columns(rows["start_ns"], np.maximum(rows["dur_ns"].to_numpy(), 1)))
