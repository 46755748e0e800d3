import polars as pl
import pytest

from tests.support import drawn_traces
from tests.support.rule_examples import metrics, ops, save_log
from tracekit.analysis.checkpoint import save_stages
from tracekit.model import schema
from tracekit.rules.checkpoint import BlockingCheckpoint
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity


def judge(*traces, **manifest):
    return check(drawn_traces.run(*traces, **manifest), [BlockingCheckpoint()])


def rank(number, *, step_ns=(100, 100, 100), **stages_ns):
    table = save_log(**stages_ns)
    return drawn_traces.trace(
        "step 01\ncompute ab", rank=number, checkpoints=table, metrics=metrics("step_time_ns", *step_ns)
    )


def test_the_stage_that_other_ranks_wait_for_is_reported_not_the_waiting(wording):
    # Rank 0 waits 70 of 100 for rank 1, which writes 80.
    (found,) = judge(
        rank(0, plan=10, stage=5, write=15, wait=70, total=100), rank(1, plan=8, stage=5, write=80, wait=7, total=100)
    ).findings
    wording(found.message)
    assert found.ranks == (1,)
    assert "faster storage" in found.fix
    assert found.evidence.select("rank", "stage").rows()[:2] == [(0, "total"), (1, "write")]


def test_between_barriers_the_slowest_rank_counts_not_the_longest_stage():
    # Rank 0 serializes longest, 40, but rank 1 arrives last: 30 + 30 + 5.
    (found,) = judge(
        rank(0, plan=1, serialize=40, write=5, wait=20, total=66),
        rank(1, plan=1, serialize=30, write=30, fsync=5, wait=0, total=66),
    ).findings
    assert found.ranks == (1,)


def test_planning_on_the_coordinator_is_reported_where_it_dominates(wording):
    (found,) = judge(
        rank(0, plan=60, write=10, finish=5, wait=2, total=77), rank(1, plan=5, write=12, wait=60, total=77)
    ).findings
    wording(found.message)
    assert "enable_plan_caching" in found.fix


def test_the_share_is_of_the_time_between_saves(wording):
    # A save after 2 steps of 100 blocks for 50: 50 of 250. Step 1, which saves, is left out.
    (found,) = judge(rank(0, plan=50, total=50, step_ns=(100, 9999, 100))).findings
    assert found.impact == 0.2
    assert found.cost_ns == 25
    wording(found.message)


@pytest.mark.parametrize(("blocked", "severity"), [(4, Severity.INFO), (5, Severity.WARNING), (150, Severity.WARNING)])
def test_the_severity_follows_from_the_share_of_training_time(blocked, severity):
    # 4 of 190 + 4 is 2.1%, at a confidence of 90%.
    (found,) = judge(rank(0, plan=blocked, total=blocked, step_ns=(95, 95, 95))).findings
    assert found.severity is severity


def test_without_a_metrics_log_the_share_is_unknown():
    (found,) = judge(drawn_traces.trace("step 01\ncompute ab", checkpoints=save_log(plan=5, total=50))).findings
    assert found.impact == 0.0
    assert "% of the time" not in found.message
    assert found.confidence == 0.6


def test_the_median_save_is_quoted(wording):
    three = [
        save_log(write=dur_ns, total=dur_ns).with_columns(
            checkpoint=pl.lit(f"step-{step}"), step=pl.lit(step), start_ns=pl.lit(1000 * step)
        )
        for step, dur_ns in ((2, 90), (4, 30), (6, 50))
    ]
    trace = drawn_traces.trace(
        "step 01\ncompute ab", checkpoints=pl.concat(three), metrics=metrics("step_time_ns", *[100] * 7)
    )
    (found,) = judge(trace).findings
    wording(found.message)
    assert found.evidence["checkpoint"].to_list() == ["step-6"] * 2 + ["step-2"] * 2 + ["step-4"] * 2


def test_a_save_in_the_background_does_not_block():
    table = save_log(write=50, total=50).with_columns(blocking=pl.lit(value=False))
    assert judge(drawn_traces.trace("step 01\ncompute ab", checkpoints=table)).findings == ()


def test_a_save_that_is_in_the_background_already_is_not_to_be_moved_there(wording):
    table = save_log(stage=40, plan=5, total=50)
    (blocking,) = judge(drawn_traces.trace("step 01\ncompute ab", checkpoints=table)).findings
    own = table.with_columns(call=pl.lit("dcp.async_save"))
    (background,) = judge(drawn_traces.trace("step 01\ncompute ab", checkpoints=own)).findings
    wording(blocking.fix)
    wording(background.fix)


TWO_STEPS = """
    step     00000000001111111111
    compute  aaaaaaaaa.aaaaaaaa..
"""


def other_recorder(*spans: tuple[str, int, int], kind="annotation"):
    """Return a trace of another recorder: no manifest and no log, only spans."""
    rows = [ops((name, kind, start, end), step=start // 10) for name, start, end in spans]
    table = pl.concat(rows).with_columns(id=pl.int_range(len(rows), dtype=pl.Int64)) if rows else schema.OPS.empty()
    return drawn_traces.trace(TWO_STEPS, ops=table)


def test_two_spans_of_saves_cost_the_time_in_which_the_device_is_idle(wording):
    # The device works for 1 of the 2 of the first save, and 1 of the 3 of the second.
    (found,) = judge(other_recorder(("## checkpoint", 8, 10), ("## checkpoint", 17, 20))).findings
    assert (found.severity, found.impact, found.cost_ns) == (Severity.WARNING, 0.15, 1)
    wording(found.message)
    assert found.evidence.select("start_ns", "dur_ns").rows() == [(8, 2), (17, 3)]


def test_one_short_save_is_priced_and_may_be_rare(wording):
    (found,) = judge(other_recorder(("dcp.save", 8, 10))).findings
    assert (found.severity, found.impact) == (Severity.WARNING, 0.05)
    wording(found.message)


def test_one_save_that_costs_more_than_a_step_is_a_warning_at_what_its_step_takes_longer():
    picture = f"step 0000000000{'1' * 40}2222222222\ncompute aaaaaaaaaaaaaa{'.' * 32}aaaabbbbbbbbbb"
    (found,) = judge(drawn_traces.trace(picture, ops=ops(("dcp.save", "annotation", 12, 46), step=1))).findings
    assert (found.severity, found.cost_ns) == (Severity.WARNING, 32 // 3)  # idle for 32; steps without saves take 10


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tracekit::checkpoint", "annotation"),
        ("tracekit::checkpoint.write", "annotation"),
        ("## checkpoint", "annotation"),
        ("dcp.save", "annotation"),
        ("torch.save", "annotation"),
        ("[pl][profile][Strategy]DDPStrategy.save_checkpoint", "annotation"),
        ("Trainer._save_checkpoint", "annotation"),
        ("[pl][profile]save_checkpoint", "annotation"),
        ("checkpoint_save", "annotation"),
        ("checkpoint_write", "annotation"),
        ("Checkpoint Save", "annotation"),
        ("Checkpointing", "annotation"),
        ("CheckpointManager.save", "annotation"),
        ("dist_checkpointing.save", "annotation"),
        ("Snapshot.take", "annotation"),
        ("accelerate/accelerator.py(3100): save_state", "python"),
        ("megatron/training/checkpointing.py(310): save_checkpoint", "python"),
        ("torch/serialization.py(942): save", "python"),
        ("torch/distributed/checkpoint/state_dict_saver.py(60): save", "python"),
        ("torch/distributed/checkpoint/state_dict_saver.py(392): _save_state_dict", "python"),
        ("transformers/trainer.py(3100): _save_checkpoint", "python"),
    ],
)
def test_spans_of_saves_are_recognized_by_name(name, kind):
    assert save_stages.save_spans(other_recorder((name, 8, 10), kind=kind)).height == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("torch/utils/checkpoint.py(450): checkpoint", "python"),
        ("CheckpointFunctionBackward", "annotation"),
        ("checkpoint_recompute", "annotation"),
        ("checkpoint_save_activations", "annotation"),
        ("dcp.query.route.explicit_all_gather", "annotation"),
        ("## forward", "annotation"),
        ("tracekit::forward", "annotation"),
        ("aten::save_for_backward", "annotation"),
        ("load_checkpoint", "annotation"),
        ("dcp.load", "annotation"),
        ("dcp.save", "cpu_op"),
    ],
)
def test_activation_checkpointing_and_loads_are_not_saves(name, kind):
    assert save_stages.save_spans(other_recorder((name, 8, 10), kind=kind)).is_empty()


def test_nested_and_adjacent_spans_are_one_save_with_the_outer_name():
    spans = save_stages.save_spans(other_recorder(("dcp.save", 2, 8), ("torch.save", 3, 5), ("torch.save", 8, 9)))
    assert spans.select("name", "start_ns", "dur_ns").rows() == [("dcp.save", 2, 7)]


def test_a_run_of_another_recorder_without_saves_is_a_blind_spot():
    report = judge(other_recorder())
    assert report.findings == ()
    assert "no checkpoint log" in report.notes[0]


def test_a_run_with_a_manifest_and_without_saves_has_no_findings():
    report = judge(other_recorder(), strategy="ddp")
    assert (report.findings, report.notes) == ((), ())
