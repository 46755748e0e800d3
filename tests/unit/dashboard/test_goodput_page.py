"""The goodput of a run's job on the dashboard: the numbers of `tracekit goodput`, as a band over time."""

import json
import shutil

import pytest

from tests.support.cli_runner import ROOT, tracekit
from tests.support.dashboard_pages import html_of, page

RUN, JOB = ROOT / "sample_traces" / "ci" / "green", ROOT / "tests" / "recordings" / "goodput"


@pytest.fixture
def run(tmp_path):
    """A run with traces and the attempts of a job that was killed five times."""
    folder = tmp_path / "job"
    shutil.copytree(RUN, folder)
    for name in ("attempts.jsonl", "rank00000.checkpoint.jsonl"):
        shutil.copy(JOB / name, folder / name)
    return folder


def test_the_page_has_the_numbers_of_the_command(run):
    shown = page("memory", run, tab="goodput")
    assert not shown.exception
    account = json.loads(tracekit("goodput", run, "--format", "json").stdout)
    (chart,) = (json.loads(element.proto.spec) for element in shown.get("plotly_chart"))
    drawn = {trace["name"]: trace for trace in chart["data"]}
    assert len(drawn) == len([time_class for time_class in account["classes"] if time_class["time_ns"]])
    productive = drawn["productive steps"]
    widths, shares = productive["width"], productive["y"]
    ratio = sum(width * share for width, share in zip(widths, shares, strict=True)) / sum(widths) / 100
    assert ratio == pytest.approx(account["productive_ratio"], rel=1e-3)
    text = html_of(shown)
    assert f"{100 * account['productive_ratio']:.1f}% of" in text
    assert text.count("SIGKILL") == 5


def test_a_damaged_log_is_no_tab_and_one_sentence(run):
    (run / "attempts.jsonl").write_text("{}\n" * 3, encoding="utf-8")
    shown = page("memory", run, tab="goodput")
    assert not shown.exception
    assert any("no line states the start of an attempt" in caption.value for caption in shown.caption)


def test_without_an_attempts_log_the_page_says_what_writes_one():
    shown = page("memory", RUN, tab="goodput")
    assert not shown.exception
    assert any("has no attempts log" in caption.value for caption in shown.caption)


def test_a_run_without_memory_opens_with_its_saves():
    shown = page("memory", ROOT / "sample_traces" / "faults" / "slow-disk")
    assert not shown.exception
    assert any("no memory events" in caption.value for caption in shown.caption)
    assert "save" in html_of(shown).lower()


def test_a_run_without_any_of_these_says_how_to_record_memory():
    shown = page("memory", RUN)
    assert not shown.exception
    assert any("no memory events" in info.value for info in shown.info)
