"""Kernels of matrix products below the device's rate: misaligned dimensions, no tensor cores, partial waves."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import polars as pl

from tracekit.analysis.compute import efficiency, flops, op_inputs
from tracekit.analysis.time import trace_columns
from tracekit.conventions import devices
from tracekit.model import columns, environment, schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

COLUMNS = schema.columns(
    "device step phase activity_id op shapes name start_ns dur_ns saved_ns padding", op=pl.String, padding=pl.String
)
_UNIT_BYTES = 16
"""Tensor cores are fed by loads of 16 bytes, so rows in memory have to begin at multiples of that (CUTLASS, cuBLAS)."""
LEFT: Mapping[str, int] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm"), 0),
    **dict.fromkeys(("aten::addmm", "aten::addmm_", "aten::_addmm_activation", "aten::baddbmm", "aten::baddbmm_"), 1),
}
"""The place of the left factor among the inputs of an operator; the right one follows."""
_PRODUCTS = f"^({'|'.join(LEFT)})$"
MIN_NS = 20_000
"""Shorter kernels are bound by latency."""
_MIN_DIM = 16
"""Of a smaller dimension, padding adds more work than alignment saves."""
_USUAL_RATIO, _MIN_CALLS = 0.5, 5
"""Share of the roofline that aligned products reach, if a trace has fewer calls of them."""
_LOW_RATIO = 0.35
"""Share of the roofline below which a product with a misaligned dimension, by its shapes, is taken for slowed by it."""
_TF32_RATIO, _MEMORY_RATIO = 0.5, 0.8
"""Shares of the peak in TF32, and of the memory bandwidth, that products without tensor cores would reach with them."""
_TENSOR_CORE = r"(?i)tensorop|s1688|s16816|s884|h1688|h884|wmma"
_ALIGN = r"_align([0-9]{1,9})(?:\D|$)"
_16_BIT = r"(?i)f16|fp16|half"
_FP32 = r"sgemm|simt_s|f32f32_f32f32_f32|implicit_convolve_s|scudnn|cudnn::(cnn|detail)::\w+<float"
_CONVOLUTION = r"(?i)conv|cudnn|wgrad|dgrad|fprop"
_TF32 = r"(?i)tf32|s1688"
_NOT_FP32 = r"(?i)tf32|tensorop|s1688|s16816|f16|half|gemv"

WAVE_COLUMNS = schema.columns(
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
def misaligned_kernels(trace: Trace) -> pl.DataFrame:
    """Kernels of products whose rows in memory do not begin at multiples of 16 bytes.

    Columns COLUMNS: name (of the kernel), saved_ns (less what the call needs at the share of the roofline that aligned
    products of the trace reach; null where that is not known), padding (JSON: each dimension that is not a multiple,
    with the next one; null where shapes are not known); one row per kernel. Products with a dimension below 16, which
    would be padded to more work than alignment saves, are left out. Evidence is the alignment in the kernel's name
    (align1), or, where the name has none, a dimension that strides show to be contiguous, of a call that reaches less
    than 35% of the roofline.
    """
    device = efficiency.device_of(trace.header)
    has_layout = device is not None and devices.TF32 in device.peaks and not device.name.startswith("mi")
    states_alignment = trace_columns.is_activity_named(trace, _ALIGN).any()
    if not states_alignment and not (has_layout and _has_misaligned_rows(trace)):
        return schema.empty(COLUMNS)  # without the work of all products, which costs much more
    calls = with_calls(trace).with_columns(
        pl.col("name").str.extract(_ALIGN).cast(pl.Int64).alias("align"),
        pl.when(pl.col("name").str.contains(_16_BIT)).then(2).otherwise(4).alias("element_bytes"),
    )
    if calls.is_empty():
        return schema.empty(COLUMNS)
    by_name = pl.col("name").str.contains(_TENSOR_CORE) & (pl.col("align") * pl.col("element_bytes") < _UNIT_BYTES)
    may_be_slow = (pl.col("dur_ns") >= MIN_NS) & (pl.col("ratio") < _LOW_RATIO)
    by_shape = pl.lit(has_layout) & may_be_slow & pl.col("align").is_null() & pl.col("is_contiguous")
    # Padding of each product by its inputs: columns _INPUTS, padding, growth, is_contiguous.
    rows = []
    for inputs in calls.select(_INPUTS).unique(maintain_order=True).iter_rows():
        call_padding = _padding_of(*inputs) or _Padding({}, 1.0, is_contiguous=False)
        padding = json.dumps({str(size): to for size, to in call_padding.dims.items()}) if call_padding.dims else None
        rows.append((*inputs, padding, call_padding.growth, call_padding.is_contiguous))
    kinds = pl.Schema({"padding": pl.String, "growth": pl.Float64, "is_contiguous": pl.Boolean})
    inputs_of_calls = {name: calls.schema[name] for name in _INPUTS}
    joined = calls.join(
        pl.DataFrame(rows, pl.Schema({**inputs_of_calls, **kinds}), orient="row"),
        on=_INPUTS,
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    can_be_padded = pl.col("padding").is_not_null() | pl.col("shapes").is_null()
    is_faulty = ((by_name & can_be_padded) | by_shape).fill_null(value=False)
    faulty = joined.with_columns(is_faulty.alias("is_faulty"))
    expected_ns = pl.col("dur_ns") * pl.col("ratio") * pl.col("growth") / _usual_ratio(faulty)
    saved_ns = (pl.col("dur_ns") - expected_ns).clip(0).round()
    return schema.select(faulty.filter("is_faulty").with_columns(saved_ns.alias("saved_ns")), COLUMNS)


@trace_fact
@memoize
def without_tensor_cores(trace: Trace) -> pl.DataFrame:
    """Kernels of 32-bit products that do not use the tensor cores of a device that has TF32.

    Columns COLUMNS: saved_ns (less the time at half the peak in TF32, or 80% of the memory bandwidth; where the call's
    shapes are not known, by the ratio of the peaks), padding null; one row per kernel. Empty where the device is
    unknown, or its tensor cores have no TF32. Convolutions are left out where others of the trace use TF32: cuDNN may
    take it then, and has chosen not to.
    """
    device = efficiency.device_of(trace.header)
    if device is None or device.peaks.get(devices.TF32, 0) < 2 * device.peaks.get(devices.FP32, math.inf):
        return schema.empty(COLUMNS)
    if not trace_columns.is_activity_named(trace, _FP32).any():
        return schema.empty(COLUMNS)
    is_fp32 = pl.col("name").str.contains(_FP32) & ~pl.col("name").str.contains(_NOT_FP32)
    names = trace.activities["name"].unique()
    allows_tf32 = bool(names.filter(names.str.contains(_CONVOLUTION) & names.str.contains(_TF32)).len())
    is_judged = is_fp32 & ~(pl.col("name").str.contains(_CONVOLUTION) & pl.lit(allows_tf32))
    kernels = with_calls(trace).filter(is_judged, pl.col("dur_ns") >= MIN_NS)
    rate = _TF32_RATIO * device.peaks[devices.TF32]
    share = pl.col("dur_ns") / pl.col("work_ns")
    known_ns = share * pl.max_horizontal(
        pl.col("flops") * 1e9 / rate, pl.col("bytes") * 1e9 / (_MEMORY_RATIO * device.memory_bytes_per_s)
    )
    expected_ns = pl.coalesce(known_ns, pl.col("dur_ns") * device.peaks[devices.FP32] / rate)
    saved_ns = (pl.col("dur_ns") - expected_ns).clip(0).round()
    return schema.conform(kernels.with_columns(saved_ns.alias("saved_ns")), COLUMNS)


_INPUTS = ["op", "shapes", "strides", "element_bytes"]


@memoize
def with_calls(trace: Trace) -> pl.DataFrame:
    """Return each compute kernel with the matrix product that launched it; no rows for a CPU run.

    Columns of the activities, device, call_id, op, shapes, strides, flops, bytes, ideal_ns, work_ns, ratio (of the
    roofline); those of the call are null where it is not known.
    """
    devices_of_lanes = trace.lanes.select("lane", "device").unique("lane", keep="first", maintain_order=True)
    activities = trace.activities.rename({"id": "activity_id"}).join(
        devices_of_lanes, on="lane", how="left", maintain_order="left"
    )
    ids = flops.counted_calls(trace).drop_nulls("flops")["id"]
    row = pl.Series("row", flops.counted_op_of_activities(trace, ids))
    of_call = trace.ops.select("id", "name", "shapes", "strides").rename({"name": "op"})
    calls = of_call.join(efficiency.of_ops(trace).drop_nulls("flops"), on="id").with_columns(
        (pl.col("ideal_ns") / pl.col("flops_ns")).alias("ratio"), pl.col("flops_ns").alias("work_ns")
    )
    ids_of_rows = trace.ops["id"].gather(row.set(row < 0, None)).alias("call_id")
    joined = activities.with_columns(ids_of_rows).join(
        calls.rename({"id": "call_id"}).drop("flops_ns", "bytes_ns", "rated_ns"),
        on="call_id", how="left", maintain_order="left", suffix="_of_call",
    )  # fmt: skip
    has_bytes = joined.with_columns(pl.col("bytes_of_call").alias("bytes"))
    return has_bytes.filter(pl.col("kind") == "compute") if trace.on_device else has_bytes.clear()


def _usual_ratio(kernels: pl.DataFrame) -> float:
    """Median share of the roofline that aligned products reach, by their time, from 0.3 to 0.8."""
    aligned = kernels.filter(~pl.col("is_faulty"), pl.col("ratio").is_not_null(), pl.col("dur_ns") >= MIN_NS)
    if aligned["call_id"].n_unique() < _MIN_CALLS:
        return _USUAL_RATIO
    ordered = aligned.sort("ratio").with_columns(pl.col("dur_ns").cum_sum().alias("until_ns"))
    middle = ordered.filter(2 * pl.col("until_ns") >= ordered["dur_ns"].sum())["ratio"][0]
    return float(min(max(middle, 0.3), 0.8))


def _has_misaligned_rows(trace: Trace) -> bool:
    """Return whether rows of a product begin unaligned for 16-bit elements: then those of 32 bits may, too."""
    products = columns.where(trace.ops[["name", "shapes", "strides"]], trace_columns.is_named(trace, _PRODUCTS))
    paddings = (_padding(op, shapes, strides, 2) for op, shapes, strides in products.unique().iter_rows())
    try:
        return any(padding is not None and padding.is_contiguous for padding in paddings)
    except (ValueError, TypeError, IndexError):  # inputs of another form: only their work shows what they are
        return True


class _Padding(NamedTuple):
    """The dimensions of a product to pad, how much work that adds, and whether rows in memory begin unaligned."""

    dims: dict[int, int]
    growth: float
    is_contiguous: bool


def _padding_of(op: str | None, shapes: str | None, strides: str | None, element_bytes: int) -> _Padding | None:
    try:
        return _padding(op, shapes, strides, element_bytes)
    except op_inputs.OTHER_INPUTS:
        return None


def _padding(op: str | None, shapes: str | None, strides: str | None, element_bytes: int) -> _Padding | None:
    if op is None or op not in LEFT or shapes is None:
        return None
    place, unit = LEFT[op], _UNIT_BYTES // element_bytes
    (*_, rows, inner), (*_, columns) = json.loads(shapes)[place : place + 2]
    contiguous = _contiguous(json.loads(strides)[place : place + 2], (rows, inner, columns)) if strides else set()
    is_small = min(rows, inner, columns) < _MIN_DIM
    dims = {size: -(-size // unit) * unit for size in (rows, inner, columns) if size % unit and not is_small}
    growth = math.prod(dims.get(size, size) / size for size in (rows, inner, columns))
    return _Padding(dims, growth, any(size in dims for size in contiguous))


def _contiguous(strides: list[Any], sizes: tuple[int, int, int]) -> set[int]:
    """Dimensions of which the rows of a factor, or of the result, are made in memory."""
    rows, inner, columns = sizes
    lhs, rhs = strides
    contiguous = {columns}  # the result is written by rows
    contiguous.add(inner if lhs[-1] == 1 else rows)
    contiguous.add(columns if rhs[-1] == 1 else inner)
    return contiguous


def pads(padding: str) -> list[tuple[int, int]]:
    """Return the dimensions to pad and their next multiple, from the column `padding`.

    >>> pads('{"5185": 5192}')
    [(5185, 5192)]
    """
    return [(int(size), to) for size, to in json.loads(padding).items()]


@trace_fact
@memoize
def partial_waves(trace: Trace) -> pl.DataFrame:
    """Kernels of products of which 20% or more is an idle part of the last of two to four waves.

    A wave is one block on each multiprocessor; a block computes a tile, whose size is in the kernel's name. Only
    kernels with exactly one block per tile of the result are known: not those that divide the inner dimension, or keep
    their blocks for several tiles. Columns WAVE_COLUMNS: saved_ns (the idle part), blocks, wave_count, rows and columns
    of the result, fewer_… (the most of them that take one wave less; 0 where none do), more_… (the most that take no
    longer); one row per kernel. Products above 70% of the roofline, or with misaligned dimensions, are left out.
    """
    counts = [device.get("numSms") for device in environment.devices(trace.header)]
    count = counts[0] if counts and all(number == counts[0] for number in counts) else None
    if type(count) is not int or not 0 < count < 1 << 31:
        return schema.empty(WAVE_COLUMNS)
    kinds = trace.activities[["name", "grid"]].unique().drop_nulls("grid").iter_rows()
    has_few_waves = any(1 < _wave_count(grid, count) <= _MAX_WAVES for name, grid in kinds if _TILE.search(name))
    if not has_few_waves or flops.counted_calls(trace).is_empty():  # without counted calls there is no roofline
        return schema.empty(WAVE_COLUMNS)
    kernels = with_calls(trace).filter(
        pl.col("ratio") < _MAX_RATIO, pl.col("dur_ns") >= MIN_NS, pl.col("grid").is_not_null()
    )
    if kernels.is_empty():
        return schema.empty(WAVE_COLUMNS)
    misaligned = misaligned_kernels(trace)
    kernels = kernels.join(misaligned, on="activity_id", how="anti", maintain_order="left")
    waves = _waves(kernels, count)
    joined = kernels.join(waves, on=_KIND, nulls_equal=True, maintain_order="left")
    idle_ratio = 1 - pl.col("blocks") / (pl.col("wave_count") * count)
    priced = joined.with_columns(
        (pl.col("dur_ns") * idle_ratio).round().alias("saved_ns"), pl.lit(count).alias("multiprocessors")
    )
    return schema.select(priced.filter(idle_ratio >= _MIN_WASTE_RATIO), WAVE_COLUMNS)


_KIND = ["name", "grid", "op", "shapes"]


_WAVES = ("blocks", "wave_count", "rows", "fewer_rows", "more_rows", "columns", "fewer_columns", "more_columns")


def _wave_count(grid: str, count: int) -> int:
    return -(-math.prod(map(int, grid.split("x"))) // count)


def _waves(kernels: pl.DataFrame, count: int) -> pl.DataFrame:
    """Waves of each kind of kernel that has some: columns _KIND and _WAVES."""
    rows = []
    for name, grid, op, shapes in kernels.select(_KIND).unique(maintain_order=True).iter_rows():
        try:
            waves = _waves_of(name, grid, op, shapes, count)
        except op_inputs.OTHER_INPUTS:
            continue
        if waves is not None:
            rows.append((name, grid, op, shapes, *waves))
    types = {**dict.fromkeys(_KIND, pl.String()), **dict.fromkeys(_WAVES, pl.Int64())}
    return pl.DataFrame(rows, pl.Schema(types), orient="row")


def _waves_of(name: str, grid: str, op: str | None, shapes: str | None, count: int) -> tuple[int, ...] | None:
    tile, blocks = _TILE.search(name), math.prod(map(int, grid.split("x")))
    wave_count = _wave_count(grid, count)
    if tile is None or op is None or op not in LEFT or shapes is None:
        return None
    if not 1 < wave_count <= _MAX_WAVES:
        return None
    place = LEFT[op]
    (*batch, rows, _), (*_, columns) = json.loads(shapes)[place : place + 2]
    sizes = (int(tile[1]), int(tile[2]))
    for high, wide in (sizes, sizes[::-1]):  # a result by columns has its tiles turned
        down, across, batches = -(-rows // high), -(-columns // wide), math.prod(batch)
        if down * across * batches == blocks:
            fewer, more = ((waves * count) for waves in (wave_count - 1, wave_count))
            return (
                blocks, wave_count,
                rows, fewer // (across * batches) * high, more // (across * batches) * high,
                columns, fewer // (down * batches) * wide, more // (down * batches) * wide,
            )  # fmt: skip
    return None
