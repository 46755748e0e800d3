"""Recordings without a part of their content: a field, category, kind of event or table, throughout the file.

The parts come from the files themselves: every key at every place of a document, every category, phase and kind of
annotation of a trace, every table and column of a database.
"""

import gzip
import json
import math
import pickle
import re
import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from tests.support.cli_runner import ROOT

Document: TypeAlias = Any
Event: TypeAlias = dict[str, Any]
CHANGES = ("remove", "rename", "empty")
SHARED = ROOT.parent / "shared" / "traces"
_LIST = "[]"
"""Stands in a path for every item of a list."""
_ALL = -math.inf, math.inf
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_MOST_DEPTH = 7
_MOST_BYTES = 60 << 20
_MOST_NAMES = 20


@dataclass(frozen=True, order=True)
class Part:
    """A part of the files of one kind, and the change that is made to it."""

    kind: str
    """Kind of the files: trace, or the suffix of their names."""
    what: str
    """key, category, phase, name, table or column."""
    path: tuple[str, ...]
    change: str

    def __str__(self) -> str:
        return f"{self.change} {self.what} {'/'.join(self.path)} of {self.kind}"


def folders() -> Iterator[Path]:
    """Yield the folders and files that are recordings: of the tests, the samples and, where present, public ones."""
    roots = [ROOT / "tests" / "recordings", ROOT / "sample_traces", SHARED]
    for root in roots:
        for folder in sorted({path.parent for path in root.rglob("*") if path.is_file()} if root.exists() else ()):
            names = [path.name for path in folder.iterdir() if path.is_file()]
            if any(kind(name) for name in names):
                yield folder


def read(folder: Path, most_slices: int, most_ranks: int = 4) -> dict[str, Document]:
    """Documents of a folder's files by name; of a trace as many slices as fit in a part of its time."""
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and kind(path.name)]
    traces = [path for path in paths if kind(path.name) == "trace"]
    left_out = set(traces[most_ranks:])
    files = {path.name: _parse(path) for path in paths if path not in left_out and path.stat().st_size < _MOST_BYTES}
    spans = [_middle(document["traceEvents"], most_slices) for document in files.values() if _is_trace(document)]
    for name, document in files.items():
        if _is_trace(document):
            span = spans[0] if any(_is_slice_within(e, *spans[0]) for e in document["traceEvents"]) else _ALL
            events = _within(document["traceEvents"], *span)
            files[name] = {**document, "traceEvents": events}
    return files


def parts(files: Mapping[str, Document]) -> list[Part]:
    """Every change of every part that the files have."""
    places = Counter[tuple[str, str, tuple[str, ...]]]()
    for name, document in files.items():
        file_kind = kind(name)
        if isinstance(document, bytes):
            places.update((file_kind, *place) for place in _database_parts(document))
        elif _is_trace(document):
            places.update((file_kind, *place) for place in _trace_parts(document))
        else:
            places.update((file_kind, "key", path) for path in _paths(document))
    return [Part(*place, change) for place in sorted(places) for change in CHANGES]


def family(folder: Path) -> str:
    """Recordings of one origin, of which those with the same part are alike: public ones are each of their own."""
    if SHARED in folder.parents:
        return folder.name
    above = folder.parent.name
    return re.split(r"[-_]", folder.name)[0] if above in ("recordings", "sample_traces") else above


def of_each_family(parts_of: Mapping[Path, Sequence[Part]]) -> list[tuple[Path, Part]]:
    """Every part once in each family of recordings: those of one family in turn."""
    places: dict[tuple[str, Part], list[Path]] = {}
    for folder, folder_parts in parts_of.items():
        for part in folder_parts:
            places.setdefault((family(folder), part), []).append(folder)
    return [(rows[zlib.crc32(str(part).encode()) % len(rows)], part) for (_, part), rows in places.items()]


def needs_reason(removed_parts: Sequence[Part]) -> bool:
    """Whether the report has to say why it changes: what need not happen looks, when it is gone, as if it had not."""
    return not all(part.what == "name" or _NEED_NOT_HAPPEN & {*part.path} for part in removed_parts)


_NEED_NOT_HAPPEN = frozenset({
    "user_annotation", "python_function",  # annotations by the program, Python frames
    "dead_ranks", "error", "failed", "system_call", "retired", "source", "is_recorded",  # of a hang: a dead process
})  # fmt: skip


def changed(files: Mapping[str, Document], removed_parts: Sequence[Part]) -> dict[str, Document]:
    """The files with changed parts. The documents given stay as they are."""
    for part in removed_parts:
        files = {name: _change(document, part) if kind(name) == part.kind else document
                 for name, document in files.items()}  # fmt: skip
    return dict(files)


def write(files: Mapping[str, Document], folder: Path) -> None:
    """Write the files of a recording into an empty folder."""
    folder.mkdir(parents=True)
    for name, document in files.items():
        plain = re.sub(r"\.(gz|zst)$", "", name)
        if isinstance(document, bytes):
            data = document
        elif ".pickle" in name:
            data = pickle.dumps(document)
        elif plain.endswith((".jsonl", ".pfw")):
            data = "\n".join(map(json.dumps, document)).encode()
        else:
            data = json.dumps(document).encode()
        (folder / plain).write_bytes(data)


# Files ---------------------------------------------------------------------------------------------------------------


def kind(name: str) -> str:
    if name in ("run.json", "seal.json"):
        return name
    suffixes = {
        ".hang.json": "hang dump", ".et.json": "execution trace", ".metrics.jsonl": "metrics log",
        ".checkpoint.jsonl": "checkpoint log", ".pickle": "snapshot", ".sqlite": "nsight", ".pfw": "I/O log",
        "trace.json": "trace", ".json": "trace",
    }  # fmt: skip
    plain = re.sub(r"\.(gz|zst)$", "", name)
    found = next((file_kind for suffix, file_kind in suffixes.items() if plain.endswith(suffix)), "")
    return "" if plain in ("truth.json", "counted.json", "baseline.json", "jax.trace.json", "viztracer.json",
                           "pyinstrument.json", "speedscope.json", "torch.json") else found  # fmt: skip


def _parse(path: Path) -> Document:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    elif path.suffix == ".zst":
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            data = stream.read()
    file_kind = kind(path.name)
    if file_kind == "nsight":
        return data
    if file_kind == "snapshot":
        return pickle.loads(data)
    if file_kind in ("metrics log", "checkpoint log", "I/O log"):
        lines = data.decode("utf-8", "replace").splitlines()
        return [json.loads(line.rstrip(",")) for line in lines if line.startswith("{")]
    document = json.loads(data)
    return {"traceEvents": document} if file_kind == "trace" and isinstance(document, list) else document


def _is_trace(document: Document) -> bool:
    return isinstance(document, dict) and isinstance(document.get("traceEvents"), list)


def _middle(events: Sequence[Event], most_slices: int) -> tuple[float, float]:
    starts = sorted(float(event["ts"]) for event in events if event.get("ph") == "X" and "ts" in event)
    if len(starts) <= most_slices:
        return _ALL
    first = (len(starts) - most_slices) // 2
    return starts[first], starts[first + most_slices]


def _within(events: Sequence[Event], begin_us: float, end_us: float) -> list[Event]:
    """Events within a time, and the device's work of its calls, which may run later."""
    calls = {
        (event.get("args") or {}).get("correlation")
        for event in events
        if _is_slice_within(event, begin_us, end_us) and "_runtime" in str(event.get("cat"))
    }
    calls.discard(None)
    rows = []
    for event in events:
        correlation = (event.get("args") or {}).get("correlation") if event.get("cat") in _WORK and calls else None
        if _is_within(event, begin_us, end_us) if correlation is None else correlation in calls:
            rows.append(event)
    return rows


def _is_within(event: Event, begin_us: float, end_us: float) -> bool:
    start_us = float(event.get("ts", begin_us))
    return event.get("ph") == "M" or (start_us < end_us and start_us + float(event.get("dur", 0)) >= begin_us)


def _is_slice_within(event: Event, begin_us: float, end_us: float) -> bool:
    return event.get("ph") == "X" and _is_within(event, begin_us, end_us)


# Parts ---------------------------------------------------------------------------------------------------------------


def _trace_parts(document: Document) -> Iterator[tuple[str, tuple[str, ...]]]:
    events: list[Event] = document["traceEvents"]
    header = {key: value for key, value in document.items() if key != "traceEvents"}
    yield from {("key", path) for path in _paths(header)}
    yield from {("category", (str(event["cat"]),)) for event in events if "cat" in event}
    yield from {("phase", (str(event["ph"]),)) for event in events}
    yield from {("field", (key,)) for event in events for key in event if key not in ("ph", "args")}
    yield from {("argument", (key,)) for event in events for key in event.get("args") or ()}
    yield "field", ("args",)
    names = Counter(_stem(event) for event in events if _is_named(event))
    yield from {("name", (name,)) for name, _ in names.most_common(_MOST_NAMES)}


def _is_named(event: Event) -> bool:
    """Whether its name is the kind of an event."""
    return event.get("ph") in ("M", "i", "I") or event.get("cat") in ("user_annotation", "cuda_sync")


def _stem(event: Event) -> str:
    return re.sub(r"\d+", "#", str(event.get("name")))


def _paths(document: Document, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    found = set[tuple[str, ...]]()
    if len(path) > _MOST_DEPTH:
        return found
    if isinstance(document, dict):
        for key, value in document.items():
            if isinstance(key, str):
                found |= {(*path, key)} | _paths(value, (*path, key))
    elif isinstance(document, list | tuple):
        for item in document[:200]:
            found |= _paths(item, (*path, _LIST))
    return found


def _change(document: Document, part: Part) -> Document:
    if isinstance(document, bytes):
        return _changed_database(document, part)
    if part.what == "key":
        return _changed_key(document, part.path, part.change)
    events = [new for event in document["traceEvents"] if (new := _changed_event(event, part)) is not None]
    return {**document, "traceEvents": events}


def _changed_event(event: Event, part: Part) -> Event | None:
    (key,) = part.path
    if part.what == "field":
        return _changed_key(event, part.path, part.change)  # type: ignore[no-any-return]
    if part.what == "argument":
        return _changed_key(event, ("args", key), part.change) if isinstance(event.get("args"), dict) else event
    field = {"category": "cat", "phase": "ph", "name": "name"}[part.what]
    value = _stem(event) if part.what == "name" and _is_named(event) else str(event.get(field))
    if value != key:
        return event
    if part.change == "remove":
        return None
    return event | {field: f"x{event[field]}" if part.change == "rename" else ""}


def _changed_key(document: Document, path: Sequence[str], change: str) -> Document:
    key, *rest = path
    if key == _LIST:
        if not isinstance(document, list | tuple):
            return document
        return type(document)(_changed_key(item, rest, change) for item in document)
    if not isinstance(document, dict) or key not in document:
        return document
    if rest:
        return document | {key: _changed_key(document[key], rest, change)}
    if change == "empty":
        return document | {key: _empty(document[key])}
    without = {name: value for name, value in document.items() if name != key}
    return without if change == "remove" else without | {f"{key}_x": document[key]}


def _empty(value: Any) -> Any:
    if isinstance(value, str | list | dict | tuple):
        return type(value)()
    return None


# Databases -----------------------------------------------------------------------------------------------------------


def _database_parts(data: bytes) -> Iterator[tuple[str, tuple[str, ...]]]:
    connection = _opened(data)
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        yield "table", (table,)
        if connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]:
            for row in connection.execute(f'PRAGMA table_info("{table}")').fetchall():
                yield "column", (table, row[1])
    connection.close()


def _opened(data: bytes) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.deserialize(data)
    return connection


def _changed_database(data: bytes, part: Part) -> bytes:
    connection = _opened(data)
    table, *column = (f'"{name}"' for name in part.path)
    try:
        if not column:
            renamed = f'ALTER TABLE {table} RENAME TO "x_{part.path[0]}"'
            queries = {"remove": f"DROP TABLE {table}", "empty": f"DELETE FROM {table}", "rename": renamed}
            connection.execute(queries[part.change])
        elif part.change == "empty":
            connection.execute(f"UPDATE {table} SET {column[0]} = NULL")
        elif part.change == "remove":
            connection.execute(f"ALTER TABLE {table} DROP COLUMN {column[0]}")
        else:
            connection.execute(f'ALTER TABLE {table} RENAME COLUMN {column[0]} TO "x_{part.path[1]}"')
    except (sqlite3.OperationalError, sqlite3.IntegrityError):  # of a key, a column that may not be null, or gone
        connection.close()
        return data
    connection.commit()
    changed_data = connection.serialize()
    connection.close()
    return changed_data
