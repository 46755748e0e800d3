"""I/O logs of DFTracer (.pfw, .pfw.gz): the file system calls of a process, one JSON object a line.

Format: github.com/llnl/dftracer, versions 1 to 4 of its core. Files, hosts and commands are logged once, with a hash
that events refer to. Times are since 1970.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import polars as pl

from tracekit.errors import BadTraceError
from tracekit.ingest import decompression
from tracekit.ingest.decompression import Blocks
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model import schema
from tracekit.model.trace import Trace

READ, WRITE, SYNC, METADATA = "read", "write", "sync", "metadata"
_MAX_LINE_BYTES = 1 << 20
_CATEGORIES = ("POSIX", "STDIO")
_LOGGER = b'"cat":"dftracer"'
_PROCESS_ID = re.compile(rb'"pid"\s*:\s*(\d{1,9})\s*[,}]')
_PARENT_ID = re.compile(rb'"ppid"\s*:\s*(\d{1,9})\s*[,}]')
_TIME = re.compile(rb'"ts"\s*:\s*(\d{1,16})\s*[,}]')
_UNIT_NS = {"NS": 1, "US": 1_000, "MS": 1_000_000, "SEC": 1_000_000_000, "S": 1_000_000_000}
_EVENT_PHASES = ("X", 1)
_METADATA_PHASES = ("M", 4)
_MOST_NS = 1 << 62


class DFTracerLogs(Reader):
    """Reads the logs of DFTracer, with the profiler's trace of the same process or of the one that started it."""

    name = "DFTracer log"
    suffixes = (".pfw", ".pfw.gz")
    contents = "file system calls of a rank and its workers: file, bytes, duration"
    has_traces = False
    is_companion = True
    usage = (
        "it has file system calls, no operators; put the profiler's trace of the same process into its "
        "folder, and name the folder"
    )

    def sniff(self, head: bytes, name: str) -> bool:
        """Return whether a file has the events of DFTracer itself, or its name."""
        start = head[:4096].replace(b" ", b"")
        return start.lstrip(b"[\r\n\t")[:1] == b"{" and (_LOGGER in start or name.lower().endswith(self.suffixes))

    def traces(self, path: str, head: bytes, *, is_complete: bool = True) -> Sequence[TraceInfo]:  # noqa: ARG002
        """Return the process that was recorded, and the one that started it."""
        process, parent, time = (pattern.search(head) for pattern in (_PROCESS_ID, _PARENT_ID, _TIME))
        return [
            TraceInfo(
                process_id=None if process is None else int(process[1]),
                parent_process_id=None if parent is None else int(parent[1]),
                start_ns=None if time is None else int(time[1]) * _UNIT_NS["US"],
            )
        ]

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:
        """Return a trace with io_calls and data_quality only. Raises BadTraceError if no line is an event."""
        log = _Log(path, info.process_id)
        log.read()
        return Trace(rank, window, path, io_calls=log.table(), data_quality=log.issues())


class _Arguments(msgspec.Struct, gc=False):
    name: Any = None
    value: Any = None
    fhash: Any = None
    fname: Any = None
    ret: Any = None


class _Event(msgspec.Struct, gc=False):
    name: Any = None
    cat: Any = None
    ph: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: _Arguments | None = None


_DECODER = msgspec.json.Decoder(_Event)


def _events(path: str) -> Iterator[_Event | None]:
    """Yield the event of each line; None for a line that is none."""
    for line in decompression.lines(Blocks(path), _MAX_LINE_BYTES):
        text = line.strip().removesuffix(b",").strip(b"[] \t\r")
        if not text:
            continue
        try:
            yield _DECODER.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            yield None


class _Log:
    """The calls of one process in a log, column by column."""

    def __init__(self, path: str, process_id: int | None) -> None:
        self._path, self._process_id = path, process_id
        self._files: dict[str, str] = {}
        self._unit_ns = _UNIT_NS["US"]
        self._rows: list[tuple[Any, ...]] = []
        self._bad_lines = self._bad_calls = self._other_calls = 0

    def read(self) -> None:
        """Read the calls. Raises BadTraceError if no event of the file can be read."""
        has_events = False
        for event in _events(self._path):
            if event is None:
                self._bad_lines += 1
                continue
            has_events = True
            if event.ph in _METADATA_PHASES:
                self._describe(event)
            elif _is_io(event):
                self._add(event)
        if not has_events:
            raise BadTraceError(f"{self._path}: no event of DFTracer can be read; record it again")

    def _describe(self, event: _Event) -> None:
        """Take the name of a file, or the unit of times."""
        args = event.args or _Arguments()
        if event.name == "FH":
            self._files[str(args.value)] = str(args.name)
        elif event.name == "CM" and args.name == "time_metric":
            self._unit_ns = _UNIT_NS.get(str(args.value).upper(), self._unit_ns)

    def _add(self, event: _Event) -> None:
        if self._process_id is not None and event.pid != self._process_id:
            self._other_calls += 1
            return
        start_ns, dur_ns = _whole(event.ts, self._unit_ns), _whole(event.dur, self._unit_ns)
        if start_ns is None or dur_ns is None or start_ns + dur_ns > _MOST_NS:
            self._bad_calls += 1
            return
        name, args = str(event.name), event.args or _Arguments()
        kind = kind_of_call(name)
        moved = _whole(args.ret) if kind in (READ, WRITE) else None
        file = None if args.fhash is None else str(args.fhash)
        ids = (_whole(event.pid), _whole(event.tid))
        self._rows.append((name, kind, file, _text(args.fname), start_ns, dur_ns, moved, *ids))

    def table(self) -> pl.DataFrame:
        """Return the calls, columns as IO_CALLS."""
        types = {"name": pl.String, "kind": pl.String, "hash": pl.String, "fname": pl.String, "start_ns": pl.Int64}
        types |= {"dur_ns": pl.Int64, "bytes": pl.Int64, "process": pl.Int64, "thread": pl.Int64}
        rows = pl.DataFrame(self._rows, types, orient="row")
        paths = pl.col("hash").replace_strict(self._files, default=None, return_dtype=pl.String)
        return schema.IO_CALLS.conform(rows.with_columns(file=pl.coalesce("fname", paths)).sort("start_ns", "dur_ns"))

    def issues(self) -> pl.DataFrame:
        """Issues for what was left out of the log, columns as DATA_QUALITY."""
        counted = (
            (self._bad_lines, "lines are no events and were left out"),
            (self._bad_calls, "calls have no usable time and were left out"),
            (self._other_calls, "calls are of other processes than the first and were left out: split the log"),
        )
        rows = [("bad_companion", f"{self._path}: {count:,} {what}.", 0.0) for count, what in counted if count]
        return pl.DataFrame(rows, schema.DATA_QUALITY.schema, orient="row")


# waitpid and the like are logged as POSIX calls too, but use no files.
_OF_PROCESSES = ("fork", "vfork", "wait", "exec", "posix_spawn", "kill", "exit")
_KINDS = (
    (READ, re.compile(r"[fp]?(?:read(?!dir|link)|gets|getc|scanf)")),
    (WRITE, re.compile(r"[fp]?(?:write|puts|putc|printf)")),
    (SYNC, re.compile(r"f?(?:data)?sync|fflush|msync")),
)


def kind_of_call(name: str) -> str:
    """Return the kind of a file system call by its name.

    >>> [kind_of_call(name) for name in ("pread64", "readv", "fwrite", "fdatasync", "open64", "readdir")]
    ['read', 'read', 'write', 'sync', 'metadata', 'metadata']
    """
    return next((kind for kind, pattern in _KINDS if pattern.match(name)), METADATA)


def _is_io(event: _Event) -> bool:
    """Return whether an event is a call that uses files."""
    is_call = event.ph in _EVENT_PHASES and event.cat in _CATEGORIES
    return is_call and not str(event.name).startswith(_OF_PROCESSES)


def _whole(value: object, factor: int = 1) -> int | None:
    """Return a number times `factor`; None if it is no whole number from 0 on that an int64 can hold."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_NS // factor:
        return None
    return value * factor


def _text(value: object) -> str | None:
    return None if value is None else str(value)
