"""Collectives by the field's names, with their sizes, and the process groups they run in."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import polars as pl

from tracekit import schema
from tracekit.readers.events import Args
from tracekit.readers.host import Host
from tracekit.readers.work import Speaker

_OPS = (
    ("reduce_scatter", "reduce_scatter"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("cross_device_reduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("send", "send"),
    ("recv", "recv"),
    ("barrier", "barrier"),
)
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
# A gather or a send moves bytes of any type, and NCCL runs it as int8: its kernel's name tells no dtype.
_TYPED = ("all_reduce", "reduce_scatter", "reduce")


def table(speakers: Iterable[Speaker], host: Host, saying: Mapping[int, Args]) -> pl.DataFrame:
    """Return the collectives table; one row per communication activity, from the best that describes it.

    That is the activity's own arguments, those of the slice that issued it, its shapes, the kernel's name.
    """
    rows = [_row(speaker, host, saying) for speaker in speakers]
    return pl.DataFrame(rows, schema=schema.COLLECTIVES.schema, orient="row")


@lru_cache(maxsize=4096)
def op_of(name: str) -> str | None:
    """Return the collective that a kernel, slice or c10d op runs, by the field's name; None where it isn't told.

    >>> op_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'reduce_scatter'
    """
    short = re.sub(r"\(.*", "", name).lower().removeprefix("c10d::").replace("_base", "").strip("_")
    return next((op for part, op in _OPS if part in short), None)


def groups(header: Mapping[str, Any], spoken: Iterable[Args]) -> pl.DataFrame:
    """Return the groups table from a header's distributedInfo, and from what collectives say of other groups."""
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    listed = info.get("pg_config")
    listed = list(listed.values()) if isinstance(listed, dict) else listed
    rows: dict[str, tuple[Any, ...]] = {}
    for group in listed if isinstance(listed, list) else ():
        if isinstance(group, dict):
            name = str(group.get("pg_name"))
            backend = _text(group.get("backend_config"))
            rows[name] = (name, _text(group.get("pg_desc")), backend, _ranks(group, info.get("world_size")))
    for args in spoken:
        if args.group is not None and str(args.group) not in rows:
            name = str(args.group)
            rows[name] = (name, _text(args.group_description), None, _listed(args.group_ranks))
    return pl.DataFrame(list(rows.values()), schema=schema.GROUPS.schema, orient="row", strict=False)


def _ranks(group: Mapping[str, Any], world_size: object) -> list[int] | None:
    ranks = group.get("ranks")
    known = [r for r in ranks if isinstance(r, int)] if isinstance(ranks, list) else None
    # PyTorch lists no ranks for the group of all.
    if not known and isinstance(world_size, int) and group.get("pg_size") == world_size:
        return list(range(world_size))
    return known


def _listed(ranks: object) -> list[int] | None:
    """Return the ranks in text such as "[0, 1, 2, 3]"; None where it is cut ("[0, 1, ...]") or no list."""
    try:
        found = json.loads(ranks) if isinstance(ranks, str) else ranks
    except ValueError:
        return None
    return [int(r) for r in found] if isinstance(found, list) and all(isinstance(r, int) for r in found) else None


def _row(speaker: Speaker, host: Host, saying: Mapping[int, Args]) -> tuple[Any, ...]:
    around = saying.get(speaker.issuer)
    own = speaker.args or _SILENT
    told = own if own.collective is not None or around is None or around.collective is None else around
    issuer = host.names.name[int(host.named[speaker.issuer])] if speaker.issuer >= 0 else None
    op = op_of(str(told.collective)) if told.collective is not None else None
    op = op or op_of(speaker.name) if _is_kernel(speaker.name) else op or op_of(issuer or speaker.name)
    op = op or op_of(issuer or "")
    place = (_text(told.group), _whole(told.seq))
    if told.dtype is not None or told.in_nelems is not None:
        dtype = _text(told.dtype)
        item = _ITEM_BYTES.get(str(dtype).lower())
        sizes = tuple(
            None if item is None or n is None else item * n for n in map(_whole, (told.in_nelems, told.out_nelems))
        )
    else:
        dtype, *sizes = _from_shapes(op, _shapes(around) or _shapes(own))  # type: ignore[assignment]
    if dtype is None and op in _TYPED:
        dtype = _kernel_dtype(speaker.name)
    return (speaker.activity_id, op, *place, dtype, *sizes, _whole(told.group_size))


_SILENT = Args()


def _is_kernel(name: str) -> bool:
    return ":" not in name.partition("(")[0] and op_of(name) is not None


def _shapes(args: Args | None) -> tuple[str, str] | None:
    if args is None or not bytes(args.input_dims):
        return None
    return bytes(args.input_dims).decode("utf-8", "replace"), bytes(args.input_type).decode("utf-8", "replace")


@lru_cache(maxsize=4096)
def _from_shapes(op: str | None, shapes: tuple[str, str] | None) -> tuple[str | None, int | None, int | None]:
    """Return dtype, sent and received bytes of a c10d op by its shapes: (output, input, …) or (tensors, …)."""
    try:
        dims, types = json.loads(shapes[0]), json.loads(shapes[1] or "[]")  # type: ignore[index]
    except (TypeError, ValueError):
        return None, None, None
    dtype = _first(types)
    item = _ITEM_BYTES.get(str(dtype).lower())
    if item is None or not isinstance(dims, list) or not dims:
        return dtype, None, None
    first = _elements(dims[0])
    if op in ("all_gather", "reduce_scatter", "all_to_all") and len(dims) > 1 and _elements(dims[1]):
        return dtype, item * _elements(dims[1]), item * first
    return dtype, item * first, item * first


@lru_cache(maxsize=4096)
def _kernel_dtype(name: str) -> str | None:
    found = _KERNEL_DTYPE.search(name.partition("(")[0])
    return _DTYPE_NAMES.get(found[1].lower(), found[1]) if found else None


def _first(kinds: object) -> str | None:
    while isinstance(kinds, list) and kinds:
        kinds = kinds[0]
    return kinds if isinstance(kinds, str) and kinds else None


def _elements(shape: object) -> int:
    if not isinstance(shape, list) or not shape:
        return 1 if shape == [] else 0
    if all(isinstance(n, int) for n in shape):
        return math.prod(shape)
    return sum(_elements(inner) for inner in shape)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _whole(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 1 << 53 else None
