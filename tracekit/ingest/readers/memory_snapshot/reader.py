"""CUDA memory snapshot (a pickle of `torch.cuda.memory._dump_snapshot`) -> tables, read as a stream."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from tracekit.conventions import object_storage
from tracekit.conventions.gc_pause import gc_paused
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest import decompression, remote
from tracekit.ingest.readers.memory_snapshot.interning import EventColumns, FrameTable
from tracekit.ingest.readers.memory_snapshot.unpickle import Unpickler
from tracekit.model import schema
from tracekit.model.trace import MemorySnapshot

OUT_OF_MEMORY = "oom"
"""The action of an event for a request that failed."""
_MEMORY_ACTIONS = (
    *("alloc", "free_requested", "free_completed"),
    *("segment_alloc", "segment_map", "segment_free", "segment_unmap"),
)
_COMMON_POOL = (0, 0)
_MAX_ERROR_LENGTH = 200
_MAX_RATIO, _MIN_LIMIT_BYTES = 100, 64 << 20
"""A compressed snapshot may be so many times as large as its file, but need not be smaller than 64 MiB."""


def read(path: str | Path, *, cache: bool = True) -> MemorySnapshot:
    """Return the snapshot in a file, maybe compressed, or at a URL; with `cache`, a remote file is downloaded once.

    Only plain containers are built: a pickle that would import or call anything is refused. Raises BadTraceError, which
    names the opcode, the byte and the file, or InputError if the file cannot be opened.
    """
    if not object_storage.is_url(path):
        return _read(Path(path), str(path))
    try:
        file = remote.info(str(path))
    except object_storage.StorageError as error:
        raise InputError(str(error)) from error
    with remote.local_copy(file, cache=cache) as copy:
        return _read(copy, file.shown)


def _read(copy: Path, path: str) -> MemorySnapshot:
    """Return the snapshot in the local file `copy` of the file at `path`."""
    try:
        packed_bytes = copy.stat().st_size if decompression.is_compressed(copy) else 0
        file = copy.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    with file, gc_paused():
        most_bytes = max(_MAX_RATIO * packed_bytes, _MIN_LIMIT_BYTES)
        unpacked = decompression.Unpacked(copy, max_bytes=most_bytes) if packed_bytes else None
        unpickler = Unpickler(unpacked or file, path)
        root = unpickler.read()
    try:
        return _snapshot(path, root, unpickler)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, pl.exceptions.PolarsError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_ERROR_LENGTH]
        raise BadTraceError(
            f"{path}: not a CUDA memory snapshot of a known form ({reason}); take another snapshot"
        ) from None


def _snapshot(path: str, root: Any, unpickler: Unpickler) -> MemorySnapshot:
    snapshot = root if isinstance(root, dict) else {"segments": root}  # old: torch.cuda.memory_snapshot(), a bare list
    listed = snapshot.get("segments")
    if not isinstance(listed, list) or not all(isinstance(segment, dict) for segment in listed):
        raise TypeError("no list of segments")
    segments = _frame(schema.SEGMENTS, _segments(listed, unpickler))
    blocks = _frame(schema.BLOCKS, _blocks(listed, unpickler))
    _refuse_missing(segments, ("device", "address", "stream", "kind", "total_bytes", "allocated_bytes", "active_bytes"))
    _refuse_missing(blocks, ("device", "segment_address", "address", "bytes", "state"))
    events = _events(snapshot.get("device_traces", []), unpickler.rows)
    _refuse_missing(events.filter(pl.col("action").is_in(_MEMORY_ACTIONS)), ("address", "bytes", "stream"))
    return MemorySnapshot(
        path,
        segments=segments,
        blocks=blocks,
        events=events,
        stacks=_stacks(unpickler.frames),
        frames=_frame(schema.FRAMES, ((number, *frame) for frame, number in unpickler.frames.frames.items())),
        annotations=_frame(schema.ANNOTATIONS, _annotations(snapshot.get("external_annotations", []))),
        settings=_settings(snapshot.get("allocator_settings")),
    )


def _refuse_missing(table: pl.DataFrame, columns: Iterable[str]) -> None:
    """Raise TypeError if a value is missing, or a size or address is negative."""
    for name in columns:
        values = table[name]
        if values.null_count():
            raise TypeError(f"no {name}")
        if name.endswith(("address", "bytes")) and (values < 0).any():
            raise ValueError(f"a negative {name}")


def _segments(listed: Iterable[dict[str, Any]], unpickler: Unpickler) -> Iterator[tuple[Any, ...]]:
    for segment in listed:
        pool = ":".join(map(str, segment.get("segment_pool_id", _COMMON_POOL)))
        yield (
            segment.get("device", 0), segment["address"], segment.get("stream", 0), pool, segment["segment_type"],
            bool(segment.get("is_expandable", False)), segment["total_size"], segment["allocated_size"],
            segment["active_size"], segment.get("requested_size"), _stack(segment, unpickler),
        )  # fmt: skip


def _blocks(listed: Iterable[dict[str, Any]], unpickler: Unpickler) -> Iterator[tuple[Any, ...]]:
    for segment in listed:
        address = segment["address"]
        for block in segment["blocks"]:
            # Blocks of old snapshots have no address: they are contiguous.
            address = block.get("address", address)
            yield (
                segment.get("device", 0), segment["address"], address, block["size"], block.get("requested_size"),
                block["state"], _stack(block, unpickler),
            )  # fmt: skip
            address += block["size"]


def _stack(block: Mapping[str, Any], unpickler: Unpickler) -> int | None:
    frames = block.get("frames")
    if frames is None and block.get("history"):  # before torch 2.1 a block had the history of its last allocations
        frames = block["history"][0].get("frames")
    number = unpickler.stack_of(frames)
    return None if number < 0 else int(number)


def _annotations(listed: Iterable[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for annotation in listed:
        yield annotation.get("device"), annotation["time_us"] * 1000, annotation["stage"], annotation["name"]


_SCALARS = (int, str, type(None))


def _frame(table: schema.Table, rows: Iterable[tuple[Any, ...]]) -> pl.DataFrame:
    """Return rows as a table. Raises TypeError if a value is a container: one that contains itself crashes Polars."""
    listed = list(rows)
    for row in listed:
        for value in row:
            if not isinstance(value, _SCALARS):
                raise TypeError(f"a value of type {type(value).__name__} in {table.name}")
    return pl.DataFrame(listed, schema=table.schema, orient="row")


def _events(traces: Any, rows: EventColumns) -> pl.DataFrame:
    """Return the events of all devices, by device and in the order of its history."""
    device, picked = [], []
    for number, ranges in enumerate(traces):
        for event_range in ranges:
            if not isinstance(event_range, range):
                raise TypeError("an event without an action")
            device.append(np.full(len(event_range), number, np.int64))
            picked.append(np.arange(event_range.start, event_range.stop))
    if not picked:
        return schema.EVENTS.empty()
    order = np.concatenate(picked)
    at_us, address, size, stream = (pl.Series(np.frombuffer(column, np.int64)[order]) for column in rows.numbers)
    stack = pl.Series(np.frombuffer(rows.stack, np.int32)[order].astype(np.int64))
    actions = pl.Series(list(rows.actions), dtype=pl.String)
    missing = EventColumns.MISSING
    action = actions.gather(np.frombuffer(rows.action, np.int16)[order])
    address = address.set(address == missing, None)
    columns = {
        "device": np.concatenate(device),
        "at_ns": (at_us * 1000).set(at_us == missing, None),
        "action": action,
        "address": address.set(action == OUT_OF_MEMORY, None),
        "bytes": size.set(size == missing, None),
        "free_bytes": address.set(action != OUT_OF_MEMORY, None),
        "stream": stream.set(stream == missing, None),
        "stack": stack.set(stack < 0, None),
    }
    return schema.EVENTS.conform(pl.DataFrame(columns))


def _stacks(frames: FrameTable) -> pl.DataFrame:
    if not frames.ends:
        return schema.STACKS.empty()
    ends = np.frombuffer(frames.ends, np.int64)
    lengths = np.diff(ends, prepend=0)
    depth = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    columns = {"stack": np.repeat(np.arange(len(ends)), lengths), "depth": depth, "frame": np.array(frames.stacks)}
    return schema.STACKS.conform(pl.DataFrame(columns))


def _settings(stated: object) -> dict[str, object]:
    return {str(key): value for key, value in stated.items()} if isinstance(stated, dict) else {}
