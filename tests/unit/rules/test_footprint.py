"""Memory growth, headroom, unused reserved memory and owners of the peak: messages and thresholds."""

from pathlib import Path

import pytest

import tracekit
from tests.support.rule_examples import (
    GIB,
    allocated_run,
    block_sizes_run,
    leaking_run,
    program_on_streams,
    run_with_snapshots,
)
from tests.support.sample_snapshots import MIB, Simulation
from tracekit.rules.allocator_calls import AllocatorRetry
from tracekit.rules.data_quality import DoubtfulTrace
from tracekit.rules.engine import check
from tracekit.rules.fragmentation import CrossStreamSlack, FragmentedMemory
from tracekit.rules.memory_footprint import GrowingMemory, IdleReserve, LittleHeadroom, PeakOwner
from tracekit.rules.memory_reuse import ChangingSizes

RECORDED = Path(__file__).parents[3].parent / "shared" / "traces"


def judge(run, rule):
    return check(run, [rule]).findings


def test_a_leak_is_reported_with_its_slope_from_the_threshold_on(wording):
    (found,) = judge(leaking_run(1 << 20), GrowingMemory())
    assert found.cost_bytes == 1 << 20
    wording(found.message)
    assert judge(leaking_run(1 << 20), GrowingMemory(min_bytes=(1 << 20) + 1)) == ()


def test_memory_allocated_in_the_first_step_is_not_a_leak():
    assert judge(allocated_run(GIB, *[4 * GIB] * 7), GrowingMemory()) == ()


def test_temporary_memory_is_not_a_leak_unless_growth_exceeds_it():
    temporary = [0, 2, 0, 4, 2, 6, 2, 4]
    (found,) = judge(
        allocated_run(*(GIB + (10 * step + here) * MIB for step, here in enumerate(temporary))), GrowingMemory()
    )
    assert found.cost_bytes > 9 * MIB
    slow = allocated_run(*(GIB + (step + here) * MIB for step, here in enumerate(temporary)))
    assert judge(slow, GrowingMemory()) == ()


def test_headroom_is_the_device_memory_that_was_never_reserved(wording):
    (found,) = judge(allocated_run(GIB, reserved_bytes=96 * GIB), LittleHeadroom())
    wording(found.message)
    assert judge(allocated_run(GIB, reserved_bytes=96 * GIB), LittleHeadroom(min_headroom_ratio=0.04)) == ()


def test_unused_reserved_memory_is_measured_at_the_peak():
    (found,) = judge(allocated_run(GIB, 6 * GIB, GIB), IdleReserve())
    message = "4 GiB of the 10 GiB reserved on rank 0 (40.0%) are unused even at the peak of allocated memory."
    assert found.message == message
    assert found.cost_bytes == 4 * GIB
    assert judge(allocated_run(GIB, 8 * GIB, GIB), IdleReserve()) == ()
    assert (
        judge(allocated_run(GIB >> 4, reserved_bytes=GIB >> 1), IdleReserve()) == ()
    )  # above the ratio, below the size


def test_the_owner_of_the_peak_is_named_with_an_alternative(wording):
    (found,) = judge(allocated_run(GIB), PeakOwner())
    wording(found.message)
    assert "scaled_dot_product_attention" in found.fix


# Changing sizes ------------------------------------------------------------------------------------------------------
def test_new_sizes_are_counted_in_the_representative_step_after_warm_up(wording):
    run = block_sizes_run(*({GIB + step * 2 * MIB: 1, GIB: 3} for step in range(4)))
    (found,) = judge(run, ChangingSizes())
    assert found.cost_bytes == GIB + 4 * MIB
    wording(found.message)
    assert found.evidence["bytes"].to_list() == [GIB + 4 * MIB]
    assert found.steps == (1, 2, 3)
    assert judge(run, ChangingSizes(min_new_size_ratio=0.6)) == ()
    assert judge(block_sizes_run({2 * GIB: 1}, *[{GIB: 1}] * 4), ChangingSizes()) == ()  # new only in one step
    assert (
        judge(block_sizes_run(*({GIB + step % 2 * MIB: 1} for step in range(4))), ChangingSizes()) == ()
    )  # within the tolerance of a request
    assert judge(block_sizes_run(*({step * 999 + 512: 9} for step in range(9))), ChangingSizes()) == ()  # small blocks


# Fragmentation -------------------------------------------------------------------------------------------------------
def test_growth_is_fragmentation_only_if_enough_memory_is_reserved_and_free(wording):
    (found,) = judge(block_sizes_run(*[{GIB: 2}] * 3, reserved=(4 * GIB, 5 * GIB, 7 * GIB)), FragmentedMemory())
    assert (found.cost_bytes, found.steps) == (3 * GIB, (1, 2))
    wording(found.message)
    assert found.evidence["idle_bytes"].to_list() == [4 * GIB, 3 * GIB]  # the larger growth first
    assert judge(block_sizes_run(*[{6 * GIB: 2}] * 3, reserved=(4 * GIB, 5 * GIB, 6 * GIB)), FragmentedMemory()) == ()
    grows = block_sizes_run(*[{GIB: 2}] * 3, reserved=(4 * GIB, 4 * GIB + 32 * MIB, 4 * GIB + 32 * MIB))
    assert judge(grows, FragmentedMemory()) == ()  # a share of less than 2%


def fragmented_program() -> Simulation:
    """Return a simulated program that frees every second of 40 blocks, after a request of twice their size."""
    program = Simulation()
    program.free(program.malloc(18 * MIB))
    blocks = [program.malloc(9 * MIB) for _ in range(40)]
    for block in blocks[::2]:
        program.free(block)
    return program


def test_a_snapshot_shows_free_blocks_smaller_than_the_largest_request(wording):
    (found,) = judge(run_with_snapshots(fragmented_program()), FragmentedMemory())
    assert found.subject == "snapshot"
    wording(found.message)
    assert found.cost_bytes > 20 * 9 * MIB
    assert judge(run_with_snapshots(fragmented_program()), FragmentedMemory(min_free_ratio=0.9)) == ()


def test_a_snapshot_shows_memory_that_only_other_streams_can_use(wording):
    program = program_on_streams((0, 900), (7, 300))
    program.free(program.malloc(200 * MIB), later=True)
    (found,) = judge(run_with_snapshots(program), CrossStreamSlack())
    assert found.cost_bytes == 500 * MIB
    wording(found.message)
    assert judge(run_with_snapshots(program), CrossStreamSlack(min_idle_bytes=501 * MIB)) == ()


def test_without_a_log_retries_come_from_a_snapshot(wording):
    program = Simulation(capacity_bytes=100 * MIB)
    program.free(program.malloc(60 * MIB))
    program.malloc(80 * MIB)
    (found,) = judge(run_with_snapshots(program_on_streams((0, 4)), program), AllocatorRetry())
    assert found.ranks == (1,)
    wording(found.message)


def test_an_unreadable_snapshot_is_an_issue_and_the_others_are_judged():
    program = program_on_streams((0, 900), (7, 500))
    run = run_with_snapshots(program, program)
    (Path(run.path) / "rank00000.memory.pickle").write_bytes(b"cos\nsystem\n(X\x04\x00\x00\x00truetR.")
    (found,) = (each for each in check(run, [DoubtfulTrace()]).findings if each.subject == "unreadable_snapshot")
    assert "os.system" in found.message
    (slack,) = judge(run, CrossStreamSlack())
    assert slack.ranks == (1,)


def test_a_broken_link_to_a_snapshot_is_an_issue_and_the_others_are_judged(wording):
    run = run_with_snapshots(program_on_streams((0, 900), (7, 500)))
    (Path(run.path) / "rank00001.memory.pickle").symlink_to("gone")
    (found,) = (each for each in check(run, [DoubtfulTrace()]).findings if each.subject == "unreadable_snapshot")
    wording(found.message.replace(run.path, "RUN"))
    (slack,) = judge(run, CrossStreamSlack())
    assert slack.ranks == (0,)


@pytest.mark.parametrize(
    ("name", "rule", "message"),
    [
        ("tracelens_h100_memory_stacks", PeakOwner(), "aten::_softmax allocated 820 MiB (31.8%)"),
        ("hta_ddp_v100_memory", IdleReserve(), "5.73 GiB of the 11.9 GiB reserved on rank 1 (48.1%)"),
    ],
)
def test_findings_on_recorded_traces(name, rule, message):
    if not RECORDED.is_dir():
        pytest.skip("the recorded traces are not next to this checkout")
    (found,) = judge(tracekit.load(str(RECORDED / name)), rule)
    assert message in found.message
