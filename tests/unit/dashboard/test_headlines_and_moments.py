"""Each page begins with the sentence that answers its question, and rows of evidence lead to their moments."""

import json
from pathlib import Path

import polars as pl
import pytest

from dashboard import moments
from tests.browser import recorded
from tests.support.dashboard_pages import addressed_pages, component, html_of, page, runs  # noqa: F401  fixtures
from tracekit.report import charts
from tracekit.report.quoted_moment import leading_ranks

SAMPLES = Path(__file__).parents[3] / "sample_traces"
SLOW_RANK = SAMPLES / "faults" / "slow-rank"
WITHOUT_SUBJECT = {"memory"}
"""The run of these tests has no memory events; its page says so."""


def _message(shown):
    sent = component(shown, "timeline").bytes
    return json.loads(sent[4 : 4 + int.from_bytes(sent[:4], "little")])


@pytest.mark.parametrize("address", [each.address for each in addressed_pages()])
def test_each_page_has_one_headline_above_everything_else(runs, address):  # noqa: F811
    shown = page(address, *([runs] if address == "compare" else [runs / recorded.GOOD]))
    assert not shown.exception
    boxes = [element.proto.body for element in shown.get("html") if "tk-headline" in element.proto.body]
    assert len(boxes) == (0 if address in WITHOUT_SUBJECT else 1)
    if boxes:
        first = next(
            e.proto.body for e in shown.get("html") if "tk-title" not in e.proto.body and "<style>" not in e.proto.body
        )
        assert first == boxes[0]


@pytest.mark.parametrize("name", ["demo-fsdp2", "parallelism/pipeline-slow-stage"])
def test_the_headlines_of_saves_memory_and_pipelines_have_their_numbers(name):
    words = {"demo-fsdp2": {("memory", "checkpoints"): "blocks training for", ("memory", "memory"): "at its peak"}}
    for (address, tab), text in words.get(name, {("ranks", "pipeline"): "bubble is 33.7% of a step"}).items():
        assert text in html_of(page(address, SAMPLES / name, tab=tab)).split("tk-headline")[1].split("</b>")[0]


def test_ranks_are_coloured_at_first_by_what_others_lose_to_them():
    shown = page("ranks", SLOW_RANK)
    assert not shown.exception
    assert shown.session_state["colour"] == charts.OTHERS_LOSE
    figure = next(json.loads(each.proto.spec) for each in shown.get("plotly_chart") if each.key.startswith("ranks-map"))
    waits = dict(
        zip((cell[0] for cell in figure["data"][0]["customdata"]), figure["data"][0]["marker"]["color"], strict=False)
    )
    assert set(waits) == {0, 1}


def test_a_moment_with_its_ranks_opens_the_timeline_with_them_at_the_top(runs):  # noqa: F811
    begun_ns = 1_790_000_000_000_000_000
    row = {"run": recorded.GOOD, "window": 0, "rank": 0, "start_ns": begun_ns + 200_000, "dur_ns": 5_000_000}
    message = _message(page("timeline", runs / recorded.GOOD, state={moments.SHOWN: row | {"ranks": (1, 0)}}))
    assert message["go"]["ranks"] == [1, 0]


def test_a_straggler_opens_the_timeline_with_the_late_rank_first():
    shown = page("timeline", SLOW_RANK)
    finding = next(box for box in shown.selectbox if box.label == "Finding")
    finding.select(next(option for option in finding.options if "RANK001" in option)).run()
    assert not shown.exception
    assert _message(shown)["go"]["ranks"] == [1, 0]


EVIDENCE = pl.DataFrame(
    {"window": 0, "rank": [2, 3, 4, 5], "late_rank": [1, 1, 7, None], "start_ns": 5, "dur_ns": [10, 30, 20, 99]}
)


def test_the_late_rank_comes_before_those_that_wait_for_it_longest_first():
    assert leading_ranks(EVIDENCE, EVIDENCE.row(0, named=True)) == (1, 2, 3)
    assert leading_ranks(EVIDENCE, EVIDENCE.row(2, named=True)) == (7, 4)
    assert leading_ranks(EVIDENCE, EVIDENCE.row(3, named=True)) == (5,)
    assert leading_ranks(EVIDENCE.drop("late_rank"), EVIDENCE.drop("late_rank").row(0, named=True)) == (2,)


def test_the_ranks_that_wait_are_those_of_the_same_step():
    later = EVIDENCE.head(1).with_columns(rank=pl.lit(9, pl.Int64), step=pl.lit(1), dur_ns=pl.lit(50, pl.Int64))
    evidence = pl.concat([EVIDENCE.with_columns(step=pl.lit(0)), later], how="diagonal")
    assert leading_ranks(evidence, evidence.row(0, named=True)) == (1, 2, 3)
    assert leading_ranks(evidence, later.row(0, named=True)) == (1, 9)


def test_a_selected_row_of_evidence_names_its_moment_on_the_button(runs):  # noqa: F811
    shown = page("diagnosis", runs / recorded.GOOD)
    labels = [button.label for button in shown.button if button.key and button.key.startswith("show-")]
    assert labels
    assert set(labels) == {"Show in the timeline"}
    key = next(button.key for button in shown.button if button.key and button.key.startswith("show-"))
    selection = f"evidence-{recorded.GOOD}-{key.removeprefix('show-')}"
    state = {selection: {"selection": {"rows": [0], "columns": [], "cells": []}}}
    chosen = page("diagnosis", runs / recorded.GOOD, state=state)
    assert not chosen.exception
