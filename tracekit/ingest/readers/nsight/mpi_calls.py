"""Calls in Nsight Systems reports: of MPI (functions, bytes, peers, communicators) and of the OS.

A call of MPI that blocks is the communication itself. One that only starts it (MPI_Isend) is not, but MPI_Wait is: what
that waited for is not recorded. The report states what a collective moves as bytes of each pair of ranks, the own one
too, added up (seen in recordings, see tests/recordings/nsight/mpi.c). Calls of the OS runtime (C library and POSIX
threads) have neither arguments nor results, and locks are recorded only where they may block: see "OS Runtime Libraries
Trace" in the User Guide.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from tracekit.ingest.readers import dftracer
from tracekit.ingest.readers.normalize import numbers
from tracekit.ingest.readers.normalize.events import Args, MessageBytes
from tracekit.ingest.readers.normalize.numbers import MISSING, Ints
from tracekit.ingest.readers.normalize.sqlite_tables import Database
from tracekit.ingest.readers.nsight.processes import MPI_TABLES, THREAD_BITS, rows_of
from tracekit.ingest.readers.nsight.report_texts import Texts
from tracekit.model import schema
from tracekit.model.manifest import MAX_RANKS

_WAITS = "MPI_START_WAIT_EVENTS"
_COMMUNICATORS = "MPI_COMMUNICATORS"
_COLUMNS = ("start", "end", "globalTid", "textId", "commHandle", "remoteRank", "size", "recvSize")
_CALL = ("start", "end", "globalTid", "textId")
_MOST_BYTES = 1 << 53
_OPS = {
    "Send": "send", "Bsend": "send", "Ssend": "send", "Rsend": "send", "Recv": "recv", "Mrecv": "recv",
    "Allreduce": "allreduce", "Allgather": "all_gather", "Allgatherv": "all_gather", "Reduce": "reduce",
    "Reduce_scatter": "reduce_scatter", "Bcast": "broadcast", "Gather": "gather", "Gatherv": "gather",
    "Scatter": "scatter", "Scatterv": "scatter", "Alltoall": "all_to_all", "Alltoallv": "all_to_all",
    "Alltoallw": "all_to_all", "Barrier": "barrier", "Sendrecv": "send_recv",
}  # fmt: skip
_POINT_TO_POINT = ("send", "recv")
# Of these the bytes of each pair were recorded, added up over the ranks: whether that is the message itself.
_IS_SENT_WHOLE = {
    "allreduce": False, "broadcast": False, "all_gather": False, "reduce_scatter": True, "all_to_all": True,
}  # fmt: skip
_IS_RECEIVED_WHOLE = {
    "allreduce": False, "reduce_scatter": False, "broadcast": True, "all_gather": True, "all_to_all": True,
}  # fmt: skip


@dataclass(frozen=True)
class Communicator:
    """A communicator of one rank: its name as Nsight Systems shows it, and its ranks, if these are known."""

    created_ns: int
    name: str
    size: int
    ranks: list[int] | None


@dataclass(frozen=True, eq=False)
class MpiCalls:
    """The calls of one process as arrays; times in ns since the report's start, MISSING where not known.

    `name_id` is the place of each call's name in `names`, `thread` a serialized id; the others are as the report states
    them. `communicators` are in the order of their creation, by handle.
    """

    names: pl.Series
    name_id: Ints
    start: Ints
    end: Ints
    thread: Ints
    communicator: Ints
    peer: Ints
    sent: Ints
    received: Ints
    communicators: Mapping[int, Sequence[Communicator]]
    unfinished: int
    """Calls without an end, which are left out."""

    def args(self) -> Iterator[tuple[int, Args]]:
        """Yield the row of each call that communicates, and what it says of that as PyTorch's profiler would."""
        ops = [op_of(name) for name in self.names.to_list()]
        columns = (self.name_id, self.communicator, self.start, self.peer, self.sent, self.received)
        for row, (name_id, handle, start, *stated) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            if (op := ops[name_id]) is not None:
                yield row, _args(op, self._communicator(handle, start), *stated)

    def _communicator(self, handle: int, at_ns: int) -> Communicator | None:
        """Return the communicator that a handle stood for at a time: handles are used again."""
        communicators = self.communicators.get(handle, ())
        place = bisect_right([communicator.created_ns for communicator in communicators], at_ns)
        return communicators[max(place - 1, 0)] if communicators else None


TABLE = "OSRT_API"
_OS_CALL = 27
"""The event class of a call; others say that the recording of calls began."""
# The report has no file descriptors: read, write, fread or close may be of a socket or pipe, these are not.
_FILE_CALL = re.compile(
    r"(?:open|creat|fopen|freopen|p(?:read|write)v?|fallocate|posix_fallocate|f?truncate|copy_file_range|fsync|"
    r"fdatasync|aio_fsync|sync|syncfs|sync_file_range|msync|flock|lockf)(?:at)?2?(?:64)?(?:v2)?$"
)


@dataclass(frozen=True, eq=False)
class OsCalls:
    """The calls of one process as arrays, in the order of the table; times in ns since the report's start.

    `name_id` is the place of each call's name in `names`, `thread` a serialized id.
    """

    names: pl.Series
    name_id: Ints
    start: Ints
    end: Ints
    thread: Ints


def read_mpi(database: Database, texts: Texts, process: int | None) -> MpiCalls:
    """Return the calls of a process."""
    parts = [_rows(database, table, process) for table in MPI_TABLES]
    rows = {name: np.concatenate([part[name] for part in parts]) for name in _COLUMNS}
    is_whole = (rows["start"] != MISSING) & (rows["end"] != MISSING)
    calls = {name: column[is_whole] for name, column in rows.items()}
    names, name_id = texts.of_all(calls["textId"])
    ranks = set(database.integers("MPI_RANKS", ("rank",), rows_of(database, "MPI_RANKS", process))["rank"].tolist())
    columns = ("rank", "timestamp", "commHandle", "size", "groupRoot", "groupRootUid")
    listed = database.integers(_COMMUNICATORS, columns)
    by_handle: dict[int, list[Communicator]] = defaultdict(list)
    for rank, at_ns, handle, size, root, number in zip(*(listed[name].tolist() for name in columns), strict=True):
        if rank in ranks and 0 < size <= MAX_RANKS:
            by_handle[handle].append(_communicator(at_ns, size, root, number))
    communicators = {handle: sorted(uses, key=lambda use: use.created_ns) for handle, uses in by_handle.items()}
    return MpiCalls(
        names,
        name_id,
        start=calls["start"],
        end=calls["end"],
        thread=calls["globalTid"],
        communicator=calls["commHandle"],
        peer=calls["remoteRank"],
        sent=calls["size"],
        received=calls["recvSize"],
        communicators=communicators,
        unfinished=int(np.count_nonzero(~is_whole)),
    )


def _rows(database: Database, table: str, process: int | None) -> dict[str, Ints]:
    """Return the rows of a table; a wait for several requests has a row for each, of which one counts."""
    rows = database.integers(table, _COLUMNS, rows_of(database, table, process))
    if table != _WAITS:
        return rows
    calls = np.stack([rows[name] for name in _CALL], axis=1)
    first = np.sort(np.unique(calls, axis=0, return_index=True)[1])
    return {name: column[first] for name, column in rows.items()}


def _communicator(at_ns: int, size: int, root: int, number: int) -> Communicator:
    """Return a communicator, by the global rank of its first rank and the number that this gave it.

    That of all ranks has neither.

    >>> _communicator(0, 2, MISSING, MISSING).name, _communicator(0, 4, 1, 3).name
    ('MPI_COMM_WORLD', 'MPI_COMM[4]1.3')
    """
    if MISSING in (root, number):
        return Communicator(at_ns, "MPI_COMM_WORLD", size, list(range(size)))
    return Communicator(at_ns, f"MPI_COMM[{size}]{root}.{number}", size, [root] if size == 1 else None)


def _args(op: str, communicator: Communicator | None, peer: int, sent: int, received: int) -> Args:
    stated: dict[str, Any] = {"collective": op}
    if communicator is not None:
        stated |= {"group": communicator.name, "group_size": communicator.size, "group_ranks": communicator.ranks}
    if op in _POINT_TO_POINT:
        if 0 <= peer < MAX_RANKS:
            stated["destination" if op == "send" else "source"] = peer
        return Args(**stated, message_bytes=MessageBytes(_bytes(sent), _bytes(sent)))
    size = None if communicator is None else communicator.size
    received_bytes = _message(received, size, _IS_RECEIVED_WHOLE.get(op))
    sent_bytes = received_bytes if op == "broadcast" else _message(sent, size, _IS_SENT_WHOLE.get(op))
    return Args(**stated, message_bytes=MessageBytes(sent_bytes, received_bytes))


def _message(stated: int, ranks: int | None, is_whole: bool | None) -> int | None:
    """Return the bytes of a message from those of all pairs; None where what these are is not known."""
    total_bytes = _bytes(stated)
    if total_bytes is None or is_whole is None or is_whole:
        return total_bytes if is_whole else None
    return None if ranks is None or total_bytes % ranks else total_bytes // ranks


def op_of(name: str) -> str | None:
    """The standard name of what a call communicates; None where it does not, or only starts it.

    >>> [op_of(name) for name in ("MPI_Reduce_scatter_block", "MPI_Ssend", "MPI_Iallreduce", "MPI_Comm_rank")]
    ['reduce_scatter', 'send', None, None]
    """
    function = name.removeprefix("MPI_").removesuffix("_replace").removesuffix("_block")
    return _OPS.get(function) if name.startswith("MPI_") else None


def read_os(database: Database, texts: Texts, process: int | None) -> OsCalls:
    """Return the calls of a process."""
    only_calls = (f"eventClass = {_OS_CALL}",) if database.has(TABLE, "eventClass") else ()
    calls = database.integers(
        TABLE, ("start", "end", "globalTid", "nameId"), rows_of(database, TABLE, process, *only_calls)
    )
    names, name_id = texts.of_all(calls["nameId"])
    return OsCalls(names, name_id, calls["start"], calls["end"], calls["globalTid"])


def file_calls(calls: OsCalls, base_ns: int) -> pl.DataFrame:
    """Return the calls that cannot be of anything but a file, columns as IO_CALLS; neither file nor bytes is known."""
    of_file = np.array([_FILE_CALL.match(name) is not None for name in calls.names.to_list()], np.bool_)
    usable = (calls.start != MISSING) & (calls.end >= calls.start) & (np.abs(calls.end) < numbers.MOST_NS)
    rows = np.flatnonzero(of_file[calls.name_id] & usable) if len(of_file) else np.empty(0, np.int64)
    names, mask = calls.names.gather(calls.name_id[rows]), (1 << THREAD_BITS) - 1
    thread = np.where(calls.thread[rows] == MISSING, 0, calls.thread[rows])
    table = pl.DataFrame(
        {
            "name": names,
            "kind": [dftracer.kind_of_call(name) for name in names.to_list()],
            "start_ns": calls.start[rows] + base_ns,
            "dur_ns": calls.end[rows] - calls.start[rows],
            "process": thread >> THREAD_BITS & mask,
            "thread": thread & mask,
        }
    )
    return schema.IO_CALLS.conform(table.sort("start_ns", "dur_ns"))


def _bytes(size: int) -> int | None:
    return size if 0 <= size < _MOST_BYTES else None
