"""Which steps of a training are profiled: one window, periodic windows, windows requested while it runs."""

import json
import math
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tracekit import conventions
from tracekit.capture import atomic_files
from tracekit.capture.slow_steps import LASTING_NS, REST_STEPS, Outlier
from tracekit.conventions import regular_files

_SPAN = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*")
_MOST_DIGITS = 12
_POLL_EVERY_S = 1.0
_MOST_STEPS = 1000
_MOST_OUTLIER_STEPS = 20
_DAY_S = 86_400
_SMALL_WORLD, _PEERS = 4, 3


class Window(NamedTuple):
    """Steps `first` to `end` (half-open), the `number`-th window of the run, counted from 0.

    `outlier` is the reason of a window that was opened by itself; other ranks may record it: `is_recorded`.
    """

    number: int
    first: int
    end: int
    is_recorded: bool = True
    outlier: Outlier | None = None


class WindowSchedule:
    """The windows of a run; equal arguments and requests give equal windows on every rank.

    `first` and `end` are the first window (half-open, counted from 0), None if there is none; with `every`, one of that
    length follows each `every` steps. Windows never overlap: a requested one must fit in between.

    >>> windows = WindowSchedule(10, 15, every=100)
    >>> windows.upcoming(12)[:3], windows.upcoming(15)[:3]
    ((0, 10, 15), (1, 110, 115))
    >>> windows.request(50, 52)
    True
    >>> windows.upcoming(15)[:3], windows.upcoming(60)[:3]
    ((1, 50, 52), (2, 110, 115))
    """

    def __init__(self, first: int | None, end: int = 0, *, every: int | None = None) -> None:
        if first is not None and not 0 <= first < end:
            raise ValueError(f"steps {first}:{end} are empty: the first must be less than the end, as in 10:15")
        self._first, self._every = first, every if first is not None else None
        self._length = end - first if first is not None else 0
        if self._every is not None and self._every < self._length:
            raise ValueError(f"a window every {every} steps is too often for windows of {self._length} steps")
        self._requested: list[tuple[int, int]] = []
        self._latest: tuple[int, Window | None, float] | None = None  # the answer from one step to another
        self._details: dict[int, tuple[bool, Outlier | None]] = {}  # by the first step of a requested window

    def upcoming(self, step: int) -> Window | None:
        """Window that contains `step`, else the next one; None if there are no more."""
        if self._latest is not None and self._latest[0] <= step < self._latest[2]:
            return self._latest[1]  # each step asks, and nothing has changed
        window = self._window_from(step)
        self._latest = step, window, math.inf if window is None else window.end
        return window

    def _window_from(self, step: int) -> Window | None:
        spans = [span for span in (self._regular(step), *self._requested) if span is not None and span[1] > step]
        if not spans:
            return None
        first, end = min(spans)
        before = sum(other < first for other, _ in self._requested)
        if self._first is not None and first > self._first:
            before += 1 if self._every is None else -(-(first - self._first) // self._every)
        return Window(before, first, end, *self._details.get(first, ()))

    def request(self, first: int, end: int, *, is_recorded: bool = True, outlier: Outlier | None = None) -> bool:
        """Add a window, unless it would overlap another; return whether it was added."""
        if any(first < other_end and other_first < end for other_first, other_end in self._neighbors(first, end)):
            return False
        self._requested.append((first, end))
        self._details[first] = is_recorded, outlier
        self._latest = None
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
    """Adds windows that are requested through the run's folder to the schedule; one rank of the run `leads`.

    At most `outlier_windows` a day are answered that ranks request because of slow steps.
    """

    def __init__(
        self,
        run: Path,
        windows: WindowSchedule,
        *,
        length: int,
        warmup: int,
        leads: bool,
        rank: int = 0,
        outlier_windows: int = 0,
    ) -> None:
        self._run = run
        self._rank = rank
        self._outlier_windows = outlier_windows
        self._opened_s: deque[float] = deque(maxlen=max(1, outlier_windows))
        self._rest_until = 0
        self._windows = windows
        self._length = length
        self._warmup = warmup
        self._leads = leads
        self._known: Any = self._read()  # of an earlier training
        touched = run / conventions.NOW_FILE
        if leads and "outlier" in _read_object(touched):  # so is this: its ranks have ended before it was answered
            touched.unlink(missing_ok=True)
        self._polled_s = time.monotonic()

    def ask(self, outlier: Outlier, ranks: Sequence[int]) -> None:
        """Request a window of some ranks because of an outlier, unless another request waits. Raises OSError."""
        touched = self._run / conventions.NOW_FILE
        if not touched.exists():
            atomic_files.write_json(touched, {"outlier": outlier._asdict(), "ranks": list(ranks)})

    @property
    def is_due(self) -> bool:
        """Whether the poll interval has passed."""
        return time.monotonic() - self._polled_s >= _POLL_EVERY_S

    def poll(self, step: int, step_time_ns: int) -> Window | None:
        """Read a new request, if the poll interval has passed; return its window. `step` is about to begin.

        Raises OSError where the folder cannot be read or written, ValueError for an invalid request.
        """
        if not self.is_due:
            return None
        self._polled_s = time.monotonic()
        if self._leads:
            self._answer(step, step_time_ns)
        request = self._read()
        if request is None or request == self._known:
            return None
        self._known = request
        first, end = int(request["first"]), int(request["end"])
        ranks, outlier = _requested_ranks(request), Outlier.parse(request.get("outlier"))
        is_recorded = ranks is None or self._rank in ranks
        if not self._windows.request(first, end, is_recorded=is_recorded, outlier=outlier) or step > first:
            raise ValueError(f"steps {first}:{end} were requested, but step {step} is too late to record them")
        return self._windows.upcoming(first)

    def _answer(self, step: int, step_time_ns: int) -> None:
        touched = self._run / conventions.NOW_FILE
        if not touched.exists() or (self._known and step < int(self._known["end"])):
            return
        request = _read_object(touched)
        touched.unlink()
        outlier = Outlier.parse(request.get("outlier"))
        if outlier is not None and not self._has_budget(step):
            return
        earliest = step + math.ceil(LASTING_NS / max(1, step_time_ns)) + self._warmup + 1
        length = _requested_length(request) or self._length
        if outlier is not None:
            earliest, length = _around_next_stall(outlier, earliest, length)
        first = self._windows.first_free_step(earliest, length, margin=self._warmup)
        window: dict[str, Any] = {"first": first, "end": first + length, "requested_ns": time.time_ns()}
        if outlier is not None:
            self._opened_s.append(time.monotonic())
            self._rest_until = first + length + REST_STEPS
            window |= {"ranks": _requested_ranks(request), "outlier": outlier._asdict()}
        atomic_files.write_json(self._run / conventions.REQUEST_FILE, window)

    def _has_budget(self, step: int) -> bool:
        """Whether another window may be opened because of an outlier: enough of them are left, and it is time."""
        is_used_up = len(self._opened_s) >= self._outlier_windows
        if not self._outlier_windows or (is_used_up and time.monotonic() - self._opened_s[0] < _DAY_S):
            return False
        return step >= self._rest_until

    def _read(self) -> Any:
        request = _read_object(self._run / conventions.REQUEST_FILE)
        is_complete = all(type(request.get(name)) is int for name in ("first", "end"))
        return request if is_complete and 0 <= request["first"] < request["end"] else None


def peers(rank: int, world_size: int) -> range:
    """Ranks that record a window because of one rank: it and its neighbours, all of up to four.

    >>> peers(0, 4), peers(0, 8), peers(5, 8), peers(7, 8)
    (range(0, 4), range(0, 3), range(4, 7), range(5, 8))
    """
    if world_size <= _SMALL_WORLD:
        return range(world_size)
    first = min(max(0, rank - 1), world_size - _PEERS)
    return range(first, first + _PEERS)


def _around_next_stall(outlier: Outlier, earliest: int, length: int) -> tuple[int, int]:
    """First step and length of a window, not before `earliest`, in which the next slow step is expected.

    >>> _around_next_stall(Outlier(100, 0, 3.0, 1, gap_steps=10, is_regular=True), 114, 5)
    (118, 5)
    >>> _around_next_stall(Outlier(100, 0, 3.0, 1, gap_steps=10, is_regular=False), 114, 5)
    (114, 11)
    """
    if outlier.gap_steps < length:
        return earliest, length
    if not outlier.is_regular:
        return earliest, max(length, min(outlier.gap_steps + 1, _MOST_OUTLIER_STEPS))
    before = length // 2  # steps of the window before the slow one
    repeats = max(0, -(-(earliest + before - outlier.step) // outlier.gap_steps))
    return outlier.step + repeats * outlier.gap_steps - before, length


def _read_object(path: Path) -> dict[str, Any]:
    """JSON object of a file; an empty one for any other content, and where it cannot be read."""
    try:
        value = json.loads(regular_files.read_text(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _requested_length(request: Mapping[str, Any]) -> int | None:
    """Number of steps that a request states, ``{"steps": 3}``; None without one."""
    steps = request.get("steps")
    return min(steps, _MOST_STEPS) if type(steps) is int and steps > 0 else None


def _requested_ranks(request: Mapping[str, Any]) -> list[int] | None:
    """Ranks that a request states; None for all."""
    ranks = request.get("ranks")
    return ranks if isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks) else None
