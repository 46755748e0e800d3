"""How a run opens in a real browser: with its progress, the late rank first; what fails is named, the rest works."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from benchmarks import cases
from tests.browser.conftest import WAIT_MS, assert_clean, served, settle

# In unit/dashboard, test_first_opening shows progress, test_crashes pages that fail, test_headlines_and_moments ranks.
pytestmark = [pytest.mark.browser, pytest.mark.accuracy]
expect.set_options(timeout=WAIT_MS)
RANKS = 6
SAMPLES = Path(__file__).parents[2] / "sample_traces"
RECORD_PROGRESS = """window.progress = [];
new MutationObserver(() => {
    const bar = document.querySelector("[data-testid=stProgress]");
    if (bar && window.progress.at(-1) !== bar.innerText) window.progress.push(bar.innerText);
}).observe(document, {childList: true, subtree: true, characterData: true})"""
PLUGIN = """
from dashboard.pages.page import Needs, Page

def show(run):
    raise ZeroDivisionError("of <b>no</b> steps")

PAGE = Page("Failing", "failing", "fails", show, Needs.ENTRY)
"""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Return a folder with recorded runs that nobody has checked."""
    folder = tmp_path_factory.mktemp("recordings")
    shutil.copytree(SAMPLES / "gpu" / "slow-rank", folder / "slow-rank")
    # Large enough to be read for longer than the time after which a page shows progress, also on a fast machine.
    copies = cases.copies_of_rank(SAMPLES / "demo-fsdp2" / "rank00000.pt.trace.json.gz", folder, RANKS)
    copies.rename(folder / "large")
    for file in folder.rglob("*.*"):
        os.utime(file, (time.time() - 3600,) * 2)
    return folder


@pytest.fixture(scope="module")
def own_server(recordings, tmp_path_factory):
    """Return a dashboard with a page of a plug-in that fails."""
    site = tmp_path_factory.mktemp("site")
    (site / "failing_page.py").write_text(PLUGIN)
    metadata = site / "failing-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: failing\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tracekit.pages]\nfailing = failing_page:PAGE\n")
    with served(recordings, tmp_path_factory.mktemp("outside"), site) as started:
        yield started


def test_a_run_that_opens_for_the_first_time_shows_its_progress_and_can_be_left(new_page, own_server):
    page = new_page
    page.add_init_script(RECORD_PROGRESS)
    page.goto(f"{own_server.url}/overview?run=large")
    page.locator("[data-testid=stProgress]").wait_for()
    page.locator("[data-testid=stSidebarNavLink]").filter(has_text=re.compile("^Plan$")).click()
    expect(page.locator("[data-testid=stSidebarNavLink][aria-current=page]")).to_have_text("Plan")
    settle(page)
    page.locator("[data-testid=stSidebarNavLink]").filter(has_text=re.compile("^Diagnosis$")).click()
    expect(page.locator(".tk-verdict")).to_be_visible()
    settle(page)
    expect(page.locator("[data-testid=stProgress]")).to_have_count(0)
    shown = page.evaluate("window.progress")
    assert shown
    assert all(re.match(rf"Reading {RANKS} files, [\d.]+ MiB|\d of {RANKS} traces read", text) for text in shown), shown
    assert_clean(page)


def test_the_late_rank_and_those_that_wait_for_it_stand_first_in_the_timeline(page, own_server):
    page.goto(f"{own_server.url}/ranks?run=slow-rank")
    expect(page.locator(".tk-headline").first).to_contain_text("Rank 1 makes 3 calls of spin_kernel")
    ticks = page.locator("[class*=st-key-ranks-map] .ytick text")
    expect(ticks).to_have_text(["1", "0"])
    settle(page)  # the map is drawn again when its width is known
    at_top = min(range(2), key=lambda number: ticks.nth(number).bounding_box()["y"])
    assert ticks.nth(at_top).text_content() == "1"
    page.goto(f"{own_server.url}/overview?run=slow-rank")
    straggler = page.locator("[data-testid=stMain]").get_by_text("Rank 1 makes 3 calls of spin_kernel")
    expect(straggler.first).to_be_visible()
    settle(page)
    cards = page.locator("[data-testid=stVerticalBlock]").filter(has=page.get_by_text(re.compile("^Evidence, ")))
    card = cards.filter(has_text="Rank 1 makes 3 calls of spin_kernel").last  # the innermost
    card.get_by_text(re.compile("^Evidence, ")).click()
    card.get_by_role("button", name="Show in the timeline").first.click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('[data-testid=stBidiComponentIsolated]')]"
        ".some((part) => part.shadowRoot?.querySelector('.timeline')?.dataset.lead === '1 0')"
    )
    assert_clean(page)


def test_a_page_that_fails_says_why_and_the_others_work(page, own_server):
    page.goto(f"{own_server.url}/failing?run=large")
    main = page.locator("[data-testid=stMain]")
    expect(main).to_contain_text(
        "The page Failing failed: ZeroDivisionError: of <b>no</b> steps. The other pages work."
    )
    expect(main).to_contain_text("failing_page.py")  # the place, in the text to send
    expect(page.locator("[data-testid=stException]")).to_have_count(0)
    page.locator("[data-testid=stSidebarNavLink]").filter(has_text=re.compile("^Runs$")).click()
    page.locator("[data-testid=stDataFrame]").wait_for()
    assert_clean(page)
