"""Profile windows of steps on one rank: warm-up, start, step marks, stop, and the files that are written."""

import contextlib
import math
import os
import queue
import shutil
import string
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tracekit import conventions
from tracekit.capture import atomic_files, notices
from tracekit.capture.profiler_session import ProfilerSession, ProfilingOptions
from tracekit.capture.window_schedule import Window, WindowSchedule

_MOST_EVENTS = 1_000_000  # of the allocator, in a memory snapshot
_MIN_FREE_BYTES = 1 << 30  # in scratch, for a trace that is not compressed yet

_OF_PARENTS: list[ProfilerSession | None] = []
"""Sessions that a forked process got: what ends them would wait for threads that the process does not have."""

OnWritten = Callable[[Window, int], None]
"""Called on any thread with a written window and the number of its recorded steps."""
_MAX_PENDING = 2


class WindowProfiler:
    """Profiles windows of steps into the folder of a run.

    `require_room` raises RuntimeError where the next window has no room on disk.
    Failures never raise: one line on stderr reports it, and that window is not recorded.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        windows: WindowSchedule,
        options: ProfilingOptions,
        *,
        written: OnWritten,
        require_room: Callable[[], None] | None = None,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._windows = windows
        self._options = options
        self._written = written
        self._require_room = require_room
        self._writer = BackgroundWriter()
        self._session: ProfilerSession | None = None
        self._window: Window | None = None
        self._failed_first_step = -1  # of the last window that could not be recorded
        self._is_in_window = False
        self._quiet_until = -math.inf  # first step that is not quiet

    @property
    def idle(self) -> bool:
        """Return whether no window is being recorded or prepared."""
        return self._window is None

    @property
    def disturbs_steps(self) -> bool:
        """Whether a window makes this step slow: it is recorded on this rank or another, or its trace is written."""
        return self._is_in_window or self._writer.is_working

    def is_quiet(self, step: int) -> bool:
        """Whether nothing is to be done at the end of the step before `step`, nor when it begins.

        A new request is not known here: call `begin` after it.
        """
        return step < self._quiet_until and not self._writer.is_working

    def begin(self, step: int) -> None:
        """Warm the profiler up, start it or mark the beginning step, whichever is due."""
        window = self._window or self._windows.upcoming(step)
        begin = math.inf if window is None else window.first - self._options.warmup
        self._is_in_window = step >= begin
        self._quiet_until = -math.inf if self._is_in_window else begin
        if window is None or step < begin or window.first == self._failed_first_step:
            return
        if not window.is_recorded:
            if step == window.end - 1:  # other ranks write the traces: the one that leads lists the window
                self._writer.submit(
                    f"window {window.number} is not listed", lambda: self._written(window, window.end - window.first)
                )
            return
        if self._session is None and step > window.first:
            return  # it began before this rank read the request
        with self._guard(f"steps {window.first}:{window.end} are not recorded"):
            self._advance(window, step)

    def end_mark(self) -> None:
        """End the mark of the current step, so that what follows belongs to no step."""
        if self._session is not None:
            with self._guard("the end of a step was not marked"):
                self._session.unmark()

    def end(self, step: int) -> None:
        """End a step: where it is the last of its window, write the window."""
        if self._window is not None and step + 1 >= self._window.end:
            self.stop(step + 1)

    def stop(self, step: int, why: str | None = None) -> None:
        """End the current window early, if there is one, and write what it recorded. `step` has not ended."""
        session, window = self._session, self._window
        self._session = self._window = None
        if session is None or window is None:
            return
        self._failed_first_step = window.first
        with self._guard(f"steps {window.first}:{window.end} were not written"):
            started = session.started
            session.stop()
            if started and step > window.first:
                self._write_window(session, window, step - window.first)
            if why is not None:
                raise RuntimeError(f"{why}; recorded up to step {step - 1}" if step > window.first else why)

    def finish(self) -> None:
        """Wait until all windows are written."""
        self._writer.finish()

    def leave_to_parent(self) -> None:
        """Profile nothing more, in a forked process, which has neither the profiler's threads nor the writer's."""
        _OF_PARENTS.append(self._session)
        self._session = self._window = None
        self._windows, self._writer = WindowSchedule(None), BackgroundWriter()

    def _advance(self, window: Window, step: int) -> None:
        self._window = window
        if self._session is None:
            if self._writer.busy:
                raise RuntimeError("earlier windows are still being written; record windows farther apart")
            if self._require_room is not None:
                self._require_room()
            self._session = ProfilerSession(self._options)
            self._session.prepare()
        if step == window.first:
            if self._options.device == "cuda":
                torch.cuda.synchronize()  # what was queued before runs before the window, which has no launch of it
            if self._options.snapshot:
                with self._guard("there is no memory snapshot"):
                    if self._options.device != "cuda":
                        raise RuntimeError(
                            "memory snapshots need the CUDA allocator, but this training runs on the CPU"
                        )
                    torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
            self._session.start()
        if self._session.started:
            self._session.mark(step)

    def _write_window(self, session: ProfilerSession, window: Window, steps: int) -> None:
        """Write the trace of a window; it is compressed and moved into the run while the training continues."""
        folder = self._folder / conventions.window_folder(window.number) if window.number else self._folder
        if self._options.snapshot and self._options.device == "cuda":
            path = folder / conventions.rank_file(self._rank, conventions.MEMORY_SNAPSHOT_SUFFIX)
            try:
                with atomic_files.atomic_write(path) as partial:
                    torch.cuda.memory._dump_snapshot(str(partial))
                    atomic_files.redact_pickle(partial)
            finally:
                with contextlib.suppress(Exception):
                    torch.cuda.memory._record_memory_history(enabled=None)
        plain = self._write_trace(session, window, folder)
        trace = folder / conventions.rank_file(self._rank, conventions.TRACE_SUFFIX)

        def put() -> None:
            atomic_files.compress(plain, trace)
            self._written(window, steps)

        self._writer.submit(f"rank {self._rank}: {trace.name} was not written", put)

    def _write_trace(self, session: ProfilerSession, window: Window, folder: Path) -> Path:
        """Write the uncompressed trace, on local disk if there is space: torch can export it only once."""
        name = atomic_files.uncompressed_name(self._rank, window.number)
        scratch = self._options.scratch
        if scratch is not None and _has_room(scratch):
            with atomic_files.atomic_write(scratch / name) as partial:
                session.save(partial)
            return scratch / name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / (name + conventions.PARTIAL_SUFFIX)
        session.save(path)
        return path

    @contextlib.contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 whatever fails here, the training continues
            notices.report_failure(f"rank {self._rank}: {what}", error)
            self._drop_window()

    def _drop_window(self) -> None:
        session, window = self._session, self._window
        self._session = self._window = None
        if window is not None:
            self._failed_first_step = window.first
        if session is not None:
            with contextlib.suppress(Exception):
                session.stop()


class BackgroundWriter:
    """Runs tasks one after the other on a thread of its own, which lives while there are any.

    `busy` limits the queue where writing is slower than recording. A task that raises is reported on stderr and never
    reaches the training.
    """

    def __init__(self) -> None:
        self._work: queue.Queue[tuple[str, Callable[[], None]]] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()

    @property
    def busy(self) -> bool:
        """Return whether the queue is full."""
        return self._work.unfinished_tasks >= _MAX_PENDING

    @property
    def is_working(self) -> bool:
        """Return whether tasks are waiting or running."""
        return self._work.unfinished_tasks > 0

    def submit(self, what: str, work: Callable[[], None]) -> None:
        """Run `work` soon; `what` describes its failure ("the trace was not written")."""
        self._work.put((what, work))
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="tracekit-writer")
                try:
                    self._thread.start()
                except RuntimeError:  # the interpreter is shutting down and starts no more threads
                    self._thread = None
                    self._serve()

    def finish(self) -> None:
        """Wait until all tasks are done."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        while True:
            with self._lock:
                try:
                    what, work = self._work.get_nowait()
                except queue.Empty:
                    self._thread = None
                    return
            try:
                work()
            except Exception as error:  # noqa: BLE001 whatever fails here, the training continues
                notices.report_failure(what, error)
            finally:
                self._work.task_done()


def prune(run: Path, budget_bytes: int) -> list[int]:
    """Remove the oldest windows of a run except the first and the newest, until it fits; return their numbers."""
    folders = dict(sorted(_window_folders(run)))
    removed: list[int] = []
    while len(folders) > 1 and _size_bytes([run, *folders.values()]) > budget_bytes:
        removed.append(next(iter(folders)))
        shutil.rmtree(folders.pop(removed[-1]), ignore_errors=True)
    return removed


def _has_room(scratch: Path) -> bool:
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        return os.access(scratch, os.W_OK) and shutil.disk_usage(scratch).free > _MIN_FREE_BYTES
    except OSError:
        return False


def _window_folders(run: Path) -> Iterator[tuple[int, Path]]:
    for path in run.iterdir():
        digits = path.name.lstrip(string.ascii_letters)
        if digits.isdigit() and path.name == conventions.window_folder(int(digits)):
            yield int(digits), path


def _size_bytes(folders: list[Path]) -> int:
    """Bytes of the files in folders, not of those in folders within."""
    total = 0
    for folder in folders:
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # gone meanwhile
                total += path.stat().st_size if path.is_file() else 0
    return total
