"""What a simulated rank did, as the engine saw it happen."""

from dataclasses import dataclass, field
from typing import NamedTuple

from tracekit.conventions.pipeline_schedules import Action
from tracekit.simulate.program import Kernel
from tracekit.simulate.topology import Group

TERMS = ("compute", "communication", "copy", "overlapped", "exposed_communication", "exposed_copy", "idle")
# What time counts for, by whether it computes, communicates, copies.
_TERMS_OF: dict[tuple[bool, bool, bool], tuple[str, ...]] = {
    (False, False, False): ("idle",),
    (False, False, True): ("copy", "exposed_copy"),
    (False, True, False): ("communication", "exposed_communication"),
    (False, True, True): ("communication", "copy", "exposed_communication"),
    (True, False, False): ("compute",),
    (True, False, True): ("compute", "copy"),
    (True, True, False): ("compute", "communication", "overlapped"),
    (True, True, True): ("compute", "communication", "copy", "overlapped"),
}


@dataclass(slots=True)
class HostSlice:
    """A slice on a host thread; `id` is its External id, `correlation` that of a runtime call."""

    thread: int
    name: str
    category: str
    start_ns: int
    end_ns: int
    id: int
    correlation: int = 0
    args: dict[str, object] | None = None


class Activity(NamedTuple):
    """Work that ran on a stream. A collective has its group, and its number in it."""

    kernel: Kernel
    start_ns: int
    end_ns: int
    correlation: int
    owner: int
    group: Group | None
    number: int


class StreamWait(NamedTuple):
    """A stream waited for an event that the call `awaited` recorded on stream `on`."""

    stream: int
    on: int
    at_ns: int
    correlation: int
    awaited: int
    owner: int


class HostWait(NamedTuple):
    """The host waited in a runtime call, for an event that the call `awaited` recorded, or (0) for all streams."""

    call: str
    start_ns: int
    end_ns: int
    stream: int | None
    correlation: int
    awaited: int
    owner: int


class Allocation(NamedTuple):
    """Memory taken (positive) or given back, with the totals after it."""

    thread: int
    at_ns: int
    address: int
    delta_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass
class Account:
    """What the time of each step's device window went to, added up as the simulation went on.

    By step: when the window starts and ends, and ns by name of `TERMS`. Two kinds of work at once count for both.
    """

    windows: dict[int, tuple[int, int]] = field(default_factory=dict)
    terms: dict[int, dict[str, int]] = field(default_factory=dict)
    _step: int | None = None
    _since_ns: int = 0

    def begin(self, step: int, now_ns: int) -> None:
        """Let a step's window begin, if it hasn't, and that of the step before end."""
        if step not in self.windows:
            self._step, self._since_ns = step, now_ns
            self.windows[step] = (now_ns, now_ns)
            self.terms[step] = dict.fromkeys(TERMS, 0)

    def pass_time(self, now_ns: int, *, computing: bool, communicating: bool, copying: bool) -> None:
        """Add the time since the last change, in which this kind of work ran."""
        if self._step is None:
            return
        passed_ns, self._since_ns = now_ns - self._since_ns, now_ns
        if not passed_ns:
            return
        self.windows[self._step] = (self.windows[self._step][0], now_ns)
        terms = self.terms[self._step]
        for name in _TERMS_OF[computing, communicating, copying]:
            terms[name] += passed_ns


@dataclass
class RankRecord:
    """All that one rank did."""

    rank: int
    slices: list[HostSlice] = field(default_factory=list)
    activities: list[Activity] = field(default_factory=list)
    waits: list[StreamWait] = field(default_factory=list)
    host_waits: list[HostWait] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    account: Account = field(default_factory=Account)
    host_steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By step: when it began and ended on the host."""
    actions: dict[tuple[int, Action], tuple[int, int]] = field(default_factory=dict)
    """By step and pipeline action: when its first kernel began and its last one ended."""

    def act(self, step: int, action: Action, start_ns: int, end_ns: int) -> None:
        """Add a kernel to a pipeline action."""
        first, last = self.actions.get((step, action), (start_ns, end_ns))
        self.actions[step, action] = min(first, start_ns), max(last, end_ns)


@dataclass(frozen=True)
class Recording:
    """What all simulated ranks did; times are ns since the simulation's start."""

    ranks: dict[int, RankRecord]

    def start_ns(self, step: int) -> int:
        """Return the time at which the first rank began a step on its device."""
        return min(record.account.windows[step][0] for record in self.ranks.values())

    def end_ns(self, step: int) -> int:
        """Return the time at which the last rank ended a step on its device."""
        return max(record.account.windows[step][1] for record in self.ranks.values())

    @property
    def total_ns(self) -> int:
        """Return the time from the first step's start to the last one's end, of the rank that takes longest."""
        windows = [record.account.windows for record in self.ranks.values()]
        return max(max(end for _, end in w.values()) - min(start for start, _ in w.values()) for w in windows)
