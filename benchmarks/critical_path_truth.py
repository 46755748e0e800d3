"""The true critical path of a simulated step: what each kernel, event and host really waited for in the simulation.

It uses the simulator's own objects (queues, events, transfers), none of the code that analyzes traces.
"""

import itertools
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from tracekit.simulate import hybrid_program
from tracekit.simulate.device import Device, Event, EventWait, HostState, Item, Stream, Transfer, Work
from tracekit.simulate.engine import SCHEDULES, Engine
from tracekit.simulate.job import Job
from tracekit.simulate.program import MAIN_STREAM, Call, Instruction, Kernel, Launch, Synchronize
from tracekit.simulate.recording import HostSlice, Recording

HOST, IDLE, UNRECORDED = "host", "idle", "unrecorded"
_KINDS = {"copy": "memcpy"}
_LATENCY_NS, _GAP_NS = 2_000, 1_000  # from a launch to its kernel, and between two kernels of a stream


class Moment(NamedTuple):
    """What something waited for until `at_ns`: the end of `work`, or its start, or a rank's host (no work)."""

    at_ns: int
    rank: int
    work: Work | None = None
    is_start: bool = False


class Part(NamedTuple):
    """A time on the path with its owner: rank, kind, and kernel or host operator.

    A collective has several ranks if they arrived last at the same nanosecond.
    """

    start_ns: int
    end_ns: int
    ranks: tuple[int, ...]
    kind: str
    name: str


_Candidate: TypeAlias = tuple[int, int, Moment]
"""When a wait ended, its place among those that ended at the same time, and what it was for."""


class _Before(NamedTuple):
    """What was put into a stream before an item: the work, the events waited for since it, and when it was ready."""

    work: Work | None
    events: tuple[Event, ...]
    ready_ns: int


class _Host(HostState):
    """A host that notes until when, and for what, it waited."""

    waits: list[Moment]

    def _wait_noted(self, before_ns: int, cause: Moment | None) -> None:
        if cause is not None and cause.at_ns > before_ns:
            self.waits.append(cause)

    def _synchronize(self, what: Synchronize) -> bool:
        before_ns, event = self._clock_ns, self._events[what.event]
        if not super()._synchronize(what):
            return False
        assert event.done_ns is not None
        engine: CausalEngine = self._engine  # type: ignore[assignment]
        self._wait_noted(before_ns, engine.cause_of_event(self._device.rank, event))
        return True

    def _call(self, what: Call) -> bool:
        before_ns = self._clock_ns
        return super()._call(what) and (self._noted_last(before_ns) if what.drains else True)

    def _launch(self, what: Launch) -> bool:
        before_ns, was_full = self._clock_ns, self._queue_was_full
        return super()._launch(what) and (self._noted_last(before_ns) if was_full else True)

    def _noted_last(self, before_ns: int) -> bool:
        engine: CausalEngine = self._engine  # type: ignore[assignment]
        rank = self._device.rank
        last = engine.last_done.get(rank)
        if last is not None:
            self._wait_noted(before_ns, Moment(engine.ends[id(last)], rank, last))
        return True


class CausalEngine(Engine):
    """A simulation that keeps what each item of a stream was queued behind."""

    def __init__(self, job: Job, program: list[Instruction] | Mapping[int, list[Instruction]]) -> None:
        super().__init__(job, program)
        programs = program if isinstance(program, Mapping) else dict.fromkeys(job.simulated_ranks, program)
        self.hosts = {rank: _Host(self, device, programs[rank]) for rank, device in self.devices.items()}
        for host in self.hosts.values():
            host.waits = []
        self.works: dict[int, list[Work]] = {rank: [] for rank in self.devices}
        self.ends: dict[int, int] = {}
        self.last_done: dict[int, Work] = {}
        self._before: dict[int, _Before] = {}
        self._last: dict[int, Work] = {}
        self._events: dict[int, list[Event]] = {}
        self._turn: dict[tuple[int, str], Transfer] = {}
        self._after_transfer: dict[tuple[int, int], Transfer | None] = {}
        self._queued_after: dict[int, Work | None] = {}
        self._rank_of: dict[int, int] = {}

    def enqueue(self, stream: Stream, item: Item, ready_ns: int) -> None:
        """Note what the item comes after."""
        key, rank = id(stream), stream.device.rank
        before = _Before(self._last.get(key), tuple(self._events.get(key, ())), ready_ns)
        if isinstance(item, EventWait):
            self._events.setdefault(key, []).append(item.event)
        else:
            self._before[id(item)] = before
        if isinstance(item, Work):
            self._queued_after[id(item)] = self.works[rank][-1] if self.works[rank] else None
            self._rank_of[id(item)] = rank
            self.works[rank].append(item)
            self._last[key], self._events[key] = item, []
        super().enqueue(stream, item, ready_ns)

    def issue(self, device: Device, kernel: Kernel, key: int, step: int) -> Transfer:
        """Note the transfer that comes before on the communicator."""
        transfer = super().issue(device, kernel, key, step)
        turn = (device.rank, transfer.group.name)
        self._after_transfer[id(transfer), device.rank] = self._turn.get(turn)
        self._turn[turn] = transfer
        return transfer

    def _finish(self, now_ns: int, device: Device, work: Work) -> None:
        self.ends[id(work)] = now_ns
        self.last_done[device.rank] = work
        super()._finish(now_ns, device, work)

    def cause_of_event(self, rank: int, event: Event) -> Moment:
        """Moment that an event of a rank waited for last."""
        return _last(self._candidates(rank, self._before[id(event)]))

    def cause_of_work(self, work: Work) -> Moment:
        """Moment that a kernel waited for last, before it started."""
        rank, before = self._rank_of[id(work)], self._before[id(work)]
        candidates = self._candidates(rank, before, latency_ns=_LATENCY_NS, gap_ns=_GAP_NS)
        if work.transfer is not None:
            earlier = self._after_transfer[id(work.transfer), rank]
            part = None if earlier is None else _work_on(earlier, rank)
            candidates += [] if part is None else [(self.ends[id(part)], 1, Moment(self.ends[id(part)], rank, part))]
        first = self._queued_after[id(work)]
        if self.job.impairments.shares_queue and first is not None:
            candidates.append((first.start_ns, 2, Moment(first.start_ns, rank, first, is_start=True)))
        return _last(candidates)

    def _candidates(self, rank: int, before: _Before, *, latency_ns: int = 0, gap_ns: int = 0) -> list[_Candidate]:
        candidates: list[_Candidate] = [(before.ready_ns, 0, Moment(before.ready_ns - latency_ns, rank))]
        if before.work is not None:
            end_ns = self.ends[id(before.work)]
            candidates.append((end_ns + gap_ns, 3, Moment(end_ns, rank, before.work)))
        for event in before.events:
            assert event.done_ns is not None
            candidates.append((event.done_ns, 1, self.cause_of_event(rank, event)))
        return candidates


def _last(candidates: list[_Candidate]) -> Moment:
    return max(candidates, key=lambda candidate: candidate[:2])[2]


def _work_on(transfer: Transfer, rank: int) -> Work | None:
    return next((work for device, work in transfer.arrived if device.rank == rank), None)


def simulate(job: Job) -> tuple[CausalEngine, Recording]:
    """Simulate a job and keep the causes."""
    if job.hybrid is not None:
        engine = CausalEngine(job, hybrid_program.programs(job))
    else:
        schedule = SCHEDULES[job.strategy](job)
        for number in range(job.steps):
            schedule.step(number)
        engine = CausalEngine(job, schedule.host.program)
    return engine, engine.run()


def true_path(engine: CausalEngine, recording: Recording, rank: int, step: int) -> list[Part]:
    """Return the path that ends with a step of a rank, from its end to its start."""
    start_ns, end_ns = recording.ranks[rank].account.windows[step]
    following = [work for work in engine.works[rank] if work.step > step and work.kernel.stream == MAIN_STREAM]
    if following:
        moment = engine.cause_of_work(min(following, key=lambda work: work.start_ns))
    else:
        last = max(engine.works[rank], key=lambda work: engine.ends[id(work)])
        moment = Moment(end_ns, rank, last)
    parts: list[Part] = []
    _add(parts, moment.at_ns, end_ns, start_ns, ((moment.rank,), IDLE, ""))
    while moment.at_ns > start_ns:
        moment = _step_back(engine, recording, parts, moment, start_ns)
        if moment.at_ns < 0:
            break
    return parts


def _step_back(engine: CausalEngine, recording: Recording, parts: list[Part], moment: Moment, start_ns: int) -> Moment:
    """Add what ended at a moment, and return the moment that it waited for."""
    at_ns, rank, work, is_start = moment
    if work is None:
        waits = [wait for wait in engine.hosts[rank].waits if wait.at_ns <= at_ns]
        since = max(waits, key=lambda wait: wait.at_ns) if waits else Moment(-1, rank)
        for lo, hi, name in _host_operators(recording.ranks[rank].slices, max(since.at_ns, start_ns), at_ns):
            _add(parts, lo, hi, start_ns, ((rank,), HOST, name))
        return since
    if not is_start:
        ranks: tuple[int, ...] = (rank,)
        if work.transfer is not None:
            last_ns = max(part.start_ns for _, part in work.transfer.arrived)
            last = {device.rank: part for device, part in work.transfer.arrived if part.start_ns == last_ns}
            rank = rank if rank in last else next(iter(last))
            ranks, work = tuple(last), last[rank]
        kind = _KINDS.get(work.kernel.kind, work.kernel.kind)
        _add(parts, work.start_ns, at_ns, start_ns, (ranks, kind, work.kernel.name))
    cause = engine.cause_of_work(work)
    _add(parts, cause.at_ns, work.start_ns, start_ns, ((rank,), IDLE, ""))
    return cause


def _add(parts: list[Part], lo: int, hi: int, start_ns: int, owner: tuple[tuple[int, ...], str, str]) -> None:
    if max(lo, start_ns) < hi:
        parts.append(Part(max(lo, start_ns), hi, *owner))


def _host_operators(slices: list[HostSlice], lo: int, hi: int) -> list[tuple[int, int, str]]:
    """Return a time of a host divided by the innermost operator of its threads, last to first."""
    ops = [op for op in slices if op.category == "cpu_op" and op.start_ns < hi and op.end_ns > lo]
    cuts = sorted({lo, hi, *(t for op in ops for t in (op.start_ns, op.end_ns) if lo < t < hi)})
    spans, open_, index = [], [], 0
    ops.sort(key=lambda op: (op.start_ns, -op.end_ns))
    for since, until in itertools.pairwise(cuts):
        while index < len(ops) and ops[index].start_ns <= since:
            open_.append(ops[index])
            index += 1
        open_ = [op for op in open_ if op.end_ns > since]
        spans.append((since, until, max(open_, key=lambda op: op.start_ns).name if open_ else ""))
    return spans[::-1]
