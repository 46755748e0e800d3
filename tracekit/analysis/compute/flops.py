"""Floating-point operations and bytes moved, computed from the inputs of operators, and for how much of the time."""

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import kernels, op_bytes, op_flops, op_inputs
from tracekit.analysis.time import backward_passes, trace_columns
from tracekit.conventions import devices
from tracekit.model import columns, nesting, schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import distinct
from tracekit.model.trace import Trace

TILE_ONLY = "no operator recorded; the kernel's name has its tile, not the problem"
_MISSING = "the kernel's name lacks {}"


class Product(NamedTuple):
    """The dimensions of a product by the kernel's name, None for what it lacks, and its element type (FP8 …)."""

    dims: Mapping[str, int | None]
    dtype: str | None

    @property
    def flops(self) -> float | None:
        """Floating-point operations; None where a dimension is not known."""
        flops = 2.0
        for size in self.dims.values():
            if size is None:
                return None
            flops *= size
        return flops


CALL_COLUMNS = {"name": pl.String, "calls": pl.Int64}
PRODUCT_COLUMNS = {"name": pl.String, "shapes": pl.String, "flops": pl.Float64}
COLUMNS = {"step": pl.Int64, "phase": pl.String, "name": pl.String, "flops": pl.Float64}
COUNTED_COLUMNS = {
    "id": pl.Int64, "flops": pl.Float64, "bytes": pl.Float64, "dtype": pl.String, "is_recomputed": pl.Boolean,
}  # fmt: skip
EACH_COLUMNS = ("step", "phase", "name", "shapes", "flops", "bytes", "dtype", "is_recomputed")
COVERAGE_COLUMNS = {"step": pl.Int64, "known_ns": pl.Int64, "work_ns": pl.Int64, "compute_ns": pl.Int64}
_IN_STEP = pl.col("step").is_not_null() & pl.col("phase").ne_missing(conventions.CHECKPOINT)


@trace_fact
def flops(trace: Trace) -> pl.DataFrame:
    """Floating-point operations of each step in products, convolutions and attention, saves excluded.

    Columns step, phase, name, flops; one row per step, phase and operator. Formulas: `op_flops`. Empty where the
    profiler recorded no shapes. `coverage` says for how much of the compute time the operations are known.
    """
    calls = each_product(trace).filter(_IN_STEP)
    sums = calls.group_by("step", "phase", "name").agg(pl.col("flops").sum())
    return schema.select(sums, COLUMNS).sort("step", "phase", "name")


@trace_fact
def products(trace: Trace) -> pl.DataFrame:
    """Floating-point operations of the steps by operator and shapes: the work of a step, in any order.

    Columns PRODUCT_COLUMNS; one row per operator and shapes of its inputs.
    """
    calls = each_product(trace).filter(_IN_STEP)
    sums = calls.group_by("name", "shapes").agg(pl.col("flops").sum())
    return schema.select(sums, PRODUCT_COLUMNS).sort("name", "shapes")


@memoize
def each_product(trace: Trace) -> pl.DataFrame:
    """Products, convolutions and attention of a trace: by the inputs of operators, else by kernels' names.

    Columns EACH_COLUMNS; one row per call of an operator, or per kernel outside of these whose name states its whole
    problem (`product`): its name is the kernel's, its shapes are null.
    """
    described = trace.ops.select("id", "step", "phase", "name", "shapes")
    calls = counted_calls(trace).drop_nulls("flops").join(described, on="id", maintain_order="left")
    return pl.concat([calls.select(EACH_COLUMNS), _by_kernel_name(trace).select(EACH_COLUMNS)])


@memoize
def counted_calls(trace: Trace) -> pl.DataFrame:
    """Calls whose operations or bytes are known: the outermost ones, so that nothing is counted twice.

    Columns COUNTED_COLUMNS: id (of ops), flops (null for operators that memory bandwidth limits), bytes (read and
    written at least: each input and output once; null where types were not recorded), dtype (element type of the first
    input, FP64 … INT8 of `devices`), is_recomputed (forward work that activation checkpointing repeats); one row per
    call, by id. Copies from and to the host are left out.
    """
    if trace.ops["shapes"].null_count() == trace.ops.height:
        return schema.empty(COUNTED_COLUMNS)
    names, code = trace_columns.op_names(trace)
    has_formula = [op_flops.has_formula(name) or op_bytes.has_formula(name) for name in names]
    is_known = np.array(has_formula, np.bool_)[code] & trace_columns.is_kind(trace, "cpu_op")
    # A slower link limits copies from and to the host.
    is_copy = trace_columns.is_activity_kind(trace, "memcpy") & ~trace_columns.is_activity_named(trace, _ON_DEVICE)
    host_copies = kernels.innermost_op(trace)[is_copy]
    is_known[host_copies[host_copies >= 0]] = False
    calls = trace.ops[np.flatnonzero(is_known)].drop_nulls("shapes")
    if calls.is_empty():
        return schema.empty(COUNTED_COLUMNS)
    calls = calls.hstack([_list_dtypes(trace, calls)])
    is_known = pl.col("flops").is_not_null() | pl.col("bytes").is_not_null()
    calls = calls.join(_work(calls), on=_CALL, nulls_equal=True).filter(is_known).sort("id")
    # Slices of a thread are sorted by start, outer ones first.
    reached_ns = (pl.col("start_ns") + pl.col("dur_ns")).cum_max().shift(1).over("lane")
    calls = calls.filter((pl.col("start_ns") >= reached_ns).fill_null(value=True))
    is_repeated = np.isin(calls["id"].to_numpy(), _recomputed_ids(trace, calls["id"]).to_numpy())
    return schema.select(calls.with_columns(pl.Series("is_recomputed", is_repeated)), COUNTED_COLUMNS)


@trace_fact
def coverage(trace: Trace) -> pl.DataFrame:
    """Compute time of each step whose operations are known: counted, or none of the counted kinds.

    Columns COVERAGE_COLUMNS: known_ns, work_ns (of calls whose operations or bytes are known), compute_ns; one row per
    step. Times of concurrent kernels add up.
    """
    return (
        compute(trace)
        .filter(_IN_STEP)
        .group_by("step")
        .agg(
            pl.col("dur_ns").filter("is_known").sum().alias("known_ns"),
            pl.col("dur_ns").filter("has_work").sum().alias("work_ns"),
            pl.col("dur_ns").sum().alias("compute_ns"),
        )
        .pipe(schema.select, COVERAGE_COLUMNS)
        .sort("step")
    )


def compute(trace: Trace) -> pl.DataFrame:
    """Compute of a trace, and which of its work is known.

    Columns of activities, op and shapes (the innermost operator around the launch and its inputs, or null), is_known
    (whether its floating-point operations are known), has_work (whether they or its bytes are); one row per activity.
    """
    work, owner = trace.activities, kernels.innermost_op(trace)
    if not trace.ops.height:
        none = pl.lit(value=False)
        text = pl.lit(None, pl.String)
        return work.with_columns(op=text, shapes=text, is_known=none, has_work=none).filter(_IS_COMPUTE)
    ids = counted_calls(trace).drop_nulls("flops")["id"]
    launcher = pl.Series("op", owner).set(pl.Series(owner < 0), None)
    op, shapes = trace.ops["name"].gather(launcher).alias("op"), trace.ops["shapes"].gather(launcher)
    names, kernel_names = (column.drop_nulls().unique().to_list() for column in (op, work["name"]))
    with_formula = [name for name in names if op_flops.has_formula(name)]
    memory_bound = op.is_in([name for name in names if op_flops.has_no_products(name)]).fill_null(value=False)
    if trace.on_device:
        by_kernel = [name for name in kernel_names if op_flops.is_memory_bound_kernel(name)]
        memory_bound |= work["name"].is_in(by_kernel) & ~op.is_in(with_formula).fill_null(value=False)
    is_counted, has_work = (
        (counted_op_of_activities(trace, calls) >= 0)
        | np.where(owner >= 0, _enclosing(trace, calls)[np.maximum(owner, 0)], False)
        for calls in (ids, counted_calls(trace)["id"])
    )
    is_named = work["id"].is_in(_by_kernel_name(trace)["id"].implode())
    is_known = pl.Series(is_counted) | memory_bound | is_named
    return work.with_columns(op, shapes, is_known=is_known, has_work=pl.Series(has_work) | is_named).filter(_IS_COMPUTE)


@trace_fact
def operator_calls(trace: Trace) -> pl.DataFrame:
    """Count the calls of each operator of the dispatcher in the steps, such as ``aten::mm``, saves excluded.

    Columns CALL_COLUMNS; one row per operator.
    """
    calls = trace.ops.filter(pl.col("name").str.starts_with("aten::"), _IN_STEP)
    return schema.select(calls.group_by("name").agg(pl.len().alias("calls")), CALL_COLUMNS).sort("name")


def counted_op_of_activities(trace: Trace, ids: pl.Series) -> nesting.Ints:
    """Return, for each activity, the row in ops of the call of `ids` that launched it or is around it; -1 for none."""
    owner = kernels.innermost_op(trace)
    if not trace.ops.height:
        return owner
    around = nesting.nearest(trace_columns.parent_ids(trace), trace.ops["id"].is_in(ids.implode()).to_numpy())
    return np.where(owner >= 0, around[np.maximum(owner, 0)], -1)


@functools.lru_cache(maxsize=4096)
def product(name: str) -> Product | None:
    """Return the product that a kernel's name states, or a part of it; None for a name that states none.

    >>> product("void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, (deep_gemm::GemmType)0>(float*)").dims
    {'M': None, 'N': 4096, 'K': 7168}
    """
    match = _KERNEL.match(name)
    if match is None:
        return None
    kernel, arguments = match["kernel"], _arguments(name[match.end() :])
    first = next((first for pattern, first in _FIRST if re.fullmatch(pattern, kernel)), None)
    numbers = [int(number[1]) for text in arguments if (number := _NUMBER.fullmatch(text))]
    if first is None or len(numbers) < len(first):
        return None
    stated = {dim: size or None for dim, size in zip(first, numbers, strict=False)}
    dims = {dim: stated.get(dim) for dim in _DIMS}
    if "S" in first or any(kind and kind[1] != _NORMAL for text in arguments if (kind := _GEMM_TYPE.fullmatch(text))):
        dims[_GROUPS] = None
    return Product(dims, next((dtype for mark, dtype in _DTYPES.items() if mark in kernel), None))


def unknown_part(name: str) -> str | None:
    """Return why the operations of a kernel that states a part of its product are not known; None for other kernels.

    >>> unknown_part("void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, (deep_gemm::GemmType)0>(float*)")
    "the kernel's name lacks M"
    """
    stated = product(name)
    missing = [dim for dim, size in stated.dims.items() if size is None] if stated else []
    return _MISSING.format(" and ".join(missing)) if missing else None


def has_tile_only(name: str) -> bool:
    """Return whether a name is that of a library's matrix product, of which it states the tile only."""
    return bool(_TILED.search(name)) and product(name) is None


def _work(calls: pl.DataFrame) -> pl.DataFrame:
    """Work of the distinct calls: columns name, shapes, dtypes, arguments, flops, bytes, dtype."""
    kinds = calls.select(_CALL).unique(maintain_order=True)
    backward = kinds.filter(pl.col("name").is_in(op_flops.CONVOLUTION_BACKWARDS)).select("name", "shapes").rows()
    outputs = op_flops.convolution_outputs(backward)
    rows: list[tuple[float | None, float | None, str | None]] = []
    for name, shapes, dtypes, arguments, *rest in kinds.iter_rows():
        if not op_flops.has_formula(name):
            rows.append((None, op_bytes.of_call(name, shapes, dtypes, arguments, *rest), None))
            continue
        done, sizes = op_flops.work(name, shapes, arguments, outputs), op_flops.input_bytes(name, shapes, dtypes)
        moved_bytes = None if done is None else op_flops.moved_bytes(done, sizes)
        rows.append((None if done is None else done.flops, moved_bytes, sizes.dtype))
    work = pl.DataFrame(rows, {"flops": pl.Float64, "bytes": pl.Float64, "dtype": pl.String}, orient="row")
    return kinds.hstack(work)


_CALL = ["name", "shapes", "dtypes", "arguments", "strides", "list_dtype"]


def _by_kernel_name(trace: Trace) -> pl.DataFrame:
    """Kernels outside of counted products whose names state the whole problem: id and EACH_COLUMNS."""
    if not trace.on_device:
        return schema.empty(_NAMED_COLUMNS)
    work = trace.activities.filter(_IS_COMPUTE)
    names = work["name"].unique().to_list()
    rows = [
        (name, kernel_product.flops, kernel_product.dtype)
        for name in names
        if (kernel_product := product(name)) and kernel_product.flops is not None
    ]
    if not rows:
        return schema.empty(_NAMED_COLUMNS)
    stated = pl.DataFrame(rows, pl.Schema({"name": pl.String, "flops": pl.Float64, "dtype": pl.String}), orient="row")
    kernel_rows = work.join(stated, on="name", maintain_order="left")
    if kernel_rows.height:
        row = counted_op_of_activities(trace, counted_calls(trace).drop_nulls("flops")["id"])
        outside = trace.activities.select("id").filter(pl.Series(row < 0))
        kernel_rows = kernel_rows.join(outside, on="id", how="semi", maintain_order="left")
    repeated = backward_passes.recomputed_activities(trace) if kernel_rows.height else kernel_rows
    return kernel_rows.with_columns(
        pl.lit(None, pl.String).alias("shapes"),
        pl.lit(None, pl.Float64).alias("bytes"),
        pl.col("id")
        .is_in((repeated["id"] if repeated.height else kernel_rows["id"].clear()).implode())
        .alias("is_recomputed"),
    )


_NAMED_COLUMNS = schema.columns(
    "id step phase name shapes flops bytes dtype is_recomputed", flops=pl.Float64, bytes=pl.Float64, shapes=pl.String
)

_ON_DEVICE = r"DtoD|DeviceToDevice|Device -> Device"


def _list_dtypes(trace: Trace, calls: pl.DataFrame) -> pl.Series:
    """Element type of the lists of tensors that calls take, by their kernels: column list_dtype."""
    ids = calls["id"].filter(calls["dtypes"].str.contains("TensorList", literal=True))
    if ids.is_empty():
        return pl.Series("list_dtype", [None], pl.String).new_from_index(0, calls.height)
    owner = pl.Series("id", kernels.innermost_op(trace))
    launched = trace.activities.select("name").with_columns(trace.ops["id"].gather(owner.set(owner < 0, None)))
    launched = launched.filter(pl.col("id").is_in(ids.implode()))
    types = {name: op_inputs.list_dtype(name) for name in launched["name"].unique().to_list()}
    dtype = pl.col("name").replace_strict(types, default=None, return_dtype=pl.String)
    is_one = (pl.col("list_dtype").n_unique() == 1) & pl.col("list_dtype").is_not_null().all()
    groups = launched.select("id", dtype.alias("list_dtype")).group_by("id")
    by_call = groups.agg(pl.when(is_one).then(pl.col("list_dtype").first()).alias("list_dtype"))
    return columns.values_at(by_call["list_dtype"], columns.rows_of(by_call["id"].to_numpy(), calls["id"].to_numpy()))


def _recomputed_ids(trace: Trace, ids: pl.Series) -> pl.Series:
    repeated = backward_passes.recomputed_activities(trace)
    if repeated.is_empty():
        return pl.Series("id", [], pl.Int64)
    if not trace.on_device:  # an activity is an outermost op, and the calls are in it
        repeats = trace.ops["id"].is_in(repeated["launch_id"].implode()).to_numpy()
        around = nesting.nearest(trace_columns.parent_ids(trace), repeats)
        return ids.filter(around[trace.ops["id"].is_in(ids.implode()).to_numpy()] >= 0)
    rows = counted_op_of_activities(trace, ids)
    rows = rows[trace.activities["id"].is_in(repeated["id"].implode()).to_numpy() & (rows >= 0)]
    return trace.ops["id"].gather(rows).unique()


_IS_COMPUTE = pl.col("kind") == "compute"


def _enclosing(trace: Trace, ids: pl.Series) -> nesting.Flags:
    """Mark the ops that have one of the calls `ids` in them: on a CPU run, an activity is an outermost op."""
    parent = trace_columns.parent_ids(trace)
    encloses = np.zeros(trace.ops.height, np.bool_)
    if trace.on_device:
        return encloses
    around = parent[trace.ops["id"].is_in(ids.implode()).to_numpy()]
    while (around := distinct(around[around >= 0])).size:
        around = around[~encloses[around]]
        encloses[around] = True
        around = parent[around]
    return encloses


_DIMS = ("M", "N", "K")
_GROUPS = "the rows of its groups"
_KERNEL = re.compile(r"(?:void )?deep_gemm::(?:\w+::)*(?P<kernel>\w+)<")
_FIRST: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"fp8_gemm_kernel", ("N", "K")),
    (r"fp8_wgrad_gemm_kernel", ("M", "N")),
    (r"sm90_fp8_gemm_1d[12]d_impl|sm(90|100)_bf16_gemm_impl", ("M", "N", "K")),
    (r"sm100_fp8_fp4_gemm_1d1d_impl", ("gran_a", "gran_b", "M", "N", "K")),
    (r"sm(90|100)_bmn_bnk_mn_gemm_impl", ("M", "N", "K", "S")),
    (r"sm(90|100)_tf32_hc_prenorm_gemm_impl", ("N", "K")),
)
"""Kernels by what their first integers among the template arguments are; S stands for a batch that is not stated."""
_NUMBER = re.compile(r"(?:\(unsigned int\)\s*)?(\d{1,15})u?")
_GEMM_TYPE = re.compile(r"\(deep_gemm::GemmType\)\s*(\d+)")
_NORMAL = "0"
_DTYPES = {"fp8": devices.FP8, "bf16": devices.BF16, "tf32": devices.TF32, "bmn_bnk": devices.BF16}
_TILED = re.compile(
    r"cutlass_\d+_\w*(?:gemm|tensorop|simt)\w*_\d+x\d+|nvjet_\w+?_\d+x\d+_|_tilesize\d+x\d+x\d+|Cijk_\w*_MT\d+x\d+|"
    r"(?:volta|turing|ampere|sm\d\d)_\w*gemm\w*_\d+x\d+"
)


def _arguments(text: str) -> list[str]:
    """Arguments of a template up to its closing bracket; what is nested in them stays text."""
    arguments, depth, begun = [], 0, 0
    for index, letter in enumerate(text):
        if letter in "<(":
            depth += 1
        elif depth and letter in ">)":
            depth -= 1
        elif letter in ",>":
            arguments.append(text[begun:index].strip())
            begun = index + 1
            if letter == ">":
                break
    return arguments
