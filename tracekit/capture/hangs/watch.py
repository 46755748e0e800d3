"""A thread that watches the collectives of this rank and dumps what they are in when they make no progress."""

import atexit
import contextlib
import faulthandler
import functools
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from torch import distributed
from torch.distributed import distributed_c10d

from tracekit import conventions
from tracekit.capture import atomic_files, notices, rank_info
from tracekit.capture.hangs import flight_recorder, threads
from tracekit.capture.hangs.flight_recorder import MessageLog
from tracekit.conventions import redaction, regular_files

SCHEMA = "tracekit.hang/1"
TIMEOUT, ERROR, EXIT = "timeout", "error", "exit"
_MOST_AT_EXIT = 200
_BACKENDS = ("gloo/", "NCCL", "ncclUnhandled", "ncclSystem", "ncclRemote")  # in errors of collectives
_POLLS_PER_TIMEOUT = 20
_STACKS_FACTOR = 1.5  # without the interpreter's lock the thread can't run; then faulthandler dumps stacks


def start(folder: Path, timeout_s: float) -> "HangWatch":
    """Watch this rank, whose process group exists, and write dumps into a folder; `tracekit hang FOLDER` reads them.

    A dump is written when no collective was called or completed for `timeout_s` seconds, and when one fails.
    """
    watch = HangWatch(lambda: folder, timeout_s)
    watch.begin()
    return watch


class HangWatch:
    """Watches one rank. Its failures never reach the training."""

    def __init__(self, folder: Callable[[], Path], timeout_s: float) -> None:
        """Watch from the creation of the process group on; `folder` is then called for the place of dumps."""
        self._folder_of = folder
        self._timeout_s = timeout_s
        self._messages = MessageLog()
        self._folder: Path | None = None
        self._stacks: TextIO | None = None
        self._lock = threading.Lock()
        self._reason = ""
        self._stop = threading.Event()
        self._rank = 0
        self._process_id = os.getpid()
        self._has_failed = False

    def install(self) -> None:
        """Begin once the script creates its process group."""
        create = distributed_c10d.init_process_group

        @functools.wraps(create)
        def create_and_begin(*args: Any, **kwargs: Any) -> Any:
            result = create(*args, **kwargs)
            try:
                self.begin()
            except Exception as error:  # noqa: BLE001 the training goes on
                notices.report_failure("hangs are not watched", error)
            return result

        distributed_c10d.init_process_group = create_and_begin
        distributed.init_process_group = create_and_begin

    def begin(self) -> None:
        """Begin to watch; the process group exists. Raises RuntimeError where torch has no flight recorder for it."""
        if self._folder is not None:
            return
        if not flight_recorder.is_available():
            raise RuntimeError("this torch has no flight recorder for its backend; 2.9 and later have one")
        self._rank = rank_info.this_rank()
        self._folder = self._folder_of()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        self._stacks = (self._folder / conventions.rank_file(self._rank, conventions.STACKS_SUFFIX)).open("w")
        self._stacks.write(f"# {json.dumps(_process())}\n")
        self._stacks.flush()
        self._messages.install()
        flight_recorder.observe_calls()
        self._observe_failures()
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._stop.set)
        threading.Thread(target=self._run, name="tracekit hang watch", daemon=True).start()

    @property
    def _path(self) -> Path:
        assert self._folder is not None
        return self._folder / conventions.rank_file(self._rank, conventions.HANG_SUFFIX)

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # noqa: BLE001 the training goes on
            notices.report_failure("hangs are not watched any more", error)

    def _watch(self) -> None:
        before, since, polls_with_progress = "", time.monotonic(), 0
        assert self._stacks is not None
        pause_s = min(5.0, max(0.05, self._timeout_s / _POLLS_PER_TIMEOUT))
        while not self._stop.is_set():
            faulthandler.dump_traceback_later(self._timeout_s * _STACKS_FACTOR, file=self._stacks)
            now = flight_recorder.progress(self._messages)
            if now != before:
                before, since = now, time.monotonic()
                polls_with_progress += 1
                if polls_with_progress > 1:  # once, it may be a call that fails because another rank was ended
                    self._on_resume()
            elif time.monotonic() - since >= self._timeout_s and not self._reason:
                polls_with_progress = 0
                self.write(TIMEOUT, stalled_s=time.monotonic() - since)
                if not self._reason:
                    continue
                sys.stderr.write(
                    f"tracekit: rank {self._rank}: no collective progressed for {self._timeout_s:g} s; "
                    f"wrote {self._path}; next: tracekit hang {self._folder}\n"
                )
            self._stop.wait(pause_s)
        faulthandler.cancel_dump_traceback_later()

    def _on_resume(self) -> None:
        with self._lock:
            if self._reason == TIMEOUT and not self._has_failed:
                self._path.unlink(missing_ok=True)
                self._reason = ""

    # Failures and the end ---------------------------------------------------------------------------------------------

    def _observe_failures(self) -> None:
        work = distributed.Work
        wait = work.wait

        @functools.wraps(wait)
        def wait_or_dump(*args: Any, **kwargs: Any) -> Any:
            try:
                return wait(*args, **kwargs)
            except Exception as error:
                self._on_failure(error, threads.stack(sys._getframe(1)))
                raise

        vars(wait_or_dump)["_torchdynamo_disable"] = True
        with contextlib.suppress(TypeError, AttributeError):
            work.wait = wait_or_dump
        excepthook = sys.excepthook

        def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if issubclass(kind, Exception) and not self._reason:
                self._uncaught(error, trace)
            excepthook(kind, error, trace)

        sys.excepthook = uncaught

    def _on_failure(self, error: Exception, frames: list[dict[str, Any]]) -> None:
        """Dump because a call of this rank failed, at once: the launcher may be about to end the process.

        A dump of a timeout stays: the ranks that are then ended make the calls of others fail.
        """
        self._has_failed = True
        if self._reason == TIMEOUT:
            return
        callers = {(frame["filename"], frame["line"]) for frame in frames}
        text = f"{type(error).__name__}: {error}"
        self._write_safely(ERROR, error=text, callers=callers, frames=frames)

    def _uncaught(self, error: BaseException, trace: TracebackType | None) -> None:
        frames = threads.of_traceback(trace)
        callers = {(frame["filename"], frame["line"]) for frame in frames}
        is_communication = isinstance(error, distributed.DistError) or any(word in str(error) for word in _BACKENDS)
        text = f"{type(error).__name__}: {error}"
        self._write_safely(ERROR, error=text, callers=callers if is_communication else None, frames=frames)

    def _at_exit(self) -> None:
        self._stop.set()
        if os.getpid() == self._process_id:
            faulthandler.cancel_dump_traceback_later()
        if not self._reason:
            self._write_safely(EXIT)

    def _write_safely(self, reason: str, **details: Any) -> None:
        if os.getpid() != self._process_id:
            return  # a forked process, such as a worker of a data loader, is not the rank
        try:
            self.write(reason, **details)
        except Exception as error:  # noqa: BLE001 the training goes on
            notices.report_failure("no dump of the hang", error)

    # The dump ---------------------------------------------------------------------------------------------------------

    def write(
        self,
        reason: str,
        *,
        stalled_s: float = 0.0,
        error: str = "",
        callers: "set[tuple[str, int]] | None" = None,
        frames: "list[dict[str, Any]] | None" = None,
    ) -> None:
        """Write the dump of this rank.

        Of an error, `frames` are the stack, and `callers` the places where the call that failed was made.
        """
        with self._lock:
            before = flight_recorder.progress(self._messages)
            states = threads.states(without=threading.get_ident()) if reason == TIMEOUT else _raising(frames)
            dump = flight_recorder.dump(self._messages, most_entries=_MOST_AT_EXIT if reason == EXIT else None)
            if reason == TIMEOUT and flight_recorder.progress(self._messages) != before:
                return  # a slow rank, which has gone on: its stacks and calls would be of different times
            if callers is not None:
                flight_recorder.mark_failed(dump["entries"], error, callers)
            header = {
                "schema": SCHEMA,
                "rank": self._rank,
                "world_size": rank_info.this_world_size(),
                "written_ns": time.time_ns(),
                "reason": reason,
                "error": error,
                "stalled_ns": int(stalled_s * 1e9),
                "timeout_s": self._timeout_s,
                **_process(),
                "threads": states,
                "dead_ranks": self._dead_ranks() if reason != EXIT else [],
            }
            text = json.dumps({**dump, "tracekit": header}, separators=(",", ":"))
            with atomic_files.atomic_write(self._path) as partial:
                partial.write_bytes(redaction.redact(text.encode()))
            self._reason = reason

    def _dead_ranks(self) -> list[int]:
        """Ranks of this host that began to be watched and whose processes do not exist any more."""
        dead = []
        assert self._folder is not None
        for path in self._folder.glob(f"rank*{conventions.STACKS_SUFFIX}"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                with regular_files.open_to_read(path) as file:
                    process = json.loads(file.readline().removeprefix(b"# "))
                if process["host"] == platform.node() and process != _process(process["pid"]):
                    dead.append(int(path.name.removeprefix("rank").removesuffix(conventions.STACKS_SUFFIX)))
        dumps = {rank: self._folder / conventions.rank_file(rank, conventions.HANG_SUFFIX) for rank in sorted(dead)}
        return [rank for rank, dump in dumps.items() if not dump.exists()]


def _raising(frames: "list[dict[str, Any]] | None") -> list[dict[str, Any]]:
    return [{"name": threading.current_thread().name, "is_main": True, "frames": frames}] if frames else []


def _process(pid: "int | None" = None) -> dict[str, Any]:
    """Identity of a process of this host: a process id is used again after its process has ended."""
    pid = os.getpid() if pid is None else pid
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        began = None if fields[0] in ("Z", "X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        began = None
    return {"host": platform.node(), "pid": pid, "began": began}
