"""The tracks of a Perfetto file: process, thread and rank of each, and the values of those that are counters."""

import re
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.conventions import perfetto as F  # noqa: N812  (field numbers, constants all)
from tracekit.ingest.readers.perfetto import packets as packet_columns
from tracekit.ingest.readers.perfetto import wire
from tracekit.ingest.readers.perfetto.events import Events
from tracekit.ingest.readers.perfetto.packets import Packets
from tracekit.ingest.readers.perfetto.wire import FIXED64, VARINT, Flags
from tracekit.model import schema
from tracekit.model.manifest import MAX_RANKS

_RANK = re.compile(r"\brank[ _-]?(\d{1,7})(?!\d)", re.I)
_MOST_PARENTS = 64
_MOST_NAME = 200


@dataclass(frozen=True)
class Track:
    """One track: process and thread ids as text, the name of the thread or track, and the rank if one is named."""

    process: str | None = None
    thread: str | None = None
    name: str | None = None
    rank: int | None = None


class Tracks:
    """Tracks by uuid."""

    def __init__(self, packets: Packets) -> None:
        rows = np.flatnonzero(packets.descriptor[1] > packets.descriptor[0])
        fields = wire.fields(packets.data, packets.descriptor[0][rows], packets.descriptor[1][rows])
        processes = wire.fields(packets.data, *fields.spans(F.PROCESS))
        threads = wire.fields(packets.data, *fields.spans(F.THREAD))
        columns = [
            fields.column(F.UUID).tolist(),
            fields.column(F.PARENT).tolist(),
            processes.column(F.PID, missing=-1).tolist(),
            threads.column(F.THREAD_PID, missing=-1).tolist(),
            threads.column(F.TID, missing=-1).tolist(),
            _names(packets, fields, F.TRACK_NAME, F.STATIC_NAME),
            _names(packets, processes, F.PROCESS_NAME),
            _names(packets, threads, F.THREAD_NAME),
        ]
        # A later descriptor of a track completes the earlier ones.
        self._stated: dict[int, tuple[int, int, int, int, str, str, str]] = {}
        for uuid, *stated in zip(*columns, strict=True):
            before = self._stated.get(uuid, (0, -1, -1, -1, "", "", ""))
            merged = (new if new not in (0, -1, "") else old for new, old in zip(stated, before, strict=True))
            self._stated[uuid] = tuple(merged)  # type: ignore[assignment]
        self._known: dict[int, Track] = {}

    def __getitem__(self, uuid: int) -> Track:
        """Return the track of a uuid; one that is not described has a thread of its own."""
        if uuid not in self._known:
            self._known[uuid] = self._track(uuid)
        return self._known[uuid]

    def _track(self, uuid: int) -> Track:
        thread = process = name = None
        rank, ancestor = None, uuid
        for _ in range(_MOST_PARENTS):
            if ancestor not in self._stated:
                break
            parent, pid, thread_pid, tid, track_name, process_name, thread_name = self._stated[ancestor]
            name = name or thread_name or track_name or None
            if tid >= 0 and thread is None:
                thread = str(tid)
            if process is None and max(thread_pid, pid) >= 0:
                process = str(max(thread_pid, pid))
            rank = _rank(process_name or track_name) if rank is None else rank
            ancestor = parent
        return Track(process, thread or f"track {uuid & (1 << 64) - 1}", name, rank)


def _names(packets: Packets, fields: wire.Fields, *numbers: int) -> list[str]:
    texts = [list(packet_columns.strings(packets.data, *fields.spans(number))) for number in numbers]
    return [next(filter(None, candidates), "") for candidates in zip(*texts, strict=True)]


def _rank(name: str) -> int | None:
    match = _RANK.search(name)
    return int(match[1]) if match and int(match[1]) < MAX_RANKS else None


def counters(events: Events, tracks: Tracks, selected: Flags) -> pl.DataFrame:
    """Return the values of the chosen events that are of counters, columns as COUNTERS; by name and time.

    A counter is named after its track, with the unit that the track states. Values that count up from the one before
    are added up from 0.
    """
    rows = np.flatnonzero(selected & (events.kind == F.COUNTER))
    stated = events.fields.column(F.VALUE, VARINT)[rows].astype(np.float64)
    in_doubles = np.zeros(len(events.kind), np.bool_)
    in_doubles[events.fields.owner[events.fields.where(F.DOUBLE_VALUE, FIXED64)]] = True
    doubles = events.fields.column(F.DOUBLE_VALUE, FIXED64)[rows].view(np.float64)
    value = np.where(in_doubles[rows], doubles, stated)
    kinds = _kinds(events.packets)
    parts = []
    for uuid in np.unique(events.track[rows]).tolist():
        track_rows = rows[events.track[rows] == uuid]
        order = np.argsort(events.at_ns[track_rows], kind="stable")
        unit, factor, is_incremental = kinds.get(uuid, ("", 1, False))
        values = value[events.track[rows] == uuid][order] * factor
        name = (tracks[uuid].name or "counter")[:_MOST_NAME] + (f" [{unit}]" if unit else "")
        columns = {"at_ns": events.at_ns[track_rows][order], "value": np.cumsum(values) if is_incremental else values}
        parts.append(pl.DataFrame(columns).with_columns(name=pl.lit(name)).filter(pl.col("value").is_finite()))
    return schema.COUNTERS.conform(pl.concat(parts).sort("name", "at_ns")) if parts else schema.COUNTERS.empty()


def _kinds(packets: Packets) -> dict[int, tuple[str, int, bool]]:
    """Return unit, factor of the values, and whether they count up from the one before, of each counter by track."""
    rows = np.flatnonzero(packets.descriptor[1] > packets.descriptor[0])
    tracks = wire.fields(packets.data, packets.descriptor[0][rows], packets.descriptor[1][rows])
    begin, end = tracks.spans(F.COUNTER_KIND)
    described = np.flatnonzero(end > begin)
    fields = wire.fields(packets.data, begin[described], end[described])
    names = packet_columns.strings(packets.data, *fields.spans(F.UNIT_NAME))
    columns = (
        tracks.column(F.UUID)[described].tolist(),
        fields.column(F.UNIT).tolist(),
        fields.column(F.UNIT_FACTOR).tolist(),
        fields.column(F.IS_INCREMENTAL).tolist(),
    )
    return {
        uuid: (name[:_MOST_NAME] or F.UNITS.get(unit, ""), factor or 1, bool(incremental))
        for uuid, unit, factor, incremental, name in zip(*columns, names, strict=True)
    }
