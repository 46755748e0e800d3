"""Simulated GPUs: streams that run one kernel at a time, contention between kernels, collectives between ranks."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tracekit.conventions.pipeline_schedules import Action
from tracekit.simulate.program import COMMUNICATION, COMPUTE, COPY, MAIN_STREAM, Collective, Kernel
from tracekit.simulate.recording import RankRecord
from tracekit.simulate.topology import Group

_LEAST_RATE = 0.02


@dataclass(slots=True, eq=False)
class Event:
    """A CUDA event: when it was reached, once it was, and the streams that wait for it."""

    stream: int
    correlation: int
    done_ns: int | None = None
    waiters: list["Stream"] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class Progress:
    """What takes time at a rate that changes: `remaining_ns` at rate 1, as of `since_ns`."""

    remaining_ns: float
    rate: float = 0.0
    since_ns: int = 0
    version: int = 0
    """Counts the changes, so that an end that was scheduled before one can be ignored."""

    def change_rate(self, now_ns: int, rate: float) -> int:
        """Continue at another rate, and return when it then ends."""
        self.remaining_ns -= (now_ns - self.since_ns) * self.rate
        self.rate, self.since_ns = rate, now_ns
        self.version += 1
        return now_ns + max(1, math.ceil(self.remaining_ns / rate - 1e-6))


@dataclass(slots=True, eq=False)
class Work(Progress):
    """A kernel: launched, resident (with its remaining time alone), done."""

    kernel: Kernel
    step: int
    correlation: int
    owner: int
    transfer: "Transfer | None" = None
    start_ns: int = 0
    action: Action | None = None


class EventWait(NamedTuple):
    """A stream may go on once an event is reached."""

    event: Event


Item: TypeAlias = Work | Event | EventWait
"""What a stream does: run a kernel, reach an event, wait for an event."""


@dataclass(slots=True, eq=False)
class Stream:
    """A queue of work; `free_ns` is when the next item may start."""

    number: int
    device: "Device"
    queue: deque[tuple[Item, int]] = field(default_factory=deque)
    running: Work | None = None
    free_ns: int = 0
    waits: bool = False


@dataclass(eq=False)
class Device:
    """The GPU of one rank."""

    record: RankRecord
    give_way: float
    """How much longer a kernel on a side stream takes during the main compute, per piece."""
    collective_slows_compute: float
    shares_queue: bool
    streams: dict[int, Stream] = field(default_factory=dict)
    running: list[Work] = field(default_factory=list)
    resident: dict[str, int] = field(default_factory=lambda: {COMPUTE: 0, COMMUNICATION: 0, COPY: 0})
    """By kind: how many of them run."""
    queue: deque[Work] = field(default_factory=deque)
    """What was launched and has not started, in order."""
    launched: int = 0
    done: int = 0
    last_end_ns: int = 0
    issue_order: dict[str, deque["Transfer"]] = field(default_factory=dict)
    """By process group: collectives in the order the host issued them, the one that runs first among them."""
    transferring: dict[str, list["Transfer"]] = field(default_factory=dict)
    """By link: its active transfers."""

    @property
    def rank(self) -> int:
        """Return the rank that drives the device."""
        return self.record.rank

    @property
    def computes(self) -> bool:
        """Whether a kernel of the main compute is resident."""
        return any(work.kernel.kind == COMPUTE and work.kernel.stream == MAIN_STREAM for work in self.running)

    def stream(self, number: int) -> Stream:
        """Return a stream by its number."""
        if number not in self.streams:
            self.streams[number] = Stream(number, self)
        return self.streams[number]

    def begin(self, work: Work, now_ns: int) -> None:
        """Let work become resident, after what ran until now is accounted for."""
        self._pass_time(now_ns)
        self.running.append(work)
        self.resident[work.kernel.kind] += 1

    def end(self, work: Work, now_ns: int) -> None:
        """Let resident work end, after what ran until now is accounted for."""
        self._pass_time(now_ns)
        self.running.remove(work)
        self.resident[work.kernel.kind] -= 1
        self.done += 1
        self.last_end_ns = now_ns

    def _pass_time(self, now_ns: int) -> None:
        kinds = self.resident
        self.record.account.pass_time(
            now_ns,
            computing=kinds[COMPUTE] > 0,
            communicating=kinds[COMMUNICATION] > 0,
            copying=kinds[COPY] > 0,
        )

    def rates(self) -> list[tuple[Work, float]]:
        """Return the speed of each resident kernel now, 1 being as if alone; collectives depend on links.

        The give-way effect: during the main compute, a kernel on a side stream takes 1 + give_way × pieces times as
        long, and its share is missing from the main compute. A resident collective occupies multiprocessors.
        """
        if len(self.running) == 1:  # most often: no contention
            return [(w, 1.0) for w in self.running if w.kernel.kind != COMMUNICATION]
        main = [w for w in self.running if w.kernel.stream == MAIN_STREAM and w.kernel.kind == COMPUTE]
        side = [w for w in self.running if w.kernel.stream != MAIN_STREAM and w.kernel.kind == COMPUTE]
        copies = [(w, 1.0) for w in self.running if w.kernel.kind == COPY]
        if not main:
            return copies + [(w, 1.0) for w in side]
        slowed = [(w, 1 / (1 + self.give_way * w.kernel.pieces)) for w in side]
        side_rate = sum(rate for _, rate in slowed)
        slowdown = 1 + self.collective_slows_compute if self.resident[COMMUNICATION] else 1.0
        return copies + slowed + [(w, max(_LEAST_RATE, 1 - side_rate) / slowdown) for w in main]


@dataclass(slots=True, eq=False)
class Transfer(Progress):
    """One collective of one group: the simulated ranks that have arrived, and the remaining transfer time."""

    group: Group
    number: int
    collective: Collective
    expected: int
    arrived: list[tuple[Device, Work]] = field(default_factory=list)

    @property
    def has_all_ranks(self) -> bool:
        """Whether all ranks have arrived."""
        return len(self.arrived) == self.expected

    def current_rate(self, compute_slows: float) -> float:
        """Return its speed: links are shared evenly, and compute on a member may slow it."""
        shared = max(len(device.transferring[self.group.link]) for device, _ in self.arrived)
        slowed = 1 + compute_slows if compute_slows and any(device.computes for device, _ in self.arrived) else 1.0
        return 1 / (shared * slowed)
