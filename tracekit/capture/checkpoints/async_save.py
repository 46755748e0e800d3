"""Saves by ``dcp.async_save``: the part that blocks training, and the rest on a background thread or process."""

import contextlib
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tracekit import conventions
from tracekit.capture.checkpoints import dcp, io_counters, operation
from tracekit.capture.checkpoints.io_counters import Counters
from tracekit.capture.checkpoints.operation import Operation, Row
from tracekit.capture.checkpoints.recording import Entry, guard, patch_for_all, with_counters

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
        dcp.listen(running, window)
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
        dcp.on_log(window, {function}, lambda *_: callback() if threading.get_ident() == thread_id else None)

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
        lines.append(self._last_line(end_ns, self._before))
        self.entry.write(lines)

    def _last_line(self, end_ns: int, before: Counters) -> Row:
        saved = self.operation
        line = self.entry.line(
            conventions.COMPLETE,
            self._start_ns,
            end_ns - self._start_ns,
            blocking=False,
            bytes=saved and saved.counted_bytes(conventions.TOTAL),
            files=saved and saved.counted_files(conventions.TOTAL),
        )
        durable = saved.files.durable() if saved else None
        return with_counters({**line, "worker": self._worker}, durable, before, io_counters.read(before.thread))


def current_background_save() -> BackgroundSave | None:
    """Return the asynchronous save that the calling thread works for."""
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
    """Return the bytes of the tensors in nested dicts, lists, tuples and modules, counting this process's parts only.

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
