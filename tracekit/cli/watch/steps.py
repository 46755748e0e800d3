"""Combine the steps of all ranks, find outlier steps, and list the events recorded during each.

Ranks wait for each other in every step, so a run has one step time, and a slow step is reported once: two series are
judged, the median over ranks and the slowest rank, however many ranks there are.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from tracekit.cli.watch.rank_log import Position, RankStep
from tracekit.cli.watch.training_state import EventKind, OutlierStep, StepEvent, Symptom
from tracekit.conventions.outlier_detector import (
    MIN_RISE_LOG,
    MIN_RISE_RATIO,
    WARM_UP_STEPS,
    WINDOW,
    OutlierDetector,
    Verdict,
)


class DownsampledCurve:
    """A series of any length as at most `max_points` means of equal parts."""

    def __init__(self, max_points: int = 240) -> None:
        self._max_points = max_points
        self._stretch = 1
        self._sum, self._count = 0.0, 0
        self.values: list[float] = []

    def add(self, value: float) -> None:
        """Add the next value."""
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._stretch:
            return
        self.values.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.values) == self._max_points:
            pairs = zip(self.values[::2], self.values[1::2], strict=True)
            self.values, self._stretch = [(a + b) / 2 for a, b in pairs], self._stretch * 2


GRACE_S = 3.0
"""How long a step waits for ranks that have not logged it: logs reach the disk up to a second late."""

_MIN_EXPLAINED_RATIO = 0.5  # report a wait for data if it is at least this share of the step's excess
_MAX_OUTLIERS = 50

EventSource = Callable[[int, float | None], Iterable[StepEvent]]
"""The events recorded during a step, by its number and the median step time in ns."""


@dataclass(slots=True)
class _PendingStep:
    """What the ranks have logged of one step."""

    since_s: float
    skipped_beginning: bool
    times_ns: dict[int, float] = field(default_factory=dict)
    waits_ns: dict[int, float] = field(default_factory=dict)
    collective_waits_ns: dict[int, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    bad_losses: list[int] = field(default_factory=list)
    retries: int = 0
    device_allocs: int = 0
    is_skipped: bool = False
    tokens_per_s: float | None = None

    def add(self, rank_step: RankStep) -> None:
        row = rank_step.row
        if row.time_ns is not None:
            self.times_ns[rank_step.rank] = row.time_ns
        if row.data_wait_ns is not None:
            self.waits_ns[rank_step.rank] = row.data_wait_ns
        if row.collective_wait_ns is not None:
            self.collective_waits_ns[rank_step.rank] = row.collective_wait_ns
        if row.loss is not None:
            if math.isfinite(row.loss):
                self.losses.append(row.loss)
            else:
                self.bad_losses.append(rank_step.rank)
        self.retries += rank_step.new_retries
        self.device_allocs += rank_step.new_device_allocs
        self.is_skipped |= row.is_skipped
        self.tokens_per_s = row.tokens_per_s if row.tokens_per_s is not None else self.tokens_per_s

    def late_rank(self) -> tuple[int, float] | None:
        """Rank that waited least for collectives, and by how many ns less than the median rank; None for one rank."""
        waits_ns = self.collective_waits_ns
        if len(waits_ns) < 2:
            return None
        rank = min(waits_ns, key=lambda waiting_rank: waits_ns[waiting_rank])
        others_ns = [wait_ns for waiting_rank, wait_ns in waits_ns.items() if waiting_rank != rank]
        return rank, statistics.median(others_ns) - waits_ns[rank]


class StepMonitor:
    """The steps of a run, judged in order, each when all ranks have logged it or GRACE_S have passed."""

    def __init__(self, recorded_events: EventSource) -> None:
        self._recorded_events = recorded_events
        self._pending: dict[Position, _PendingStep] = {}
        self._last_judged: Position | None = None
        self._warm_up = WARM_UP_STEPS
        self._median_times, self._slowest_times = OutlierDetector(), OutlierDetector()  # logarithms of ns
        self._losses, self._waits_ns, self._lateness_ns = OutlierDetector(), OutlierDetector(), OutlierDetector()
        self._data_waits: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._is_slow = self._is_bad_loss = False
        self._unreported: list[int] = []  # numbers of outliers, counted from 1
        self.outliers: deque[OutlierStep] = deque(maxlen=_MAX_OUTLIERS)
        self.outlier_count = 0
        self.loss_curve = DownsampledCurve()
        self.first_step: int | None = None
        self.step_time_ns: float | None = None
        self.loss: float | None = None
        self.tokens_per_s: float | None = None

    @property
    def median_ns(self) -> float | None:
        """Return the median step time of the last steps."""
        median = self._median_times.median
        return None if median is None else math.exp(median)

    @property
    def spread_ratio(self) -> float | None:
        """Return the spread of step times relative to the median."""
        spread = self._median_times.spread
        return None if spread is None else math.expm1(spread)

    @property
    def data_wait_ratio(self) -> float | None:
        """Return the share of the last steps' time that was spent waiting for data."""
        total_ns = sum(time for _, time in self._data_waits)
        return sum(wait for wait, _ in self._data_waits) / total_ns if total_ns else None

    def add(self, rank_step: RankStep, now_s: float, *, skipped_beginning: bool) -> None:
        """Add what a rank logged of a step."""
        if self._last_judged is not None and rank_step.position <= self._last_judged:
            return  # too late
        pending = self._pending.get(rank_step.position)
        if pending is None:
            pending = self._pending[rank_step.position] = _PendingStep(now_s, skipped_beginning)
        pending.add(rank_step)

    def judge_ready(self, ready: Position | None, now_s: float) -> None:
        """Judge the steps that all ranks have reached, those up to `ready`, and those that waited long enough."""
        for position in sorted(self._pending):
            pending = self._pending[position]
            if (ready is None or position > ready) and now_s - pending.since_s < GRACE_S:
                return
            del self._pending[position]
            self._judge(position, pending)

    def take_new_outliers(self) -> list[OutlierStep]:
        """Return the outliers since the last call. A slow stretch is returned when it starts and when it ends."""
        unreported, self._unreported = self._unreported, []
        oldest = self.outlier_count - len(self.outliers) + 1
        return [self.outliers[number - oldest] for number in unreported if number >= oldest]

    def _judge(self, position: Position, pending: _PendingStep) -> None:
        attempt, step = position
        if self._last_judged is None:
            self.first_step = step
            self._warm_up = 0 if pending.skipped_beginning else WARM_UP_STEPS
        elif attempt > self._last_judged[0]:
            self._warm_up, self._is_slow = WARM_UP_STEPS, False
        self._last_judged = position
        is_warm = self._warm_up == 0
        self._warm_up -= not is_warm
        self._judge_loss(step, pending, is_warm=is_warm)
        if pending.times_ns:
            self._judge_time(step, pending, is_warm=is_warm)
        self.tokens_per_s = pending.tokens_per_s if pending.tokens_per_s is not None else self.tokens_per_s

    # Time ------------------------------------------------------------------------------------------------------------

    def _judge_time(self, step: int, pending: _PendingStep, *, is_warm: bool) -> None:
        self.step_time_ns = statistics.median(pending.times_ns.values())
        median, slowest = math.log(self.step_time_ns), math.log(max(pending.times_ns.values()))
        if pending.waits_ns:
            self._data_waits.append((statistics.fmean(pending.waits_ns.values()), self.step_time_ns))
        if not is_warm:
            return
        verdicts = (self._median_times.judge(median, MIN_RISE_LOG), self._slowest_times.judge(slowest, MIN_RISE_LOG))
        was_slow, self._is_slow = self._is_slow, any(verdict is not Verdict.NORMAL for verdict in verdicts)
        events: tuple[StepEvent, ...] = ()
        if self._is_slow:
            events = self._events(step, pending)
            stragglers = self._stragglers(pending, all_are=verdicts[0] is not Verdict.NORMAL)
            if was_slow and self.outliers[-1].symptom is Symptom.SLOW:
                self._extend_stretch(step, max(pending.times_ns.values()), stragglers, events)
            elif Verdict.OUTLIER in verdicts:
                self._record_outlier(Symptom.SLOW, step, pending, stragglers, events)
            else:
                self._is_slow = False
        if was_slow and not self._is_slow:
            self._end_stretch()
        # A slow step with a known cause does not count for the median.
        if not any(event.kind in (EventKind.SAVE, EventKind.PROFILED, EventKind.TRACE_WRITTEN) for event in events):
            self._median_times.add(median)
            self._slowest_times.add(slowest)
        if pending.waits_ns:
            self._waits_ns.add(max(pending.waits_ns.values()))
        if (late := pending.late_rank()) is not None:
            self._lateness_ns.add(late[1])

    def _stragglers(self, pending: _PendingStep, *, all_are: bool) -> tuple[int, ...]:
        limit = self._median_times.limit(MIN_RISE_LOG)
        stragglers = [rank for rank, ns in pending.times_ns.items() if limit is not None and math.log(ns) > limit]
        if not stragglers and not all_are:
            stragglers = [max(pending.times_ns, key=lambda rank: pending.times_ns[rank])]
        return tuple(sorted(stragglers or pending.times_ns))

    def _extend_stretch(
        self, step: int, time_ns: float, stragglers: tuple[int, ...], events: tuple[StepEvent, ...]
    ) -> None:
        last = self.outliers[-1]
        worst = max(last.step_time_ns or 0, time_ns)
        ranks = tuple(sorted({*last.ranks, *stragglers}))
        # A wait has another length in each step.
        places = {(event.kind, event.rank, event.count, event.name) for event in last.events}
        new = tuple(event for event in events if (event.kind, event.rank, event.count, event.name) not in places)
        events = (last.events + new)[:8]
        self.outliers[-1] = replace(last, last_step=step, step_time_ns=worst, ranks=ranks, events=events)

    def _end_stretch(self) -> None:
        number, last = self.outlier_count, self.outliers[-1]
        if last.last_step > last.step and number not in self._unreported:
            self._unreported.append(number)

    # Loss ------------------------------------------------------------------------------------------------------------

    def _judge_loss(self, step: int, pending: _PendingStep, *, is_warm: bool) -> None:
        if pending.bad_losses:
            # After one loss is not finite, later ones usually are not either: report it once.
            if not self._is_bad_loss:
                ranks = tuple(sorted(pending.bad_losses))
                self._record_outlier(Symptom.LOSS_NOT_FINITE, step, pending, ranks, self._events(step, pending))
            self._is_bad_loss, self.loss = True, math.nan
            return
        if not pending.losses:
            return
        self._is_bad_loss = False
        self.loss = statistics.fmean(pending.losses)
        median = self._losses.median
        if is_warm and median is not None:
            verdict = self._losses.judge(self.loss, MIN_RISE_RATIO * abs(median))
            if verdict is Verdict.OUTLIER:
                self._record_outlier(Symptom.LOSS_SPIKE, step, pending, (), self._events(step, pending))
        self._losses.add(self.loss)
        self.loss_curve.add(self.loss)

    # Reporting --------------------------------------------------------------------------------------------------------

    def _record_outlier(
        self, symptom: Symptom, step: int, pending: _PendingStep, ranks: tuple[int, ...], events: tuple[StepEvent, ...]
    ) -> None:
        outlier = OutlierStep(
            symptom=symptom,
            step=step,
            last_step=step,
            step_time_ns=max(pending.times_ns.values(), default=None),
            median_ns=self.median_ns,
            loss=statistics.fmean(pending.losses) if pending.losses and not pending.bad_losses else None,
            median_loss=self._losses.median,
            ranks=ranks,
            rank_count=max(len(pending.times_ns), len(pending.losses) + len(pending.bad_losses)),
            events=events,
        )
        self.outliers.append(outlier)
        self.outlier_count += 1
        self._unreported.append(self.outlier_count)

    def _events(self, step: int, pending: _PendingStep) -> tuple[StepEvent, ...]:
        events = [*self._recorded_events(step, self.median_ns)]
        explained_ns = _MIN_EXPLAINED_RATIO * (max(pending.times_ns.values(), default=0) - (self.median_ns or 0))
        if pending.waits_ns:
            rank, wait_ns = max(pending.waits_ns.items(), key=lambda item: item[1])
            if wait_ns - (self._waits_ns.median or 0) >= explained_ns > 0:
                events.append(StepEvent(EventKind.DATA_WAIT, dur_ns=wait_ns, rank=rank))
        if (late := pending.late_rank()) is not None:
            rank, late_ns = late
            if late_ns - (self._lateness_ns.median or 0) >= explained_ns > 0:
                events.append(StepEvent(EventKind.LATE_RANK, dur_ns=late_ns, rank=rank))
        if pending.retries:
            events.append(StepEvent(EventKind.RETRIES, count=pending.retries))
        if pending.device_allocs:
            events.append(StepEvent(EventKind.DEVICE_ALLOCS, count=pending.device_allocs))
        if pending.is_skipped:
            events.append(StepEvent(EventKind.SKIPPED))
        return tuple(events)
