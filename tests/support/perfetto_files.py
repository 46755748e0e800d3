"""Perfetto files of Kineto traces, written with Perfetto's published schema as another tool would write them."""

from dataclasses import dataclass, field
from typing import Any

import pytest

schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

BEGIN, END, INSTANT = 1, 2, 3
SEQUENCE, BOOTTIME, OWN_CLOCK = 7, 6, 64


@dataclass
class Writer:
    """Packets of one sequence. With `interned`, texts are numbered, and times count from the packet before."""

    interned: bool
    trace: Any = field(default_factory=schema.Trace)
    last_ns: int = 0
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)

    def packet(self, **fields: Any) -> Any:
        return self.trace.packet.add(trusted_packet_sequence_id=SEQUENCE, **fields)

    def event(self, at_ns: int, **fields: Any) -> Any:
        stated = at_ns - self.last_ns if self.interned else at_ns
        self.last_ns = at_ns
        packet = self.packet(sequence_flags=2, timestamp=stated)
        for name, value in fields.items():
            setattr(packet.track_event, name, value)
        return packet

    def number(self, packet: Any, kind: str, text: str) -> int:
        known = self.numbers.setdefault(kind, {})
        if text not in known:
            known[text] = len(known) + 1
            getattr(packet.interned_data, kind).add(iid=known[text], name=text)
        return known[text]


def of_kineto(
    events: list[dict[str, Any]], base_ns: int, *, interned: bool = False, process: str | None = None
) -> bytes:
    """Return the file of the complete events of a Kineto trace, which nest on each thread; times are whole ns."""
    writer = Writer(interned)
    writer.packet(sequence_flags=1)
    slices = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (str(e["tid"]), e["ts"], -e["dur"]))
    moments = sorted(_moments(slices, base_ns), key=lambda moment: moment[0])
    if interned:
        clocks = writer.packet().clock_snapshot.clocks
        clocks.add(clock_id=BOOTTIME, timestamp=moments[0][0])
        clocks.add(clock_id=OWN_CLOCK, timestamp=0, is_incremental=True)
        writer.packet().trace_packet_defaults.timestamp_clock_id = OWN_CLOCK
        writer.last_ns = moments[0][0]
    tracks = {str(e["tid"]): 100 + i for i, e in enumerate(slices)}
    for tid, uuid in tracks.items():
        described = writer.packet().track_descriptor
        described.uuid = uuid
        if process is not None:
            described.process.process_name = process
        described.thread.pid, described.thread.tid = 1, int(tid)
    for at_ns, event, begins in moments:
        packet = writer.event(at_ns, type=BEGIN if begins else END, track_uuid=tracks[str(event["tid"])])
        if begins:
            _describe(writer, packet, event)
    return writer.trace.SerializeToString()


def _moments(slices: list[dict[str, Any]], base_ns: int) -> list[tuple[int, dict[str, Any], bool]]:
    found, open_slices = [], []
    for event in [*slices, {"tid": None, "ts": 0, "dur": 0}]:
        while open_slices and (open_slices[-1]["tid"] != event["tid"] or _end(open_slices[-1]) <= event["ts"]):
            last = open_slices.pop()
            found.append((base_ns + round(_end(last) * 1000), last, False))
        if event["tid"] is not None:
            open_slices.append(event)
            found.append((base_ns + round(event["ts"] * 1000), event, True))
    return found


def _end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def _describe(writer: Writer, packet: Any, event: dict[str, Any]) -> None:
    described = packet.track_event
    if writer.interned:
        described.name_iid = writer.number(packet, "event_names", event["name"])
        described.category_iids.append(writer.number(packet, "event_categories", event["cat"]))
    else:
        described.name = event["name"]
        described.categories.append(event["cat"])
    for key, value in event["args"].items():
        argument = described.debug_annotations.add()
        if writer.interned:
            argument.name_iid = writer.number(packet, "debug_annotation_names", key)
        else:
            argument.name = key
        state(argument, value)


def state(argument: Any, value: Any) -> None:
    """State the value of an argument, which may be a list."""
    if isinstance(value, list):
        for each in value:
            state(argument.array_values.add(), each)
    else:
        kinds = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}
        setattr(argument, kinds[type(value)], value)
