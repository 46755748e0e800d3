"""Where the time of a distributed-checkpoint save or load goes on this rank, for the log and the trace.

torch's own log reports when a save plans, writes and finishes, but not what happens inside writing. So during a save,
and only then, the writer's streams, the planner's `resolve_data` and `os.fsync` are timed on the saving threads;
during a load, the reader's streams and the planner's methods. Nothing else changes: the files are the same.
"""

import contextlib
import functools
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tracekit import conventions
from tracekit.capture.checkpoints import io_counters, operation, recording, storage_streams
from tracekit.capture.checkpoints.io_counters import Counters
from tracekit.capture.checkpoints.operation import Operation, Row
from tracekit.capture.checkpoints.recording import Entry, RecordedCall, guard, patch_for_all, with_counters
from tracekit.capture.rank_info import this_rank

_here = threading.local()
_DAEMON_FILE = "_async_process_executor.py"  # of torch
_LAUNCH, _WRITING = "create_checkpoint_daemon_process", "write_data"  # names in torch's log
_MOST_FRAMES = 12


class BackgroundSave:
    """One asynchronous save, from the call on the training thread to the end of its work elsewhere.

    `entry` holds what its lines have in common; `saved` becomes the save on the background thread of this process.
    `serve` is the main function of the process that saves (folder, rank and torch's arguments); None: a thread saves.
    """

    def __init__(self, entry: Entry, *, serve: Callable[..., None] | None = None) -> None:
        self.entry = entry
        self.operation: Operation | None = None
        self._worker = conventions.THREAD if serve is None else conventions.PROCESS
        self._serve = serve
        self._before: Counters | None = None
        self._start_ns = 0
        self._staging_ns: list[int] = []
        self._staging_entry = entry
        self._launch_ns: list[int] = []
        self._thread_entry = entry
        self._pending_lines: list[Row] = []
        self._lock = threading.Lock()
        self._finished = False

    def attach(self, running: Operation, window: contextlib.ExitStack) -> None:
        """Record an async_save on the calling thread, and link it to the executor that will do the work."""
        self._before = io_counters.read(threading.get_native_id())
        self._start_ns = running.start_ns
        listen(running, window)
        _saves_by_operation[id(running)] = self
        window.callback(_saves_by_operation.pop, id(running), None)
        for executor in _executors():
            window.enter_context(patch_for_all(executor, "execute_save", _linked_execute_save))

    def watch_futures(self, response: Any) -> None:
        """Add callbacks to the futures that async_save returned."""
        staging = getattr(response, "staging_completion", None)
        if staging is not None:
            self._staging_ns.append(time.time_ns())
            staging.add_done_callback(guard(self._on_staged))
        getattr(response, "upload_completion", response).add_done_callback(guard(self._complete))

    def hand_over(self, lines: list[Row]) -> None:
        """Let the saving thread write the training thread's lines; write them now if it has finished."""
        with self._lock:
            self._pending_lines += lines
            is_over = self._finished
        if is_over:
            self._write_pending()

    def _write_pending(self) -> None:
        with self._lock:
            lines, self._pending_lines = self._pending_lines, []
        if lines:
            self.entry.write(lines)

    def bind(self, running: Operation, executor: Any, staged: Any) -> None:
        """Link the next task of torch's executor to this save; count what was staged."""
        if isinstance(staged, dict):
            running.count(conventions.STAGE, tensor_bytes(staged), None)
        pool = executor._executor
        submit = pool.submit

        def submit_linked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            vars(pool).pop("submit", None)
            return submit(functools.partial(self._run, function), *args, **kwargs)

        pool.submit = submit_linked

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as window:
            guard(self._enter)(window)
            return function(*args, **kwargs)

    def _enter(self, window: contextlib.ExitStack) -> None:
        _here.background = self
        window.callback(setattr, _here, "background", None)
        callback: Callable[[], None] = self._write_pending
        function = _WRITING
        if self._serve is not None:
            self._thread_entry = self.entry.on_worker(conventions.THREAD)
            callback, function = (lambda: self._launch_ns.append(time.time_ns())), _LAUNCH
            window.enter_context(
                _replaced_main(functools.partial(self._serve, str(self.entry.folder.absolute()), self.entry.rank))
            )
        thread_id = threading.get_ident()
        on_log(window, {function}, lambda *_: callback() if threading.get_ident() == thread_id else None)

    def _on_staged(self, _: "Future[None]") -> None:
        self._staging_ns.append(time.time_ns())
        staged_by = self.entry.on_worker(conventions.THREAD)
        # If staging has finished already, the thread that adds the callback calls it at once.
        self._staging_entry = replace(staged_by, thread=None) if staged_by.thread == self.entry.thread else staged_by

    def _complete(self, future: "Future[Any]") -> None:
        end_ns = time.time_ns()
        with self._lock:
            self._finished = True
        self._write_pending()
        if future.cancelled() or future.exception() is not None or self._before is None:
            return
        lines = []
        for stage, times_ns, entry in (
            (conventions.STAGE, self._staging_ns, self._staging_entry),
            (conventions.LAUNCH, self._launch_ns, self._thread_entry),
        ):
            if len(times_ns) == 2:
                lines.append(entry.line(stage, times_ns[0], times_ns[1] - times_ns[0], blocking=False))
        saved = self.operation
        line = self.entry.line(
            conventions.COMPLETE,
            self._start_ns,
            end_ns - self._start_ns,
            blocking=False,
            bytes=saved and saved.counted_bytes(conventions.TOTAL),
            files=saved and saved.counted_files(conventions.TOTAL),
        )
        durable, after = saved.files.durable() if saved else None, io_counters.read(self._before.thread)
        lines.append(with_counters({**line, "worker": self._worker}, durable, self._before, after))
        self.entry.write(lines)


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
    """Time a ``save``, whoever creates its writer."""
    from torch.distributed.checkpoint import state_dict_saver

    running.worker_stage = conventions.WRITE
    listen(running, window)
    _on_storage_setup(
        window, state_dict_saver, running, functools.partial(storage_streams.attach_writer, running, window)
    )


def attach_load(running: Operation, window: contextlib.ExitStack) -> None:
    """Time a ``load``, whoever creates its reader."""
    from torch.distributed.checkpoint import state_dict_loader

    listen(running, window)
    _on_storage_setup(
        window, state_dict_loader, running, functools.partial(storage_streams.attach_reader, running, window)
    )
    window.enter_context(patch_for_all(state_dict_loader, "_load_state_dict", _finishing_load))


def current_background_save() -> BackgroundSave | None:
    """Asynchronous save that the calling thread works for."""
    save: BackgroundSave | None = getattr(_here, "background", None)
    return save


def in_daemon() -> bool:
    """Return whether this is the process that torch started to save for a training process."""
    frame, frames_left = sys._getframe(1), _MOST_FRAMES
    while frame is not None and frames_left:
        if frame.f_code.co_name == "_execute_save" and frame.f_code.co_filename.endswith(_DAEMON_FILE):
            return True
        frame, frames_left = frame.f_back, frames_left - 1  # type: ignore[assignment]
    return False


def tensor_bytes(value: Any, limit_bytes: int | None = None, limit_items: int = 1 << 20) -> int:
    """Bytes of the tensors in nested dicts, lists, tuples and modules, counting this process's parts only.

    Stops at `limit_bytes`, or after `limit_items` items.
    """
    total_bytes, visited, pending = 0, 0, [value]
    while pending and visited < limit_items and (limit_bytes is None or total_bytes < limit_bytes):
        item = pending.pop()
        visited += 1
        if isinstance(item, _PLAIN):
            continue
        if isinstance(item, torch.Tensor):
            local = getattr(item, "_local_tensor", item)
            total_bytes += local.numel() * local.element_size()
        elif isinstance(item, dict | list | tuple):
            pending.extend(itertools.islice(item.values() if isinstance(item, dict) else item, limit_items))
        elif isinstance(item, torch.nn.Module):
            pending.extend(item.parameters())
        elif torch.is_storage(item):
            total_bytes += int(item.nbytes())
    return total_bytes


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


_PLAIN = (int, float, str, bytes, type(None))
_saves_by_operation: dict[int, BackgroundSave] = {}


def _linked_execute_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute_save(executor: Any, staged: Any, *args: Any, **kwargs: Any) -> Any:
        running = operation.current()
        background = _saves_by_operation.get(id(running))
        if running is not None and background is not None:
            guard(background.bind)(running, executor, staged)
        return original(executor, staged, *args, **kwargs)

    return execute_save


def _executors() -> Iterator[type]:
    from torch.distributed.checkpoint import state_dict_saver

    for name in ("_ThreadBasedAsyncCheckpointExecutor", "_ProcessBasedAsyncCheckpointExecutor"):
        executor = getattr(state_dict_saver, name, None)
        if executor is not None:
            yield executor


# The process that torch starts to save ------------------------------------------------------------------------------


@contextlib.contextmanager
def _replaced_main(serve: Callable[..., None]) -> Iterator[None]:
    """Make `serve` the main function of the process that torch starts in this block, the first time."""
    from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess

    name = "_checkpointing_subprocess"
    original = vars(_AsyncCheckpointProcess).get(name)
    # A process that cannot import this module could not save.
    if original is None or not _children_find_tracekit():
        yield
        return
    setattr(_AsyncCheckpointProcess, name, staticmethod(serve))
    try:
        yield
    finally:
        setattr(_AsyncCheckpointProcess, name, original)


def _children_find_tracekit() -> bool:
    """Return whether a child process can import tracekit: by our sys.path, or as `tracekit record` injects it."""
    root = Path(__file__).resolve().parents[3]
    if any(Path(entry or ".").resolve() == root for entry in sys.path):
        return True
    injected = os.environ.get("PYTHONPATH", "").split(os.pathsep) if conventions.RECORD_VARIABLE in os.environ else []
    return any(Path(entry).resolve().is_relative_to(root / "tracekit") for entry in injected if entry)
