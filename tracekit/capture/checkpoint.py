"""A distributed-checkpoint save taken apart: where its time goes on this rank, in the log and in the trace.

torch tells by its own log when a save plans, writes and finishes, and nothing of what happens inside its writing. So
for the time of a save, and only for it, the writer's streams, the planner's `resolve_data` and `os.fsync` are timed
on the threads that save. Nothing else changes: the files are those that would be written without.
"""

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.logger import _dcp_logger

from tracekit import conventions
from tracekit.capture import files
from tracekit.capture.place import this_rank
from tracekit.capture.saving import Save


@contextlib.contextmanager
def record_save(
    folder: str | os.PathLike[str],
    writer: Any,
    planner: Any = None,
    *,
    checkpoint: str,
    step: int | None = None,
    rank: int | None = None,
    blocking: bool = True,
) -> Iterator[None]:
    """Record the ``torch.distributed.checkpoint.save`` in this block that uses `writer` (and `planner`).

    Adds one line per stage to the rank's checkpoint log in `folder`, in the format that `tracekit.conventions`
    documents, and to a trace being recorded the spans ``tracekit::checkpoint`` and ``tracekit::checkpoint.<stage>``
    of the stages that are one stretch of time (plan, wait, finish, and each fsync). What the block does before the
    save, such as gathering the state, counts as plan. Without a planner the bytes staged are not known. `writer` is a
    FileSystemWriter or another with a file system of its kind under `fs`; of any other, all of its writing counts as
    write. A save that raises leaves no lines. Say ``blocking=False`` on a thread that training does not wait for.

        writer, planner = FileSystemWriter(path), DefaultSavePlanner()
        with record_save(run, writer, planner, checkpoint="step-100", step=100):
            dcp.save({"model": model.state_dict()}, storage_writer=writer, planner=planner)
    """
    streams = hasattr(getattr(writer, "fs", None), "create_stream")
    with contextlib.ExitStack() as window:
        window.enter_context(torch.profiler.record_function(conventions.span_name(conventions.CHECKPOINT)))
        save = Save(streams=streams, paired_tells=_serialization(writer) != "SAFETENSORS")
        window.callback(save.close_span)
        window.enter_context(_listening(save))
        if streams:
            window.enter_context(_replaced(writer.fs, "create_stream", save.timed_create_stream))
        if planner is not None:
            window.enter_context(_replaced(planner, "resolve_data", save.timed_resolve_data))
        window.enter_context(_fsync_timed(save))
        yield
        save.stop()
    number = this_rank() if rank is None else rank
    what = {"checkpoint": checkpoint, "operation": "save", "step": step}
    where = {"path": str(writer.path) if hasattr(writer, "path") else None, "blocking": blocking, "rank": number}
    try:
        log = Path(folder) / conventions.rank_file(number, conventions.CHECKPOINT_LOG_SUFFIX)
        files.append_lines(log, [{**what, **row, **where} for row in save.rows()])
    except OSError as error:
        files.complain("the checkpoint log was not written", error)


@contextlib.contextmanager
def _listening(save: Save) -> Iterator[None]:
    """Follow torch's own log of what a save does."""
    handler = _Listener(save)
    _dcp_logger.addHandler(handler)
    try:
        yield
    finally:
        _dcp_logger.removeHandler(handler)


class _Listener(logging.Handler):
    def __init__(self, save: Save) -> None:
        super().__init__(logging.DEBUG)
        self._save = save

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict):
            self._save.turn(str(record.msg.get("func_name")), str(record.msg.get("event")))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Give one object, not its class, a wrapped method for the time of the block."""
    own = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


_saves: list[Save] = []
_saves_lock = threading.Lock()
_syncs: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


@contextlib.contextmanager
def _fsync_timed(save: Save) -> Iterator[None]:
    """Time `os.fsync` and `os.sync` on the threads of `save`. Several saves at once share one replacement."""
    with _saves_lock:
        if not _saves:
            for name in ("fsync", "sync"):
                original = getattr(os, name)
                _syncs[name] = (original, _timed_sync(original))
                setattr(os, name, _syncs[name][1])
        _saves.append(save)
    try:
        yield
    finally:
        with _saves_lock:
            _saves.remove(save)
            for name, (original, timed) in _syncs.items():
                if not _saves and getattr(os, name) is timed:
                    setattr(os, name, original)


def _timed_sync(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sync(*args: Any) -> Any:
        for save in tuple(_saves):
            if save.is_mine():
                with save.syncing():
                    return original(*args)
        return original(*args)

    return sync


def _serialization(writer: Any) -> str:
    return str(getattr(getattr(writer, "serialization_format", None), "name", "TORCH_SAVE"))
