"""Trace events as typed objects, decoded many at a time by a C parser, or one at a time where the bytes are unusual.

Every value is accepted (`Any`) and checked where it is used: one invalid value must not lose a file.
"""

import functools
import operator
from collections.abc import Mapping
from types import GenericAlias
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Raw, field

from tracekit.ingest import untrusted_json

_NO_RAW = Raw(b"")


class MessageBytes(NamedTuple):
    """What a rank sends and receives in a collective; None where that is not known."""

    sent: int | None
    received: int | None


class Args(msgspec.Struct, gc=False):
    """The arguments that tracekit reads; names are case-sensitive (`bytes` of a copy, `Bytes` of an allocation)."""

    device: Any = None
    stream: Any = None
    correlation: Any = None
    external_id: Any = field(default=None, name="External id")
    old_external_id: Any = field(default=None, name="external id")
    sequence: Any = field(default=None, name="Sequence number")
    forward_thread: Any = field(default=None, name="Fwd thread id")
    record_id: Any = field(default=None, name="Record function id")
    name: Any = None
    labels: Any = None
    rank: Any = None
    bytes: Any = None
    graph_node: Any = field(default=None, name="graph node id")
    module_fqn: Any = None
    annotation: Any = None
    grid: Raw = _NO_RAW
    block: Raw = _NO_RAW
    delta_bytes: Any = field(default=None, name="Bytes")
    address: Any = field(default=None, name="Addr")
    device_type: Any = field(default=None, name="Device Type")
    device_id: Any = field(default=None, name="Device Id")
    allocated_bytes: Any = field(default=None, name="Total Allocated")
    reserved_bytes: Any = field(default=None, name="Total Reserved")
    collective: Any = field(default=None, name="Collective name")
    dtype: Any = None
    in_nelems: Any = field(default=None, name="In msg nelems")
    out_nelems: Any = field(default=None, name="Out msg nelems")
    in_split: Any = field(default=None, name="In split size")
    group: Any = field(default=None, name="Process Group Name")
    group_description: Any = field(default=None, name="Process Group Description")
    group_ranks: Any = field(default=None, name="Process Group Ranks")
    group_size: Any = field(default=None, name="Group size")
    seq: Any = field(default=None, name="Seq")
    source: Any = field(default=None, name="Src Rank")
    destination: Any = field(default=None, name="Dst Rank")
    awaited_stream: Any = field(default=None, name="wait_on_stream")
    awaited_correlation: Any = field(default=None, name="wait_on_cuda_event_record_corr_id")
    input_dims: Raw = field(default=_NO_RAW, name="Input Dims")
    input_type: Raw = field(default=_NO_RAW, name="Input type")
    input_strides: Raw = field(default=_NO_RAW, name="Input Strides")
    inputs: Raw = field(default=_NO_RAW, name="Concrete Inputs")
    message_bytes: Any = None
    """`MessageBytes` where a reader knows them; PyTorch's profiler states elements instead."""


class Slice(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event; times in µs as the file writes them."""

    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


class Exact(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event with times as text, for files whose times float64 cannot represent to the ns."""

    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Raw = _NO_RAW
    dur: Raw = _NO_RAW
    args: Args | None = None


class Counted(msgspec.Struct, gc=False):
    """An event that is only counted."""

    cat: Any = None


class Flow(msgspec.Struct, gc=False):
    """An end of an arrow between two slices, read only where it may show which slice launched work."""

    cat: Any = None
    id: Any = None
    pid: Any = None
    tid: Any = None
    ts: Raw = _NO_RAW


class Other(msgspec.Struct, gc=False):
    """An event of a kind that tracekit does not know: only counted."""

    ph: Any = None
    cat: Any = None


EMPTY = Other()
"""An object without keys: files of millions of them share this one."""
Event: TypeAlias = Slice | Exact | Counted | Flow | Other


def _of_phases(base: type[Any], phases: str) -> dict[str, type[Any]]:
    return {
        phase: msgspec.defstruct(f"{base.__name__}_{phase}", [], bases=(base,), tag_field="ph", tag=phase, gc=False)
        for phase in phases
    }


def _decoder(kinds: Mapping[str, type[Any]]) -> "msgspec.json.Decoder[list[Event]]":
    return msgspec.json.Decoder(GenericAlias(list, (functools.reduce(operator.or_, kinds.values()),)))


# B and E begin and end a slice; i, or I of older writers, is a moment; M names a process or thread.
_KINDS = {"X": Slice} | _of_phases(Slice, "BEiIM")
_EXACT = {"X": Exact} | _of_phases(Exact, "BEiI")
# Arrows (s, t, f), counters, and what other writers add: asynchronous events, objects, samples, marks, memory dumps.
_COUNTED = _of_phases(Counted, "stfCbneSTpFNODPRcvV")
Metadata = _KINDS["M"]
_FLOWS = _of_phases(Flow, "sf")
TAIL, HEAD = _FLOWS.values()
SLICES = frozenset({Slice, Exact})
COUNTED = frozenset({*_COUNTED.values(), Other})
BEGINS = frozenset({_KINDS["B"], _EXACT["B"]})
_ENDS = frozenset({_KINDS["E"], _EXACT["E"]})
HALVES: frozenset[type] = BEGINS | _ENDS
INSTANTS = frozenset(kinds[phase] for kinds in (_KINDS, _EXACT) for phase in "iI")
PHASES = {kind: phase for kinds in (_KINDS, _EXACT, _COUNTED) for phase, kind in kinds.items()}

_KNOWN = _KINDS | _COUNTED
_DECODER = _decoder(_KNOWN)
_EXACT_DECODER = _decoder(_EXACT | _COUNTED | {"M": Metadata})
_FLOW_DECODER = _decoder(_EXACT | _COUNTED | {"M": Metadata} | _FLOWS)
_SLICE_FIELDS = ("cat", "name", "pid", "tid", "ts", "dur")
_ARG_FIELDS = tuple((f.name, f.encode_name) for f in msgspec.structs.fields(Args))
_RAW_ARGS = ("grid", "block", "input_dims", "input_type", "input_strides", "inputs")


def decode(array: bytes, *, exact: bool = False, with_flows: bool = False) -> list[Event] | None:
    """Return the events of a JSON array; None where it is not valid JSON or holds anything unusual."""
    try:
        if with_flows:
            return _FLOW_DECODER.decode(array)
        return (_EXACT_DECODER if exact else _DECODER).decode(array)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def from_text(text: str, event: Mapping[str, Any], *, with_flows: bool = False) -> Event:
    """Return the event of a JSON object, given as text and parsed; its times are text."""
    decoded = decode(f"[{text}]".encode(), exact=True, with_flows=with_flows) if _has_known_phase(event) else None
    return decoded[0] if decoded else from_object(event)


def from_object(event: Mapping[str, Any]) -> Event:
    """Return the event of a plain JSON object; lone surrogates in strings are replaced."""
    phase = event.get("ph")
    if not _has_known_phase(event):
        return Other(_clean(phase), _clean(event.get("cat")))
    if phase in _COUNTED:
        return _COUNTED[phase](cat=_clean(event.get("cat")))  # type: ignore[no-any-return]
    raw_args = event.get("args")
    args = None
    if isinstance(raw_args, dict):
        args = Args(**{name: _arg(name, raw_args[key]) for name, key in _ARG_FIELDS if key in raw_args})
    return _KINDS[phase](*(_clean(event.get(name)) for name in _SLICE_FIELDS), args)  # type: ignore[no-any-return]


def _has_known_phase(event: Mapping[str, Any]) -> bool:
    phase = event.get("ph")
    return isinstance(phase, str) and phase in _KNOWN


def _arg(name: str, value: Any) -> Any:
    return Raw(untrusted_json.to_text(value).encode()) if name in _RAW_ARGS else _clean(value)


def _clean(value: Any) -> Any:
    """Return `value` with lone surrogates replaced; what is neither text nor number becomes its text."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if value is None or isinstance(value, int | float):
        return value
    return untrusted_json.to_text(value)
