"""Checks of listed runs in the background: one process checks them one by one while somebody looks at the list.

A process does not take the interpreter lock from pages, and is stopped together with the check that it has begun. Its
reports are in the store of reports, from which the next listing of the runs has their summaries.
"""

import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dashboard.run_entry import RunEntry
from tracekit.conventions import object_storage, python_child

MAX_BYTES = 512 << 20
"""Larger runs, and those behind a URL, are checked on request."""
WATCHED_S = 15.0
"""The process ends where nobody has looked at the list for this long."""
_MODULE = "dashboard.server.check_process"


@dataclass(frozen=True)
class Progress:
    """The checks that are under way."""

    waiting: int = 0
    """Runs that are not checked yet, the current one among them."""
    current: str = ""
    """Name of the run that is being checked."""


@dataclass(frozen=True, eq=False)
class BackgroundChecks:
    """The checks of the runs of one catalog."""

    watched_s: float = WATCHED_S
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: dict[str, RunEntry] = field(default_factory=dict)
    _requested: set[str] = field(default_factory=set)
    _errors: dict[str, str] = field(default_factory=dict)
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)
    """The process, if there is one."""
    _checked: set[str] = field(default_factory=set)

    def watch(self, entries: Sequence[RunEntry]) -> None:
        """Check those of the listed runs that need it. Call this again and again while somebody looks at the list."""
        with self._lock:
            due = sorted(filter(self.is_due, entries), key=lambda entry: entry.size_bytes)
            self._waiting.clear()
            self._waiting.update({entry.stamp: entry for entry in due})
            for process in self._processes:
                _send(process, None)  # it waits for no longer than `watched_s`
            if due and not self._processes:
                self._processes.append(self._start())

    def request(self, entries: Sequence[RunEntry]) -> None:
        """Check these runs, too, whatever their size; those that failed are tried again."""
        with self._lock:
            for entry in entries:
                self._requested.add(entry.stamp)
                self._errors.pop(entry.stamp, None)
                self._checked.discard(entry.stamp)

    def request_comparisons(self, entries: Sequence[RunEntry]) -> None:
        """Measure what comparisons read, too, of those runs that the command line has checked without it."""
        with self._lock:
            self._requested.update(entry.stamp for entry in entries if entry.summary is not None and _is_small(entry))

    def is_due(self, entry: RunEntry) -> bool:
        """Whether a run is checked without a further request."""
        is_requested = entry.stamp in self._requested
        is_unchecked = entry.summary is None or (is_requested and not entry.has_comparisons)
        return (
            is_unchecked
            and not entry.problem
            and not entry.is_live
            and entry.stamp not in self._checked
            and (is_requested or _is_small(entry))
        )

    @property
    def errors(self) -> Mapping[str, str]:
        """Why runs could not be checked, by the stamp of their files."""
        with self._lock:
            return dict(self._errors)

    @property
    def progress(self) -> Progress:
        """The checks that are under way now; none while nobody looks."""
        with self._lock:
            if not self._processes:
                return Progress()
            return Progress(len(self._waiting), next((entry.name for entry in self._waiting.values()), ""))

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(  # noqa: S603  our own module
            python_child.module_command(_MODULE, str(self.watched_s)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=python_child.environment(),
            start_new_session=True,  # an interrupt at the terminal is for the server, whose end closes the pipe
        )
        threading.Thread(target=self._run, args=(process,), name="tracekit-background-checks", daemon=True).start()
        return process

    def _run(self, process: subprocess.Popen[str]) -> None:
        """Let a process check the waiting runs until there are none, or until it ends because nobody looks."""
        entry = None
        with process:
            while entry := self._next():
                with self._lock:
                    _send(process, entry)
                answer = process.stdout.readline() if process.stdout else ""
                if not answer:
                    break
                self._note(entry, json.loads(answer))
        with self._lock:
            self._processes.remove(process)
        if entry is not None and process.returncode:
            self._note(entry, f"the check ended with status {process.returncode}, as where memory runs out")

    def _next(self) -> RunEntry | None:
        with self._lock:
            return next(iter(self._waiting.values()), None)

    def _note(self, entry: RunEntry, error: str) -> None:
        with self._lock:
            self._checked.add(entry.stamp)
            self._waiting.pop(entry.stamp, None)
            if error:
                self._errors[entry.stamp] = error


def _is_small(entry: RunEntry) -> bool:
    return entry.size_bytes <= MAX_BYTES and not object_storage.is_url(entry.path)


def _send(process: subprocess.Popen[str], entry: RunEntry | None) -> None:
    """Write a request as a line; None only says that somebody looks. A process that has ended is noticed elsewhere."""
    request = None if entry is None else {"path": entry.path, "roots": entry.roots}
    try:
        if process.stdin is not None:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
    except (BrokenPipeError, ValueError):
        pass
