"""The bubbles of drawn pipelines: each number can be counted in the drawing."""

import random

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import drawn_pipelines, drawn_traces
from tracekit.analysis.parallelism import pipeline_bubbles, pipeline_stages
from tracekit.analysis.parallelism.pipeline_actions import pipeline_actions
from tracekit.model import schema
from tracekit.model.run import Run

# p = 2, m = 2, a backward takes twice as long as a forward
GPIPE = """
0 0  01...aabb
1 1  .01aabb..
"""
# p = 2, m = 3
ONE_F_ONE_B = """
0 0  01..aa2aa...
1 1  .0aa1bb2cc..
"""
# p = 4, m = 4: every rank is idle in 3 of 7 units of forward and backward
ONE_F_ONE_B_OF_4 = """
0 0  0123......aa.bb.cc.dd
1 1  .012....aa3bb.cc.dd..
2 2  ..01..aa2bb3cc.dd....
3 3  ...0aa1bb2cc3dd......
"""


def bubbles(run: Run) -> pl.DataFrame:
    return run.table(pipeline_bubbles.pipeline_bubbles)


def test_gpipe_is_idle_for_p_minus_1_of_m_plus_p_minus_1_parts():
    rows = bubbles(drawn_pipelines.run(GPIPE))
    assert rows["bubble_ns"].to_list() == [3000, 3000]
    assert rows["duration_ns"].to_list() == [9000, 9000]
    assert rows["bubble_ratio"].to_list() == [pytest.approx(1 / 3)] * 2
    assert rows["ideal_bubble_ratio"].to_list() == [pytest.approx(1 / 3)] * 2
    assert rows["formula_bubble_ratio"].to_list() == [pytest.approx(1 / 3)] * 2
    assert rows["forward_ns"].to_list() == [2000, 2000]
    assert rows["backward_ns"].to_list() == [4000, 4000]


def test_the_bubble_is_split_at_the_first_backward_and_the_last_forward():
    first, last = bubbles(drawn_pipelines.run(GPIPE)).iter_rows(named=True)
    assert [first[name] for name in pipeline_bubbles.PHASES] == [3000, 0, 0]
    assert [last[name] for name in pipeline_bubbles.PHASES] == [1000, 0, 2000]


def test_one_f_one_b_of_4_ranks_and_4_micro_batches_has_the_bubble_of_the_formula():
    rows = bubbles(drawn_pipelines.run(ONE_F_ONE_B_OF_4))
    assert rows["bubble_ns"].to_list() == [9000] * 4
    assert rows["bubble_ratio"].to_list() == [pytest.approx(3 / 7)] * 4
    assert rows["formula_bubble_ratio"].to_list() == [pytest.approx(3 / 7)] * 4
    assert rows["ideal_bubble_ratio"].to_list() == [pytest.approx(3 / 7)] * 4
    assert rows.select(pipeline_bubbles.CAUSES).row(0) == (9000, 0, 0, 0, 0)


def test_a_schedule_of_two_stages_a_rank_has_half_the_bubble():
    # p = 2, v = 2, m = 2: stages 0 and 2 on rank 0, 1 and 3 on rank 1
    run = drawn_pipelines.run("""
        0 0  01.........aabb
        0 2  ..01..aa.bb....
        1 1  .01......aabb..
        1 3  ...0aa1bb......
    """)
    rows = bubbles(run)
    assert rows["stage"].to_list() == [0, 2, 1, 3]
    assert rows["bubble_ns"].to_list() == [3000] * 4
    assert rows["bubble_ratio"].to_list() == [pytest.approx(1 / 5)] * 4
    assert rows["formula_bubble_ratio"].to_list() == [pytest.approx(1 / 5)] * 4
    assert rows["ideal_bubble_ratio"].to_list() == [pytest.approx(1 / 5)] * 4
    assert rows["forward_ns"].to_list() == [2000] * 4


def test_a_slow_stage_makes_the_others_wait_for_imbalance():
    # stage 1 takes 2 and 4, stage 0 1 and 2
    run = drawn_pipelines.run("""
        0 0  01.......aa..bb
        1 1  .0011aaaabbbb..
    """)
    first, last = bubbles(run).iter_rows(named=True)
    assert (first["bubble_ns"], last["bubble_ns"]) == (9000, 3000)
    # With stages of 1.5 and 3 the bubble would be a third of 13.5: 4.5.
    assert (first["schedule_ns"], first["imbalance_ns"]) == (4500, 4500)
    assert (last["schedule_ns"], last["imbalance_ns"]) == (4500, -1500)
    assert first["ideal_bubble_ratio"] == pytest.approx(9 / 15)


def test_a_slow_micro_batch_counts_as_uneven():
    run = drawn_pipelines.run("""
        0 0  011......aabb
        1 1  .0.1111aabb..
    """)
    rows = bubbles(run)
    assert rows["bubble_ns"].to_list() == [6000, 4000]
    # With each stage's mean (forwards of 1.5 and 2.5, backwards of 2) it would be 5.5 and 3.5 on a total of 12.5.
    assert rows["uneven_ns"].to_list() == [500, 500]
    assert (rows.select(pl.sum_horizontal(pipeline_bubbles.CAUSES)).to_series() == rows["bubble_ns"]).all()


def test_actions_that_start_late_without_a_transfer_are_of_the_host():
    # The second forward of rank 1 starts 4 after its input is there.
    run = drawn_pipelines.run("""
        0 0  01.......aabb
        1 1  .0....1aabb..
    """)
    rows = bubbles(run)
    assert rows["bubble_ns"].to_list() == [7000, 7000]
    assert rows["host_ns"].to_list() == [4000, 4000]
    assert rows["communication_ns"].to_list() == [0, 0]
    assert rows["ideal_bubble_ratio"].to_list() == [pytest.approx(1 / 3)] * 2


def test_on_a_device_the_kernels_count_and_not_the_spans_of_the_host():
    on_host, on_device = (bubbles(drawn_pipelines.run(GPIPE, on_device=device)) for device in (False, True))
    assert on_host.drop("start_ns").equals(on_device.drop("start_ns"))


def test_replicas_are_pipelines_of_their_own():
    # Ranks 2 and 3 run the same stages, later.
    second = GPIPE.replace("0 0  ", "1 0  ......").replace("1 1  ", "3 1  ......")
    run = drawn_pipelines.run(GPIPE.replace("1 1  ", "2 1  ") + second)
    rows = bubbles(run).sort("rank")
    assert rows["pipeline"].to_list() == [0, 1, 0, 1]
    assert rows["duration_ns"].to_list() == [9000] * 4


def test_stages_that_spans_do_not_name_come_from_the_manifest():
    traces = drawn_pipelines.traces(GPIPE, spans="loop")
    collectives = pl.DataFrame({"activity_id": [0], "op": ["send"]})
    traces = [trace.replace(collectives=schema.COLLECTIVES.conform(collectives)) for trace in traces]
    mesh = {"axes": ["pp"], "shape": [2]}
    assert bubbles(drawn_traces.run(*traces, mesh=mesh))["bubble_ns"].to_list() == [3000, 3000]
    stated = {"stage_ranks": [[1], [0]]}
    assert bubbles(drawn_traces.run(*traces, pipeline=stated))["stage"].to_list() == [1, 0]


def test_clocks_that_contradict_the_order_of_stages_are_corrected():
    traces = drawn_pipelines.traces(GPIPE)
    late = traces[1].ops.with_columns(pl.col("start_ns") + 50_000)
    shifted = traces[1].activities.with_columns(pl.col("start_ns") + 50_000)
    run = drawn_traces.run(traces[0], traces[1].replace(ops=late, activities=shifted))
    assert bubbles(run)["bubble_ns"].to_list() == [3000, 3000]


def test_a_run_without_pipeline_has_no_bubbles():
    run = drawn_traces.run(drawn_traces.trace("step 0000\ncompute aabb"))
    assert bubbles(run).is_empty()
    assert run.table(pipeline_actions).is_empty()


# Against brute force -------------------------------------------------------------------------------------------------


def one_f_one_b(ranks: int, micro_batches: int) -> list[tuple[int, int, int, str]]:
    """Return the actions of 1F1B of each rank in turn, in the order in which it runs them."""
    actions = []
    for rank in range(ranks):
        first = min(ranks - rank - 1, micro_batches)
        order = [(m, "forward") for m in range(first)]
        for m in range(micro_batches):
            order += [(first + m, "forward")] if first + m < micro_batches else []
            order += [(m, "backward")]
        actions += [(rank, rank, m, action) for m, action in order]
    return actions


def simulated(actions: list[tuple[int, int, int, str]], durations: list[int]) -> list[int]:
    """Return the end of each action by going through time: a rank starts its next action once its input is there."""
    ends: dict[int, int] = {}
    number = {action[1:]: at for at, action in enumerate(actions)}
    queues = {rank: [at for at, action in enumerate(actions) if action[0] == rank] for rank, *_ in actions}
    free = dict.fromkeys(queues, 0)
    time = 0
    while any(queues.values()):
        for rank, queue in queues.items():
            if not queue or free[rank] > time:
                continue
            _, stage, micro_batch, action = actions[queue[0]]
            needed = [(stage - 1, micro_batch, "forward")]
            if action == "backward":
                needed = [(stage, micro_batch, "forward"), (stage + 1, micro_batch, "backward")]
            if all(ends.get(number[key], time + 1) <= time for key in needed if key in number):
                ends[queue[0]] = free[rank] = time + durations[queue[0]]
                queue.pop(0)
        time += 1
    return [ends[at] for at in range(len(actions))]


@given(ranks=st.integers(1, 4), micro_batches=st.integers(1, 5), seed=st.integers(0, 1000))
def test_the_ideal_schedule_is_that_of_a_simulation_in_time(ranks, micro_batches, seed):
    actions = one_f_one_b(ranks, micro_batches)
    durations = [random.Random(seed + at).randint(1, 6) for at in range(len(actions))]
    schedule = pipeline_stages.schedule_graph(tuple(actions))
    assert schedule is not None
    ends = pipeline_stages.end_times(schedule, np.array(durations, np.float64)[:, None])
    assert ends[:, 0].tolist() == simulated(actions, durations)


@given(ranks=st.integers(1, 6), micro_batches=st.integers(1, 10), times=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_equal_stages_under_1f1b_have_the_bubble_of_the_formula(ranks, micro_batches, times):
    actions = one_f_one_b(ranks, micro_batches)
    durations = np.array([[times[action[3] == "backward"]] for action in actions], np.float64)
    schedule = pipeline_stages.schedule_graph(tuple(actions))
    assert schedule is not None
    total = pipeline_stages.end_times(schedule, durations).max()
    assert total == (micro_batches + ranks - 1) * sum(times)


def test_an_order_in_which_actions_wait_in_a_circle_is_no_schedule():
    forwards = ((0, 0, 0, "backward"), (0, 0, 0, "forward"))
    assert pipeline_stages.schedule_graph(forwards) is None


def test_by_stage_has_the_columns_of_the_contract():
    shown = pipeline_bubbles.by_stage(drawn_pipelines.run(GPIPE))
    contract = ["rank", "stage", "step", "bubble_ns", "bubble_ratio", "ideal_bubble_ratio", "forward_ns", "backward_ns"]
    assert set(contract) <= set(shown.columns)
