"""Rules on pipelines, tensor and expert parallelism: what they name and what they cost, on drawn runs."""

import polars as pl
import pytest

from tests.support import drawn_pipelines, drawn_traces, pipeline_examples
from tracekit.analysis.parallelism import pipeline_balance, pipeline_bubbles
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.rules.engine import check
from tracekit.rules.registry import RULES
from tracekit.rules.rule import Finding, Severity

CODES = ("PIPE001", "PIPE002", "PIPE003", "PIPE004", "PIPE005", "TP001", "TP002", "EP001")


def judge(run: Run, *codes: str) -> tuple[Finding, ...]:
    return check(run, [rule() for rule in RULES if rule.code in (codes or CODES)]).findings


def test_a_delay_costs_what_the_pipeline_takes_longer_than_its_schedule():
    (found,) = judge(pipeline_examples.delayed(), "PIPE001")
    assert found.cost_ns == 4000
    assert "25.0%" in found.message


def test_a_pipeline_whose_recorded_actions_wait_for_each_other_has_no_ideal_to_compare_with():
    # Stage 0 runs the backward of micro-batch 1 before its forward, as where a trace lost a part of its events.
    run = drawn_pipelines.run(
        """
        0 0  00.bb.11.aa
        1 1  ..0011bbaa.
        """
    )
    assert not run.table(pipeline_bubbles.pipeline_bubbles).is_empty()
    assert judge(run) == ()


def test_actions_that_take_no_time_have_no_ideal_to_compare_with(monkeypatch):
    measured = pipeline_bubbles.schedule_cases
    no_time = dict.fromkeys(("ideal_duration_ns", "ideal_bubble_ns"), pl.lit(0, pl.Int64))
    monkeypatch.setattr(pipeline_bubbles, "schedule_cases", run_fact(lambda run: measured(run).with_columns(**no_time)))
    run = pipeline_examples.delayed()
    assert run.table(pipeline_bubbles.pipeline_bubbles)["ideal_bubble_ratio"].null_count() > 0
    assert judge(run, "PIPE001") == ()


def test_stages_of_which_one_has_no_time_of_its_own_are_not_compared(monkeypatch):
    """GIVEN a stage whose waits are as long as its actions, as in damaged traces, THEN PIPE002 is silent."""
    measured = pipeline_balance.stage_times
    own_ns = pl.when(pl.col("stage") == 1).then(pl.col("stage_ns"))
    without_time = run_fact(lambda run: measured(run).with_columns(own_ns.otherwise(0)))
    monkeypatch.setattr(pipeline_balance, "stage_times", without_time)
    assert judge(pipeline_examples.uneven(), "PIPE002") == ()


def test_the_slow_stage_is_named_with_the_layers_to_move(wording):
    (found,) = judge(pipeline_examples.uneven(), "PIPE002")
    assert found.ranks == (1,)
    wording(found.fix)
    # With 3 ns per forward and 3 layers a stage the pipeline takes 18 instead of 21.
    assert found.cost_ns == 3000


def test_layers_are_moved_such_that_stages_of_one_rank_are_alike():
    # Two stages a rank, of 3, 2, 2 and 1 layers: 3 and 1 on rank 1 would be as good for the ranks alone.
    run = drawn_pipelines.run(
        """
        0 0  000...............aaaaaa
        0 2  .....00...aaaa..........
        1 1  ...00.........aaaa......
        1 3  .......0aa..............
        """,
        pipeline={"stage_layers": [[0, 1, 2], [3, 4], [5, 6], [7]]},
    )
    balance = pipeline_balance.balance(run)
    assert balance is not None
    assert balance.better_layers == (2, 2, 2, 2)


def v_shaped(*layers):
    """Return a pass of one micro-batch through four stages of two ranks, and back; a layer takes about ten cells."""
    widths = [10 * count - (count == 3) for count in layers]  # of three layers each is a little faster
    starts = [sum(widths[:at]) for at in range(4)]
    total = sum(widths)
    lines = []
    for stage, rank in enumerate((0, 1, 1, 0)):
        width, behind = widths[stage], total + 2 * sum(widths[stage + 1 :])
        cells = ("." * starts[stage], "0" * width, "." * (behind - starts[stage] - width), "a" * 2 * width)
        lines.append(f"{rank} {stage} {''.join(cells)}")
    places = [list(range(sum(layers[:at]), sum(layers[: at + 1]))) for at in range(4)]
    return drawn_pipelines.run("\n".join(lines), pipeline={"stage_layers": places})


def test_noise_does_not_decide_which_stage_of_an_overloaded_rank_gives_a_layer():
    # Rank 1 has 3 + 2 layers, rank 0 has 2 + 1. That three layers take 29 instead of 30 does not make them faster.
    balance = pipeline_balance.balance(v_shaped(2, 3, 2, 1))
    assert balance is not None
    assert balance.better_layers == (2, 2, 2, 2)


def test_the_longest_stage_of_an_overloaded_rank_is_named():
    balance = pipeline_balance.Balance(
        (20, 30, 20, 10), (10.0, 10.0, 10.0, 10.0), (0, 1, 1, 0), (2, 3, 2, 1), (2, 3, 1, 2), 5, 0, 100
    )
    assert balance.slowest == 1  # although stage 2 of its rank gives the layer


def test_slow_layers_are_reported_where_no_layer_can_be_moved(wording):
    small_head = {"vocabulary": 1, "width": 1, "layers": 2, "parameters": 2002}
    one_each = drawn_pipelines.run(pipeline_examples.UNEVEN, pipeline={"stage_layers": [[0], [1]]}, model=small_head)
    (found,) = judge(one_each, "PIPE002")
    assert "2.00 times as long" in found.message
    wording(found.fix)


def test_twice_the_micro_batches_save_half_of_the_bubble_of_the_schedule():
    (found,) = judge(pipeline_examples.few(), "PIPE003")
    assert found.cost_ns == 3000  # of a bubble of 6 in 12
    assert "4 micro-batches" in found.message


def test_a_schedule_with_small_bubbles_does_not_hide_few_micro_batches(wording):
    (found,) = judge(drawn_pipelines.run(pipeline_examples.FEW_ZERO_BUBBLE), "PIPE003")
    wording(found.message)
    assert judge(pipeline_examples.even(), "PIPE003") == ()  # three micro-batches for two ranks


def test_a_gradient_reduction_per_micro_batch_is_no_zero_1():
    (found,) = judge(pipeline_examples.sharded(per_micro_batch=True), "PIPE004")
    assert "3 of 3 micro-batches" in found.message
    assert "ZeRO stage 2" in found.message


def test_a_slow_link_costs_both_its_directions():
    (found,) = judge(pipeline_examples.linked(pipeline_examples.SLOW_LINK), "PIPE005")
    assert found.ranks == (1, 2)
    assert found.cost_ns == 6000


def test_a_tensor_parallel_group_across_nodes_is_one_finding():
    (found,) = judge(pipeline_examples.tensor_parallel(pipeline_examples.EXPOSED_TP, gpus_per_node=1))
    assert (found.code, found.cost_ns) == ("TP001", 6400)


def test_exposed_tensor_parallel_time_is_stated_per_layer(wording):
    (found,) = judge(pipeline_examples.tensor_parallel(pipeline_examples.EXPOSED_TP))
    assert (found.code, found.cost_ns) == ("TP002", 8000)
    wording(found.message)


@pytest.mark.parametrize(
    ("device", "gigabytes_per_s", "codes"),
    [
        ("NVIDIA H100 80GB HBM3", 60, ["TP002"]),
        ("NVIDIA H100 80GB HBM3", 200, []),
        ("NVIDIA A100-SXM4-80GB", 100, []),
        ("NVIDIA A100-SXM4-80GB", 60, ["TP002"]),
        ("NVIDIA H100 PCIe", 60, []),  # two devices may have a bridge between them, or not
        ("NVIDIA H100 PCIe", 40, ["TP002"]),
        ("AMD Instinct MI300X", 46, []),  # of a pair's one link of 64 GB/s, RCCL gets 48
        ("AMD Instinct MI300X", 30, ["TP002"]),
        ("AMD Instinct MI250X", 30, []),
        ("AMD Instinct MI250X", 20, ["TP002"]),
        ("Tesla V100-SXM2-16GB", 20, []),
    ],
)
def test_links_are_slow_for_their_kind_of_device(device: str, gigabytes_per_s: float, codes: list[str]):
    found = judge(pipeline_examples.linked_by(device, gigabytes_per_s * 1e9))
    assert [each.code for each in found] == codes


def test_exposed_communication_points_to_the_rule_on_tensor_parallelism():
    run = pipeline_examples.tensor_parallel(pipeline_examples.EXPOSED_TP)
    (found,) = judge(run, "COMM001")
    assert found.severity == Severity.INFO
    assert "TP002" in found.message


def test_waiting_for_a_hot_expert_costs_its_time_above_the_mean():
    (found,) = judge(pipeline_examples.experts(18, 6, 6, 6), "EP001")
    assert (found.ranks, found.cost_ns) == ((0,), 9000)


@pytest.mark.parametrize(
    "run",
    [
        pipeline_examples.even(),
        pipeline_examples.experts(9, 9),
        drawn_traces.run(drawn_traces.trace("step 00\ncompute aa")),
    ],
    ids=["pipeline", "experts", "one rank"],
)
def test_healthy_runs_are_silent(run):
    assert judge(run) == ()


@pytest.mark.parametrize("code", ["PIPE001", "PIPE002", "PIPE003", "PIPE005"])
def test_no_pipeline_costs_more_than_its_ranks_are_idle(code):
    run = pipeline_examples.EXAMPLES[code][0]()
    (found,) = judge(run, code)
    assert found.cost_ns <= run.table(pipeline_bubbles.pipeline_bubbles)["bubble_ns"].max()
