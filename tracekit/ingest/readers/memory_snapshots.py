"""CUDA memory snapshot (a pickle of `torch.cuda.memory._dump_snapshot`) -> tables.

A child process reads the pickle and answers with JSON, in which each stack is a number, and with columns of the events
and stacks.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from tracekit.conventions import object_storage, regular_files
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest import decompression, pickle_child, pickles, remote
from tracekit.ingest.budget import OverBudgetError
from tracekit.model import schema
from tracekit.model.trace import MemorySnapshot

OUT_OF_MEMORY = "oom"
"""The action of an event for a request that failed."""
_MEMORY_ACTIONS = (
    *("alloc", "free_requested", "free_completed"),
    *("segment_alloc", "segment_map", "segment_free", "segment_unmap"),
)
_WINDOWS_PATH = r"^(?:[A-Za-z]:)?\\[^/]*$|^[A-Za-z]:\\"
_COMMON_POOL = (0, 0)
_MAX_ERROR_LENGTH = 200
_MAX_DEVICES = 128
"""c10 numbers devices by one signed byte (DeviceIndex). The history of each one takes 5 ms, whatever it has."""


def read(path: str | Path, *, cache: bool = True) -> MemorySnapshot:
    """Return the snapshot in a file, maybe compressed, or at a URL; with `cache`, a remote file is downloaded once.

    Only plain containers are built: a pickle that would import anything is refused by its name, and one that would take
    far more memory or time than its size is refused too. Raises BadTraceError, or InputError if the file cannot be
    opened.
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
    try:
        unpacked = decompression.Unpacked(copy) if decompression.is_compressed(copy) else None
        file = regular_files.open_to_read(copy)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    with file:
        try:
            document, columns = pickles.read(pickle_child.SNAPSHOT, unpacked or file)
            return _snapshot(path, json.loads(document), _Columns(columns))
        except pickles.WrongFormError as error:
            raise _wrong_form(path, str(error)) from None
        except pickles.OverBudgetError as error:
            raise OverBudgetError(f"{path}: the snapshot {error}, else take another snapshot") from None
        except pickles.PickleError as error:
            raise BadTraceError(f"{path}: the snapshot {error}; take another snapshot") from None
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, pl.exceptions.PolarsError) as error:
            raise _wrong_form(path, f"{type(error).__name__}: {error}") from None


def _wrong_form(path: str, reason: str) -> BadTraceError:
    one_line = " ".join(reason.split())[:_MAX_ERROR_LENGTH]
    return BadTraceError(f"{path}: not a CUDA memory snapshot of a known form ({one_line}); take another snapshot")


def _snapshot(path: str, document: Mapping[str, Any], columns: "_Columns") -> MemorySnapshot:
    listed = document["segments"]
    segments = _frame(schema.SEGMENTS, _segments(listed))
    blocks = _frame(schema.BLOCKS, _blocks(listed))
    _refuse_missing(segments, ("device", "address", "stream", "kind", "total_bytes", "allocated_bytes", "active_bytes"))
    _refuse_missing(blocks, ("device", "segment_address", "address", "bytes", "state"))
    events = _events(document["device_traces"], document["actions"], columns)
    device_count = len({*segments["device"].unique(), *events["device"].unique()})
    if device_count > _MAX_DEVICES:
        raise ValueError(f"{device_count:,} devices; PyTorch numbers at most {_MAX_DEVICES}")
    _refuse_missing(events.filter(pl.col("action").is_in(_MEMORY_ACTIONS)), ("address", "bytes", "stream"))
    # Table of frames; a path of Windows is written with slashes, as all that reads its parts expects.
    table = _frame(schema.FRAMES, ((number, *frame) for number, frame in enumerate(document["frames"])))
    is_of_windows = pl.col("file").str.contains(_WINDOWS_PATH)
    with_slashes = pl.when(is_of_windows).then(pl.col("file").str.replace_all("\\", "/", literal=True))
    return MemorySnapshot(
        path,
        segments=segments,
        blocks=blocks,
        events=events,
        stacks=_stacks(document["stacks"], columns),
        frames=table.with_columns(with_slashes.otherwise("file").alias("file")),
        annotations=_frame(schema.ANNOTATIONS, _annotations(document.get("external_annotations", []))),
        settings=_settings(document.get("allocator_settings")),
    )


def _refuse_missing(table: pl.DataFrame, columns: Iterable[str]) -> None:
    """Raise TypeError if a value is missing, or a size or address is negative."""
    for name in columns:
        values = table[name]
        if values.null_count():
            raise TypeError(f"no {name}")
        if name.endswith(("address", "bytes")) and (values < 0).any():
            raise ValueError(f"a negative {name}")


def _segments(listed: Iterable[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for segment in listed:
        pool = ":".join(map(str, segment.get("segment_pool_id", _COMMON_POOL)))
        yield (
            segment.get("device", 0), segment["address"], segment.get("stream", 0), pool, segment["segment_type"],
            bool(segment.get("is_expandable", False)), segment["total_size"], segment["allocated_size"],
            segment["active_size"], segment.get("requested_size"), _stack(segment),
        )  # fmt: skip


def _blocks(listed: Iterable[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for segment in listed:
        address = segment["address"]
        for block in segment["blocks"]:
            # Blocks of old snapshots have no address: they are contiguous.
            address = block.get("address", address)
            yield (
                segment.get("device", 0), segment["address"], address, block["size"], block.get("requested_size"),
                block["state"], _stack(block),
            )  # fmt: skip
            address += block["size"]


def _stack(block: Mapping[str, Any]) -> int | None:
    number: int = block["frames"]
    return None if number < 0 else number


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


class _Columns:
    """The columns of a child's answer, to be taken in order."""

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def take(self, dtype: type[np.integer[Any]], count: int) -> np.ndarray[Any, Any]:
        """The next column, aligned."""
        column = np.frombuffer(self._content, dtype, count).copy()
        self._content = self._content[column.nbytes :]
        return column


def _events(counts: list[int], actions: list[str], columns: "_Columns") -> pl.DataFrame:
    """Events of all devices, by device and in the order of its history."""
    if not counts:
        return schema.EVENTS.empty()
    number = sum(counts)
    at_us, size, stream, address = (_nullable(columns.take(np.int64, number)) for _ in range(4))
    stack = pl.Series(columns.take(np.int32, number).astype(np.int64))
    action = pl.Series(actions, dtype=pl.String).gather(columns.take(np.int16, number))
    table = {
        "device": np.repeat(np.arange(len(counts)), counts),
        "at_ns": at_us * 1000,
        "action": action,
        "address": address.set(action == OUT_OF_MEMORY, None),
        "bytes": size,
        "free_bytes": address.set(action != OUT_OF_MEMORY, None),
        "stream": stream,
        "stack": stack.set(stack < 0, None),
    }
    return schema.EVENTS.conform(pl.DataFrame(table))


def _nullable(column: np.ndarray[Any, Any]) -> pl.Series:
    values = pl.Series(column)
    return values.set(values == pickle_child.MISSING, None)


def _stacks(counts: tuple[int, int], columns: _Columns) -> pl.DataFrame:
    number_of_frames, number_of_stacks = counts
    ends = columns.take(np.int64, number_of_stacks)
    frame = columns.take(np.int32, number_of_frames)
    lengths = np.diff(ends, prepend=0)
    depth = np.arange(len(frame)) - np.repeat(ends - lengths, lengths)
    table = {"stack": np.repeat(np.arange(len(ends)), lengths), "depth": depth, "frame": frame}
    return schema.STACKS.conform(pl.DataFrame(table))


def _settings(stated: object) -> dict[str, object]:
    return {str(key): value for key, value in stated.items()} if isinstance(stated, dict) else {}
