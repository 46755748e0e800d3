"""FSDP unit buffers that are allocated in every step, and the two pre-allocated buffers that could replace them."""

import numpy as np
import polars as pl

from tracekit.analysis.memory import allocations
from tracekit.analysis.time import trace_columns
from tracekit.model import columns, schema
from tracekit.model.fact import trace_fact
from tracekit.model.sweep_line import distinct
from tracekit.model.trace import Trace

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
    blocks = unit_blocks(trace)
    if blocks.is_empty():
        return schema.empty(COLUMNS)
    key = ["step", "device", "kind"]
    # A flat buffer is one block; weights copied out of it are several, all of one span.
    flat = blocks.group_by(*key, "unit", "span", "span_id").agg(
        whole=pl.col("bytes").sum(), largest=pl.col("bytes").max()
    )
    need = pl.when(pl.col("kind") == "weights").then("whole").otherwise("largest").max()
    wide = flat.group_by(key).agg(units=pl.col("unit").n_unique(), buffer_bytes=need)
    sums = blocks.group_by(key).agg(count=pl.len(), bytes=pl.col("bytes").sum())
    begins = blocks.select(*key, event="start_event", bytes="bytes")
    moves = pl.concat([begins, blocks.select(*key, event="end_event", bytes=-pl.col("bytes"))]).sort("event")
    peaks = moves.group_by(key).agg(peak_bytes=pl.col("bytes").cum_sum().max())
    wide = wide.join(sums, on=key, nulls_equal=True).join(peaks, on=key, nulls_equal=True)
    wide = wide.filter(pl.col("units") > BUFFERS).with_columns(buffers_bytes=BUFFERS * pl.col("buffer_bytes"))
    return schema.select(wide, COLUMNS).sort("step", "device", "kind")


def unit_blocks(trace: Trace) -> pl.DataFrame:
    """Blocks of named units that `alternating` counts: columns of `allocations.match_blocks`, kind and span_id.

    span_id is the outermost slice of the same unit and span around the op that allocated.
    """
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
    of_kind = blocks.filter(~allocations.in_collectives(trace, blocks["start_ns"])).with_columns(kind=kind)
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
    spans = pl.DataFrame({"op_id": ids[first], "span_id": ids[row]})
    return of_kind.drop_nulls("kind").join(spans, on="op_id", how="left")
