"""Which steps of a training are profiled: one window, periodic windows, windows requested while it runs."""

import json
import math
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from tracekit import conventions
from tracekit.capture import atomic_files
from tracekit.conventions import regular_files

_SPAN = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*")
_MOST_DIGITS = 12
_POLL_EVERY_S = 1.0
_LEAD_S = 3.0
_MOST_STEPS = 1000


class Window(NamedTuple):
    """Steps `first` to `end` (half-open), the `number`-th window of the run, counted from 0."""

    number: int
    first: int
    end: int


class WindowSchedule:
    """The windows of a run; equal arguments and requests give equal windows on every rank.

    `first` and `end` are the first window (half-open, counted from 0), None if there is none; with `every`, one of that
    length follows each `every` steps. Windows never overlap: a requested one must fit in between.

    >>> windows = WindowSchedule(10, 15, every=100)
    >>> windows.upcoming(12), windows.upcoming(15)
    (Window(number=0, first=10, end=15), Window(number=1, first=110, end=115))
    >>> windows.request(50, 52)
    True
    >>> windows.upcoming(15), windows.upcoming(60)
    (Window(number=1, first=50, end=52), Window(number=2, first=110, end=115))
    """

    def __init__(self, first: int | None, end: int = 0, *, every: int | None = None) -> None:
        if first is not None and not 0 <= first < end:
            raise ValueError(f"steps {first}:{end} are empty: the first must be less than the end, as in 10:15")
        self._first, self._every = first, every if first is not None else None
        self._length = end - first if first is not None else 0
        if self._every is not None and self._every < self._length:
            raise ValueError(f"a window every {every} steps is too often for windows of {self._length} steps")
        self._requested: list[tuple[int, int]] = []

    def upcoming(self, step: int) -> Window | None:
        """Window that contains `step`, else the next one; None if there are no more."""
        spans = [span for span in (self._regular(step), *self._requested) if span is not None and span[1] > step]
        if not spans:
            return None
        first, end = min(spans)
        before = sum(other < first for other, _ in self._requested)
        if self._first is not None and first > self._first:
            before += 1 if self._every is None else -(-(first - self._first) // self._every)
        return Window(before, first, end)

    def request(self, first: int, end: int) -> bool:
        """Add a window, unless it would overlap another; return whether it was added."""
        if any(first < other_end and other_first < end for other_first, other_end in self._neighbors(first, end)):
            return False
        self._requested.append((first, end))
        return True

    def first_free_step(self, first: int, length: int, *, margin: int = 0) -> int:
        """First step from `first` on at which a window of `length` fits, `apart` steps from its neighbours.

        Raises ValueError where the regular windows leave no room.
        """
        if self._every is not None and self._every - self._length < length + 2 * margin:
            raise ValueError(f"windows every {self._every} steps leave no room for one of {length}")
        while True:
            blocking_ends = [
                end
                for begin, end in self._neighbors(first - margin, first + length + margin)
                if begin - margin < first + length and first < end + margin
            ]
            if not blocking_ends:
                return first
            first = max(blocking_ends) + margin

    def _regular(self, step: int) -> tuple[int, int] | None:
        """Periodic window that contains `step`, or the next one."""
        if self._first is None:
            return None
        repeats = 0
        if self._every is not None:
            repeats = max(0, -(-(step + 1 - self._first - self._length) // self._every))
        first = self._first + repeats * (self._every or 0)
        return (first, first + self._length) if first + self._length > step else None

    def _neighbors(self, first: int, end: int) -> list[tuple[int, int]]:
        """Windows that a span may touch."""
        regular = [self._regular(max(0, first)), self._regular(max(0, end))]
        return [*(span for span in regular if span is not None), *self._requested]


def parse_steps(text: str) -> tuple[int, int]:
    """Parse a half-open range of steps such as ``10:15``. Raises ValueError for anything else.

    >>> parse_steps("10:15")
    (10, 15)
    """
    match = _SPAN.fullmatch(text)
    if not match or max(len(number) for number in match.groups()) > _MOST_DIGITS:
        raise ValueError(f"{text!r} is not a range of steps: use FIRST:END, such as 10:15 for steps 10 to 14")
    first, end = (int(number) for number in match.groups())
    if first >= end:
        raise ValueError(f"{text!r} is empty: END is excluded, so 10:11 is step 10 alone")
    return first, end


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
            request = json.loads(regular_files.read_text(path))
        except (OSError, ValueError):
            return None
        is_complete = isinstance(request, dict) and all(type(request.get(name)) is int for name in ("first", "end"))
        return request if is_complete and 0 <= request["first"] < request["end"] else None


def _requested_length(touched: Path) -> int | None:
    """Number of steps that the touched file requests: ``{"steps": 3}``; None for an empty file."""
    try:
        request = json.loads(regular_files.read_text(touched))
        steps = request["steps"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return min(steps, _MOST_STEPS) if type(steps) is int and steps > 0 else None
