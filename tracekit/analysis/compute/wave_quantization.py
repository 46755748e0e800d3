"""Matrix products whose last wave of blocks leaves most multiprocessors of the device idle."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import polars as pl

from tracekit.analysis.compute import flops, op_inputs, product_kernels
from tracekit.model import environment, schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

COLUMNS = schema.columns(
    "device step phase activity_id op shapes name start_ns dur_ns saved_ns blocks multiprocessors wave_count "
    "rows fewer_rows more_rows columns fewer_columns more_columns",
    op=pl.String,
)
_MAX_RATIO = 0.7
"""Share of the roofline above which a product leaves little idle, whatever its waves."""
_MAX_WAVES, _MIN_WASTE_RATIO = 4, 0.2
_TILE = re.compile(r"_(?:tilesize)?(\d{2,3})x(\d{2,3})(?=[x_])")


@trace_fact
@memoize
def partial_waves(trace: Trace) -> pl.DataFrame:
    """Return the kernels of products of which 20% or more is an idle part of the last of two to four waves.

    A wave is one block on each multiprocessor; a block computes a tile, whose size is in the kernel's name. Only
    kernels with exactly one block per tile of the result are known: not those that divide the inner dimension, or keep
    their blocks for several tiles. Columns COLUMNS: saved_ns (the idle part), blocks, wave_count, rows and columns of
    the result, fewer_… (the most of them that take one wave less; 0 where none do), more_… (the most that take no
    longer); one row per kernel. Products above 70% of the roofline, or with misaligned dimensions, are left out.
    """
    count = _multiprocessors(trace.header)
    if count is None or not _has_few_waves(trace, count) or flops.counted_calls(trace).is_empty():
        return schema.empty(COLUMNS)  # without counted calls there is no roofline
    kernels = product_kernels.with_calls(trace).filter(
        pl.col("ratio") < _MAX_RATIO, pl.col("dur_ns") >= product_kernels.MIN_NS, pl.col("grid").is_not_null()
    )
    if kernels.is_empty():
        return schema.empty(COLUMNS)
    misaligned = product_kernels.misaligned_kernels(trace)
    kernels = kernels.join(misaligned, on="activity_id", how="anti", maintain_order="left")
    waves = _waves(kernels, count)
    joined = kernels.join(waves, on=_KIND, nulls_equal=True, maintain_order="left")
    idle_ratio = 1 - pl.col("blocks") / (pl.col("wave_count") * count)
    priced = joined.with_columns(
        (pl.col("dur_ns") * idle_ratio).round().alias("saved_ns"), pl.lit(count).alias("multiprocessors")
    )
    return schema.select(priced.filter(idle_ratio >= _MIN_WASTE_RATIO), COLUMNS)


_KIND = ["name", "grid", "op", "shapes"]


class _Waves(NamedTuple):
    """The blocks of a product, and how many rows and columns fill its waves."""

    blocks: int
    wave_count: int
    rows: int
    fewer_rows: int
    more_rows: int
    columns: int
    fewer_columns: int
    more_columns: int


def _has_few_waves(trace: Trace, count: int) -> bool:
    """Return whether a kernel whose name has a tile runs in two to four waves: the work of products costs much more."""
    kinds = trace.activities[["name", "grid"]].unique().drop_nulls("grid")
    return any(1 < _wave_count(grid, count) <= _MAX_WAVES for name, grid in kinds.iter_rows() if _TILE.search(name))


def _wave_count(grid: str, count: int) -> int:
    return -(-math.prod(map(int, grid.split("x"))) // count)


def _waves(kernels: pl.DataFrame, count: int) -> pl.DataFrame:
    """Return the waves of each kind of kernel that has some: columns _KIND and those of _Waves."""
    rows = []
    for name, grid, op, shapes in kernels.select(_KIND).unique(maintain_order=True).iter_rows():
        try:
            waves = _waves_of(name, grid, op, shapes, count)
        except op_inputs.OTHER_INPUTS:
            continue
        if waves is not None:
            rows.append((name, grid, op, shapes, *waves))
    types = {**dict.fromkeys(_KIND, pl.String()), **dict.fromkeys(_Waves._fields, pl.Int64())}
    return pl.DataFrame(rows, pl.Schema(types), orient="row")


def _waves_of(name: str, grid: str, op: str | None, shapes: str | None, count: int) -> _Waves | None:
    tile, blocks = _TILE.search(name), math.prod(map(int, grid.split("x")))
    wave_count = _wave_count(grid, count)
    if tile is None or op is None or op not in product_kernels.LEFT or shapes is None:
        return None
    if not 1 < wave_count <= _MAX_WAVES:
        return None
    place = product_kernels.LEFT[op]
    (*batch, rows, _), (*_, columns) = json.loads(shapes)[place : place + 2]
    sizes = (int(tile[1]), int(tile[2]))
    for high, wide in (sizes, sizes[::-1]):  # a result by columns has its tiles turned
        down, across, batches = -(-rows // high), -(-columns // wide), math.prod(batch)
        if down * across * batches == blocks:
            fewer, more = ((waves * count) for waves in (wave_count - 1, wave_count))
            return _Waves(
                blocks, wave_count,
                rows, fewer // (across * batches) * high, more // (across * batches) * high,
                columns, fewer // (down * batches) * wide, more // (down * batches) * wide,
            )  # fmt: skip
    return None


def _multiprocessors(header: Mapping[str, Any]) -> int | None:
    """Count the multiprocessors of each device of a header; None where it does not say, or they differ."""
    counts = [device.get("numSms") for device in environment.devices(header)]
    count = counts[0] if counts and all(number == counts[0] for number in counts) else None
    return count if type(count) is int and 0 < count < 1 << 31 else None
