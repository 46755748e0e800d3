"""Messages, severity and cost of the rules on blocking saves, background saves and the checkpoint policy."""

import pytest

from tests.support import rule_examples
from tests.support.rule_examples import EXAMPLES, save_run, writer_run
from tracekit.rules import checkpoint, checkpoint_policy, save_stalls
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

CLASSES = (
    save_stalls.SerializedSave,
    save_stalls.StagedSave,
    save_stalls.SlowStorage,
    save_stalls.SlowSync,
    save_stalls.StragglingWriter,
    save_stalls.PlannedSave,
    save_stalls.GlobalSync,
    save_stalls.CrowdedSave,
)


def judge(run, *rules):
    return check(run, [rule() if isinstance(rule, type) else rule for rule in rules]).findings


@pytest.mark.parametrize("rule", CLASSES, ids=lambda rule: rule.code)
def test_exactly_one_class_of_stall_is_reported(rule):
    found = judge(EXAMPLES[rule.code].fires(), *CLASSES)
    assert [finding.code for finding in found] == [rule.code]
    assert found[0].severity is Severity.WARNING


def test_the_impact_is_the_share_of_this_class_in_the_cost_of_the_save():
    # The save takes 500 ms of 2.5 s; 400 ms of it are writing.
    (found,) = judge(save_run({"write": 400, "total": 500}), save_stalls.SlowStorage)
    assert found.impact == pytest.approx(0.2 * 0.8)
    assert found.cost_ns == 200_000_000


def test_without_step_times_the_severity_is_information():
    run = save_run({"write": 400, "total": 500}, steps_ms=())
    (found,) = judge(run, save_stalls.SlowStorage)
    assert (found.severity, found.impact) == (Severity.INFO, 0.0)


def test_the_message_states_the_write_rate(wording):
    run = save_run({"write": 400, "total": 500}, columns={"write": {"bytes": 4 * 10**6}})
    wording(judge(run, save_stalls.SlowStorage)[0].message)


def test_the_straggling_writer_is_named_and_first_in_the_evidence():
    (found,) = judge(writer_run((10**9, 50), (10**9, 450)), save_stalls.StragglingWriter)
    assert found.ranks == (1,)
    assert "rank 1's node" in found.fix
    assert found.evidence.select("rank", "stage").row(0) == (1, "write")


def test_many_small_tensors_are_recognized_by_the_bytes_that_are_not_tensor_data(wording):
    columns = {"stage": {"bytes": 40}, "write": {"bytes": 100}}
    run = save_run({"stage": 5, "serialize": 400, "write": 50, "total": 500}, columns=columns)
    wording(judge(run, save_stalls.SerializedSave)[0].message)


def test_counters_distinguish_waiting_for_the_gil_from_waiting_for_a_core():
    locked = rule_examples.background_save_run(cpu_ns=1200, run_delay_ns=100)
    crowded = rule_examples.background_save_run(
        cpu_ns=900, run_delay_ns=1000
    )  # of 2 s, 0.1 s is neither running nor waiting for a core
    both = (checkpoint.GilContention, checkpoint.CpuStarvation)
    assert [[f.code for f in judge(run, *both)] for run in (locked, crowded)] == [["CKPT009"], ["CKPT010"]]


def test_gil_and_run_delay_are_both_reported_where_both_delay_training():
    run = rule_examples.background_save_run(cpu_ns=600, run_delay_ns=1000)
    found = {finding.code: finding for finding in judge(run, checkpoint.GilContention, checkpoint.CpuStarvation)}
    assert found["CKPT009"].confidence < found["CKPT010"].confidence


def test_without_counters_the_confidence_in_the_gil_is_lower():
    without, counted = (
        judge(run, checkpoint.GilContention)[0]
        for run in (rule_examples.background_save_run(), rule_examples.background_save_run(cpu_ns=1200, run_delay_ns=1))
    )
    assert without.confidence < counted.confidence


def test_a_background_save_that_does_not_slow_steps_is_not_reported():
    assert judge(rule_examples.background_save_run(after_ms=105), checkpoint.GilContention) == ()


def test_a_blocking_call_is_reported_with_its_longest_part(wording):
    run = save_run(
        {"stage": 400, "total": 500, "complete": 900},
        columns={"complete": {"blocking": False}},
    )
    (found,) = judge(run, checkpoint.BlockingBackgroundSave)
    wording(found.message)
    assert found.impact == pytest.approx(0.2)


def test_the_cost_of_waiting_for_an_upload_is_the_time_between_saves_beyond_the_steps():
    # Saves start every 3 s, with 20 steps of 100 ms between them.
    (found,) = judge(rule_examples.repeated_background_saves(uploads_ms=2990), checkpoint.BlockingBackgroundSave)
    assert found.impact == pytest.approx(1 / 3)


def test_a_slow_restore_is_a_warning():
    rule = checkpoint_policy.AmplifiedRestore(max_load_s=0.005)
    assert judge(rule_examples.load_run(10, 10, whole_bytes=10), rule)[0].severity is Severity.WARNING


def test_without_a_mean_time_between_failures_the_interval_is_not_judged():
    assert judge(EXAMPLES["CKPT013"].fires(), checkpoint_policy.SuboptimalInterval) == ()


@pytest.mark.parametrize(("step_ms", "message"), [(1000, "too frequent"), (147_000, None), (1_000_000, "too rare")])
def test_the_interval_is_compared_with_the_best(step_ms, message):
    # 0.5 s per save, one failure per day: √(2 · 0.5 · 86400) = 294 s = 4.9 min.
    run = save_run({"write": 500, "total": 500}, steps_ms=(step_ms,) * 3)
    found = judge(run, checkpoint_policy.SuboptimalInterval(mtbf_s=86400))
    assert [message in finding.message for finding in found] == ([True] if message else [])
    assert all("4.9 min" in finding.fix for finding in found)


def test_metadata_synced_too_early_and_files_never_synced_have_different_messages():
    total = {"total": {"durable": False, "bytes": 5}, "write": {"bytes": 5}}
    early = save_run({"write": 300, "fsync": 100, "total": 500}, columns=total)
    never = save_run({"write": 400, "total": 500}, columns=total)
    messages = [judge(run, checkpoint_policy.LostOnPowerFailure)[0].message for run in (early, never)]
    assert "before it is flushed" in messages[0]
    assert "no file is synced" in messages[1]


def test_checkpoints_of_the_instrumented_trainers_are_verified():
    run = save_run({"write": 5, "total": 5}, every={"call": "dcp.save"}, arguments={"checkpoint_every": 2})
    assert judge(run, checkpoint_policy.UnverifiedShards) == ()


def test_bytes_that_more_than_one_rank_writes_to_a_file_are_counted_without_the_first(wording):
    (found,) = judge(EXAMPLES["CKPT017"].fires(), checkpoint_policy.SeveralWriters)
    wording(found.message)
