"""Compress traces and move them into the run on a background thread."""

import contextlib
import queue
import shutil
import string
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tracekit import conventions
from tracekit.capture import notices

_MAX_PENDING = 2


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


def _window_folders(run: Path) -> Iterator[tuple[int, Path]]:
    for path in run.iterdir():
        digits = path.name.lstrip(string.ascii_letters)
        if digits.isdigit() and path.name == conventions.window_folder(int(digits)):
            yield int(digits), path


def _size_bytes(folders: list[Path]) -> int:
    """Return the bytes of the files in folders, not of those in folders within."""
    total = 0
    for folder in folders:
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # gone meanwhile
                total += path.stat().st_size if path.is_file() else 0
    return total
