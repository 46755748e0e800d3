"""Small delays of known length at chosen places of a live training: which host time is on the critical path.

The method is causal profiling (Curtsinger, Berger: Coz, SOSP 2015), with delays instead of virtual speedups. A trial
has two blocks of steps, in drawn order: one with a delay in its first step, one without. The difference of their times
over the length of the delay is the sensitivity of the training to that place of that rank: 1 on the critical path, 0
where the delay hides. The blocks follow each other, so that a load of the machine that changes slowly cancels.

Every rank draws the same trials from the name of the run and the number of the step; ranks do not communicate.
"""

import contextlib
import functools
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tracekit import conventions
from tracekit.capture import collective_waits, notices
from tracekit.capture.perturbed_places import DELAY_RATIO, MAX_DELAY_RATIO

MAX_DELAY_NS = 5_000_000
BUDGET_NS = 60 * 10**9
"""Most time of all delays of all ranks together: each delays the whole job at most by its length."""
MAX_RANKS = 8
"""Ranks that are delayed where none are chosen. With more, each would have too few trials."""
MIN_STEPS = 16
"""Steps before the first delay, whose length follows from their median."""
GUARD_TRIALS = 32
MAX_SENSITIVITY = 2.0
"""A delay on the critical path costs its length. What costs more than twice as much disturbs the training."""

_SPIN_NS = 1_000_000  # shorter delays are busy: a thread that sleeps wakes up some 0.1 ms late
_MEDIAN_STEPS = 64
_STANDARD_ERRORS = 4.0
_MEDIAN_ERROR = 1.2533 * 1.4826  # standard error of a median over its MAD / sqrt(n), for Gaussian values


class Trial(NamedTuple):
    """What is delayed in TRIAL_STEPS steps: an index of `conventions.PERTURBED_PLACES`, a rank, and which step."""

    place: int
    rank: int
    delayed_step: int
    """The first step of one of the two blocks."""


class TrialSchedule:
    """The trial of each step: every place of every rank once in each round, in an order drawn for the round.

    >>> schedule = TrialSchedule([0, 2], [0, 1], seed="runs/today")
    >>> sorted(schedule.trial(step)[:2] for step in range(0, 16, 4))
    [(0, 0), (0, 1), (2, 0), (2, 1)]
    >>> schedule.trial(5) == schedule.trial(7)
    True
    """

    def __init__(self, places: Iterable[int], ranks: Sequence[int], *, seed: str) -> None:
        self._pairs = [(place, rank) for place in sorted(set(places)) for rank in ranks]
        self._seed = seed
        # Drawn once: a step asks when it begins and, a second later, when its time is known.
        self._draw_once = functools.lru_cache(maxsize=1024)(self._draw)

    def trial(self, step: int) -> Trial:
        """Trial that a step belongs to."""
        return self._draw_once(step // conventions.TRIAL_STEPS)

    def _draw(self, number: int) -> Trial:
        round_number, turn = divmod(number, len(self._pairs))
        order = random.Random(f"{self._seed}/round {round_number}").sample(self._pairs, len(self._pairs))  # noqa: S311
        block = random.Random(f"{self._seed}/trial {number}").randrange(2)  # noqa: S311 no secret
        return Trial(*order[turn], number * conventions.TRIAL_STEPS + block * conventions.BLOCK_STEPS)


class Perturbation:
    """The delays of one rank: `begin_step`, `reach` at each place, `end_step`; `add_row` when a step's time is known.

    It ends for good when the file ``perturb.stop`` exists in the folder, when this rank's share of the budget is used
    up, and where steps with delays take longer than the delays explain: then it creates that file for all ranks.
    """

    def __init__(
        self,
        places: Sequence[str],
        *,
        folder: Path,
        rank: int,
        ranks: Sequence[int],
        delay_ratio: float = DELAY_RATIO,
    ) -> None:
        """Delay `ranks` at `places`; without places, none. Raises ValueError for a delay above MAX_DELAY_RATIO."""
        if not 0 < delay_ratio <= MAX_DELAY_RATIO:
            raise ValueError(
                f"perturb_ratio: a delay is a share of a step above 0 and up to {MAX_DELAY_RATIO}, not {delay_ratio}"
            )
        if places and not ranks:
            raise ValueError("perturb_ranks: no rank is left to delay; name one, or leave the argument out")
        self._places = places
        self.is_on = bool(places)
        codes = [conventions.PERTURBED_PLACES.index(place) for place in self._places]
        self._schedule = TrialSchedule(codes, ranks, seed=folder.name)
        self._rank = rank
        self._delay_ratio = delay_ratio
        self._left_ns = BUDGET_NS // max(1, len(ranks))
        self._stop_file = folder / conventions.PERTURB_STOP_FILE
        self._thread = threading.get_ident()
        self._trial: Trial | None = None
        self._armed_place: str | None = None
        self._injected_ns = 0
        self._step_times_ns: deque[float] = deque(maxlen=_MEDIAN_STEPS)
        self._trial_times_ns: dict[int, float] = {}  # by step
        self._excess_ns: deque[float] = deque(maxlen=GUARD_TRIALS)
        self._hooks: list[Any] = []

    def install(self) -> None:
        """Reach forward, collective and optimizer by hooks of torch; data and backward are reached by the recorder."""
        if conventions.FORWARD in self._places:
            self._hooks.append(register_module_forward_pre_hook(self._before_forward))
        if conventions.OPTIMIZER in self._places:
            self._hooks.append(register_optimizer_step_pre_hook(lambda *_: self.reach(conventions.OPTIMIZER)))
        if conventions.COLLECTIVE_PLACE in self._places:
            collective_waits.call_before_waits(lambda: self.reach(conventions.COLLECTIVE_PLACE))

    def close(self) -> None:
        """Remove the hooks, and inject nothing more."""
        self.is_on, self._armed_place = False, None
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        if conventions.COLLECTIVE_PLACE in self._places:
            collective_waits.call_before_waits(None)

    @property
    def delay_ns(self) -> int:
        """Length of the next delay; 0 while too few steps are known."""
        if len(self._step_times_ns) < MIN_STEPS:
            return 0
        return min(MAX_DELAY_NS, int(self._delay_ratio * statistics.median(self._step_times_ns)))

    def begin_step(self, step: int, *, is_disturbed: bool) -> None:
        """Begin a step; one that `is_disturbed` by a profiled window has no delay and is part of no trial."""
        self._trial, self._armed_place = None, None
        if not self.is_on or is_disturbed or not self.delay_ns:
            return
        self._thread, self._injected_ns = threading.get_ident(), 0
        self._trial = trial = self._schedule.trial(step)
        if trial.rank == self._rank and trial.delayed_step == step:
            self._armed_place = conventions.PERTURBED_PLACES[trial.place]

    def reach(self, place: str) -> None:
        """Delay the calling thread if this step's delay is due at this place; the training calls this before it."""
        if place != self._armed_place or threading.get_ident() != self._thread:
            return
        self._armed_place = None
        delay_ns = self.delay_ns
        if self._stop_file.exists():
            self.stop()
        elif self._left_ns >= delay_ns:
            self._injected_ns = _wait(delay_ns)
            self._left_ns -= self._injected_ns

    def end_step(self) -> dict[str, int]:
        """Metrics of the step that ends: its trial, and the length of its delay; nothing outside of trials."""
        if self._trial is None:
            return {}
        return {
            conventions.INJECTED_METRIC: self._injected_ns,
            conventions.INJECTED_PLACE_METRIC: self._trial.place,
            conventions.INJECTED_RANK_METRIC: self._trial.rank,
        }

    def add_row(self, row: Mapping[str, float | None]) -> None:
        """Add a step's metrics, in order: its time counts for the length of delays, and for the guard."""
        step, step_ns = int(row["step"] or 0), row.get(conventions.STEP_TIME_METRIC)
        if not (self.is_on and step_ns):
            return
        delayed_step = self._schedule.trial(step).delayed_step
        if not delayed_step <= step < delayed_step + conventions.BLOCK_STEPS:
            self._step_times_ns.append(step_ns)
        first_step = step - step % conventions.TRIAL_STEPS
        self._trial_times_ns = {number: ns for number, ns in self._trial_times_ns.items() if number >= first_step}
        if conventions.INJECTED_METRIC in row:
            self._trial_times_ns[step] = step_ns
        if len(self._trial_times_ns) == conventions.TRIAL_STEPS:
            self._add_trial(delayed_step)

    def stop(self, reason: str = "") -> None:
        """Inject nothing more on this rank; with a reason, on no rank."""
        self.is_on, self._armed_place = False, None
        if reason:
            notices.notify(f"rank {self._rank}: no more delays are injected: {reason}; training continues")
            with contextlib.suppress(OSError):  # its own guard ends the delays of each rank
                self._stop_file.touch()

    def _add_trial(self, delayed_step: int) -> None:
        delayed_ns = sum(self._trial_times_ns.pop(delayed_step + offset) for offset in range(conventions.BLOCK_STEPS))
        self._excess_ns.append(delayed_ns - sum(self._trial_times_ns.values()))
        self._trial_times_ns = {}
        if len(self._excess_ns) < GUARD_TRIALS:
            return
        excess_ns = statistics.median(self._excess_ns)
        deviation_ns = statistics.median(abs(value - excess_ns) for value in self._excess_ns)
        error_ns = _MEDIAN_ERROR * deviation_ns / GUARD_TRIALS**0.5
        if excess_ns > MAX_SENSITIVITY * self.delay_ns + _STANDARD_ERRORS * error_ns:
            self.stop(f"delays of {self.delay_ns / 1e6:.3g} ms cost {excess_ns / 1e6:.3g} ms each")

    def _before_forward(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # the module is traced, not called
            self.reach(conventions.FORWARD)


def delayed_ranks(world_size: int) -> range:
    """Ranks that are delayed where none are chosen: up to MAX_RANKS, evenly spaced.

    >>> delayed_ranks(2), delayed_ranks(64)
    (range(0, 2), range(0, 64, 8))
    """
    return range(0, world_size, -(-world_size // MAX_RANKS))


def _wait(delay_ns: int) -> int:
    """Wait, and return how long that took, in ns: a thread that sleeps wakes up late."""
    began_ns = time.perf_counter_ns()
    if delay_ns > _SPIN_NS:
        time.sleep((delay_ns - _SPIN_NS) / 1e9)
    while time.perf_counter_ns() - began_ns < delay_ns:
        pass
    return time.perf_counter_ns() - began_ns
