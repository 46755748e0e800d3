"""Collectives by the field's names, with their sizes, and the process groups they run in."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import polars as pl

from tracekit import schema

_OPS = (
    ("reduce_scatter", "reduce_scatter"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
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
}  # fmt: skip


def table(sources: pl.DataFrame) -> pl.DataFrame:
    """Return the collectives table from what the reader knows of each communication activity."""
    rows = [_row(source) for source in sources.iter_rows(named=True)]
    return pl.DataFrame(rows, schema=schema.COLLECTIVES.schema, orient="row")


def op_of(name: str) -> str | None:
    """Return the collective that a kernel, slice or c10d op runs, by the field's name; None where it isn't told.

    >>> op_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'reduce_scatter'
    """
    short = re.sub(r"\(.*", "", name).lower().removeprefix("c10d::").replace("_base", "").strip("_")
    return next((op for part, op in _OPS if part in short), None)


def groups(header: Mapping[str, Any]) -> pl.DataFrame:
    """Return the groups table from a trace header's distributedInfo; empty where it lists none."""
    info = header.get("distributedInfo")
    listed = info.get("pg_config") if isinstance(info, dict) else None
    rows = []
    for group in listed if isinstance(listed, list) else ():
        if not isinstance(group, dict):
            continue
        ranks = group.get("ranks")
        known = [r for r in ranks if isinstance(r, int)] if isinstance(ranks, list) else None
        rows.append((str(group.get("pg_name")), group.get("pg_desc"), group.get("backend_config"), known))
    return pl.DataFrame(rows, schema=schema.GROUPS.schema, orient="row", strict=False)


def _row(source: Mapping[str, Any]) -> tuple[Any, ...]:
    dtype = source.get("arg_dtype")
    item = _ITEM_BYTES.get(str(dtype).lower())
    sent, received = source.get("arg_in_nelems"), source.get("arg_out_nelems")
    op = op_of(source.get("arg_collective") or source.get("issuer") or source["name"])
    if source.get("input_dims"):
        dtype, sent_bytes, received_bytes = _from_shapes(op, source["input_dims"], source.get("input_type"))
    else:
        sent_bytes = None if item is None or sent is None else item * sent
        received_bytes = None if item is None or received is None else item * received
    place = (source.get("arg_group"), source.get("arg_seq"))
    return (source["id"], op, *place, dtype, sent_bytes, received_bytes, source.get("arg_group_size"))


def _from_shapes(op: str | None, dims: str, types: str | None) -> tuple[str | None, int | None, int | None]:
    """Return dtype, sent and received bytes of a c10d op by its shapes: (output, input, …) or (tensors, …)."""
    try:
        shapes, kinds = json.loads(dims), json.loads(types or "[]")
    except ValueError:
        return None, None, None
    dtype = _first(kinds)
    item = _ITEM_BYTES.get(str(dtype).lower())
    if item is None or not isinstance(shapes, list) or not shapes:
        return dtype, None, None
    first = _elements(shapes[0])
    if op in ("all_gather", "reduce_scatter") and len(shapes) > 1:
        return dtype, item * _elements(shapes[1]), item * first
    return dtype, item * first, item * first


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
