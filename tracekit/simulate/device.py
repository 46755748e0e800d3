"""Simulated machines: the GPU of a rank with its streams, and the host process that runs ahead of it."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from tracekit.conventions.pipeline_schedules import Action
from tracekit.simulate import program
from tracekit.simulate.job import Job
from tracekit.simulate.memory import Memory
from tracekit.simulate.program import COMMUNICATION, COMPUTE, COPY, MAIN_STREAM, Collective, Kernel
from tracekit.simulate.recording import HostSlice, HostWait, RankRecord, StreamWait
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
            now_ns, computing=kinds[COMPUTE] > 0, communicating=kinds[COMMUNICATION] > 0, copying=kinds[COPY] > 0
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


_LAUNCH_LATENCY_NS = 2_000
_EVENT_CALL_NS = 1_000
_LAUNCH_CALLS = {"copy": "cudaMemcpyAsync"}
SPACE_NS = 100
"""Between two slices on a thread."""


class Scheduler(Protocol):
    """What a host needs of the simulation: its clock, its streams and its collectives."""

    job: Job
    is_recorded: bool

    def at(self, time_ns: int, handler: Callable[..., None], *arguments: object) -> None:
        """Call a handler at a time."""

    def enqueue(self, stream: Stream, item: Item, ready_ns: int) -> None:
        """Put an item at the end of a stream; it can be reached from `ready_ns` on."""

    def duration_ns(self, device: Device, kernel: program.Kernel, key: int, step: int) -> float:
        """Return the time of a kernel alone on a device in a step, jitter included."""

    def jitter(self, key: int) -> float:
        """Return a factor around 1 that is the same for the same key."""

    def issue(self, device: Device, kernel: program.Kernel, key: int, step: int) -> Transfer:
        """Add a collective to the queue of its group's communicator."""


class HostState:
    """Where a rank's host is in its program, and its clock."""

    def __init__(self, engine: Scheduler, device: Device, instructions: list[program.Instruction]) -> None:
        self._engine, self._device, self._program = engine, device, instructions
        self._is_recorded = engine.is_recorded
        self._record = device.record
        self._position = 0
        self._clock_ns = 0
        self._waiting = self._running = False
        self._queue_was_full = False
        self._step = 0
        self._action: Action | None = None
        self._thread = program.MAIN_THREAD
        self._open: dict[int, list[HostSlice]] = {program.MAIN_THREAD: []}
        self._ids = self._correlations = 0
        self._events: dict[int, Event] = {}
        self._issued: dict[str, int] = {}
        self._memory = Memory(engine.job, device.record)
        hardware = engine.job.hardware
        ideal = engine.job.impairments.ideal_host
        self._depth = hardware.queue_depth
        self._launch_ns = 1 if ideal else round(hardware.launch_s * 1e9)
        self._call_ns, self._space_ns = (1, 0) if ideal else (_EVENT_CALL_NS, SPACE_NS)
        self._do: dict[type[Any], Callable[[Any], bool | None]] = {  # False: the host must wait
            program.OpenSlice: self._begin_slice,
            program.CloseSlice: self._end_slice,
            program.SwitchThread: self._switch,
            program.PassTime: self._spend,
            program.Stall: self._stall,
            program.Call: self._call,
            program.Launch: self._launch,
            program.Record: self._record_event,
            program.Wait: self._wait,
            program.Synchronize: self._synchronize,
            program.Allocate: self._allocate,
            program.Free: self._free,
            program.Flush: self._flush,
            program.Step: self._begin_step,
            program.Act: self._act,
        }

    @property
    def is_done(self) -> bool:
        """Whether the program has ended and the device has done all of it."""
        return self._position == len(self._program) and self._device.done == self._device.launched

    def run(self, now_ns: int) -> None:
        """Run the program from `now_ns` on, up to the next wait."""
        self._clock_ns = max(self._clock_ns, now_ns)
        self._waiting, self._running = False, True
        while self._position < len(self._program):
            instruction = self._program[self._position]
            if self._do[type(instruction)](instruction) is False:
                self._waiting = True
                break
            self._position += 1
        self._running = False

    def wake(self, now_ns: int) -> None:
        """Retry the instruction that the host waits in, if there is one."""
        if self._waiting and not self._running:
            self._engine.at(now_ns, self._again)
            self._waiting = False

    def count_issued(self, group: str) -> int:
        """Count the collectives that the host issues to a group, and return this one's number, from 1."""
        self._issued[group] = self._issued.get(group, 0) + 1
        return self._issued[group]

    def _again(self, _now_ns: int) -> None:
        self.run(0)  # its clock is set by the awaited event

    # Slices ----------------------------------------------------------------------------------------------------------
    def _begin_slice(self, what: program.OpenSlice) -> None:
        self._ids += 1
        self._clock_ns += self._space_ns
        self._open[self._thread].append(
            HostSlice(self._thread, what.name, what.category, self._clock_ns, 0, self._ids, args=what.args)
        )
        self._clock_ns += what.cost_ns

    def _end_slice(self, _: program.CloseSlice) -> None:
        self._clock_ns += self._space_ns
        closed = self._open[self._thread].pop()
        closed.end_ns = self._clock_ns
        self._record.slices.append(closed)
        if self._thread == program.MAIN_THREAD and not self._open[self._thread]:
            self._record.host_steps[self._step] = (closed.start_ns, closed.end_ns)

    def _switch(self, what: program.SwitchThread) -> None:
        self._thread = what.thread
        self._open.setdefault(what.thread, [])

    def _spend(self, what: program.PassTime) -> None:
        self._clock_ns += what.ns

    def _stall(self, _: program.Stall) -> None:
        step, stall_ns = self._engine.job.impairments.host_stalls.get(self._device.rank, (None, 0))
        if step == self._step:
            self._clock_ns += stall_ns

    def _begin_step(self, what: program.Step) -> None:
        self._step = what.number

    def _act(self, what: program.Act) -> None:
        self._action = what.action

    def _runtime(self, name: str, start_ns: int, end_ns: int) -> int:
        """Note a runtime call, and return its correlation."""
        self._correlations += 1
        self._clock_ns = end_ns
        if self._is_recorded:
            self._record.slices.append(
                HostSlice(self._thread, name, "cuda_runtime", start_ns, end_ns, self._owner, self._correlations)
            )
        return self._correlations

    @property
    def _owner(self) -> int:
        slices = self._open[self._thread]
        return slices[-1].id if slices else 0

    # The device ------------------------------------------------------------------------------------------------------
    def _launch(self, what: program.Launch) -> bool:
        device, kernel = self._device, what.kernel
        if device.launched - device.done >= self._depth:
            self._queue_was_full = True
            return False
        start_ns = max(self._clock_ns, device.last_end_ns) if self._queue_was_full else self._clock_ns
        self._queue_was_full = False
        took_ns = max(1, round(self._launch_ns * self._engine.jitter(what.key)))
        call = _LAUNCH_CALLS.get(kernel.kind, "cudaLaunchKernelExC" if kernel.collective else "cudaLaunchKernel")
        correlation = self._runtime(call, self._clock_ns, start_ns + took_ns)  # a full queue blocks the call itself
        remaining_ns = self._engine.duration_ns(device, kernel, what.key, self._step)
        work = Work(kernel, self._step, correlation, self._owner, action=self._action, remaining_ns=remaining_ns)
        if kernel.collective is not None:
            work.transfer = self._engine.issue(device, kernel, what.key, self._step)
        device.launched += 1
        if device.shares_queue:
            device.queue.append(work)
        self._engine.enqueue(device.stream(kernel.stream), work, self._clock_ns + _LAUNCH_LATENCY_NS)
        return True

    def _record_event(self, what: program.Record) -> None:
        correlation = self._runtime("cudaEventRecord", self._clock_ns, self._clock_ns + self._call_ns)
        event = self._events[what.event] = Event(what.stream, correlation)
        self._engine.enqueue(self._device.stream(what.stream), event, self._clock_ns)

    def _wait(self, what: program.Wait) -> None:
        correlation = self._runtime("cudaStreamWaitEvent", self._clock_ns, self._clock_ns + self._call_ns)
        event = self._events[what.event]
        self._engine.enqueue(self._device.stream(what.stream), EventWait(event), self._clock_ns)
        if self._is_recorded:
            self._record.waits.append(
                StreamWait(what.stream, event.stream, self._clock_ns, correlation, event.correlation, self._owner)
            )

    def _synchronize(self, what: program.Synchronize) -> bool:
        event, start_ns = self._events[what.event], self._clock_ns
        if event.done_ns is None:
            return False
        correlation = self._runtime(what.call, start_ns, max(start_ns, event.done_ns) + self._call_ns)
        self._record.host_waits.append(
            HostWait(what.call, start_ns, self._clock_ns, event.stream, correlation, event.correlation, self._owner)
        )
        return True

    def _call(self, what: program.Call) -> bool:
        if what.drains and self._device.done < self._device.launched:
            return False
        start_ns = self._clock_ns
        drained_ns = max(start_ns, self._device.last_end_ns) if what.drains else start_ns
        correlation = self._runtime(what.name, start_ns, drained_ns + what.ns)
        if what.name == "cudaDeviceSynchronize":
            self._record.host_waits.append(
                HostWait(what.name, start_ns, self._clock_ns, None, correlation, 0, self._owner)
            )
        return True

    # Memory ----------------------------------------------------------------------------------------------------------
    def _allocate(self, what: program.Allocate) -> None:
        self._memory.allocate(what.buffer, what.bytes, self._thread, self._clock_ns)

    def _free(self, what: program.Free) -> None:
        self._memory.free(what.buffer, self._thread, self._clock_ns)

    def _flush(self, what: program.Flush) -> None:
        self._memory.flush(empties=what.empties)
