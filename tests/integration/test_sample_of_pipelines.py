"""The recorded pipelines: measured bubbles beside the schedule's own, and the stage that was made slower."""

from pathlib import Path

import polars as pl
import pytest

import tracekit
from tracekit.analysis.parallelism import pipeline_bubbles

SAMPLES = Path(__file__).parents[2] / "sample_traces" / "parallelism"


def bubbles(name: str) -> pl.DataFrame:
    return tracekit.load(SAMPLES / name).table(pipeline_bubbles.pipeline_bubbles)


@pytest.mark.parametrize("name", ["pipeline-1f1b", "pipeline-interleaved", "pipeline-slow-stage"])
def test_measured_bubbles_are_the_schedules_own_within_three_points(name: str) -> None:
    table = bubbles(name)
    assert table.unique(["step", "rank"]).height == 2 * 4
    assert (table["bubble_ratio"] - table["ideal_bubble_ratio"]).abs().max() < 0.03  # type: ignore[operator]


def test_the_interleaved_pipeline_has_two_stages_on_each_rank() -> None:
    table = bubbles("pipeline-interleaved")
    assert table["stages_per_rank"].unique().to_list() == [2]
    assert table["formula_bubble_ratio"].unique().to_list() == [pytest.approx(1 / 9)]


def test_the_slow_stage_and_no_other_is_named() -> None:
    findings = tracekit.check(tracekit.load(SAMPLES / "pipeline-slow-stage")).findings
    (found,) = (each for each in findings if each.code == "PIPE002")
    assert (found.subject, found.ranks) == ("stage 1", (1,))
    assert not any(each.code.startswith("RANK") for each in findings)


def test_a_pipeline_of_equal_stages_has_no_finding_of_its_stages() -> None:
    findings = tracekit.check(tracekit.load(SAMPLES / "pipeline-1f1b")).findings
    assert not [each.code for each in findings if each.code.startswith(("PIPE", "RANK"))]
