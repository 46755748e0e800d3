"""Eight slow runs as a new user meets them: from the list of a folder to the cause, its place and its fix by clicks."""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import polars as pl
import pytest
from playwright.sync_api import expect

from dashboard.pages.runs import ROW_PX
from tests.browser.conftest import WAIT_MS, assert_clean, served, settle
from tests.browser.grid import HEADER_PX, ROWS, TABLE, select
from tests.browser.test_timeline_page import Shown
from tests.support.selection import others_in_accuracy
from tracekit.analysis.time import breakdown
from tracekit.ingest import loader
from tracekit.report import phrases, quoted_moment
from tracekit.rules import engine

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
ROOT = Path(__file__).parents[2]
SAMPLES, SHARED = ROOT / "sample_traces", ROOT.parent / "shared" / "traces"
OPEN_X = 520  # in the column whose links open a run


@dataclass(frozen=True)
class Story:
    """A slow run: its folder, and the finding that a person must meet first, with the rank and step of its moment."""

    folder: Path
    code: str
    rank: int
    step: int
    fix: str


STORIES = {
    story.folder.name: story
    for story in (
        Story(SAMPLES / "faults" / "slow-rank", "RANK001", 1, 4, "aten::matmul on rank 1 only"),
        Story(SAMPLES / "faults" / "slow-disk", "CKPT001", 0, 6, "dcp.async_save"),
        Story(SAMPLES / "parallelism" / "pipeline-slow-stage", "PIPE002", 1, 5, "aten::matmul on stage 1 only"),
        Story(SAMPLES / "faults" / "no-prefetch", "COMM001", 1, 3, "overlap the next all-gather"),
        Story(SHARED / "nanogpt_h100_8ranks", "HOST001", 1, 13, "CUDA graphs"),
        Story(SHARED / "megatron_tp8_a100_8ranks", "HOST001", 0, 3, "CUDA graphs"),
    )
}
OUT_OF_MEMORY = ROOT / "tests" / "recordings" / "out_of_memory" / "leak"
BEFORE, AFTER = SAMPLES / "ci" / "green", SAMPLES / "ci" / "red"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all runs, none of which was checked."""
    runs = tmp_path_factory.mktemp("stories")
    for source in (*(story.folder for story in STORIES.values()), OUT_OF_MEMORY, BEFORE, AFTER):
        if source.is_dir():
            shutil.copytree(source, runs / source.name)
    for file in runs.rglob("*.*"):
        os.utime(file, (time.time() - 3600,) * 2)
    return runs


@pytest.fixture(scope="module")
def stories(folder, tmp_path_factory):
    with served(folder, tmp_path_factory.mktemp("outside")) as started:
        yield started


def list_runs(page, server):
    """Open the dashboard, and wait until no row moves: each run has its verdict."""
    page.goto(server.url)
    expect(page.locator(".tk-title b").filter(has_text="Runs")).to_be_visible()
    expect(page.locator(".tk-headline")).not_to_contain_text("runs checked")
    settle(page)


def open_run(page, name):
    """Search for a run, which scrolls to it, and click on the link in its row; return the new tab of the browser."""
    find = page.get_by_placeholder("Search name")
    find.fill(name)
    find.press("Enter")
    expect(page.locator(ROWS)).to_have_count(1)
    settle(page)
    link = {"x": OPEN_X, "y": HEADER_PX + ROW_PX / 2}
    page.locator(TABLE).first.hover(position=link)
    page.wait_for_timeout(1000)  # the canvas has no element that says that it knows where the mouse is
    with page.context.expect_page() as opened:
        page.locator(TABLE).first.click(position=link)
    return opened.value


def quoted_place(run, code):
    """Rank, step, begin and duration of the moment that the finding of a rule quotes, in ns since the run began."""
    report = engine.check(run)
    finding = next(finding for finding in report.findings if finding.code == code)
    row = quoted_moment.quoted_row(finding)
    evidence = pl.DataFrame([row], schema=finding.evidence.schema)
    (place,) = phrases.from_run_start(evidence, breakdown.run_clock(run)).to_dicts()
    late_ranks = [row[column] for column in phrases.LATE_RANK_COLUMNS if row.get(column) is not None]
    return late_ranks[0] if late_ranks else row["rank"], row.get("step"), place["start_ns"], place["dur_ns"]


@pytest.mark.parametrize("name", others_in_accuracy(STORIES, ["slow-rank", "nanogpt_h100_8ranks"]))
def test_two_clicks_lead_to_the_cause_its_fix_and_its_place(page, stories, folder, name):
    story = STORIES[name]
    if not story.folder.is_dir():
        pytest.skip(f"needs ../shared/traces/{name}, which is not part of the project")
    list_runs(page, stories)
    opened = open_run(page, name)
    expect(opened.locator(".tk-verdict b").first).to_be_visible()
    settle(opened)
    card = opened.locator(".tk-finding").filter(visible=True).first
    expect(card.locator(".tk-code")).to_contain_text(story.code)
    expect(card.locator("p.fix")).to_contain_text(story.fix)
    opened.get_by_role("button", name="Show in the timeline").filter(visible=True).first.click()
    shown = Shown(opened)
    shown.wait(f"e.sharp === 'true' && e.lead?.split(' ')[0] === '{story.rank}'")
    rank, step, start_ns, dur_ns = quoted_place(loader.load(folder / name, cache=False), story.code)
    assert (rank, step) == (story.rank, story.step)
    begin_ns, end_ns = shown.view
    assert begin_ns <= start_ns
    assert start_ns + dur_ns <= end_ns
    assert end_ns - begin_ns <= 4 * dur_ns + 4_001
    address = parse_qs(urlsplit(opened.url).query)
    assert story.code in address["finding"][0]
    assert_clean(page)


def test_a_run_that_ran_out_of_memory_says_which_line_leaks(page, stories):
    list_runs(page, stories)
    opened = open_run(page, OUT_OF_MEMORY.name)
    headline = opened.locator(".tk-headline").first
    expect(headline).to_contain_text("Out of memory")
    expect(headline).to_contain_text("grows by 16 MiB a step")
    assert_clean(page)


def test_a_regression_between_two_runs_says_what_got_slower_and_why(page, stories):
    list_runs(page, stories)
    select(page, BEFORE.name, AFTER.name)
    compare = page.get_by_role("button", name="Compare 2")
    expect(compare).to_be_enabled()
    settle(page)
    compare.click()
    headline = page.locator(".tk-headline").first
    expect(headline).to_contain_text("red is 2.0 times slower")
    expect(headline).to_contain_text("waiting for data +138 ms at data.py:20")
    assert_clean(page)
