"""What NCCL's own NVTX ranges state: communicators with their sizes, and the bytes of each collective.

A payload has fields by name (github.com/NVIDIA/nccl src/include/nvtx_payload_schemas.h). Nsight Systems stores it as
JSON text, or as bytes with tables of their layout: 32 bytes that name the domain, the layout and its size, then the
fields at their offsets. Their types are numbered as in nvToolsExtPayload.h of github.com/NVIDIA/NVTX.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.normalize import nccl_calls
from tracekit.ingest.readers.normalize.events import Args
from tracekit.ingest.readers.normalize.sqlite_tables import Database
from tracekit.ingest.readers.nsight.report_texts import Texts
from tracekit.model.manifest import MAX_RANKS

_FUNCTION = re.compile(rf"p?nccl({'|'.join(nccl_calls.OPS)})$")
_COMMUNICATOR, _SIZE, _RANK, _RANKS, _PEER = (
    "NCCL communicator ID",
    "Message size [bytes]",
    "Rank",
    "No. of ranks",
    "Peer rank",
)
_HEADER = struct.Struct("<IIIIQQ")
_FORMATS = {5: "<i", 6: "<I", 15: "<i", 16: "<I", 17: "<q", 18: "<Q", 22: "<Q"}
_MOST_BYTES = 1 << 53

Fields = Mapping[str, int]


@dataclass(frozen=True)
class _Layout:
    """The fields of a payload: name, struct format and offset of each."""

    fields: list[tuple[str, str, int]] = field(default_factory=list)

    def read(self, payload: bytes) -> Fields:
        """Return the values of the fields that lie within the payload."""
        return {
            name: struct.unpack_from(form, payload, offset)[0]
            for name, form, offset in self.fields
            if 0 <= offset <= len(payload) - struct.calcsize(form)
        }


class Payloads:
    """Decodes the payloads of the ranges of a report."""

    def __init__(self, database: Database, texts: Texts) -> None:
        self._texts = texts
        self._layouts: dict[tuple[int, int], _Layout] = {}
        columns = ("domainId", "schemaId", "type", "name", "offset")
        for domain, schema, kind, name, offset in database.rows("NVTX_PAYLOAD_SCHEMA_ENTRIES", columns):
            if isinstance(domain, int) and isinstance(schema, int) and isinstance(name, str) and kind in _FORMATS:
                layout = self._layouts.setdefault((domain, schema), _Layout())
                layout.fields.append((name, _FORMATS[kind], offset if isinstance(offset, int) else 0))

    def read(self, json_text: object, json_id: object, binary: object) -> Fields:
        """Return the integer fields of a payload by name; none if it has none, or not of a known layout."""
        if json_text is None and json_id is not None:
            json_text = self._texts.get(json_id)
        if isinstance(json_text, str):
            return _of_json(json_text)
        if isinstance(binary, str):
            binary = bytes.fromhex(binary) if re.fullmatch(r"(?:[0-9a-fA-F]{2})*", binary) else None
        if not isinstance(binary, bytes) or len(binary) < _HEADER.size:
            return {}
        domain, _, schema, *_ = _HEADER.unpack_from(binary)
        layout = self._layouts.get((domain, schema))
        return {} if layout is None else layout.read(binary[_HEADER.size :])


def _of_json(text: str) -> Fields:
    try:
        parsed = untrusted_json.parse(text)
    except ValueError:
        return {}
    return {name: value for name, value in parsed.items() if type(value) is int} if isinstance(parsed, dict) else {}


@dataclass(frozen=True)
class NcclRange:
    """The payload of an NVTX range; `process` is the serialized id of its process."""

    process: int
    start_ns: int
    fields: Fields


@dataclass(frozen=True)
class Communicators:
    """The communicators that NCCL's ranges state; `ranges` are in the order of their starts."""

    ranges: list[NcclRange]

    @cached_property
    def size_of(self) -> Mapping[int, int]:
        """Return the number of ranks of each communicator."""
        return {
            nccl_range.fields[_COMMUNICATOR]: nccl_range.fields[_RANKS]
            for nccl_range in self.ranges
            if _COMMUNICATOR in nccl_range.fields and 0 < nccl_range.fields.get(_RANKS, 0) <= MAX_RANKS
        }

    @cached_property
    def world_ranks(self) -> Mapping[int, tuple[int, int]]:
        """Return the rank and size of the largest communicator of each process, of several the first."""
        by_process: dict[int, tuple[int, int]] = {}
        for nccl_range in self.ranges:
            rank, size = nccl_range.fields.get(_RANK, -1), nccl_range.fields.get(_RANKS, 0)
            if 0 <= rank < size <= MAX_RANKS and size > by_process.get(nccl_range.process, (0, 0))[1]:
                by_process[nccl_range.process] = rank, size
        return by_process


def args_of(name: str, fields: Fields, communicators: Communicators) -> Args | None:
    """The collective of a range of NCCL, as arguments of PyTorch's profiler; None if it is none."""
    match = _FUNCTION.match(name)
    if match is None:
        return None
    op, communicator = nccl_calls.OPS[match[1]], fields.get(_COMMUNICATOR)
    size = None if communicator is None else communicators.size_of.get(communicator)
    stated: dict[str, Any] = {"collective": op, "group_size": size}
    if communicator is not None:
        stated["group"] = f"{communicator & (1 << 64) - 1:#x}"
    if (peer := fields.get(_PEER, -1)) >= 0:
        stated["destination" if op == "send" else "source"] = peer
    if 0 <= (part_bytes := fields.get(_SIZE, -1)) < _MOST_BYTES:
        stated["message_bytes"] = nccl_calls.message_bytes(op, part_bytes, size)
    return Args(**stated)
