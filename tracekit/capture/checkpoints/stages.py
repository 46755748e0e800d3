"""Divide time among stages, so that each moment belongs to exactly one."""

import contextlib
import time
from collections.abc import Iterable, Iterator

Stage = str | None


class StageClock:
    """The time of one thread, each nanosecond counted in its current `stage`; None is no stage.

    `spent_ns` and `first_ns` give by stage the time spent there and the Unix time of the first entry. Callers
    that switch to a stage and back use `previous_stage`: it runs several times per tensor, so each call counts.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.spent_ns: dict[Stage, int] = {stage: 0}
        self.previous_stage: Stage = None
        self._outer: list[Stage] = []
        self._since_ns = time.time_ns()
        self.first_ns: dict[Stage, int] = {stage: self._since_ns}

    def switch(self, stage: Stage) -> None:
        """Leave the current stage for `stage`."""
        now_ns = time.time_ns()
        # The system's clock may be set back; a stage never lasts less than no time.
        if now_ns > self._since_ns:
            self.spent_ns[self.stage] += now_ns - self._since_ns
        self._since_ns = now_ns
        self.stage = stage
        if stage not in self.first_ns:
            self.spent_ns[stage] = 0
            self.first_ns[stage] = now_ns

    def enter(self, stage: Stage) -> None:
        """Count what follows in `stage`, until `leave`."""
        self._outer.append(self.stage)
        self.switch(stage)

    def leave(self) -> None:
        """Return to the stage before the last `enter`."""
        self.switch(self._outer.pop())

    @contextlib.contextmanager
    def inside(self, stage: Stage) -> Iterator[None]:
        """Count the block in `stage`, then return to the current one."""
        self.enter(stage)
        try:
            yield
        finally:
            self.leave()

    def stop(self) -> int:
        """Count the time until now, and return now, in Unix ns."""
        self.switch(self.stage)
        return self._since_ns


def apportion(duration_ns: int, clocks: Iterable[StageClock]) -> dict[str, tuple[int, int]]:
    """Divide a time among the stages of concurrent threads, in proportion to the threads' own time in each.

    Returns by stage the Unix time of its first entry and its share, in ns; the shares sum to `duration_ns` at most.
    """
    spent_ns: dict[str, int] = {}
    first_ns: dict[str, int] = {}
    for clock in clocks:
        for stage, own_ns in clock.spent_ns.items():
            if stage is not None:
                spent_ns[stage] = spent_ns.get(stage, 0) + own_ns
                first_ns[stage] = min(first_ns.get(stage, clock.first_ns[stage]), clock.first_ns[stage])
    total_ns = max(1, sum(spent_ns.values()))
    return {stage: (first_ns[stage], duration_ns * own_ns // total_ns) for stage, own_ns in spent_ns.items()}
