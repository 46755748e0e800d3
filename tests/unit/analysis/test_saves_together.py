"""What is saved after one step is analyzed together: several files of one save, and several saves."""

import re
from dataclasses import replace

import polars as pl
import pytest

from tests.support import drawn_traces, sample_baselines
from tests.support.rule_examples import MS, metrics
from tests.support.wording import Wording
from tracekit.analysis.checkpoint import saves
from tracekit.analysis.checkpoint.saves import planning_inputs
from tracekit.analysis.compute import step_charges
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.regression import baseline, budgets
from tracekit.regression import gate as checks
from tracekit.regression.budgets import BudgetOutcome, parse
from tracekit.regression.samples import samples
from tracekit.rules.background_save import BlockingBackgroundSave
from tracekit.rules.checkpoint import BlockingCheckpoint
from tracekit.rules.checkpoint_policy import SuboptimalInterval
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

STEP_MS, EVERY = 100, 10
MODEL, OPTIMIZER = ("step-{}/model.pt", "torch.save", 200), ("step-{}/optim.pt", "torch.save", 1200)
LARGE, TINY = ("step-{}", "dcp.save", 1000), ("extra/step-{}/loader.pt", "torch.save", 20)
Saved = tuple[str, str, int]


def saving(*each: Saved, count: int = 8, model: object = None, **columns: object) -> Run:
    """Return a rank that every 10 steps of 100 ms writes all of these one by one: name, call and ms of each."""
    rows = []
    for save in range(1, count + 1):
        at_ms = save * (EVERY * STEP_MS + sum(ms for _, _, ms in each))
        for name, call, took_ms in each:
            took_ms += save  # no two saves take the same time
            line = {"checkpoint": name.format(save * EVERY), "operation": "save", "step": save * EVERY, "call": call}
            line |= {"start_ns": at_ms * MS, "dur_ns": took_ms * MS, "blocking": True, "bytes": took_ms * MS}
            rows += [line | {"stage": stage} for stage in ("write", "total")]
            at_ms += took_ms
    log = schema.CHECKPOINTS.conform(pl.DataFrame(rows).with_columns(pl.lit(v).alias(k) for k, v in columns.items()))
    times = metrics("step_time_ns", *[float(STEP_MS * MS)] * (EVERY * count + 1))
    return drawn_traces.run(
        drawn_traces.trace("step 01\ncompute ab", checkpoints=log, metrics=times), strategy="ddp", model=model
    )


def test_a_sample_of_a_save_is_the_sum_of_its_files() -> None:
    saved = samples(saving(MODEL, OPTIMIZER, count=1).trace(0)).filter(pl.col("metric").str.starts_with("checkpoint"))
    # The log has neither processor time nor calls.
    assert dict(saved.select("metric", "value").rows()) == {
        "checkpoint_blocked_ns": 1402.0 * MS,
        "checkpoint_written_bytes": 1402.0 * MS,
    }


def test_saves_without_a_step_are_samples_of_their_own() -> None:
    saved = samples(saving(MODEL, OPTIMIZER, count=1, step=None).trace(0))
    assert saved.filter(pl.col("metric") == "checkpoint_blocked_ns")["value"].to_list() == [201.0 * MS, 1201.0 * MS]


def test_the_median_save_includes_all_its_files() -> None:
    (work,) = step_charges.save_work(saving(MODEL, OPTIMIZER, count=3).trace(0)).iter_rows(named=True)
    assert (work["name"], work["amount"]) == ("write", 1404.0 * MS)


@pytest.mark.parametrize(("slower_ms", "expected"), [(3600, ["checkpoint_blocked_ns"]), (1210, [])])
def test_a_slower_second_file_is_a_regression(slower_ms: int, expected: list[str]) -> None:
    before, after = (saving(MODEL, (*OPTIMIZER[:2], took_ms)) for took_ms in (1200, slower_ms))
    base = baseline.of_reports([(sample_baselines.report(before), before)])
    gate = checks.judge(sample_baselines.report(after), None, baseline=base)
    assert [each.metric for each in gate.regressions if each.metric == "checkpoint_blocked_ns"] == expected


@pytest.mark.parametrize("each", [(LARGE,), (LARGE, TINY), (TINY, LARGE)], ids=["alone", "tiny after", "tiny before"])
def test_a_tiny_save_does_not_hide_a_large_one(each: tuple[Saved, ...], wording: Wording) -> None:
    run = saving(*each)
    (found,) = check(run, [BlockingCheckpoint()]).findings
    assert found.severity is Severity.WARNING
    assert found.impact == pytest.approx(0.5, abs=0.01)
    wording(found.message)
    assert ("and 1 more after that step" in found.message) == (len(each) > 1)
    assert found.evidence["checkpoint"][0] == "step-40"
    (budget,) = budgets.check(run, parse({"checkpoint_overhead_ratio": "30%"}).budgets)
    assert (budget.outcome, budget.measured) == (BudgetOutcome.BROKEN, pytest.approx(0.5, abs=0.01))
    (interval,) = check(run, [SuboptimalInterval(mtbf_s=86400)]).findings
    (saved_s,) = re.findall(r"with ([\d.]+) s per save", interval.message)
    assert float(saved_s) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("each", [(LARGE,), (LARGE, TINY), (TINY, LARGE)])
def test_without_step_times_the_interval_is_the_time_between_saves_of_two_steps(each: tuple[Saved, ...]) -> None:
    trace = saving(*each).trace(0)
    run = drawn_traces.run(replace(trace, metrics=trace.metrics.clear()))
    found = run.table(saves.by_save)["interval_ns"].unique().to_list()
    assert found == [pytest.approx(EVERY * STEP_MS * MS, rel=0.02)]


def test_independent_saves_of_ranks_at_one_step_are_concurrent() -> None:
    own = [saving((f"rank{rank}/step-{{}}/a.pt", "torch.save", 500), count=1).trace(0) for rank in (0, 1)]
    run = drawn_traces.run(own[0], drawn_traces.trace("step 01\ncompute ab", rank=1, checkpoints=own[1].checkpoints))
    each = run.table(saves.by_save)
    assert each["blocked_ns"].to_list() == [501 * MS] * 2
    (row,) = saves.by_training_step(each, run.table(saves.by_rank)).iter_rows(named=True)
    assert (row["blocked_ns"], row["saves"]) == (501 * MS, 2)


def test_saves_without_a_step_are_separate() -> None:
    run = saving(LARGE, TINY, count=3, step=None)
    assert saves.by_training_step(run.table(saves.by_save), run.table(saves.by_rank))["saves"].to_list() == [1] * 6


@pytest.mark.parametrize("each", [(MODEL, OPTIMIZER), (MODEL, OPTIMIZER, TINY), (OPTIMIZER, LARGE)])
def test_planning_inputs_cover_everything_saved_after_a_step(each: tuple[Saved, ...]) -> None:
    inputs = planning_inputs(saving(*each, model={"parameters": 10**6}))
    whole_s = sum(took_ms for _, _, took_ms in each) / 1000
    assert inputs.saves == 8
    assert inputs.interval_seconds == pytest.approx(EVERY * STEP_MS / 1000 + whole_s)
    assert inputs.blocked_seconds == pytest.approx(whole_s, rel=0.02)
    assert inputs.checkpoint_bytes == pytest.approx(whole_s * 1e9, rel=0.02)
    assert inputs.bytes_per_param == pytest.approx(whole_s * 1000, rel=0.02)
    assert inputs.write_bytes_per_second == pytest.approx(1e9)  # a byte a nanosecond


def test_files_with_total_bytes_only_count_like_those_with_bytes_by_stage() -> None:
    trace = saving(MODEL, OPTIMIZER, count=1).trace(0)
    of_model = pl.col("checkpoint").str.ends_with("model.pt") & (pl.col("stage") == "write")
    log = trace.checkpoints.with_columns(bytes=pl.when(~of_model).then("bytes"))
    assert planning_inputs(drawn_traces.run(replace(trace, checkpoints=log))).checkpoint_bytes == 1402 * MS


def uploading(uploads_ms: int, *others: Saved) -> Run:
    """Return a rank that every second writes `others`, then saves in the background for `uploads_ms`."""
    trace = saving(*others, ("step-{}", "dcp.async_save", uploads_ms), count=4).trace(0)
    background = pl.col("call") == "dcp.async_save"
    log = trace.checkpoints.with_columns(blocking=~background)
    # Training continues during an upload.
    early_ms = (pl.col("step") // EVERY - 1) * uploads_ms
    return drawn_traces.run(replace(trace, checkpoints=log.with_columns(start_ns=pl.col("start_ns") - early_ms * MS)))


TWICE = (("a/step-{}", "dcp.async_save", 300),)


@pytest.mark.parametrize("others", [(), (TINY,), TWICE], ids=["alone", "a small save before", "another before"])
@pytest.mark.parametrize(("uploads_ms", "expected"), [(500, 0), (1100, 1)])
def test_only_a_previous_background_save_can_block_a_save(
    others: tuple[Saved, ...], uploads_ms: int, expected: int
) -> None:
    found = check(uploading(uploads_ms, *others), [BlockingBackgroundSave()]).findings
    assert len(found) == expected
    assert all("the upload takes 1.1 s" in each.message for each in found)
    assert all("saves come every 1 s" in each.message for each in found if not others)
