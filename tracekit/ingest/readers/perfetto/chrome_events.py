"""Events of Chrome in bundles, as Perfetto files had them before there were tracks: those of a Chrome trace in JSON.

Field numbers: Perfetto's protos/perfetto/trace/chrome/chrome_trace_event.proto. Bundles that hold JSON text, or texts
by number, are not read.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.perfetto import packets as packet_columns
from tracekit.ingest.readers.perfetto import wire
from tracekit.ingest.readers.perfetto.packets import Packets
from tracekit.ingest.readers.perfetto.wire import FIXED64, LENGTH, VARINT, Ints

_EVENTS = 1  # of ChromeEventBundle
_NAME, _CATEGORY = 1, 10
_TIME_US, _PHASE, _THREAD, _DURATION_US, _PROCESS = 2, 3, 4, 5, 11
_ARGUMENT = 14
_ARGUMENT_NAME, _BOOL, _UINT, _INT, _DOUBLE, _TEXT, _POINTER, _JSON = 1, 2, 3, 4, 5, 6, 7, 8
_PHASES = "XBEiI"


def read(packets: Packets) -> list[dict[str, Any]]:
    """Return the slices and moments of all bundles, in file order, with the fields that Chrome's JSON has."""
    rows = np.flatnonzero(packets.chrome[1] > packets.chrome[0])
    if not len(rows):
        return []
    bundles = wire.fields(packets.data, packets.chrome[0][rows], packets.chrome[1][rows])
    which = bundles.where(_EVENTS, LENGTH)
    begin = np.sort(bundles.value[which])
    fields = wire.fields(packets.data, begin, (bundles.value + bundles.size)[which][np.argsort(bundles.value[which])])
    numbers = (_PHASE, _PROCESS, _THREAD, _TIME_US, _DURATION_US)
    columns = (fields.column(number, VARINT).tolist() for number in numbers)
    texts = (packet_columns.strings(packets.data, *fields.spans(number)) for number in (_NAME, _CATEGORY))
    args = _arguments(packets.data, fields)
    return [
        {"ph": chr(phase), "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": name, "cat": category, "args": values}
        for phase, pid, tid, ts, dur, name, category, values in zip(*columns, *texts, args, strict=True)
        if 0 < phase < 128 and chr(phase) in _PHASES
    ]


def _arguments(data: bytes, fields: wire.Fields) -> list[dict[str, Any]]:
    """Return the arguments of each event by name."""
    rows = fields.where(_ARGUMENT, LENGTH)
    inner = wire.fields(data, fields.value[rows], fields.value[rows] + fields.size[rows])
    names = packet_columns.strings(data, *inner.spans(_ARGUMENT_NAME))
    by_event: list[dict[str, Any]] = [{} for _ in fields.damaged]
    values = dict(_values(data, inner))
    for number, (event, name) in enumerate(zip(fields.owner[rows].tolist(), names, strict=True)):
        if number in values:
            by_event[event][name] = values[number]
    return by_event


def _values(data: bytes, inner: wire.Fields) -> Iterator[tuple[int, Any]]:
    """Yield the place of each argument, and its value."""
    for number in (_BOOL, _UINT, _INT, _POINTER):
        yield from ((owner, bool(v) if number == _BOOL else v) for owner, v in _pairs(inner, number, VARINT))
    yield from ((owner, float(np.int64(v).view(np.float64))) for owner, v in _pairs(inner, _DOUBLE, FIXED64))
    for number in (_TEXT, _JSON):
        rows = inner.where(number, LENGTH)
        texts = packet_columns.strings(data, inner.value[rows], inner.value[rows] + inner.size[rows])
        for owner, text in zip(inner.owner[rows].tolist(), texts, strict=True):
            yield owner, _parse_or_keep(text) if number == _JSON else text


def _pairs(inner: wire.Fields, number: int, kind: int) -> Iterator[tuple[int, int]]:
    rows: Ints = inner.where(number, kind)
    yield from zip(inner.owner[rows].tolist(), inner.value[rows].tolist(), strict=True)


def _parse_or_keep(text: str) -> Any:
    try:
        return untrusted_json.parse(text)
    except ValueError:
        return text
