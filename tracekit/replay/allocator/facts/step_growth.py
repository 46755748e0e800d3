"""Memory that grows from step to step in a snapshot: what each of the last steps requested and nobody freed."""

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.trace import MemorySnapshot
from tracekit.replay.allocator.facts import snapshot_facts
from tracekit.replay.allocator.playback import History, ReplayResult

COLUMNS = schema.columns("device op steps count bytes step_bytes")
LEAST_STEPS = 5
_OPEN_STEPS = 2
"""The step in progress and the one before it, whose gradients and outputs may still be in use."""
_MARKS = r"^ProfilerStep#\d+|^Optimizer\.step#"


def of_snapshot(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the memory that grows until the last event of a history.

    Columns device, op (with its place in code), steps (the last steps that all requested some that is still allocated),
    count and bytes (of blocks), step_bytes (the median of a step); one row per op, the largest first. Steps begin where
    the profiler or an optimizer marks one; of fewer than 5 steps with such memory there is no row.
    """
    begins = _begins(snapshot, history.device)
    if len(begins) < LEAST_STEPS + _OPEN_STEPS or not len(history.at_ns):
        return schema.empty(COLUMNS)
    alive = snapshot_facts.alive(history, played, len(history.action) - 1).filter(~pl.col("earlier"))
    at_ns = history.at_ns[alive["event"].to_numpy()]
    alive = alive.with_columns(step=pl.Series(np.searchsorted(begins, at_ns, side="right"), dtype=pl.Int64))
    with_operator = pl.when(pl.col("caller").is_not_null()).then(pl.format("{} in {}", "caller", "place"))
    callers = snapshot_facts.places(snapshot).select("stack", op=with_operator.otherwise("place"))
    described = alive.join(callers, on="stack", how="left").drop_nulls("op")
    last = len(begins) - _OPEN_STEPS
    # What was requested before the first mark is of no step: that time may be a part of one, or many.
    in_steps = described.filter(pl.col("step").is_between(1, last))
    of_step = in_steps.group_by("op", "step").agg(pl.len(), pl.col("bytes").sum())
    # Steps in a row that end with the last closed one have one value of step + rank from the end.
    ordered = of_step.sort("op", "step").with_columns(
        run=pl.col("step") + pl.col("step").rank("ordinal", descending=True).over("op")
    )
    recent = ordered.filter(pl.col("run") == last + 1)
    grown = recent.group_by("op").agg(
        steps=pl.len(), count=pl.col("len").sum(), bytes=pl.col("bytes").sum(), step_bytes=pl.col("bytes").median()
    )
    wide = grown.filter(pl.col("steps") >= LEAST_STEPS).with_columns(device=pl.lit(history.device))
    return schema.conform(wide.sort("bytes", "op", descending=[True, False]), COLUMNS)


def _begins(snapshot: MemorySnapshot, device: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Begins of steps, in ns: by the marks of the profiler, else by those of optimizers."""
    marks = snapshot.annotations.filter(
        pl.col("stage") == "START", pl.col("device") == device, pl.col("name").str.contains(_MARKS)
    )
    of_profiler = marks.filter(pl.col("name").str.starts_with("ProfilerStep"))
    if of_profiler.is_empty() and marks.height:
        marks = marks.filter(pl.col("name") == marks["name"].min())  # of several optimizers one
    step_marks = of_profiler if of_profiler.height else marks
    return np.sort(step_marks["at_ns"].drop_nulls().to_numpy().astype(np.int64))
