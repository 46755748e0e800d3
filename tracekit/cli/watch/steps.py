"""The steps of all ranks put together and held against those before: which one is out of line, and what coincided.

Ranks wait for each other in every step, so a run has one step time, and a slow step is told once: two series are
judged, the median over ranks and the slowest rank, however many ranks there are.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from tracekit.cli.watch.outliers import WINDOW, Curve, Usual, Verdict
from tracekit.cli.watch.rank_log import Position, Told
from tracekit.cli.watch.snapshot import Coincidence, Happened, OutOfLine

GRACE_S = 3.0
"""How long a step waits for the ranks that have not told of it: logs reach the disk up to a second late."""

WARM_UP_STEPS = 5
"""The first steps of a training, or of a part that was resumed, are never out of line."""

LEAST_RISE_RATIO = 0.2
"""A step is not slow, nor a loss a spike, that is less than this above the median."""

_LEAST_RISE_LOG = math.log1p(LEAST_RISE_RATIO)
_EXPLAINS_RATIO = 0.5  # what share of a step's excess a wait for data must be to be told beside it
_MOST_KEPT = 50

Coinciding = Callable[[int, float | None], Iterable[Coincidence]]
"""What was recorded beside a step, by its number and the usual time of a step in ns."""


@dataclass(slots=True)
class _Gathered:
    """What the ranks told of one step so far."""

    since_s: float
    begins_inside: bool
    times_ns: dict[int, float] = field(default_factory=dict)
    waits_ns: dict[int, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    bad_losses: list[int] = field(default_factory=list)
    retries: int = 0
    device_allocs: int = 0
    is_skipped: bool = False
    tokens_per_s: float | None = None

    def add(self, told: Told) -> None:
        row = told.row
        if row.time_ns is not None:
            self.times_ns[told.rank] = row.time_ns
        if row.data_wait_ns is not None:
            self.waits_ns[told.rank] = row.data_wait_ns
        if row.loss is not None:
            if math.isfinite(row.loss):
                self.losses.append(row.loss)
            else:
                self.bad_losses.append(told.rank)
        self.retries += told.new_retries
        self.device_allocs += told.new_device_allocs
        self.is_skipped |= row.is_skipped
        self.tokens_per_s = row.tokens_per_s if row.tokens_per_s is not None else self.tokens_per_s


class Steps:
    """The steps of a run, judged in order, each once all ranks have told of it or GRACE_S have passed."""

    def __init__(self, coinciding: Coinciding) -> None:
        self._coinciding = coinciding
        self._pending: dict[Position, _Gathered] = {}
        self._settled: Position | None = None
        self._warm_up = WARM_UP_STEPS
        self._typical, self._slowest = Usual(), Usual()  # logarithms of ns
        self._losses, self._waits_ns = Usual(), Usual()
        self._shares: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._is_slow = self._is_bad_loss = False
        self._news: list[int] = []  # numbers of those found out of line, counted from 1
        self.out_of_line: deque[OutOfLine] = deque(maxlen=_MOST_KEPT)
        self.out_of_line_count = 0
        self.loss_curve = Curve()
        self.first_step: int | None = None
        self.step_time_ns: float | None = None
        self.loss: float | None = None
        self.tokens_per_s: float | None = None

    @property
    def median_ns(self) -> float | None:
        """Return the median step time of the last steps."""
        median = self._typical.median
        return None if median is None else math.exp(median)

    @property
    def spread_ratio(self) -> float | None:
        """Return how far step times usually are from the median, relative to it."""
        spread = self._typical.spread
        return None if spread is None else math.expm1(spread)

    @property
    def data_wait_ratio(self) -> float | None:
        """Return the share of the last steps' time that was spent waiting for data."""
        total_ns = sum(time for _, time in self._shares)
        return sum(wait for wait, _ in self._shares) / total_ns if total_ns else None

    def add(self, told: Told, now_s: float, *, begins_inside: bool) -> None:
        """Take in what a rank tells of a step."""
        if self._settled is not None and told.position <= self._settled:
            return  # too late
        gathered = self._pending.get(told.position)
        if gathered is None:
            gathered = self._pending[told.position] = _Gathered(now_s, begins_inside)
        gathered.add(told)

    def settle(self, ready: Position | None, now_s: float) -> None:
        """Judge the steps that all ranks have reached, those up to `ready`, and those that waited long enough."""
        for position in sorted(self._pending):
            gathered = self._pending[position]
            if (ready is None or position > ready) and now_s - gathered.since_s < GRACE_S:
                return
            del self._pending[position]
            self._settle(position, gathered)

    def take_news(self) -> list[OutOfLine]:
        """Return what was found out of line since the last call. A slow stretch is told when it begins and ends."""
        news, self._news = self._news, []
        oldest = self.out_of_line_count - len(self.out_of_line) + 1
        return [self.out_of_line[number - oldest] for number in news if number >= oldest]

    def _settle(self, position: Position, gathered: _Gathered) -> None:
        attempt, step = position
        if self._settled is None:
            self.first_step = step
            self._warm_up = 0 if gathered.begins_inside else WARM_UP_STEPS
        elif attempt > self._settled[0]:
            self._warm_up, self._is_slow = WARM_UP_STEPS, False
        self._settled = position
        is_warm = self._warm_up == 0
        self._warm_up -= not is_warm
        self._judge_loss(step, gathered, is_warm=is_warm)
        if gathered.times_ns:
            self._judge_time(step, gathered, is_warm=is_warm)
        self.tokens_per_s = gathered.tokens_per_s if gathered.tokens_per_s is not None else self.tokens_per_s

    # Time ------------------------------------------------------------------------------------------------------------

    def _judge_time(self, step: int, gathered: _Gathered, *, is_warm: bool) -> None:
        self.step_time_ns = statistics.median(gathered.times_ns.values())
        typical, slowest = math.log(self.step_time_ns), math.log(max(gathered.times_ns.values()))
        if gathered.waits_ns:
            self._shares.append((statistics.fmean(gathered.waits_ns.values()), self.step_time_ns))
        if not is_warm:
            return
        verdicts = (self._typical.judge(typical, _LEAST_RISE_LOG), self._slowest.judge(slowest, _LEAST_RISE_LOG))
        was_slow, self._is_slow = self._is_slow, any(verdict is not Verdict.USUAL for verdict in verdicts)
        coincided: tuple[Coincidence, ...] = ()
        if self._is_slow:
            coincided = self._coincided(step, gathered)
            late = self._late(gathered, all_are=verdicts[0] is not Verdict.USUAL)
            if was_slow and self.out_of_line[-1].what is Happened.SLOW:
                self._prolong(step, max(gathered.times_ns.values()), late, coincided)
            elif Verdict.OUT_OF_LINE in verdicts:
                self._tell(Happened.SLOW, step, gathered, late, coincided)
            else:
                self._is_slow = False
        if was_slow and not self._is_slow:
            self._end_stretch()
        # A slow step with a known reason says nothing of what is usual.
        if not any(each.what in (Happened.SAVE, Happened.PROFILED, Happened.TRACE_WRITTEN) for each in coincided):
            self._typical.add(typical)
            self._slowest.add(slowest)
        if gathered.waits_ns:
            self._waits_ns.add(max(gathered.waits_ns.values()))

    def _late(self, gathered: _Gathered, *, all_are: bool) -> tuple[int, ...]:
        bound = self._typical.bound(_LEAST_RISE_LOG)
        late = [rank for rank, ns in gathered.times_ns.items() if bound is not None and math.log(ns) > bound]
        if not late and not all_are:
            late = [max(gathered.times_ns, key=lambda rank: gathered.times_ns[rank])]
        return tuple(sorted(late or gathered.times_ns))

    def _prolong(self, step: int, time_ns: float, late: tuple[int, ...], coincided: tuple[Coincidence, ...]) -> None:
        last = self.out_of_line[-1]
        worst = max(last.step_time_ns or 0, time_ns)
        ranks = tuple(sorted({*last.ranks, *late}))
        new = tuple(each for each in coincided if each not in last.coincided)
        kept = (last.coincided + new)[:8]
        self.out_of_line[-1] = replace(last, last_step=step, step_time_ns=worst, ranks=ranks, coincided=kept)

    def _end_stretch(self) -> None:
        number, last = self.out_of_line_count, self.out_of_line[-1]
        if last.last_step > last.step and number not in self._news:
            self._news.append(number)

    # Loss ------------------------------------------------------------------------------------------------------------

    def _judge_loss(self, step: int, gathered: _Gathered, *, is_warm: bool) -> None:
        if gathered.bad_losses:
            # Once a loss is not finite, so are those after it, as a rule: it is said once.
            if not self._is_bad_loss:
                ranks = tuple(sorted(gathered.bad_losses))
                self._tell(Happened.LOSS_NOT_FINITE, step, gathered, ranks, self._coincided(step, gathered))
            self._is_bad_loss, self.loss = True, math.nan
            return
        if not gathered.losses:
            return
        self._is_bad_loss = False
        self.loss = statistics.fmean(gathered.losses)
        median = self._losses.median
        if is_warm and median is not None:
            verdict = self._losses.judge(self.loss, LEAST_RISE_RATIO * abs(median))
            if verdict is Verdict.OUT_OF_LINE:
                self._tell(Happened.LOSS_SPIKE, step, gathered, (), self._coincided(step, gathered))
        self._losses.add(self.loss)
        self.loss_curve.add(self.loss)

    # What is told ----------------------------------------------------------------------------------------------------

    def _tell(
        self,
        what: Happened,
        step: int,
        gathered: _Gathered,
        ranks: tuple[int, ...],
        coincided: tuple[Coincidence, ...],
    ) -> None:
        found = OutOfLine(
            what=what,
            step=step,
            last_step=step,
            step_time_ns=max(gathered.times_ns.values(), default=None),
            usual_ns=self.median_ns,
            loss=statistics.fmean(gathered.losses) if gathered.losses and not gathered.bad_losses else None,
            usual_loss=self._losses.median,
            ranks=ranks,
            rank_count=max(len(gathered.times_ns), len(gathered.losses) + len(gathered.bad_losses)),
            coincided=coincided,
        )
        self.out_of_line.append(found)
        self.out_of_line_count += 1
        self._news.append(self.out_of_line_count)

    def _coincided(self, step: int, gathered: _Gathered) -> tuple[Coincidence, ...]:
        found = [*self._coinciding(step, self.median_ns)]
        if gathered.waits_ns and gathered.times_ns:
            rank, wait_ns = max(gathered.waits_ns.items(), key=lambda item: item[1])
            excess_ns = max(gathered.times_ns.values()) - (self.median_ns or 0)
            if wait_ns - (self._waits_ns.median or 0) >= _EXPLAINS_RATIO * excess_ns > 0:
                found.append(Coincidence(Happened.DATA_WAIT, dur_ns=wait_ns, rank=rank))
        if gathered.retries:
            found.append(Coincidence(Happened.RETRIES, count=gathered.retries))
        if gathered.device_allocs:
            found.append(Coincidence(Happened.DEVICE_ALLOCS, count=gathered.device_allocs))
        if gathered.is_skipped:
            found.append(Coincidence(Happened.SKIPPED))
        return tuple(found)
