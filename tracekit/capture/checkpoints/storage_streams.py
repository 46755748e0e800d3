"""The streams of a checkpoint's writer or reader, and its planner's methods, timed and counted."""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tracekit import conventions
from tracekit.capture.checkpoints.durability import File
from tracekit.capture.checkpoints.operation import Operation
from tracekit.capture.checkpoints.patching import patch_method
from tracekit.capture.checkpoints.timed_streams import StreamTransfer, timed_reader, timed_writer


def attach_writer(operation: Operation, window: contextlib.ExitStack, writer: Any) -> None:
    """Time a storage writer until `window` closes: its streams, and its requests to the planner."""
    if hasattr(getattr(writer, "fs", None), "create_stream"):
        operation.worker_stage = conventions.STAGE
        paired = str(getattr(getattr(writer, "serialization_format", None), "name", "TORCH_SAVE")) != "SAFETENSORS"
        timed = functools.partial(_timed_create_stream, operation, tells_twice=paired)
        window.enter_context(patch_method(writer.fs, "create_stream", timed))

    def with_timed_planner(write_data: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            sizes_bytes: list[int] = []
            timed = functools.partial(_timed_resolve_data, operation, sizes_bytes)
            with patch_method(_planner(args, kwargs), "resolve_data", timed):
                written = write_data(*args, **kwargs)
            operation.count(conventions.STAGE, sum(sizes_bytes) if sizes_bytes else None, None)
            return written

        return write

    window.enter_context(patch_method(writer, "write_data", with_timed_planner))


def attach_reader(operation: Operation, window: contextlib.ExitStack, reader: Any) -> None:
    """Time a storage reader until `window` closes: its streams, and its planner's methods."""
    operation.worker_stage = conventions.READ
    if hasattr(getattr(reader, "fs", None), "create_stream"):
        window.enter_context(patch_method(reader.fs, "create_stream", functools.partial(_timed_read_stream, operation)))

    def with_timed_planner(read_data: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            planner = _planner(args, kwargs)
            with (
                patch_method(planner, "load_bytes", functools.partial(_timed_load_bytes, operation)),
                patch_method(planner, "resolve_tensor", functools.partial(_timed_resolve_tensor, operation)),
                patch_method(planner, "commit_tensor", functools.partial(_timed_commit_tensor, operation)),
            ):
                operation.whole_bytes = _checkpoint_bytes(reader)
                return read_data(*args, **kwargs)

        return read

    window.enter_context(patch_method(reader, "read_data", with_timed_planner))


def _checkpoint_bytes(reader: Any) -> int | None:
    """Return the bytes of all shards by the reader's metadata; None where the metadata lacks lengths."""
    shards = getattr(reader, "storage_data", None)
    lengths = [getattr(info, "length", None) for info in shards.values()] if isinstance(shards, dict) else []
    valid_lengths = [length for length in lengths if isinstance(length, int)]
    return sum(valid_lengths) if valid_lengths and len(valid_lengths) == len(lengths) else None


def _planner(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("planner", args[-1] if args else None)


def _timed_create_stream(
    operation: Operation, create_stream: Callable[..., Any], *, tells_twice: bool
) -> Callable[..., Any]:
    @contextlib.contextmanager
    def create(*args: Any, **kwargs: Any) -> Iterator[Any]:
        clock = operation.thread_clock()
        # The metadata file counts in finish as a whole; shards are split into stages.
        stage = operation.kind.metadata_stage if clock.stage == operation.kind.metadata_stage else conventions.WRITE
        with contextlib.ExitStack() as stream:
            with clock.inside(stage):
                raw = stream.enter_context(create_stream(*args, **kwargs))
            transfer = StreamTransfer(clock, stage, operation.files.open(raw), tells_twice)
            # Between two items torch fetches the next; each item ends with the second of two calls of tell().
            timed = timed_writer(raw, transfer)
            if isinstance(timed, io.BufferedWriter):
                # Flushing the rest must fail here, as it would in the wrapped stream.
                stream.enter_context(contextlib.closing(timed))
            yield timed
            with clock.inside(stage):
                stream.close()
            transfer.file.flush()
        if stage == conventions.WRITE:
            clock.switch(None)  # until the next item: a thread may have finished and wait for the others
        operation.count(stage, transfer.moved_bytes, 1, transfer.calls)

    return create


def _timed_resolve_data(
    operation: Operation, sizes_bytes: list[int], resolve_data: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(resolve_data)
    def resolve(write_item: Any) -> Any:
        clock = operation.thread_clock()
        outer = clock.stage
        if outer == conventions.STAGE:  # the stage between the items of a file
            data = resolve_data(write_item)
        else:
            clock.switch(conventions.STAGE)
            try:
                data = resolve_data(write_item)
            finally:
                clock.switch(outer)
        size_bytes = _size_bytes(data)
        if size_bytes is not None:
            sizes_bytes.append(size_bytes)
        return data

    return resolve


def _timed_read_stream(operation: Operation, create_stream: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def create(*args: Any, **kwargs: Any) -> Iterator[Any]:
        clock = operation.thread_clock()
        aside = clock.stage == operation.kind.metadata_stage
        stage, between = (operation.kind.metadata_stage,) * 2 if aside else (conventions.READ, conventions.DESERIALIZE)
        with contextlib.ExitStack() as stream:
            with clock.inside(stage):
                raw = stream.enter_context(create_stream(*args, **kwargs))
            transfer = StreamTransfer(clock, stage, File())
            with clock.inside(between):
                yield timed_reader(raw, transfer)
            with clock.inside(stage):
                stream.close()
        operation.count(stage, transfer.moved_bytes, 1, transfer.calls)

    return create


# From handing out a target to its commit counts as copy.


def _timed_load_bytes(operation: Operation, load_bytes: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_bytes)
    def load(read_item: Any, value: Any) -> Any:
        with operation.thread_clock().inside(conventions.DESERIALIZE):
            return load_bytes(read_item, value)

    return load


def _timed_resolve_tensor(operation: Operation, resolve_tensor: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(resolve_tensor)
    def resolve(read_item: Any) -> Any:
        target = resolve_tensor(read_item)
        clock = operation.thread_clock()
        clock.previous_stage = clock.stage
        clock.switch(conventions.COPY)
        return target

    return resolve


def _timed_commit_tensor(operation: Operation, commit_tensor: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(commit_tensor)
    def commit(read_item: Any, tensor: Any) -> Any:
        clock = operation.thread_clock()
        committed = commit_tensor(read_item, tensor)
        if clock.stage == conventions.COPY:
            clock.switch(clock.previous_stage)
            operation.count(conventions.COPY, _size_bytes(tensor), None, 1)
        return committed

    return commit


def _size_bytes(data: Any) -> int | None:
    if isinstance(data, torch.Tensor):
        return int(data.nbytes)
    return memoryview(data.getbuffer()).nbytes if hasattr(data, "getbuffer") else None
