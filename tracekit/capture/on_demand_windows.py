"""Windows requested while a training runs: a user touches a file in the run, and all ranks profile the same steps.

No rank ever waits for another. The leading rank answers the touched file with a request for steps so far ahead that
every rank reads it in time; each rank polls for requests about once a second, at the end of a step.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.capture import atomic_files
from tracekit.capture.window_schedule import WindowSchedule

_POLL_EVERY_S = 1.0
_LEAD_S = 3.0
_MOST_STEPS = 1000


class WindowRequests:
    """Adds windows that are requested through the run's folder to the schedule; one rank of the run `leads`."""

    def __init__(self, run: Path, windows: WindowSchedule, *, length: int, warmup: int, leads: bool) -> None:
        self._run = run
        self._windows = windows
        self._length = length
        self._warmup = warmup
        self._leads = leads
        self._known: Any = self._read()  # of an earlier training
        self._polled_s = time.monotonic()

    def poll(self, step: int, step_time_ns: int) -> None:
        """Read a new request, if the poll interval has passed; `step` is about to begin.

        Raises OSError where the folder cannot be read or written, ValueError for an invalid request.
        """
        if time.monotonic() - self._polled_s < _POLL_EVERY_S:
            return
        self._polled_s = time.monotonic()
        if self._leads:
            self._answer(step, step_time_ns)
        request = self._read()
        if request is None or request == self._known:
            return
        self._known = request
        first, end = int(request["first"]), int(request["end"])
        if not self._windows.request(first, end) or step > first:
            raise ValueError(f"steps {first}:{end} were requested, but step {step} is too late to record them")

    def _answer(self, step: int, step_time_ns: int) -> None:
        touched = self._run / conventions.NOW_FILE
        if not touched.exists() or (self._known and step < int(self._known["end"])):
            return
        length = _requested_length(touched) or self._length
        touched.unlink()
        lead_steps = math.ceil(_LEAD_S * 1e9 / max(1, step_time_ns)) + self._warmup + 1
        first = self._windows.first_free_step(step + lead_steps, length, margin=self._warmup)
        atomic_files.write_json(
            self._run / conventions.REQUEST_FILE,
            {"first": first, "end": first + length, "requested_ns": time.time_ns()},
        )

    def _read(self) -> Any:
        path = self._run / conventions.REQUEST_FILE
        try:
            request = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        is_complete = isinstance(request, dict) and all(type(request.get(name)) is int for name in ("first", "end"))
        return request if is_complete and 0 <= request["first"] < request["end"] else None


def _requested_length(touched: Path) -> int | None:
    """Return the number of steps that the touched file requests: ``{"steps": 3}``; None for an empty file."""
    try:
        request = json.loads(touched.read_text(encoding="utf-8"))
        steps = request["steps"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return min(steps, _MOST_STEPS) if type(steps) is int and steps > 0 else None
