"""Calls of the OS runtime in Nsight Systems reports: C library and POSIX threads, with neither arguments nor results.

See "OS Runtime Libraries Trace" in the User Guide. Locks are recorded only where they may block.
"""

import re
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.ingest.readers import dftracer
from tracekit.ingest.readers.normalize import numbers
from tracekit.ingest.readers.normalize.numbers import MISSING, Ints
from tracekit.ingest.readers.nsight.database import Database
from tracekit.ingest.readers.nsight.names import Texts
from tracekit.ingest.readers.nsight.processes import THREAD_BITS, rows_of
from tracekit.model import schema

TABLE = "OSRT_API"
_CALL = 27
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


def read(database: Database, texts: Texts, process: int | None) -> OsCalls:
    """Return the calls of a process."""
    only_calls = (f"eventClass = {_CALL}",) if database.has(TABLE, "eventClass") else ()
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
