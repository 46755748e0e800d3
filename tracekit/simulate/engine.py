"""The discrete-event simulation of hosts that run ahead, streams, events and collectives."""

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from tracekit.conventions.gc_pause import gc_paused
from tracekit.conventions.strategies import STRATEGIES
from tracekit.simulate import hybrid_program, topology
from tracekit.simulate.device import SPACE_NS, Device, Event, HostState, Item, Stream, Transfer, Work
from tracekit.simulate.fsdp import Ddp, Fsdp1, Fsdp2, Hsdp, Yafsdp, YafsdpV1
from tracekit.simulate.job import DDP, FSDP1, FSDP2, HSDP, YAFSDP, YAFSDP_V1, Job
from tracekit.simulate.program import MAIN_STREAM, Collective, Instruction, Kernel, timed_program
from tracekit.simulate.recording import Activity, RankRecord, Recording
from tracekit.simulate.schedule import Schedule

SCHEDULES: Mapping[str, type[Schedule]] = {
    DDP: Ddp,
    FSDP1: Fsdp1,
    FSDP2: Fsdp2,
    HSDP: Hsdp,
    YAFSDP: Yafsdp,
    YAFSDP_V1: YafsdpV1,
}
_KERNEL_GAP_NS = 1_000  # between two kernels of a stream
_JITTERS = 4096
_Handler: TypeAlias = Callable[..., None]


def simulate(job: Job) -> Recording:
    """Run all steps of a job and return what its simulated ranks did."""
    with gc_paused():
        return Engine(job, programs(job)).run()


def total_ns(job: Job) -> int:
    """Return the time of all steps of a job: `Recording.total_ns` of its simulation, computed in a part of the time."""
    with gc_paused():
        return Engine(job, programs(job), is_recorded=False).run().total_ns


def programs(job: Job) -> list[Instruction] | Mapping[int, list[Instruction]]:
    """What ranks do in all steps: one program for all of them, or with a layout one for each."""
    if job.hybrid is not None:
        return hybrid_program.programs(job)
    schedule = SCHEDULES[job.strategy](job)
    for number in range(job.steps):
        schedule.step(number)
    return schedule.host.program


class Engine:
    """Runs one program on all simulated ranks of a job, or one for each rank.

    Without `is_recorded`, it only finds out when steps begin and end.
    """

    def __init__(
        self, job: Job, program: list[Instruction] | Mapping[int, list[Instruction]], *, is_recorded: bool = True
    ) -> None:
        self.job, self.is_recorded = job, is_recorded
        self.world = topology.world(job)
        programs = program if isinstance(program, Mapping) else dict.fromkeys(job.simulated_ranks, program)
        if not is_recorded:
            space_ns = 0 if job.impairments.ideal_host else SPACE_NS
            by_id = {id(instructions): instructions for instructions in programs.values()}  # ranks share programs
            timed = {key: timed_program(instructions, space_ns) for key, instructions in by_id.items()}
            programs = {rank: timed[id(instructions)] for rank, instructions in programs.items()}
        self._heap: list[tuple[int, int, _Handler, tuple[Any, ...]]] = []
        self._count = 0
        self._jitter = _jitter(job)
        self._has_stalled = False
        self._transfers: dict[tuple[str, int], Transfer] = {}
        self._members = set(job.simulated_ranks)
        hardware, impairments = job.hardware, job.impairments
        high_priority = STRATEGIES[job.strategy].high_priority and not impairments.prepares_on_communication
        give_way = hardware.give_way_high_priority if high_priority else hardware.give_way
        self.devices = {
            rank: Device(RankRecord(rank), give_way, hardware.collective_slows_compute, impairments.shares_queue)
            for rank in job.simulated_ranks
        }
        self.hosts = {rank: HostState(self, device, programs[rank]) for rank, device in self.devices.items()}

    def run(self) -> Recording:
        """Simulate to the end."""
        for host in self.hosts.values():
            host.run(0)
        heap = self._heap
        while heap:
            now_ns, _, handler, arguments = heapq.heappop(heap)
            handler(now_ns, *arguments)
        stuck = [rank for rank, host in self.hosts.items() if not host.is_done]
        assert not stuck, f"ranks {stuck} are in a deadlock"
        return Recording({rank: device.record for rank, device in self.devices.items()})

    def at(self, time_ns: int, handler: _Handler, *arguments: object) -> None:
        """Call a handler at a time."""
        self._count += 1
        heapq.heappush(self._heap, (time_ns, self._count, handler, arguments))

    def enqueue(self, stream: Stream, item: Item, ready_ns: int) -> None:
        """Put an item at the end of a stream; it can be reached from `ready_ns` on."""
        stream.queue.append((item, ready_ns))
        if len(stream.queue) == 1 and stream.running is None:
            self.at(max(ready_ns, stream.free_ns), self._advance, stream)

    def duration_ns(self, device: Device, kernel: Kernel, key: int, step: int) -> float:
        """Return the time of a kernel alone on a device in a step, jitter included."""
        factor, since = self.job.impairments.slow_ranks.get(device.rank, (1.0, 0))
        jitter = self._jitter[(key + 7919 * device.rank) % _JITTERS]
        return kernel.work_ns * float(jitter) * (factor if step >= since else 1.0)

    def jitter(self, key: int) -> float:
        """Return a factor around 1 that is the same for the same key."""
        return float(self._jitter[key % _JITTERS])

    def issue(self, device: Device, kernel: Kernel, key: int, step: int) -> Transfer:
        """Add a collective of a rank's host to the queue of the group's communicator."""
        assert kernel.collective is not None
        group = self.world.group(kernel.collective.group, device.rank)
        turns = device.issue_order.setdefault(group.name, deque())
        number = self.hosts[device.rank].count_issued(group.name)
        transfer = self._transfers.get((group.name, number))
        if transfer is None:
            expected = len(self._members.intersection(group.ranks))
            transfer_ns = self.world.transfer_ns(kernel.collective, group) * self.world.slowdown(group, step)
            transfer_ns *= self.jitter(key + 104_729)
            transfer_ns += self._collective_stall_ns(kernel.collective, step)
            transfer = Transfer(group, number, kernel.collective, expected, remaining_ns=transfer_ns)
            self._transfers[group.name, number] = transfer
        turns.append(transfer)
        return transfer

    def _collective_stall_ns(self, collective: Collective, step: int) -> int:
        """Return the extra time of a new collective: only the first one of the step that stalls has any."""
        stalled = self.job.impairments.stalled_collective
        if stalled is None or stalled[0] != step or self._has_stalled or collective.peer is not None:
            return 0
        self._has_stalled = True
        return stalled[1]

    # Streams ---------------------------------------------------------------------------------------------------------
    def _advance(self, now_ns: int, stream: Stream) -> None:
        while stream.queue and stream.running is None:
            item, ready_ns = stream.queue[0]
            if max(ready_ns, stream.free_ns) > now_ns:
                self.at(max(ready_ns, stream.free_ns), self._advance, stream)
                return
            if isinstance(item, Event):
                self._complete_event(now_ns, item, stream.device)
            elif isinstance(item, Work):
                if not self._begin(now_ns, stream, item):
                    return
            elif item.event.done_ns is None:
                item.event.waiters.append(stream)
                return
            stream.queue.popleft()

    def _complete_event(self, now_ns: int, event: Event, device: Device) -> None:
        event.done_ns = now_ns
        for waiter in event.waiters:
            self.at(now_ns, self._advance, waiter)
        event.waiters = []
        self.hosts[device.rank].wake(now_ns)

    def _begin(self, now_ns: int, stream: Stream, work: Work) -> bool:
        """Let a kernel become resident; False where its communicator is busy."""
        device, transfer = stream.device, work.transfer
        if transfer is not None and device.issue_order[transfer.group.name][0] is not transfer:
            return False  # retried when it is first in the queue
        if device.shares_queue and device.queue[0] is not work:
            return False
        device.begin(work, now_ns)
        if stream.number == MAIN_STREAM:
            device.record.account.begin(work.step, now_ns)
        stream.running = work
        self._leave_queue(now_ns, device)
        work.start_ns = work.since_ns = now_ns
        if transfer is not None:
            transfer.arrived.append((device, work))
            if transfer.has_all_ranks:
                self._begin_transfer(now_ns, transfer)
        self._update_rates(now_ns, device)
        return True

    def _leave_queue(self, now_ns: int, device: Device) -> None:
        if not device.shares_queue:
            return
        device.queue.popleft()
        for stream in device.streams.values():
            if stream.running is None and stream.queue and device.queue and stream.queue[0][0] is device.queue[0]:
                self.at(max(now_ns, stream.free_ns), self._advance, stream)

    def _update_rates(self, now_ns: int, device: Device) -> None:
        """Update the rate of every resident kernel, and its end where the rate changed."""
        for work, rate in device.rates():
            if rate != work.rate:
                self.at(work.change_rate(now_ns, rate), self._end, device, work, work.version)
        if self.job.hardware.compute_slows_collective:
            for transfers in device.transferring.values():
                for transfer in transfers:
                    self._set_rate(now_ns, transfer)

    def _end(self, now_ns: int, device: Device, work: Work, version: int) -> None:
        if version == work.version:
            self._finish(now_ns, device, work)

    def _finish(self, now_ns: int, device: Device, work: Work) -> None:
        device.end(work, now_ns)
        work.version += 1
        stream = device.streams[work.kernel.stream]
        stream.running, stream.free_ns = None, now_ns + _KERNEL_GAP_NS
        transfer = work.transfer
        if self.is_recorded:
            group, number = (transfer.group, transfer.number) if transfer else (None, 0)
            device.record.activities.append(
                Activity(work.kernel, work.start_ns, now_ns, work.correlation, work.owner, group, number)
            )
        if work.action is not None:
            device.record.act(work.step, work.action, work.start_ns, now_ns)
        # An event right after the kernel completes with it; the next kernel must be started first.
        while stream.queue and isinstance(event := stream.queue[0][0], Event) and stream.queue[0][1] <= now_ns:
            stream.queue.popleft()
            self._complete_event(now_ns, event, device)
        if stream.queue:
            self.at(stream.free_ns, self._advance, stream)
        self._update_rates(now_ns, device)
        self.hosts[device.rank].wake(now_ns)

    # Links -----------------------------------------------------------------------------------------------------------
    def _begin_transfer(self, now_ns: int, transfer: Transfer) -> None:
        transfer.since_ns = now_ns
        for device, _ in transfer.arrived:
            device.transferring.setdefault(transfer.group.link, []).append(transfer)
        self._share_link(now_ns, transfer)

    def _share_link(self, now_ns: int, changed: Transfer) -> None:
        """Update the rate of every transfer that shares a link with `changed`."""
        link = changed.group.link
        for transfer in {id(t): t for device, _ in changed.arrived for t in device.transferring[link]}.values():
            self._set_rate(now_ns, transfer)

    def _set_rate(self, now_ns: int, transfer: Transfer) -> None:
        rate = transfer.current_rate(self.job.hardware.compute_slows_collective)
        if rate != transfer.rate:
            self.at(transfer.change_rate(now_ns, rate), self._end_transfer, transfer, transfer.version)

    def _end_transfer(self, now_ns: int, transfer: Transfer, version: int) -> None:
        """Let all ranks leave a collective together."""
        if version != transfer.version:
            return
        transfer.version += 1
        for device, _ in transfer.arrived:
            device.transferring[transfer.group.link].remove(transfer)
        self._share_link(now_ns, transfer)
        for device, work in transfer.arrived:
            turns = device.issue_order[transfer.group.name]
            turns.popleft()
            self._finish(now_ns, device, work)
            for stream in device.streams.values():
                if stream.running is None and stream.queue and _is_next(stream, turns):
                    self.at(max(now_ns, stream.free_ns), self._advance, stream)
        del self._transfers[transfer.group.name, transfer.number]


def _is_next(stream: Stream, turns: "deque[Transfer]") -> bool:
    item = stream.queue[0][0]
    return bool(turns) and isinstance(item, Work) and item.transfer is turns[0]


def _jitter(job: Job) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Return factors around 1, at least one half."""
    random = np.random.default_rng(job.seed)
    return np.maximum(0.5, 1 + job.hardware.jitter_ratio * random.standard_normal(_JITTERS))
