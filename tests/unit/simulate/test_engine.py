"""The simulation's rules, on programs of a few kernels whose timelines can be drawn."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.simulate.jobs import job
from tracekit.simulate import memory
from tracekit.simulate.engine import Engine, simulate
from tracekit.simulate.job import STRATEGIES, Impairments, Job
from tracekit.simulate.kernels import collective
from tracekit.simulate.program import (
    COMPUTE,
    GATHER_STREAM,
    MAIN_STREAM,
    REDUCE_STREAM,
    REPLICATE,
    SHARD,
    Host,
    Kernel,
    Step,
    Synchronize,
)
from tracekit.simulate.recording import Activity
from tracekit.simulate.topology import World

MS = 1_000_000
NEAR_NS = 50_000  # launches and gaps between kernels


def _kernel(name: str, ms: float, stream: int = MAIN_STREAM, *, pieces: int = 1) -> Kernel:
    return Kernel(name, COMPUTE, stream, round(ms * MS), pieces)


def _gather(group: str = SHARD, stream: int = GATHER_STREAM, *, elements: int = 200_000_000) -> Kernel:
    return collective("all_gather", group, stream, elements=elements, ranks=16, dtype="BFloat16")


def _ran(write: Callable[[Host], None], of: Job) -> dict[int, dict[str, Activity]]:
    """Run a program of one step; return by rank what ran, by name, and collectives by stream."""
    host = Host(0)
    with host.span("ProfilerStep#0"):
        host.add(Step(0))
        write(host)
    found = Engine(of, host.program).run().ranks
    return {
        rank: {str(a.kernel.stream) if a.kernel.collective else a.kernel.name: a for a in record.activities}
        for rank, record in found.items()
    }


def _took(activity: Activity) -> int:
    return activity.end_ns - activity.start_ns


def test_a_side_kernel_slows_during_compute_and_delays_compute_by_its_own_time() -> None:
    # time ms   0  1  2  3  4 … 10 11      give-way 2: the side kernel of 1 ms takes 3 ms
    # compute   #######################    of 10 ms takes 11 ms
    # side      #########
    def write(host: Host) -> None:
        host.launch(_kernel("main", 10))
        host.launch(_kernel("side", 1, REDUCE_STREAM))

    of = job(ranks_written=1)
    of = replace(of, strategy="fsdp1", hardware=replace(of.hardware, give_way=2.0))
    ran = _ran(write, of)[0]
    assert _took(ran["side"]) == pytest.approx(3 * MS, abs=NEAR_NS)
    assert _took(ran["main"]) == pytest.approx(11 * MS, abs=NEAR_NS)


@pytest.mark.parametrize(("pieces", "expected_ms"), [(1, 3.0), (2, 5.0), (20, 11.0)])
def test_each_piece_of_a_side_kernel_is_slowed_only_during_compute(pieces: int, expected_ms: float) -> None:
    def write(host: Host) -> None:
        host.launch(_kernel("main", 10))
        host.launch(_kernel("side", 1, REDUCE_STREAM, pieces=pieces))

    of = job(ranks_written=1)
    of = replace(of, strategy="fsdp1", hardware=replace(of.hardware, give_way=2.0))
    assert _took(_ran(write, of)[0]["side"]) == pytest.approx(expected_ms * MS, abs=NEAR_NS)


def test_a_collective_starts_on_each_rank_separately_and_ends_on_all_ranks_together() -> None:
    # rank 0   compute ####       gather ####========      waits for rank 1, then 13 ms are carried
    # rank 1   compute ########   gather     ========
    def write(host: Host) -> None:
        host.launch(_kernel("main", 4))
        host.follow(GATHER_STREAM, MAIN_STREAM)
        host.launch(_gather())

    of = replace(job(ranks_written=2), impairments=Impairments(slow_ranks={1: (2.0, 0)}))
    ran = _ran(write, of)
    first, second = (ran[rank][str(GATHER_STREAM)] for rank in (0, 1))
    message = _gather().collective
    assert message is not None
    carried_ns = World(of).transfer_ns(message, World(of).group(SHARD, 0))
    assert first.end_ns == second.end_ns
    assert second.start_ns - first.start_ns == pytest.approx(4 * MS, abs=NEAR_NS)
    assert _took(second) == pytest.approx(carried_ns, abs=NEAR_NS)


def test_a_ring_takes_the_time_of_its_bandwidth_and_hops() -> None:
    of = job()
    message = _gather(elements=160_000_000).collective
    assert message is not None
    hardware = of.hardware
    expected_s = 15 / 16 * 320e6 / hardware.network_bytes_per_s + 15 * hardware.network_hop_s
    assert World(of).transfer_ns(message, World(of).group(SHARD, 0)) == pytest.approx(expected_s * 1e9, rel=1e-6)


@pytest.mark.parametrize(("group", "shares"), [(SHARD, False), (REPLICATE, True)], ids=["one group", "two groups"])
def test_collectives_of_one_group_are_serialized_and_of_two_groups_share_the_link(group: str, shares: bool) -> None:
    # one group    gather ########         two groups   gather ############    8 ms, and 4 ms of the other's
    #              gather         ####                  gather ########        4 ms at half the speed
    def write(host: Host) -> None:
        host.launch(_kernel("main", 1))
        host.launch(_gather(SHARD, GATHER_STREAM))
        host.launch(_gather(group, REDUCE_STREAM))

    of = job(ranks_written=1)
    world, message = World(of), _gather().collective
    assert message is not None
    alone_ns, other_ns = (world.transfer_ns(message, world.group(each, 0)) for each in (SHARD, group))
    ran = _ran(write, of)[0]
    first, second = ran[str(GATHER_STREAM)], ran[str(REDUCE_STREAM)]
    assert _took(first) == pytest.approx(alone_ns + other_ns if shares else alone_ns, abs=NEAR_NS)
    assert (second.start_ns < first.end_ns) is shares


def test_a_shared_queue_delays_work_that_was_launched_later() -> None:
    # compute waits for the gather, and what is launched behind it on another stream may not start either
    def write(host: Host) -> None:
        host.launch(_kernel("main", 1))
        host.launch(_gather())
        host.follow(MAIN_STREAM, GATHER_STREAM)
        host.launch(_kernel("next", 1))
        host.launch(_kernel("side", 1, REDUCE_STREAM))

    of = job(ranks_written=1)
    free = _ran(write, of)[0]
    shared = _ran(write, replace(of, impairments=Impairments(shares_queue=True)))[0]
    assert free["side"].start_ns < free[str(GATHER_STREAM)].end_ns
    assert shared["side"].start_ns >= shared["next"].start_ns >= shared[str(GATHER_STREAM)].end_ns


def test_the_host_waits_for_an_event_and_for_space_in_the_launch_queue() -> None:
    def write(host: Host) -> None:
        host.launch(_kernel("first", 5))
        host.add(Synchronize(host.record(MAIN_STREAM), "cudaStreamSynchronize"))
        for index in range(4):
            host.launch(_kernel(f"kernel {index}", 1))

    of = job(ranks_written=1)
    of = replace(of, hardware=replace(of.hardware, queue_depth=2))
    host = Host(0)
    with host.span("ProfilerStep#0"):
        host.add(Step(0))
        write(host)
    record = Engine(of, host.program).run().ranks[0]
    launches = [s.end_ns for s in record.slices if s.name == "cudaLaunchKernel"]  # a full queue blocks the call
    ends = [a.end_ns for a in record.activities]
    assert launches[1] >= ends[0]  # the event
    assert launches[3] >= ends[1] > launches[2]  # two may be outstanding


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_streams_memory_and_collectives_are_consistent(strategy: str) -> None:
    of = replace(job(strategy, steps=2, layers=3), seed=1)
    recording = simulate(of)
    for record in recording.ranks.values():
        totals = [each.allocated_bytes for each in record.allocations]
        assert totals[-1] == memory.static_bytes(of)  # a step frees all that it allocated
        assert max(totals) <= memory.round_up(memory.peak_bytes(of)) == record.allocations[0].reserved_bytes
        last: dict[int, int] = {}
        for activity in sorted(record.activities, key=lambda a: a.start_ns):
            stream = activity.kernel.stream
            assert activity.start_ns >= last.get(stream, 0)
            last[stream] = activity.end_ns
        for step, (start_ns, end_ns) in record.account.windows.items():
            terms = record.account.terms[step]
            parts = ("compute", "exposed_communication", "exposed_copy", "idle")
            assert sum(terms[name] for name in parts) == end_ns - start_ns
    ends = [
        {(a.group.name, a.number): a.end_ns for a in record.activities if a.group}
        for record in recording.ranks.values()
    ]
    shared = set(ends[0]) & set(ends[1])
    assert shared
    assert all(ends[0][each] == ends[1][each] for each in shared)
