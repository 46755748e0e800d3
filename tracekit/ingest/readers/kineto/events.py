"""Trace events as typed objects, decoded many at a time by a C parser, or one at a time where the bytes are unusual.

Every value is accepted (`Any`) and checked where it is used: one invalid value must not lose a file.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import msgspec
from msgspec import Raw, field

_NO_RAW = Raw(b"")


class Args(msgspec.Struct, gc=False):
    """The arguments that tracekit reads; names are case-sensitive (`bytes` of a copy, `Bytes` of an allocation)."""

    device: Any = None
    stream: Any = None
    correlation: Any = None
    external_id: Any = field(default=None, name="External id")
    old_external_id: Any = field(default=None, name="external id")
    sequence: Any = field(default=None, name="Sequence number")
    forward_thread: Any = field(default=None, name="Fwd thread id")
    name: Any = None
    rank: Any = None
    bytes: Any = None
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
    inputs: Raw = field(default=_NO_RAW, name="Concrete Inputs")


class Slice(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event; times in µs as the file writes them."""

    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


class Begin(Slice, gc=False, tag="B"):
    """The start of a slice that an End event ends."""


class End(Slice, gc=False, tag="E"):
    """The end of the last slice begun on its thread."""


class Instant(Slice, gc=False, tag="i"):
    """A moment, such as a `[memory]` event."""


class OldInstant(Instant, gc=False, tag="I"):
    """A moment as older writers mark it."""


class Metadata(Slice, gc=False, tag="M"):
    """The name of a process or thread."""


class Exact(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event with times as text, for files whose times float64 cannot represent to the ns."""

    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Raw = _NO_RAW
    dur: Raw = _NO_RAW
    args: Args | None = None


class ExactBegin(Exact, gc=False, tag="B"):
    """The start of a slice, its time as text."""


class ExactEnd(Exact, gc=False, tag="E"):
    """The end of a slice, its time as text."""


class ExactInstant(Exact, gc=False, tag="i"):
    """A moment, its time as text."""


class ExactOldInstant(ExactInstant, gc=False, tag="I"):
    """A moment as older writers mark it, its time as text."""


class FlowStart(msgspec.Struct, gc=False, tag_field="ph", tag="s"):
    """Where an arrow starts: only counted."""

    cat: Any = None


class FlowEnd(msgspec.Struct, gc=False, tag_field="ph", tag="f"):
    """Where an arrow ends: only counted."""

    cat: Any = None


class Counter(msgspec.Struct, gc=False, tag_field="ph", tag="C"):
    """A counter's value: only counted."""

    cat: Any = None


class Other(msgspec.Struct, gc=False):
    """An event of a kind that tracekit does not know: only counted."""

    ph: Any = None
    cat: Any = None


AnySlice: TypeAlias = Slice | Exact
Event: TypeAlias = AnySlice | FlowStart | FlowEnd | Counter | Other

_KINDS: tuple[type[Any], ...] = (Slice, Begin, End, Instant, OldInstant, Metadata)
_EXACT: tuple[type[Any], ...] = (Exact, ExactBegin, ExactEnd, ExactInstant, ExactOldInstant)
SLICES = frozenset({Slice, Exact})
COUNTED = frozenset({FlowStart, FlowEnd, Counter, Other})
BEGINS = frozenset({Begin, ExactBegin})
ENDS = frozenset({End, ExactEnd})
INSTANTS = frozenset({Instant, OldInstant, ExactInstant, ExactOldInstant})
_COUNTED: tuple[type[Any], ...] = (FlowStart, FlowEnd, Counter)
PHASES: Mapping[type[Any], str] = {kind: str(kind.__struct_config__.tag) for kind in (*_KINDS, *_EXACT, *_COUNTED)}

_DECODER = msgspec.json.Decoder(
    list[Slice | Begin | End | Instant | OldInstant | Metadata | FlowStart | FlowEnd | Counter]
)
_EXACT_DECODER = msgspec.json.Decoder(
    list[Exact | ExactBegin | ExactEnd | ExactInstant | ExactOldInstant | Metadata | FlowStart | FlowEnd | Counter]
)
_BY_PHASE: Mapping[str, type[Any]] = {PHASES[kind]: kind for kind in (*_KINDS, *_COUNTED)}
_SLICE_FIELDS = ("cat", "name", "pid", "tid", "ts", "dur")
_ARG_FIELDS = tuple((f.name, f.encode_name) for f in msgspec.structs.fields(Args))
_RAW_ARGS = ("grid", "block", "input_dims", "input_type", "inputs")


def decode(array: bytes, *, exact: bool = False) -> list[Event] | None:
    """Return the events of a JSON array; None where it is not valid JSON or holds anything unusual."""
    try:
        decoder = cast("msgspec.json.Decoder[list[Event]]", _EXACT_DECODER if exact else _DECODER)
        return decoder.decode(array)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def from_text(text: str, event: Mapping[str, Any]) -> Event:
    """Return the event of a JSON object, given as text and parsed; its times are text."""
    found = decode(f"[{text}]".encode(), exact=True)
    return found[0] if found else from_object(event)


def from_object(event: Mapping[str, Any]) -> Event:
    """Return the event of a plain JSON object; lone surrogates in strings are replaced."""
    kind = _BY_PHASE.get(event["ph"]) if isinstance(event.get("ph"), str) else None
    if kind is None:
        return Other(_clean(event.get("ph")), _clean(event.get("cat")))
    if kind not in _KINDS:
        return kind(cat=_clean(event.get("cat")))  # type: ignore[no-any-return]
    given = event.get("args")
    args = None
    if isinstance(given, dict):
        args = Args(**{name: _arg(name, given[key]) for name, key in _ARG_FIELDS if key in given})
    return kind(*(_clean(event.get(name)) for name in _SLICE_FIELDS), args)  # type: ignore[no-any-return]


def _arg(name: str, value: Any) -> Any:
    return Raw(json.dumps(value).encode()) if name in _RAW_ARGS else _clean(value)


def _clean(value: Any) -> Any:
    """Return `value` with lone surrogates replaced; what is neither text nor number becomes its text."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if value is None or isinstance(value, int | float):
        return value
    return json.dumps(value)
