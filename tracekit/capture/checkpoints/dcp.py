"""Where the time of a distributed-checkpoint save or load goes on this rank, for the log and the trace.

torch's own log reports when a save plans, writes and finishes, but not what happens inside writing. So during a save,
and only then, the writer's streams, the planner's `resolve_data` and `os.fsync` are timed on the saving threads;
during a load, the reader's streams and the planner's methods. Nothing else changes: the files are the same.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.capture.checkpoints import operation, recording, storage_streams
from tracekit.capture.checkpoints.operation import Operation
from tracekit.capture.checkpoints.recording import Entry, RecordedCall, patch_for_all
from tracekit.capture.rank_info import this_rank


@contextlib.contextmanager
def record_save(
    folder: str | os.PathLike[str],
    writer: Any,
    planner: Any = None,  # noqa: ARG001 known once the writer is given it
    *,
    checkpoint: str,
    step: int | None = None,
    rank: int | None = None,
    blocking: bool = True,
) -> Iterator[None]:
    """Record the ``torch.distributed.checkpoint.save`` in this block that uses `writer`.

        writer, planner = FileSystemWriter(path), DefaultSavePlanner()
        with record_save(run, writer, planner, checkpoint="step-100", step=100):
            dcp.save({"model": model.state_dict()}, storage_writer=writer, planner=planner)

    It adds one line per stage to the rank's checkpoint log, in the format that `tracekit.conventions` documents. If a
    trace is being recorded, it adds the spans ``tracekit::checkpoint`` and ``tracekit::checkpoint.<stage>`` of the
    contiguous stages (plan, wait, finish, and each fsync). What the block does before the save, such as gathering the
    state, counts as plan; what it does after it, as wait. A save that raises logs nothing.

    Args:
        folder: The run's folder, in which the rank's checkpoint log is.
        writer: A FileSystemWriter, or another writer with a file system of its kind under `fs`. With any other, all of
            its work counts as the stage write.
        planner: The planner that the save uses, if any.
        checkpoint: The name of the checkpoint in the log.
        step: The optimizer step after which it is saved.
        rank: The rank; by default that of the process group or the launcher.
        blocking: Whether training waits for the save; False on a thread that it does not wait for.
    """

    def attach(running: Operation, window: contextlib.ExitStack) -> None:
        running.worker_stage = conventions.WRITE
        listen(running, window)
        storage_streams.attach_writer(running, window, writer)

    def entry(_: Operation) -> Entry:
        return Entry(
            folder=Path(folder),
            rank=this_rank() if rank is None else rank,
            checkpoint=checkpoint,
            operation=conventions.SAVE,
            step=step,
            path=str(writer.path) if hasattr(writer, "path") else None,
            call=conventions.DCP_SAVE,
            worker=conventions.MAIN if blocking else conventions.THREAD,
        )

    with RecordedCall(lambda: recording.begin(operation.SAVE, attach, entry, step=lambda: step, blocking=blocking)):
        yield


@contextlib.contextmanager
def record_load(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    checkpoint: str,
    step: int | None = None,
    rank: int | None = None,
) -> Iterator[None]:
    """Record the ``torch.distributed.checkpoint.load`` from `path` in this block, as `record_save` does a save.

        with record_load(run, path, checkpoint="step-100"):
            dcp.load(state, checkpoint_id=path)

    Args:
        folder: The run's folder, in which the rank's checkpoint log is.
        path: The checkpoint that is loaded.
        checkpoint: The name of the checkpoint in the log.
        step: The optimizer step after which it was saved, if known.
        rank: The rank; by default that of the process group or the launcher.
    """

    def entry(_: Operation) -> Entry:
        return Entry(
            folder=Path(folder),
            rank=this_rank() if rank is None else rank,
            checkpoint=checkpoint,
            operation=conventions.LOAD,
            step=step,
            path=str(path),
            call=conventions.DCP_LOAD,
            worker=conventions.MAIN,
        )

    with RecordedCall(lambda: recording.begin(operation.LOAD, attach_load, entry, step=lambda: step, blocking=True)):
        yield


def listen(running: Operation, window: contextlib.ExitStack) -> None:
    """Listen to torch's log of a save or load, until `window` closes."""
    on_log(window, {function for function, _ in running.kind.transitions}, running.on_log_event)


def on_log(window: contextlib.ExitStack, functions: Container[str], callback: Callable[[str, str], None]) -> None:
    """Call `callback` with function and event of torch's log messages about `functions`, until `window` closes."""
    # A slow import, but a saving process has done it already.
    from torch.distributed.checkpoint.logger import _dcp_logger

    handler = _LogListener(functions, callback)
    _dcp_logger.addHandler(handler)
    window.callback(_dcp_logger.removeHandler, handler)


class _LogListener(logging.Handler):
    def __init__(self, functions: Container[str], callback: Callable[[str, str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._functions = functions
        self._callback = recording.guard(callback)

    def handle(self, record: logging.LogRecord) -> bool:
        """Handle one message, without a lock: torch logs two irrelevant ones per tensor."""
        message = record.msg
        if isinstance(message, dict) and message.get("func_name") in self._functions:
            self._callback(message["func_name"], str(message.get("event")))
        return True


def attach_save(running: Operation, window: contextlib.ExitStack) -> None:
    """Time a ``dcp.save``, whoever creates its writer."""
    from torch.distributed.checkpoint import state_dict_saver

    running.worker_stage = conventions.WRITE
    listen(running, window)
    _on_storage_setup(
        window, state_dict_saver, running, functools.partial(storage_streams.attach_writer, running, window)
    )


def attach_load(running: Operation, window: contextlib.ExitStack) -> None:
    """Time a ``dcp.load``, whoever creates its reader."""
    from torch.distributed.checkpoint import state_dict_loader

    listen(running, window)
    _on_storage_setup(
        window, state_dict_loader, running, functools.partial(storage_streams.attach_reader, running, window)
    )
    window.enter_context(patch_for_all(state_dict_loader, "_load_state_dict", _finishing_load))


_storage_callbacks: dict[int, Callable[[Any], None]] = {}


def _on_storage_setup(
    window: contextlib.ExitStack, module: Any, running: Operation, callback: Callable[[Any], None]
) -> None:
    """Call `callback` with the storage that the module sets up on the operation's thread."""
    _storage_callbacks[id(running)] = recording.guard(callback)
    window.callback(_storage_callbacks.pop, id(running))
    window.enter_context(patch_for_all(module, "_storage_setup", _reported_storage_setup))


def _reported_storage_setup(original: Callable[..., Any]) -> Callable[..., Any]:
    def storage_setup(*args: Any, **kwargs: Any) -> Any:
        storage = original(*args, **kwargs)
        running = operation.current()
        if storage is not None and id(running) in _storage_callbacks:
            _storage_callbacks[id(running)](storage)
        return storage

    return storage_setup


def _finishing_load(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        running = operation.current()
        if running is not None:
            running.switch(conventions.FINISH)  # stateful objects load their state
        return loaded

    return load_state_dict
