"""The tracks of a Perfetto file: process and thread of each, and the rank that a process is named after."""

import re
from dataclasses import dataclass

import numpy as np

from tracekit.conventions import perfetto as F  # noqa: N812  (field numbers, constants all)
from tracekit.ingest.readers.perfetto import packets as packet_columns
from tracekit.ingest.readers.perfetto import wire
from tracekit.ingest.readers.perfetto.packets import Packets
from tracekit.model.manifest import MAX_RANKS

_RANK = re.compile(r"\brank[ _-]?(\d{1,7})(?!\d)", re.I)
_MOST_PARENTS = 64


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
