"""Collectives by the field's names, with their sizes, and the process groups they run in."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import polars as pl

from tracekit.conventions.strategies import PP, axis_of_description
from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.normalize.activities import CommunicationActivity
from tracekit.ingest.readers.normalize.communication_kernels import op_of
from tracekit.ingest.readers.normalize.events import Args, MessageBytes
from tracekit.ingest.readers.normalize.host_slices import Host
from tracekit.model import schema
from tracekit.model.manifest import MAX_RANKS

_ITEM_BYTES = {
    "double": 8, "float64": 8, "long": 8, "int64": 8, "float": 4, "float32": 4, "int": 4, "int32": 4,
    "half": 2, "float16": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "short": 2, "byte": 1, "int8": 1,
    "char": 1, "signed char": 1, "unsigned char": 1, "uint8": 1, "bool": 1, "long int": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1, "int16": 2,
}  # fmt: skip
# NCCL names its old kernels …_Sum_float(…) and its new ones …_Sum_f32_….
_KERNEL_DTYPE = re.compile(
    r"_(?:sum|prod|min|max|minmax|avg|premulsum|sumpostdiv)_(b?f16|f32|f64|f8e4m3|f8e5m2|[iu](?:8|32|64)|u?int\d+_t|float|double|"
    r"half|__nv_bfloat16)(?=_|\(|$)",
    re.I,
)
_DTYPE_NAMES = {
    "bf16": "BFloat16", "f16": "Half", "f32": "Float", "f64": "Double", "__nv_bfloat16": "BFloat16", "half": "Half",
    "float": "Float", "double": "Double", "f8e4m3": "Float8_e4m3fn", "f8e5m2": "Float8_e5m2",
}  # fmt: skip
# Gathers and sends move bytes of any type; NCCL runs them as int8, so the kernel name has no dtype.
_TYPED = ("all_reduce", "reduce_scatter", "reduce")
# Of these, output and input differ.
_UNLIKE = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_NO_TENSOR = ("", "Scalar", "ScalarList")

_Shapes = tuple[str, str, bool]
"""Input dims and types as JSON, and whether output and input come first among them; else it is the input alone."""


def table(
    communication: Iterable[CommunicationActivity],
    host: Host,
    slice_args: Mapping[int, Args],
    groups: pl.DataFrame,
    rank: int,
) -> pl.DataFrame:
    """Return the collectives table; one row per communication activity, from the best that describes it.

    That is the activity's own arguments, those of the slice that issued it, its shapes, the kernel's name. `groups` are
    the process groups of the trace of `rank`.
    """
    raw_rows = [_row(activity, host, slice_args) for activity in communication]
    ranks = _ranks_of_sends({place for *_, place in raw_rows if place is not None}, groups, rank)
    rows = [(*row, peer if place is None else ranks.get(place), *splits) for *row, splits, peer, place in raw_rows]
    return pl.DataFrame(rows, schema=schema.COLLECTIVES.schema, orient="row")


def groups(
    header: Mapping[str, Any], collective_args: Iterable[Args], listed_groups: Sequence[Any] = ()
) -> pl.DataFrame:
    """Return the groups table from a header's distributedInfo, else from `listed_groups`, else from collectives."""
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    listed = info.get("pg_config")
    listed = list(listed.values()) if isinstance(listed, dict) else listed
    rows: dict[str, tuple[Any, ...]] = {}
    for group in (*(listed if isinstance(listed, list) else ()), *listed_groups):
        name = _whole_text(str(group.get("pg_name"))) if isinstance(group, dict) else None
        if name is not None and name not in rows:
            backend = _text(group.get("backend_config"))
            rows[name] = (name, _text(group.get("pg_desc")), backend, _ranks(group, info.get("world_size")))
    for args in collective_args:
        if args.group is not None and str(args.group) not in rows:
            name = str(args.group)
            rows[name] = (name, _text(args.group_description), None, _parse_ranks(args.group_ranks))
    return pl.DataFrame(list(rows.values()), schema=schema.GROUPS.schema, orient="row", strict=False)


def _ranks(group: Mapping[str, Any], world_size: object) -> list[int] | None:
    ranks = _believable(group.get("ranks"))
    # PyTorch lists no ranks for a group of all; its name for the size is another in execution traces.
    size = group.get("pg_size", group.get("group_size"))
    if not ranks and type(world_size) is int and 0 < world_size <= MAX_RANKS and size == world_size:
        return list(range(world_size))
    return ranks or None


def _parse_ranks(ranks: object) -> list[int] | None:
    """Return the ranks in text such as "[0, 1, 2, 3]"; None where it is cut ("[0, 1, ...]") or no list."""
    try:
        parsed = untrusted_json.parse(ranks) if isinstance(ranks, str) else ranks
    except ValueError:
        return None
    return _believable(parsed)


def _believable(ranks: object) -> list[int] | None:
    if not isinstance(ranks, list) or not all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in ranks):
        return None
    return ranks


def _row(activity: CommunicationActivity, host: Host, slice_args: Mapping[int, Args]) -> tuple[Any, ...]:
    stated = activity.args or _NO_ARGS
    around = _around(activity.issuer, host, slice_args)
    described = next((args for _, args in ((activity.name, stated), *around) if args.collective is not None), stated)
    op = op_of(str(described.collective)) if described.collective is not None else None
    op = op or _op_by_names(activity.name, [name for name, _ in around])
    by_name = _dtype_by_name(op, activity.name)
    if isinstance(described.message_bytes, MessageBytes):
        dtype, (sent, received) = by_name, described.message_bytes
    elif described.dtype is not None or described.in_nelems is not None:
        dtype = by_name if described.dtype is None else _text(described.dtype)
        sent, received = (_bytes(n, dtype) for n in (described.in_nelems, described.out_nelems))
    else:
        # The op's own inputs come first: output and input. Slices inside it have the input only.
        shapes = [_shapes(name, args) for name, args in (*reversed(around), (activity.name, stated))]
        dtype, sent, received = _sizes_by_shapes(op, by_name, shapes)
    return (
        activity.activity_id,
        op,
        _text(described.group),
        _whole(described.seq),
        dtype,
        sent,
        received,
        _whole(described.group_size),
        _splits(described, around, sent) if op == _ALL_TO_ALL else (None, None),
        _peer(described) if described.collective is not None else None,
        _place_by_inputs(op, around) if described.collective is None else None,
    )


def _peer(described: Args) -> int | None:
    """Return the global rank of the peer of a send or receive; arguments give its index in the group."""
    place = _whole(described.source if described.destination is None else described.destination)
    ranks = _parse_ranks(described.group_ranks)
    if place is None or place < 0:
        return None
    return ranks[place] if ranks is not None and place < len(ranks) else place


def _splits(
    described: Args, around: list[tuple[str, Args]], sent_bytes: int | None
) -> tuple[list[int] | None, int | None]:
    """Return the bytes that an all-to-all sends to each rank, and those of a row; None where equal, or not known."""
    splits = _parse_ranks(described.in_split)
    if splits is None:
        issued = next((args for name, args in around if name.startswith(_ALL_TO_ALL_OP)), _NO_ARGS)
        splits = _parse_ranks(_input(issued, 4))
    rows = sum(splits or ())
    if not splits or not rows or sent_bytes is None or sent_bytes % rows:
        return None, None
    return [sent_bytes // rows * split for split in splits], sent_bytes // rows


def _place_by_inputs(op: str | None, around: list[tuple[str, Args]]) -> int | None:
    """Return the place in the group of c10d::send's receiver, or c10d::recv_'s sender: the op's third input."""
    if op not in ("send", "recv"):
        return None
    described = next((args for name, args in around if name.startswith(_C10D)), _NO_ARGS)
    place = _whole(_input(described, 2))
    return place if place is not None and 0 <= place < MAX_RANKS else None


def _ranks_of_sends(places: set[int], groups: pl.DataFrame, rank: int) -> dict[int, int]:
    """Return the global ranks at these places of the group in which `rank` sends and receives; {} where unknown.

    The ops do not record the group. It contains `rank` at none of the places, since no rank sends to itself. Of several
    such groups it is the one described as pipeline-parallel, otherwise the largest.
    """
    listed = groups.select("description", "ranks").drop_nulls("ranks").iter_rows()
    possible = [(axis_of_description(text), ranks) for text, ranks in listed if rank in ranks and len(ranks) > 1]
    if not possible and rank not in places:
        return {place: place for place in places}
    fitting = [(axis, ranks) for axis, ranks in possible if _fits(places, ranks, rank)]
    fitting = [group for group in fitting if group[0] == PP] or fitting
    size = max((len(ranks) for _, ranks in fitting), default=0)
    largest = {tuple(ranks) for _, ranks in fitting if len(ranks) == size}  # frameworks make several groups of the same
    return {place: ranks[place] for ranks in largest for place in places} if len(largest) == 1 else {}


def _fits(places: set[int], ranks: list[int], rank: int) -> bool:
    return max(places, default=0) < len(ranks) and ranks.index(rank) not in places


def _input(args: Args, index: int) -> Any:
    """Return an op's recorded input; None where it is not there."""
    try:
        return untrusted_json.parse(bytes(args.inputs))[index]
    except (ValueError, IndexError, TypeError, KeyError):
        return None


_NO_ARGS = Args()
_C10D = "c10d::"
_ALL_TO_ALL, _ALL_TO_ALL_OP = "all_to_all", "c10d::alltoall_base_"
_MAX_DEPTH = 64


def _around(index: int, host: Host, slice_args: Mapping[int, Args]) -> list[tuple[str, Args]]:
    """Return the slices around a launch that may describe it, innermost first, up to the c10d op that issued it."""
    slices: list[tuple[str, Args]] = []
    for _ in range(_MAX_DEPTH):
        if index < 0 or (slices and slices[-1][0].startswith(_C10D)):
            break
        if index in slice_args:
            slices.append((host.names.name[int(host.name_id[index])], slice_args[index]))
        index = int(host.parent[index])
    return slices


def _op_by_names(name: str, around: list[str]) -> str | None:
    """Return the op named by a kernel, otherwise by the slices around it."""
    issued = next((op for op in map(op_of, around) if op), None)
    kernel_op = op_of(name)
    # NCCL runs many an op as sends and receives; and gloo runs a reduce-scatter as an all-reduce.
    return kernel_op if _is_kernel(name) and kernel_op != "send_recv" else issued or kernel_op


def _is_kernel(name: str) -> bool:
    return ":" not in name.partition("(")[0] and op_of(name) is not None


def _shapes(name: str, args: Args) -> _Shapes:
    dims, kinds = (bytes(raw).decode("utf-8", "replace") for raw in (args.input_dims, args.input_type))
    return dims, kinds, name.startswith(_C10D)


def _bytes(elements: Any, dtype: str | None) -> int | None:
    count, item = _whole(elements), _item_bytes(dtype)
    return None if count is None or item is None else item * count


def _text(value: object) -> str | None:
    return None if value is None else _whole_text(str(value))


def _whole_text(text: str) -> str:
    """Return a text with lone surrogates replaced, which JSON can spell and no table can hold."""
    return text.encode("utf-8", "replace").decode()


def _whole(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 1 << 53 else None


def _item_bytes(dtype: str | None) -> int | None:
    """Return the size of one element; None where the type is not known."""
    return _ITEM_BYTES.get(str(dtype).lower())


def _dtype_by_name(op: str | None, kernel: str) -> str | None:
    """Return the element type in a kernel's name; None if the op moves any type as bytes."""
    return _kernel_dtype(kernel) if op in _TYPED else None


def _sizes_by_shapes(
    op: str | None, dtype: str | None, candidates: Iterable[_Shapes]
) -> tuple[str | None, int | None, int | None]:
    """Return dtype, sent and received bytes by the first of `candidates` that gives a size.

    `dtype` is the fallback where no shapes have a type: lists of tensors have none.
    """
    shapes = list(candidates)
    dtype = next((kind for _, kinds, _ in shapes if (kind := _dtype(kinds))), dtype)
    item = _item_bytes(dtype)
    for dims, kinds, both_sides in shapes:
        sent, received = _counts(op, dims, kinds, both_sides)
        if item is not None and (sent is not None or received is not None):
            return dtype, None if sent is None else item * sent, None if received is None else item * received
    return dtype, None, None


@lru_cache(maxsize=4096)
def _counts(op: str | None, dims: str, kinds: str, both_sides: bool) -> tuple[int | None, int | None]:
    first, second = (_elements(*tensor) for tensor in zip(_two(dims), _two(kinds), strict=True))
    if op not in _UNLIKE:
        return first, first
    return (second, first) if both_sides else (first, None)


@lru_cache(maxsize=4096)
def _dtype(kinds: str) -> str | None:
    return next((kind for kind in _two(kinds) if isinstance(kind, str) and _item_bytes(kind) is not None), None)


def _two(listed: str) -> list[object]:
    try:
        parsed = untrusted_json.parse(listed)
    except ValueError:
        parsed = None
    return [*(parsed if isinstance(parsed, list) else []), None, None][:2]


def _elements(shape: object, kind: object) -> int | None:
    """Number of elements of a tensor, or of all tensors of a list; None for what is none or has no shape."""
    if kind in _NO_TENSOR or not isinstance(shape, list):
        return None
    if not shape:
        return 1 if isinstance(kind, str) and _item_bytes(kind) is not None else None
    return _product(shape)


def _product(shape: object) -> int | None:
    if isinstance(shape, list) and all(isinstance(n, int) for n in shape):
        return math.prod(shape)
    counts = [_product(inner) for inner in shape] if isinstance(shape, list) else [None]
    return None if None in counts else sum(count for count in counts if count is not None)


@lru_cache(maxsize=4096)
def _kernel_dtype(name: str) -> str | None:
    match = _KERNEL_DTYPE.search(name.partition("(")[0])
    return _DTYPE_NAMES.get(match[1].lower(), match[1]) if match else None
