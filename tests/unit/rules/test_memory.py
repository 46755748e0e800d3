import polars as pl
import pytest

from tests.support import drawn_traces
from tests.support.rule_examples import CHURNING, device_malloc_run, metrics, ops
from tracekit.analysis.memory import steady_state
from tracekit.model import schema
from tracekit.rules.allocator_calls import AllocatorRetry, SteadyDeviceAllocation
from tracekit.rules.engine import check
from tracekit.rules.memory_reuse import ReallocatedBuffers
from tracekit.rules.rule import Severity

# time      0         1         2         3         4         5
# idle      10 to 16, 30 to 36, 50 to 56


def judge(run, rule=SteadyDeviceAllocation, **thresholds):
    return check(run, [rule(**thresholds)]).findings


def stalled(*calls, picture=CHURNING):
    return device_malloc_run(picture, *calls).table(steady_state.device_calls)["stalled_ns"].to_list()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((0, 2, 8), 0),  # the device is busy throughout, with work queued
        ((0, 11, 15), 4),  # inside an idle gap: at most the call's own time counts
        ((0, 8, 12), 4),  # 2 while idle, and 2 after it for the part that ran while the device was busy
        ((0, 10, 18), 6),  # longer than the gap: at most the gap
        ((0, 3, 10), 6),  # returns as the gap begins: without the call, the next work starts 6 earlier
        ((0, 3, 9), 0),  # returns before the gap: something else delays the next work
    ],
)
def test_a_call_stalls_the_device_only_while_it_is_idle_and_at_most_as_long_as_the_call(call, expected):
    assert stalled(call) == [expected]


def test_idle_time_after_a_call_ends_with_the_next_call():
    assert stalled((0, 6, 11), (0, 12, 14)) == [2, 2]


def test_the_step_counts_each_moment_once():
    run = device_malloc_run(CHURNING, (0, 10, 14), (0, 12, 16))
    assert run.table(steady_state.stalls)["stalled_ns"].to_list() == [6, 0, 0]
    assert run.table(steady_state.stalls)["host_ns"].to_list() == [8, 0, 0]


def test_the_representative_step_after_warm_up_is_quoted(wording):
    (found,) = judge(device_malloc_run(CHURNING, (0, 10, 16), (1, 30, 33), (2, 50, 54)))
    assert (found.cost_ns, found.impact) == (3, 3 / 20)
    wording(found.message)
    assert found.steps == (1, 2)
    call, whole = found.evidence.rows(named=True)
    assert (call["name"], call["start_ns"], call["dur_ns"], call["stalled_ns"]) == ("cudaMalloc", 30, 3, 3)
    assert (whole["name"], whole["stalled_ns"], whole["step_ns"]) == ("all 1 calls", 3, 20)


def test_calls_in_the_first_step_only_are_not_reported():
    assert judge(device_malloc_run(CHURNING, (0, 10, 16))) == ()


def test_one_step_that_only_allocates_is_taken_for_warm_up(wording):
    (found,) = judge(device_malloc_run("step 00000000000000000000\ncompute aaaaaaaaaa......aaaa", (0, 10, 16)))
    assert found.severity == Severity.INFO
    wording(found.message)


def test_the_length_of_warm_up_can_be_set():
    run = device_malloc_run(CHURNING, (0, 10, 16), (1, 30, 36), (2, 50, 51))
    assert judge(run, warmup_steps=2)[0].cost_ns == 1
    assert judge(run, warmup_steps=0)[0].cost_ns == 6


def test_a_single_step_is_judged_with_less_confidence():
    (found,) = judge(device_malloc_run("step 00000\ncompute a...a", (0, 1, 4)))
    assert found.confidence == 0.5


def test_without_steps_the_second_half_is_judged(wording):
    # 6 of the last 10 ns are idle under a call; the calls of the first half filled the cache.
    calls = pl.concat([ops(("hipMalloc", "runtime", start, start + 6), step=None) for start in (3, 12)])
    whole = pl.DataFrame({"step": [None], "start_ns": [0], "end_ns": [20], "device": [0]})
    (found,) = judge(drawn_traces.run(drawn_traces.trace("compute  aa........aa......aa", ops=calls, steps=whole)))
    assert found.impact == 0.6
    wording(found.message)
    assert (found.cost_ns, found.is_of_window) == (6, True)
    assert found.evidence["start_ns"].drop_nulls().to_list() == [12]


@pytest.mark.parametrize(("threshold", "fires"), [(0.15, True), (0.151, False)])
def test_the_stall_must_reach_its_threshold(threshold, fires):
    run = device_malloc_run(CHURNING, (1, 30, 33), (2, 50, 53))
    assert bool(judge(run, min_stall_ratio=threshold, min_host_ratio=1.0)) == fires


def test_calls_that_only_take_host_time_are_information(wording):
    (found,) = judge(device_malloc_run(CHURNING, (1, 21, 25), (2, 41, 45)))
    assert (found.severity, found.impact, found.cost_ns) == (Severity.INFO, 0.0, 0)
    wording(found.message)


def test_steps_that_save_are_left_out():
    rows = [ops(("cudaMalloc", "runtime", 30 + 20 * n, 34 + 20 * n), step=n + 1) for n in (0, 1)]
    span = ops(("tracekit::checkpoint", "annotation", 36, 39), step=1)
    run = drawn_traces.run(drawn_traces.trace(CHURNING, ops=pl.concat([*rows, span])))
    (found,) = judge(run)
    assert found.steps == (2,)


def test_a_cpu_run_has_no_device_to_stall():
    trace = drawn_traces.trace(CHURNING, on_device=False, ops=ops(("cudaMalloc", "runtime", 30, 34), step=1))
    assert steady_state.device_calls(trace)["stalled_ns"].to_list() == [0]


RETRIED = pl.concat([metrics("num_alloc_retries", 5, 5, 6, 6, 8), metrics("step_time_ns", 900, 100, 150, 110, 170)])


def test_retries_come_from_the_metrics_log_and_cost_the_extra_time_of_their_steps(wording):
    # After warm-up (step 1, the first with a known growth): retries in steps 2 and 4, none in step 3.
    (found,) = judge(drawn_traces.run(drawn_traces.trace("step 0\ncompute a", metrics=RETRIED)), AllocatorRetry)
    wording(found.message)
    assert found.steps == (2, 4)
    assert found.impact == pytest.approx(50 * 2 / (150 + 110 + 170))
    assert found.cost_ns == int(50 * 2 / 3)
    assert found.evidence.select("step", "retries", "step_time_ns").rows() == [(2, 1, 150), (4, 2, 170), (3, 0, 110)]


@pytest.mark.parametrize("counts", [(5, 5, 5, 5, 5), (0, 3, 3, 3, 3), (9, 9, 9, 0, 0)])
def test_a_constant_counter_growth_in_warm_up_and_a_restarted_counter_are_not_reported(counts):
    run = drawn_traces.run(drawn_traces.trace("step 0\ncompute a", metrics=metrics("num_alloc_retries", *counts)))
    assert judge(run, AllocatorRetry) == ()


def buffers(*rows: tuple[int, str, int], phase: str | None = None) -> pl.DataFrame:
    frame = pl.DataFrame(rows, schema=["step", "span", "delta_bytes"], orient="row").with_row_index("at_ns")
    return schema.ALLOCATIONS.conform(frame.with_columns(unit=pl.lit("layers.0"), phase=pl.lit(phase, pl.String)))


MIB = 1 << 20


def with_buffers(table: pl.DataFrame):
    return drawn_traces.run(drawn_traces.trace("step 000111222\ncompute aaabbbccc", allocations=table))


def test_unit_buffers_are_those_of_the_representative_step(wording):
    (found,) = judge(
        with_buffers(buffers((0, "all_gather", 9 * MIB), (1, "all_gather", MIB), (2, "all_gather", 2 * MIB))),
        ReallocatedBuffers,
    )
    assert (found.severity, found.cost_bytes, found.impact) == (Severity.INFO, 2 * MIB, 0.0)
    wording(found.message)
    assert found.evidence["bytes"].to_list() == [2 * MIB]


@pytest.mark.parametrize(
    "table",
    [
        buffers((0, "all_gather", 8 * MIB)),
        buffers(*((step, "all_gather", MIB - 1) for step in (0, 1, 2))),
        buffers(*((step, "forward", 8 * MIB) for step in (0, 1, 2))),
        buffers(*((step, "all_gather", 8 * MIB) for step in (0, 1, 2)), phase="checkpoint"),
    ],
    ids=["one step only", "small", "activations", "in a save"],
)
def test_only_large_buffers_of_units_in_every_step_are_reported(table):
    assert judge(with_buffers(table), ReallocatedBuffers) == ()
