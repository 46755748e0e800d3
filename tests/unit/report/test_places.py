"""Where a finding is, in words, and the mean step that savings are shares of."""

from dataclasses import replace

import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces
from tests.support.cli_runner import ROOT
from tests.support.selection import others_in_accuracy
from tracekit.analysis.time import breakdown
from tracekit.report import phrases, text
from tracekit.rules import data_quality, engine
from tracekit.rules.rule import Finding, IgnoredFinding, Severity

WAIT = {"rank": 2, "step": 11, "op": "all_gather", "phase": "optimizer"}


def place(ranks: tuple[int, ...], **row: object) -> str:
    return phrases.place(Finding("RANK001", Severity.WARNING, "", "", ranks=ranks, evidence=pl.DataFrame([row])))


@pytest.mark.parametrize("column", phrases.LATE_RANK_COLUMNS)
def test_a_late_rank_stands_first_and_then_who_waits_for_it(column: str) -> None:
    at, what = place((6,), **WAIT, **{column: 6}).split(": ")
    assert at == "rank 6, step 11"
    assert what == "late for the all-gather in optimizer, where rank 2 waits"


def test_ranks_that_are_late_together_are_all_named() -> None:
    assert place((4, 5, 6), **WAIT, late_rank=4).startswith("ranks 4–6, step 11: ")


def test_the_late_rank_of_ranks_in_turn_is_that_of_the_row() -> None:
    # RANK003 lists all ranks that wait.
    assert place((0, 1, 2), **WAIT, peer_rank=1).startswith("rank 1, step 11: ")


def test_a_late_rank_without_the_one_that_waits_is_a_row_like_others() -> None:
    assert place((6,), step=11, op="all_gather", late_rank=6) == "rank 6, step 11: all-gather"


def test_a_row_without_a_late_rank_is_where_it_is() -> None:
    assert place((2,), **WAIT).startswith("rank 2, step 11: all-gather")
    assert place((2,), rank=2, step=1, unit="10") == "rank 2, step 1: module 10"


def test_a_rank_of_a_pipeline_stands_with_its_stage_and_a_save_apart_from_steps() -> None:
    assert place((2,), rank=2, step=5, stage=1) == "rank 2 (stage 1), step 5"
    save = Finding("CKPT001", Severity.WARNING, "", "", steps=(6,), ranks=(0,), is_of_training=True)
    rows = pl.DataFrame([{"rank": 0, "step": 6, "stage": "total"}])
    assert phrases.place(replace(save, evidence=rows)) == "rank 0, save at step 6"


@pytest.mark.parametrize(
    "name",
    others_in_accuracy(
        ["ci/red", "demo-fsdp2", "parallelism/moe-ep2", "parallelism/cp-ring"], ["ci/red", "parallelism/cp-ring"]
    ),
)
def test_costs_are_shares_of_the_mean_step(name: str) -> None:
    run = tracekit.load(ROOT / "sample_traces" / name)
    mean_ns = breakdown.mean_step_ns(run)
    costly = [f for f in run.check().findings if f.cost_ns and f.impact and not f.is_of_training]
    assert costly
    for finding in costly:
        assert finding.cost_ns / finding.impact == pytest.approx(mean_ns, rel=0.005), finding.id


def test_the_mean_step_is_of_one_rank_and_may_be_below_the_median_step() -> None:
    # Ranks 0 and 1 are slow by turns, as where each waits for the other in every second step.
    pictures = ("step 000000001111\ncompute CCCCCCCCDDDD", "step 000011111111\ncompute CCCCDDDDDDDD")
    run = drawn_traces.run(*(drawn_traces.trace(picture, rank=rank) for rank, picture in enumerate(pictures)))
    assert breakdown.mean_step_ns(run) == 6
    assert breakdown.step_time_ns(run) == 8
    assert "6 ns a step, median 8 ns" in text.render(engine.check(run), run, width=120)


def test_only_without_ignored_findings_no_single_cause_is_said_to_cost_three_percent() -> None:
    report = tracekit.load(ROOT / "sample_traces" / "faults" / "healthy-ddp").check()
    assert "3%" in phrases.no_problems(report)
    ignored = IgnoredFinding(Finding("COMM001", Severity.WARNING, "", ""), "known")
    assert phrases.no_problems(replace(report, ignored=(ignored,))) == "No problems found"


def test_a_cut_file_is_named_before_what_follows_from_it() -> None:
    issues = [Finding("DATA001", Severity.WARNING, "", "", subject=kind) for kind in ("unaligned", "truncated", "x")]
    assert min(issues, key=data_quality.cause_order).subject == "truncated"


@pytest.mark.parametrize(
    ("name", "expected"), [("ProfilerStep#11", "rank 1, step 11"), ("sample", "rank 1, step 11: in sample")]
)
def test_a_stall_is_in_what_the_host_does_and_before_nothing(name: str, expected: str) -> None:
    assert place((1,), rank=1, step=11, cause="other", detail="python", name=name) == expected
