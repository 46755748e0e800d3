"""FSDP unit buffers that are allocated in every step, and the two pre-allocated buffers that could replace them."""

import dataclasses

import numpy as np
import polars as pl

from tracekit.analysis.memory import allocations
from tracekit.analysis.time import trace_columns
from tracekit.errors import InputError
from tracekit.model import columns, schema
from tracekit.model.fact import trace_fact
from tracekit.model.sweep_line import distinct
from tracekit.model.trace import Trace
from tracekit.replay.allocator import BlockState, SegmentState, playback
from tracekit.replay.allocator.playback import History

COLUMNS = schema.columns("step device kind units count bytes peak_bytes buffer_bytes buffers_bytes")
BUFFERS = 2
_KINDS = {"weights": "all_gather", "gradients": "reduce"}


@trace_fact
def alternating(trace: Trace) -> pl.DataFrame:
    """Return per step the blocks that units allocate, and the two buffers that could serve all units (as in YaFSDP).

    Columns step, device, kind (weights: of all-gathers; gradients: of reductions), units, count and bytes (allocations
    that two buffers would avoid), peak_bytes (their peak of allocated bytes), buffer_bytes (the need of the largest
    unit), buffers_bytes (two of those); one row per step, device and kind. Counted are blocks of named units that are
    freed in the step of their allocation, without the root unit, which keeps its buffer, and without blocks that a
    backend allocates inside its collective.
    """
    if trace.allocations["unit"].null_count() == trace.allocations.height:
        return schema.empty(COLUMNS)
    unit_blocks = _of_units(trace)
    if unit_blocks.is_empty():
        return schema.empty(COLUMNS)
    key = ["step", "device", "kind"]
    # A flat buffer is one block; weights copied out of it are several, all of one span.
    instance = ["unit", "span", "span_id"]
    flat = unit_blocks.group_by(*key, *instance).agg(whole=pl.col("bytes").sum(), largest=pl.col("bytes").max())
    need = pl.when(pl.col("kind") == "weights").then("whole").otherwise("largest").max()
    wide = flat.group_by(key).agg(units=pl.col("unit").n_unique(), buffer_bytes=need)
    sums = unit_blocks.group_by(key).agg(count=pl.len(), bytes=pl.col("bytes").sum())
    wide = wide.join(sums, on=key, nulls_equal=True).join(_peak_allocated(unit_blocks, key), on=key, nulls_equal=True)
    wide = wide.filter(pl.col("units") > BUFFERS).with_columns(buffers_bytes=BUFFERS * pl.col("buffer_bytes"))
    return schema.select(wide, COLUMNS).sort("step", "device", "kind")


def with_buffers(trace: Trace) -> History:
    """Return the trace's history as if two buffers of each kind had served all units from the start.

    The blocks that `alternating` counts are removed, and the buffers stay allocated. Recorded peaks do not change.
    Raises InputError if no unit allocates and frees blocks.
    """
    recorded = playback.from_trace(trace)
    served, per_step = _of_units(trace), alternating(trace)
    if per_step.is_empty():
        raise InputError(
            "no FSDP unit allocates and frees buffers in this trace: double buffering would change nothing"
        )
    served = served.join(per_step, on=["step", "device", "kind"], how="semi", nulls_equal=True)
    gone = pl.concat([served["start_event"], served["end_event"]])
    remaining = trace.allocations.with_row_index("event").filter(~pl.col("event").is_in(gone.implode()))
    history = playback.from_trace(dataclasses.replace(trace, allocations=remaining.drop("event")))
    sizes = per_step.group_by("kind").agg(pl.col("buffer_bytes").max()).sort("kind")["buffer_bytes"].to_list()
    buffers = [_static_segment(number, size) for number, size in enumerate(sizes * BUFFERS, 1)]
    return dataclasses.replace(
        recorded, **{name: getattr(history, name) for name in _PLAYED}, start=(*buffers, *history.start)
    )


_PLAYED = ("action", "address", "bytes", "stream", "pool", "at_ns", "stack", "releases")


def _static_segment(number: int, size_bytes: int) -> SegmentState:
    address = -(number << 40)  # not a real address: the block is allocated again
    block = BlockState(address, size_bytes, "allocated", size_bytes)
    return SegmentState(address, size_bytes, 0, small=False, pool=0, expandable=False, blocks=(block,))


def _of_units(trace: Trace) -> pl.DataFrame:
    events = trace.allocations.with_row_index("event").filter(
        allocations.of_training(trace), pl.col("address").is_not_null()
    )
    # Events at other addresses do not matter here.
    units = pl.col("unit").is_not_null() & (pl.col("unit") != "")
    events = events.join(events.filter(units), on=["device", "address"], how="semi", nulls_equal=True)
    blocks = allocations.match_blocks(events).filter(units, pl.col("freed"), pl.col("end_step") == pl.col("step"))
    kind = pl.coalesce(
        pl.when(pl.col("span").str.contains(pattern)).then(pl.lit(name)) for name, pattern in _KINDS.items()
    )
    unit_blocks = blocks.filter(~allocations.in_collectives(trace, blocks["start_ns"])).with_columns(kind=kind)
    return unit_blocks.drop_nulls("kind").join(_spans(trace), on="op_id", how="left")


def _spans(trace: Trace) -> pl.DataFrame:
    """Return the span instance of each op that allocates, its outermost enclosing slice in the same span.

    Columns op_id, span_id.
    """
    ids, above = trace.ops["id"].to_numpy(), trace_columns.parent_rows(trace)
    unit, span = trace.ops["unit"], trace.ops["span"]
    first = columns.rows_of(ids, distinct(trace.allocations["op_id"].drop_nulls().to_numpy()))
    first = first[first >= 0]
    row, climbing = first.copy(), np.arange(len(first))
    while len(climbing):
        climbing = climbing[above[row[climbing]] >= 0]
        child, up = row[climbing], above[row[climbing]]
        inside = columns.flags(span[up] == span[child]) & columns.flags(unit[up].eq_missing(unit[child]))
        climbing = climbing[inside]
        row[climbing] = up[inside]
    return pl.DataFrame({"op_id": ids[first], "span_id": ids[row]})


def _peak_allocated(blocks: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """Return the peak of allocated bytes of these blocks."""
    moves = pl.concat(
        [
            blocks.select(*key, event="start_event", bytes="bytes"),
            blocks.select(*key, event="end_event", bytes=-pl.col("bytes")),
        ]
    ).sort("event")
    return moves.group_by(key).agg(peak_bytes=pl.col("bytes").cum_sum().max())
