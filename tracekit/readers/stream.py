"""The bytes of a trace file: the header beside the events, and the events as rows, streamed through DuckDB."""

import gzip
import json
import os
import re
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import duckdb
import polars as pl
from isal import igzip

from tracekit.errors import BadTraceError

_CHUNK_BYTES = 1 << 20
_HEADER_BYTES = 64 << 20  # a header longer than this is no header
_TAIL_BYTES = 1 << 20  # keys after the events must fit in here
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_ARRAY_END = re.compile(rb'\]\s*(?:,\s*"|\}\s*$)')
_BARE_ARRAY = re.compile(rb"\s*\[\s*(?:\{|\]\s*$)")

# Every value is read as text and cast where it is used: a wrong type in one event must not lose the file.
_ARGS = {
    "device": "device",
    "stream": "stream",
    "correlation": "correlation",
    "external_id": "External id",
    "name": "name",
    "collective": "Collective name",
    "dtype": "dtype",
    "in_nelems": "In msg nelems",
    "out_nelems": "Out msg nelems",
    "group": "Process Group Name",
    "group_size": "Group size",
    "seq": "Seq",
    "address": "Addr",
    "delta_bytes": "Bytes",
    "device_type": "Device Type",
    "device_id": "Device Id",
    "allocated_bytes": "Total Allocated",
    "reserved_bytes": "Total Reserved",
    "input_dims": "Input Dims",
    "input_type": "Input type",
}
_TEXT_ARGS = {"name", "collective", "dtype", "group", "input_dims", "input_type"}


@dataclass(frozen=True)
class Events:
    """A trace file's header and its events.

    `frame` has columns ph, cat, name, pid, tid (text), ts_us, dur_us (float) and ts_ns, dur_ns (rounded, on the file's
    own zero), and one column for each argument that tracekit reads, null where absent; one row per X, i and M event, in
    the order of the file.
    """

    header: dict[str, Any]
    frame: pl.DataFrame


def read_events(path: str) -> Events:
    """Read the header and the events of one Kineto JSON file, plain or gzipped.

    Raises BadTraceError if the file is missing, empty, cut, not JSON or not a trace.
    """
    feed = _Feed(path)
    reader, writer = os.pipe()
    thread = threading.Thread(target=feed.run, args=(writer,), daemon=True)
    thread.start()
    try:
        frame = _query(f"/proc/self/fd/{reader}" if Path("/proc/self/fd").exists() else f"/dev/fd/{reader}")
    except duckdb.Error as error:
        os.close(reader)  # the feeder now gets a broken pipe and ends
        thread.join()
        if feed.error:
            raise feed.error from None
        reason = str(error).splitlines()[0]
        raise BadTraceError(f"{path}: not readable as trace events ({reason}); record it again") from error
    os.close(reader)
    thread.join()
    if feed.error:
        raise feed.error
    return Events(feed.header, frame)


def read_header(path: str) -> dict[str, Any] | None:
    """Return what stands before the events of a trace file; None if its first 64 MiB hold no `traceEvents` array.

    Raises BadTraceError if the file cannot be read at all.
    """
    start = b""
    for chunk in _chunks(path):
        start += chunk
        found = _EVENTS_KEY.search(start)
        if found or len(start) >= _HEADER_BYTES:
            break
        if _BARE_ARRAY.match(start):
            return {}
    else:
        found = _EVENTS_KEY.search(start)
    if not found:
        return None
    return _parse_header(path, start[: found.start()])


class _Feed:
    """Writes the bare event array of a file into a pipe, and keeps the header that lies around it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.error: BadTraceError | None = None

    def run(self, writer: int) -> None:
        try:
            with os.fdopen(writer, "wb", buffering=0) as pipe:
                for part in self._array():
                    pipe.write(part)
        except BadTraceError as error:
            self.error = error
        except BrokenPipeError:
            pass  # the reader gave up and says why

    def _array(self) -> Iterator[bytes]:
        chunks = _chunks(self.path)
        start, bare = self._skip_header(chunks)
        held = start
        for chunk in chunks:
            held += chunk
            if len(held) > 2 * _TAIL_BYTES:
                yield held[:-_TAIL_BYTES]
                held = held[-_TAIL_BYTES:]
        yield self._cut_tail(held, bare)

    def _skip_header(self, chunks: Iterator[bytes]) -> tuple[bytes, bool]:
        start = b""
        for chunk in chunks:
            start += chunk
            if _BARE_ARRAY.match(start):
                return start, True
            found = _EVENTS_KEY.search(start)
            if found:
                self.header = _parse_header(self.path, start[: found.start()])
                return start[found.end() - 1 :], False
            if len(start) > _HEADER_BYTES:
                break
        if not start.strip():
            raise BadTraceError(f"{self.path}: the file is empty; record it again")
        raise BadTraceError(
            f"{self.path}: no traceEvents array, so this is no profiler trace; name a trace file or run"
        )

    def _cut_tail(self, held: bytes, bare: bool) -> bytes:
        if bare:
            if held.rstrip().endswith(b"]"):
                return held
            raise self._cut()
        for found in _ARRAY_END.finditer(held):
            try:
                keys = json.loads(b'{"":0' + held[found.start() + 1 :])
            except ValueError:
                continue
            self.header |= {key: value for key, value in keys.items() if key}
            return held[: found.start() + 1]
        raise self._cut()

    def _cut(self) -> BadTraceError:
        return BadTraceError(f"{self.path}: the file ends in the middle of its events, it was cut; record it again")


def _parse_header(path: str, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8", "replace").rstrip().rstrip(",") + "}")
    except ValueError:
        raise BadTraceError(f"{path}: the header before traceEvents is not JSON; record it again") from None
    return cast("dict[str, Any]", header)


def _chunks(path: str) -> Iterator[bytes]:
    try:
        with Path(path).open("rb") as raw:
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            file = cast("BinaryIO", igzip.IGzipFile(fileobj=raw)) if zipped else raw
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except EOFError:
        raise BadTraceError(f"{path}: the gzip file ends early, it was cut; record it again") from None
    except (gzip.BadGzipFile, zlib.error, igzip.isal_zlib.error) as error:
        raise BadTraceError(f"{path}: damaged gzip file ({error}); copy or record it again") from None
    except FileNotFoundError:
        raise BadTraceError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise BadTraceError(f"{path}: {error.strerror or error}; check the path and its permissions") from None


def _query(source: str) -> pl.DataFrame:
    struct = "STRUCT(" + ", ".join(f'"{key}" VARCHAR' for key in _ARGS.values()) + ")"
    picked = ", ".join(
        f'args."{key}" AS arg_{name}' if name in _TEXT_ARGS else f'TRY_CAST(args."{key}" AS BIGINT) AS arg_{name}'
        for name, key in _ARGS.items()
    )
    query = f"""
        SELECT ph, cat, name, pid, tid,
               CAST(round(ts * 1000) AS BIGINT) AS ts_ns, CAST(round(dur * 1000) AS BIGINT) AS dur_ns, {picked}
        FROM (SELECT ph, cat, name, pid, tid, TRY_CAST(ts AS DOUBLE) AS ts, TRY_CAST(dur AS DOUBLE) AS dur, args
              FROM read_json({_quote(source)}, format = 'array', maximum_object_size = 67108864, columns = {{
                  ph: 'VARCHAR', cat: 'VARCHAR', name: 'VARCHAR', pid: 'VARCHAR', tid: 'VARCHAR',
                  ts: 'VARCHAR', dur: 'VARCHAR', args: '{struct}'}}))
        WHERE ph IN ('X', 'i', 'M')
    """  # noqa: S608  (our own names; the path is quoted)
    with duckdb.connect(config={"threads": 2, "preserve_insertion_order": True}) as connection:
        connection.execute("SET enable_progress_bar = false")
        return cast("pl.DataFrame", pl.from_arrow(connection.sql(query).to_arrow_table()))


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
