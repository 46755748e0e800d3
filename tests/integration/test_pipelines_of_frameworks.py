"""Pipelines that DeepSpeed, Megatron-core and torchtitan ran: their actions and axes (tests/recordings/README.md)."""

import itertools
import shutil
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support.python_path import REPOSITORY
from tests.support.selection import others_in_accuracy
from tracekit.analysis.parallelism import axis_communication, pipeline_bubbles, pipeline_stages
from tracekit.analysis.parallelism.pipeline_actions import BACKWARD, FORWARD, pipeline_actions
from tracekit.model.run import Run
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

MICRO_BATCHES = 4
STAGES_OF = {
    "deepspeed_pipeline": {0: [0], 1: [1]},
    "megatron_interleaved": {0: [0, 2], 1: [1, 3]},
    "megatron_tp2_pp2": {0: [0], 1: [0], 2: [1], 3: [1]},
    "torchtitan_interleaved": {0: [0, 2], 1: [0, 2], 2: [1, 3], 3: [1, 3]},
    "torchtitan_1f1b_tp2": {0: [0], 1: [0], 2: [1], 3: [1]},
}
UNMARKED = ("torchtitan_1f1b_tp2",)
"""Pipelines of torch's 1F1B, which writes no spans."""
AXES = {
    "deepspeed_pipeline": {"dp", "pp"},
    "megatron_interleaved": {"pp"},
    "megatron_tp2_pp2": {"pp", "tp"},
    "torchtitan_interleaved": {"pp", "dp_shard"},
    "torchtitan_1f1b_tp2": {"pp", "tp"},
}


def recorded(name: str) -> Run:
    return tracekit.load(str(REPOSITORY / "tests" / "recordings" / name))


@pytest.mark.parametrize("name", STAGES_OF)
def test_each_micro_batch_passes_each_stage_once_forward_and_once_backward(name: str) -> None:
    run = recorded(name)
    assert set(run.table(pipeline_actions)["source"]) == {"inferred" if name in UNMARKED else "span"}
    actions = run.table(pipeline_stages.staged_actions)
    for rank, stages in STAGES_OF[name].items():
        own = actions.filter(pl.col("rank") == rank).select("stage", "micro_batch", "action")
        every = {
            (stage, micro_batch, action)
            for stage in stages
            for micro_batch in range(MICRO_BATCHES)
            for action in (FORWARD, BACKWARD)
        }
        assert own.height == len(every)
        assert set(own.iter_rows()) == every


@pytest.mark.parametrize("name", STAGES_OF)
def test_no_action_starts_before_the_stage_before_has_sent(name: str) -> None:
    needed = pipeline_stages.dependencies(recorded(name).table(pipeline_stages.staged_actions))
    assert needed.height
    assert needed.filter(pl.col("start_ns") < pl.col("ready_ns")).is_empty()


@pytest.mark.parametrize("name", STAGES_OF)
def test_bubbles_are_at_least_those_of_the_schedule(name: str) -> None:
    rows = recorded(name).table(pipeline_bubbles.pipeline_bubbles)
    stages = sum(len(stages) for stages in STAGES_OF[name].values())
    assert rows.height == stages
    assert set(rows["micro_batches"]) == {MICRO_BATCHES}
    assert (rows["ideal_duration_ns"] <= rows["duration_ns"]).all()
    per_rank = max(map(len, STAGES_OF[name].values()))
    assert rows["formula_bubble_ratio"].to_list() == pytest.approx([1 / (per_rank * MICRO_BATCHES + 1)] * stages)


@pytest.mark.parametrize("name", STAGES_OF)
def test_axes_are_those_of_the_layout(name: str) -> None:
    assert set(axis_communication.by_axis(recorded(name))["axis"]) == AXES[name]


@pytest.mark.parametrize("name", STAGES_OF)
def test_clocks_of_one_machine_agree(name: str) -> None:
    clocks = recorded(name).offsets
    assert clocks["residual_ns"].null_count() == 0
    assert clocks["clock_domain"].n_unique() == 1
    assert clocks["offset_ns"].abs().max() <= clocks["residual_ns"].max()


@pytest.mark.parametrize("name", others_in_accuracy(STAGES_OF, ["torchtitan_1f1b_tp2", "megatron_tp2_pp2"]))
def test_all_rules_judge_it(name: str) -> None:
    codes = {finding.code for finding in check(recorded(name)).findings}
    assert codes & {"COMM001", "PIPE001", "PIPE002", "PIPE003", "RANK003", "TP002"}
    assert not codes & {"RANK002", "TP001", "EP001", "PIPE004", "PIPE005"}


@pytest.mark.parametrize("name", ["deepspeed_pipeline", "megatron_tp2_pp2"])
def test_without_stacks_the_same_actions_are_inferred(name: str) -> None:
    for trace in recorded(name).traces():
        without_stacks = trace.replace(ops=trace.ops.filter(pl.col("kind") != "python"))
        marked, inferred = (pipeline_actions(of).sort("start_ns") for of in (trace, without_stacks))
        assert set(inferred["source"]) == {"inferred"}
        assert inferred.select("action", "micro_batch").equals(marked.select("action", "micro_batch"))
        both = pl.concat(
            [marked, inferred.select(pl.col("start_ns", "end_ns").name.prefix("inferred_"))], how="horizontal"
        )
        overlaps = (pl.col("start_ns") < pl.col("inferred_end_ns")) & (pl.col("inferred_start_ns") < pl.col("end_ns"))
        assert both.select(overlaps.all()).item()


PAIRED = ("megatron_tp2_pp2", "torchtitan_1f1b_tp2")


@pytest.mark.parametrize(
    ("name", "absent"),
    others_in_accuracy(itertools.product(PAIRED, range(4)), [(PAIRED[0], 0), (PAIRED[1], 1)]),
)
def test_a_stage_whose_tensor_parallel_peer_has_no_trace_is_not_slow(name: str, absent: int, tmp_path: Path) -> None:
    # The other rank waits for it in each layer. With all traces, PIPE002 reports neither recording.
    files = sorted((REPOSITORY / "tests" / "recordings" / name).glob("*.json.gz"))
    for rank, file in enumerate(files):
        if rank != absent:
            shutil.copy(file, tmp_path)
    found = check(tracekit.load(str(tmp_path), cache=False)).findings
    slow = [each for each in found if each.code == "PIPE002"]
    assert all(each.severity is Severity.INFO and "one slow rank" in each.message for each in slow)


def test_transfer_is_measured_on_ranks_whose_peers_have_traces(tmp_path: Path) -> None:
    # Rank 0 waits for rank 1 for most of its time in collectives; ranks 2 and 3 have all traces of their group.
    folder = REPOSITORY / "tests" / "recordings" / "torchtitan_1f1b_tp2"
    for rank in (0, 2, 3):
        shutil.copy(folder / f"rank{rank}_trace.json.gz", tmp_path)
    found = {each.code: each for each in check(tracekit.load(str(tmp_path), cache=False)).findings}
    whole = {each.code: each for each in check(recorded("torchtitan_1f1b_tp2")).findings}
    assert found["TP002"].ranks == (2, 3)
    assert found["TP002"].cost_ns == pytest.approx(whole["TP002"].cost_ns, rel=0.1)
    assert "may be waiting for ranks without a trace" in found["COMM001"].message
    assert "without a trace" not in whole["COMM001"].message
