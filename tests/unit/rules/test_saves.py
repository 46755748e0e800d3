"""What the rules on stalls, background saves and safekeeping say, beyond firing and staying silent."""

import pytest

from tests.support import rule_examples
from tests.support.rule_examples import PROOFS, stalling, writing
from tracekit.rules import background_save, checkpoint_policy, save_stalls
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
def test_each_stall_is_of_one_class(rule):
    found = judge(PROOFS[rule.code].fires(), *CLASSES)
    assert [finding.code for finding in found] == [rule.code]
    assert found[0].severity is Severity.WARNING


def test_the_impact_is_the_class_s_share_of_what_the_save_costs():
    # 500 ms of 2 s and 500 ms, and 400 ms of that are writing.
    (found,) = judge(stalling({"write": 400, "total": 500}), save_stalls.SlowStorage)
    assert found.impact == pytest.approx(0.2 * 0.8)
    assert found.cost_ns == 200_000_000


def test_without_step_times_the_class_is_information():
    run = stalling({"write": 400, "total": 500}, steps_ms=())
    (found,) = judge(run, save_stalls.SlowStorage)
    assert (found.severity, found.impact) == (Severity.INFO, 0.0)


def test_the_rate_that_storage_gives_is_told():
    run = stalling({"write": 400, "total": 500}, columns={"write": {"bytes": 4 * 10**6}})
    assert "rank 0 writes 3.81 MiB at 10 MB/s" in judge(run, save_stalls.SlowStorage)[0].message


def test_the_straggler_is_named_and_shown_first():
    (found,) = judge(writing((10**9, 50), (10**9, 450)), save_stalls.StragglingWriter)
    assert found.ranks == (1,)
    assert "rank 1's node" in found.fix
    assert found.evidence.select("rank", "stage").row(0) == (1, "write")


def test_many_small_tensors_are_told_by_what_is_no_tensor():
    columns = {"stage": {"bytes": 40}, "write": {"bytes": 100}}
    run = stalling({"stage": 5, "serialize": 400, "write": 50, "total": 500}, columns=columns)
    assert "60.0% of the bytes of rank 0 are not tensor data" in judge(run, save_stalls.SerializedSave)[0].message


def test_the_lock_and_the_processors_are_told_apart_by_what_the_thread_waited_for():
    locked = rule_examples.beside(cpu_ns=1200, run_delay_ns=100)
    crowded = rule_examples.beside(cpu_ns=900, run_delay_ns=1000)  # 0.1 s of 2 s are neither
    both = (background_save.LockedOut, background_save.CrowdedOut)
    assert [[f.code for f in judge(run, *both)] for run in (locked, crowded)] == [["CKPT009"], ["CKPT010"]]


def test_where_both_hold_training_up_both_are_said():
    run = rule_examples.beside(cpu_ns=600, run_delay_ns=1000)
    found = {finding.code: finding for finding in judge(run, background_save.LockedOut, background_save.CrowdedOut)}
    assert found["CKPT009"].confidence < found["CKPT010"].confidence


def test_without_counters_the_lock_is_less_certain():
    without, counted = (
        judge(run, background_save.LockedOut)[0]
        for run in (rule_examples.beside(), rule_examples.beside(cpu_ns=1200, run_delay_ns=1))
    )
    assert without.confidence < counted.confidence


def test_a_save_beside_which_steps_are_as_ever_holds_nobody_up():
    assert judge(rule_examples.beside(after_ms=105), background_save.LockedOut) == ()


def test_a_call_that_blocks_is_told_with_what_it_does():
    run = stalling(
        {"stage": 400, "total": 500, "complete": 900},
        columns={"complete": {"blocking": False}},
    )
    (found,) = judge(run, background_save.BlockingBackgroundSave)
    assert "blocks training for 500 ms (step-2, complete after 900 ms)" in found.message
    assert "device-to-host, 400 ms" in found.message
    assert found.impact == pytest.approx(0.2)


def test_an_upload_that_is_waited_for_costs_what_lies_between_saves_beyond_steps():
    # Saves every 3 s, 20 steps of 100 ms between them.
    (found,) = judge(rule_examples.again(uploads_ms=2990), background_save.BlockingBackgroundSave)
    assert found.impact == pytest.approx(1 / 3)


def test_a_slow_restore_is_a_warning():
    rule = checkpoint_policy.AmplifiedRestore(max_load_s=0.005)
    assert judge(rule_examples.restoring(10, 10, whole_bytes=10), rule)[0].severity is Severity.WARNING


def test_without_a_time_between_failures_no_interval_is_judged():
    assert judge(PROOFS["CKPT013"].fires(), checkpoint_policy.UnwiseInterval) == ()


@pytest.mark.parametrize(("step_ms", "told"), [(1000, "too frequent"), (147_000, None), (1_000_000, "too rare")])
def test_the_interval_is_set_against_daly_s(step_ms, told):
    # 0.5 s a save, a failure a day: √(2 · 0.5 · 86400) = 294 s.
    run = stalling({"write": 500, "total": 500}, steps_ms=(step_ms,) * 3)
    found = judge(run, checkpoint_policy.UnwiseInterval(mtbf_s=86400))
    assert [told in finding.message for finding in found] == ([True] if told else [])
    assert all("294 s" in finding.fix or "293 s" in finding.fix for finding in found)


def test_metadata_synced_too_early_and_files_never_synced_have_fixes_of_their_own():
    total = {"total": {"durable": False, "bytes": 5}, "write": {"bytes": 5}}
    early = stalling({"write": 300, "fsync": 100, "total": 500}, columns=total)
    never = stalling({"write": 400, "total": 500}, columns=total)
    words = [judge(run, checkpoint_policy.LostOnPowerFailure)[0].message for run in (early, never)]
    assert "before it is flushed" in words[0]
    assert "no file is synced" in words[1]


def test_what_our_trainers_seal_is_verified():
    run = stalling({"write": 5, "total": 5}, every={"call": "dcp.save"}, arguments={"checkpoint_every": 2})
    assert judge(run, checkpoint_policy.UnverifiedShards) == ()


def test_what_several_ranks_write_to_one_file_is_counted_beyond_the_first():
    (found,) = judge(PROOFS["CKPT017"].fires(), checkpoint_policy.SeveralWriters)
    assert "2 ranks write the same file (step-2 (step 2)): 8 B of 16 B are written more than once." in found.message
