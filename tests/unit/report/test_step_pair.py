"""The two steps that are compared, and their difference in words."""

import re
from pathlib import Path

import pytest

import tracekit
from tests.support import drawn_traces
from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.time import breakdown
from tracekit.report import step_pair

SAMPLE = Path(__file__).parents[3] / "sample_traces" / "demo-fsdp2"
STEP = {"step": 5, "duration_ns": 10_000, "compute_ns": 6_000, "exposed_communication_ns": 3_000}
STEP |= {"exposed_copy_ns": 0, "idle_ns": 1_000}


def test_the_parts_that_differ_are_listed_largest_first(wording):
    other = STEP | {"step": 7, "duration_ns": 12_500, "compute_ns": 5_500, "exposed_communication_ns": 6_000}
    wording(step_pair.sentence(STEP, other))
    wording(step_pair.sentence(other, STEP, names=("new", "old")))


def test_steps_of_the_same_length_are_said_to_be_that(wording):
    wording(step_pair.sentence(STEP, STEP))
    moved = STEP | {"compute_ns": 5_000, "idle_ns": 2_000}
    wording(step_pair.sentence(STEP, moved))


def test_a_recorded_run_offers_its_marked_steps_and_the_representative_one_of_the_report():
    run = tracekit.load(SAMPLE)
    marked = step_pair.marked_steps(run)
    typical = save_stages.representative_step(run)
    assert (marked.rank, marked.step) == (typical["rank"], typical["step"])
    assert marked.table["rank"].unique().sort().to_list() == list(run.ranks)
    by_step = breakdown.slowest_device_by_step(run).filter(rank=0)
    assert marked.steps(0) == by_step["step"].to_list()
    for row in marked.table.iter_rows(named=True):
        assert sum(row[part] for part in step_pair.PARTS) == row["duration_ns"]
    assert marked.row(0, marked.steps(0)[0])["duration_ns"] == by_step["duration_ns"][0]
    with pytest.raises(LookupError, match=re.escape("rank 0 has no step 999")):
        marked.row(0, 999)


def test_of_several_devices_the_slowest_counts():
    run = tracekit.load(SAMPLE)
    table = run.table(breakdown.by_step)
    assert step_pair.marked_steps(run, 0).table.height == table.select("rank", "step").unique().height


def test_a_run_without_marked_steps_has_none_to_compare():
    marked = step_pair.marked_steps(drawn_traces.run(drawn_traces.trace("compute aa.bb")))
    assert (marked.rank, marked.step, marked.table.height) == (None, None, 0)
