"""Unit buffers that come and go, and what two of each kind, allocated once, would serve instead (YaFSDP's way)."""

import dataclasses

import polars as pl

from tracekit.analysis.memory import allocations
from tracekit.errors import InputError
from tracekit.model.trace import Trace
from tracekit.replay.allocator import BlockState, SegmentState, playback
from tracekit.replay.allocator.playback import History

COLUMNS = {
    "step": pl.Int64, "device": pl.Int64, "kind": pl.String, "units": pl.Int64, "count": pl.Int64, "bytes": pl.Int64,
    "held_bytes": pl.Int64, "buffer_bytes": pl.Int64, "buffers_bytes": pl.Int64,
}  # fmt: skip
BUFFERS = 2
_KINDS = {"weights": "all_gather", "gradients": "reduce"}


def alternating(trace: Trace) -> pl.DataFrame:
    """Return, for each step, the blocks that every unit takes anew, and the two buffers that would do for all.

    Columns step, device, kind (weights: of gathers; gradients: of reductions), units, count and bytes (allocations that
    two buffers would save), held_bytes (most of them held at once), buffer_bytes (what the largest unit needs),
    buffers_bytes (two of those); one row per step, device and kind. Only blocks that are freed in the step they came
    in, of units told by name, the root apart: it keeps its own. What a backend takes inside its own collective is not
    the engine's.
    """
    found = _of_units(trace)
    if found.is_empty():
        return pl.DataFrame(schema=COLUMNS)
    key = ["step", "device", "kind"]
    # A flat buffer is one block; weights copied out of it are several, all of one span.
    instance = ["unit", "span", "span_id"]
    flat = found.group_by(*key, *instance).agg(whole=pl.col("bytes").sum(), largest=pl.col("bytes").max())
    need = pl.when(pl.col("kind") == "weights").then("whole").otherwise("largest").max()
    wide = flat.group_by(key).agg(units=pl.col("unit").n_unique(), buffer_bytes=need)
    sums = found.group_by(key).agg(count=pl.len(), bytes=pl.col("bytes").sum())
    wide = wide.join(sums, on=key, nulls_equal=True).join(_held(found, key), on=key, nulls_equal=True)
    wide = wide.filter(pl.col("units") > BUFFERS).with_columns(buffers_bytes=BUFFERS * pl.col("buffer_bytes"))
    return wide.select(pl.col(name).cast(dtype) for name, dtype in COLUMNS.items()).sort("step", "device", "kind")


def with_buffers(trace: Trace) -> History:
    """Return the trace's history as if two buffers of each kind had served all units from the start.

    The blocks that `alternating` counts are left out, and the buffers are held throughout. What was recorded stays what
    it was. Raises InputError where no blocks of units come and go.
    """
    recorded = playback.of_trace(trace)
    served, found = _of_units(trace), alternating(trace)
    if found.is_empty():
        raise InputError("no blocks of FSDP units come and go in this trace: there is nothing for buffers to serve")
    served = served.join(found, on=["step", "device", "kind"], how="semi", nulls_equal=True)
    gone = pl.concat([served["start_event"], served["end_event"]])
    kept = trace.allocations.with_row_index("event").filter(~pl.col("event").is_in(gone.implode()))
    history = playback.of_trace(dataclasses.replace(trace, allocations=kept.drop("event")))
    sizes = found.group_by("kind").agg(pl.col("buffer_bytes").max()).sort("kind")["buffer_bytes"].to_list()
    buffers = [_held_throughout(number, size) for number, size in enumerate(sizes * BUFFERS, 1)]
    return dataclasses.replace(
        recorded,
        **{name: getattr(history, name) for name in _PLAYED},
        start=(*buffers, *history.start),
    )


_PLAYED = ("action", "address", "bytes", "stream", "pool", "at_ns", "stack", "releases")


def _held_throughout(number: int, size_bytes: int) -> SegmentState:
    address = -(number << 40)  # nowhere: it is asked for anew
    block = BlockState(address, size_bytes, "allocated", size_bytes)
    return SegmentState(address, size_bytes, 0, small=False, pool=0, expandable=False, blocks=(block,))


def _of_units(trace: Trace) -> pl.DataFrame:
    events = trace.allocations.with_row_index("event").filter(
        allocations.of_training(trace), pl.col("address").is_not_null()
    )
    # Other addresses have nothing to tell of these.
    units = pl.col("unit").is_not_null() & (pl.col("unit") != "")
    events = events.join(events.filter(units), on=["device", "address"], how="semi", nulls_equal=True)
    blocks = allocations.match_blocks(events).filter(units, pl.col("freed"), pl.col("end_step") == pl.col("step"))
    kind = pl.coalesce(
        pl.when(pl.col("span").str.contains(pattern)).then(pl.lit(name)) for name, pattern in _KINDS.items()
    )
    mine = blocks.filter(~allocations.in_collectives(trace, blocks["start_ns"])).with_columns(kind=kind)
    return mine.drop_nulls("kind").join(_spans(trace), on="op_id", how="left")


def _spans(trace: Trace) -> pl.DataFrame:
    """Return which instance of a span each op lies in: the outermost slice up from it that is in the same span."""
    ops = trace.ops.select("id", "parent_id", "unit", "span")
    found = trace.allocations.select("op_id", id="op_id").drop_nulls().unique().join(ops, on="id")
    above = ops.rename({"id": "parent_id", "parent_id": "further", "unit": "above_unit", "span": "above_span"})
    while True:
        up = found.join(above, on="parent_id", how="left")
        inside = (pl.col("above_span") == pl.col("span")) & pl.col("above_unit").eq_missing(pl.col("unit"))
        up = up.with_columns(climbs=inside.fill_null(value=False))
        if not up["climbs"].any():
            return found.select("op_id", span_id="id")
        found = up.select(
            "op_id",
            pl.when("climbs").then("parent_id").otherwise("id").alias("id"),
            pl.when("climbs").then("further").alias("parent_id"),
            "unit",
            "span",
        )


def _held(found: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """Return the most bytes of these blocks that are held at once."""
    moves = pl.concat(
        [
            found.select(*key, event="start_event", bytes="bytes"),
            found.select(*key, event="end_event", bytes=-pl.col("bytes")),
        ]
    ).sort("event")
    return moves.group_by(key).agg(held_bytes=pl.col("bytes").cum_sum().max())
