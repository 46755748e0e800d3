"""Reads a Perfetto trace by Perfetto's own published schema, the way its trace processor treats events of tracks."""

import gzip
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest

schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


@dataclass
class Slice:
    track: int
    name: str
    category: str
    start_ns: int
    dur_ns: int
    depth: int
    arguments: dict[str, Any]
    leaving: list[int]
    ending: list[int]


@dataclass
class File:
    processes: dict[int, str] = field(default_factory=dict)
    tracks: dict[int, Any] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    moments: list[Slice] = field(default_factory=list)
    values: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def track_of(self, each: Slice) -> str:
        return self.tracks[each.track].name

    def process_of(self, each: Slice) -> str:
        return self.processes[self.tracks[each.track].parent_uuid]


def read(data: bytes) -> File:
    """Return what the file says. Fails on a field that Perfetto doesn't know, an event without its track or text, an
    end without a begin, a slice left open."""
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    trace = schema.Trace.FromString(data)
    known_bytes = trace.ByteSize()
    trace.DiscardUnknownFields()
    assert trace.ByteSize() == known_bytes
    assert trace.IsInitialized()
    found, texts = File(), {}
    events = []
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            described = packet.track_descriptor
            assert described.uuid not in (found.tracks.keys() | found.processes.keys() | {0})
            if described.HasField("process"):
                assert described.process.pid > 0
                found.processes[described.uuid] = described.process.process_name
            else:
                assert described.parent_uuid in found.processes
                found.tracks[described.uuid] = described
        elif packet.HasField("interned_data"):
            assert packet.sequence_flags == schema.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
            texts[packet.trusted_packet_sequence_id] = _texts(packet.interned_data)
        else:
            assert packet.sequence_flags == schema.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            assert packet.trusted_packet_sequence_id in texts
            events.append(packet)
    _play(events, texts, found)
    return found


def _texts(interned: Any) -> dict[str, dict[int, str]]:
    strings = {each.iid: each.str.decode() for each in interned.debug_annotation_string_values}
    kinds = {"event_names": {}, "event_categories": {}, "debug_annotation_names": {}}
    for kind, numbers in kinds.items():
        numbers.update((each.iid, each.name) for each in getattr(interned, kind))
        assert 0 not in numbers
    return kinds | {"strings": strings}


def _play(events: list[Any], texts: dict[int, dict[str, dict[int, str]]], found: File) -> None:
    # Sorted by time, and at one time in the order of the file: a track's stack must come out even.
    stacks: dict[int, list[Slice]] = defaultdict(list)
    for packet in sorted(events, key=lambda each: each.timestamp):
        event, known = packet.track_event, texts[packet.trusted_packet_sequence_id]
        assert event.track_uuid in found.tracks
        assert packet.timestamp < 1 << 63
        stack = stacks[event.track_uuid]
        if event.type in (BEGIN, INSTANT):
            begun = Slice(
                event.track_uuid,
                known["event_names"][event.name_iid],
                *(known["event_categories"][iid] for iid in event.category_iids),
                packet.timestamp,
                -1,
                len(stack),
                {known["debug_annotation_names"][a.name_iid]: _value(a, known) for a in event.debug_annotations},
                list(event.flow_ids),
                list(event.terminating_flow_ids),
            )
            if event.type == INSTANT:
                found.moments.append(begun)
                continue
            stack.append(begun)
            found.slices.append(begun)
        elif event.type == END:
            ended = stack.pop()
            ended.dur_ns = packet.timestamp - ended.start_ns
        else:
            assert event.type == COUNTER
            assert found.tracks[event.track_uuid].HasField("counter")
            found.values[event.track_uuid].append((packet.timestamp, event.counter_value))
    assert not any(stacks.values())


def _value(annotation: Any, known: dict[str, dict[int, str]]) -> Any:
    kind = annotation.WhichOneof("value")
    value = getattr(annotation, kind)
    return known["strings"][value] if kind == "string_value_iid" else value
