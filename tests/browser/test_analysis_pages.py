"""The pages made of the analyses, in a real browser: on a recorded run, and on one full of hostile names."""

import contextlib
import re

import pytest
from playwright.sync_api import expect

from tests.browser import conftest, grid, recorded
from tests.browser.conftest import WAIT_MS, assert_clean, expand, heard, settle, turn_to
from tests.support import dashboard_pages

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
TEXT = "[data-testid=stMain]"
PLOT = ".js-plotly-plot .main-svg"
ROWS = "[data-testid=stDataFrame]"


@pytest.fixture(scope="module")
def shown(tab, server):
    """Return one page for the tests up to those of `hostile`, opened on the recorded run."""
    yield from conftest.stay_open(tab, f"{server.url}/?run={recorded.GOOD}")


def _heading(page, text):
    return page.locator(f"{TEXT} h3").filter(has_text=text)


def _open_tab(page, name):
    page.locator(".st-key-tab").get_by_text(name, exact=True).click()


def _says(page, text):
    expect(page.locator(TEXT)).to_contain_text(text)


@pytest.fixture
def at(shown):
    """Return what turns the page to another, with what was heard before forgotten."""

    def turned(name):
        heard(shown)
        turn_to(shown, name)
        return shown

    return turned


def test_communication_shows_exposed_time_causes_of_gaps_and_waiting(at):
    page = at("Ranks and communication")
    _open_tab(page, "exposed communication")
    for heading in ("Exposed communication", "Why no collective runs", "Why nothing computes"):
        expect(_heading(page, heading)).to_be_visible()
    hidden = page.locator(".st-key-communication-hidden .barlayer .point")
    expect(hidden).to_have_count(3 * 2)  # parts by ranks
    _open_tab(page, "bandwidth")
    expect(_heading(page, "Collectives")).to_be_visible()
    _says(page, "how to record them")  # this run has no sizes
    assert_clean(page)


def test_contention_says_that_nothing_ran_at_the_same_time(at):
    page = at("Ranks and communication")
    _open_tab(page, "contention")
    _says(page, "No two kinds of work ran at the same time")
    assert_clean(page)


def test_kernels_are_listed_searched_and_drawn(at):
    page = at("Kernels")
    tick = page.locator(".st-key-kernels-top .ytick text")
    expect(tick).to_have_count(3)
    page.get_by_placeholder("part of a name").fill("GEMM")
    page.get_by_placeholder("part of a name").press("Enter")
    expect(tick).to_have_count(1)
    expect(page).to_have_url(re.compile("search=GEMM"))
    page.get_by_text("operators", exact=True).click()
    _says(page, "No name contains this text")
    page.get_by_placeholder("part of a name").fill("")
    page.get_by_placeholder("part of a name").press("Enter")
    expect(tick.filter(has_text="aten::mm")).to_be_visible()
    assert_clean(page)


def test_the_roofline_says_what_it_needs(at):
    page = at("Kernels")
    page.get_by_text("roofline", exact=True).click()
    _says(page, "There is no roofline")
    expect(page).to_have_url(re.compile("what=roofline"))
    assert_clean(page)


@pytest.mark.accuracy  # unit/dashboard/test_analysis runs and refuses queries
def test_a_query_runs_on_request_and_a_refused_one_shows_an_error(at, server, shown):
    page = at("SQL")
    page.get_by_text("step times", exact=True).click()
    expect(page.get_by_label("One SELECT")).to_have_value(re.compile("step_ms"))
    settle(page)
    page.get_by_role("button", name="Run", exact=True).click()
    _says(page, "6 rows")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    assert download.value.path().read_text().startswith("step,rank,step_ms,idle_ms")
    box = page.get_by_label("One SELECT")
    box.fill("COPY activities TO '/tmp/out.csv'")
    box.press("Control+Enter")
    expect(page.locator("[data-testid=stAlert]")).to_contain_text("query:")
    assert_clean(page)
    page.goto(f"{server.url}/sql?run={recorded.GOOD}&sql=SELECT+42+AS+answer")
    _says(page, "is part of the link")
    expect(page.locator(TEXT)).not_to_contain_text("1 row")
    settle(page)
    page.get_by_role("button", name="Run", exact=True).click()
    _says(page, "1 row")
    assert_clean(page)


def test_data_quality_says_what_is_missing_and_what_was_judged(at):
    page = at("Diagnosis")
    page.get_by_text("What the trust in the data rests on", exact=True).click()
    table = page.locator("table.tracekit").filter(has_text="how to record it")
    expect(table).to_contain_text("memory events")
    expect(table).to_contain_text("profile_memory=True")
    _says(page, "rules, those of plug-ins included")
    assert_clean(page)


def test_a_cell_of_the_map_of_ranks_leads_to_its_step(at):
    page = at("Ranks and communication")
    _open_tab(page, "waiting")
    cells = page.locator("[class*=st-key-ranks-map] .barlayer .point path")
    expect(cells).to_have_count(2 * len(recorded.STEPS))
    settle(page)
    cells.nth(1).click(force=True)
    page.get_by_role("button", name=re.compile(r"Show rank \d, step \d in the timeline")).click()
    expect(page).to_have_url(re.compile(r"timeline\?.*from=\d+"))
    assert_clean(page)


def test_a_part_of_the_critical_path_leads_to_its_moment_with_the_path_as_the_top_row(at):
    page = at("Timeline")
    page.get_by_text("Critical path of a step", exact=True).click()
    bars = page.locator("[class*=st-key-critical-path-] .barlayer .point path")
    expect(bars.first).to_be_visible()
    settle(page)
    button = page.get_by_role("button", name=re.compile(r"Show rank \d in the timeline"))
    for _ in range(5):  # a chart that is drawn again meanwhile loses the click
        bars.nth(1).click(force=True)
        with contextlib.suppress(AssertionError):
            expect(button).to_be_visible(timeout=30_000)
            break
    button.click()
    expect(page).to_have_url(re.compile(r"timeline\?(?=.*path=True).*from=\d+"))
    expect(bars.first).to_be_visible()
    assert_clean(page)


def test_memory_and_checkpoints_say_how_to_record_what_is_missing(at):
    page = at("Memory and checkpoints")
    _says(page, "profile_memory=True")
    expand(page, "Not in this run: checkpoints, goodput")
    _says(page, "record_save")
    assert_clean(page)


def test_findings_are_ticked_and_savings_ranked_and_several_taken_away_as_the_address_says(at):
    page = at("Diagnosis")
    tick = page.locator("[class*=st-key-tick-] label").first
    tick.click()
    expect(page).to_have_url(re.compile("without=[a-z-]+"))
    expect(page.locator(".tk-numbers").last).to_contain_text("saved")
    settle(page)
    page.get_by_text("Savings of all causes, and other", exact=False).click()
    ranked = page.locator("table.tracekit").filter(has_text="mean step").locator("tbody tr")
    expect(ranked.first).to_be_visible()
    expect(page.locator(".st-key-whatif-savings .ytick text")).to_have_count(ranked.count())
    settle(page)
    box = page.locator("[data-testid=stMain] [data-testid=stMultiSelect] input")
    box.press_sequentially("straggler")
    box.press("Enter")
    expect(page.locator(".tk-numbers").filter(has_text=" and ")).to_contain_text("saved")
    expect(page).to_have_url(re.compile("without=[a-z-]+&without=[a-z-]+"))
    settle(page)
    with page.expect_download() as download:
        page.locator(".st-key-download-csv-whatif button").click()
    assert download.value.path().read_text().startswith("cause,step_ns,code,saved_ns")
    assert_clean(page)


def test_a_row_of_evidence_leads_to_its_moment(shown, server):
    shown.goto(f"{server.url}/?run={recorded.GOOD}")
    heard(shown)
    shown.locator("[data-testid=stExpander] summary").filter(has_text="Evidence").first.click()
    expect(shown.get_by_role("button", name="Show in the timeline", exact=True).first).to_be_visible()
    settle(shown)
    grid.select_first(shown)
    shown.get_by_role("button", name=re.compile(r"Show rank \d, step \d in the timeline")).click()
    expect(shown).to_have_url(re.compile(r"timeline\?.*from=\d+"))
    expect(shown.locator("[data-testid=stSidebarNavLink][aria-current=page]")).to_have_text("Timeline")
    assert_clean(shown)


@pytest.fixture(scope="module")
def hostile(tab, server):
    """Return one page for all tests, opened on a run whose names are hostile."""
    yield from conftest.stay_open(tab, f"{server.url}/?run={recorded.HOSTILE}")


WITH_NAMES = ("diagnosis", "timeline", "ranks", "kernels", "compare")
"""Pages that show names in headlines, tables, figures, the canvas and notes; test_other_visitors.py opens all."""


# test_other_visitors.py opens each at its address.
@pytest.mark.parametrize(
    "listed",
    [
        pytest.param(page, marks=() if page.address in WITH_NAMES else pytest.mark.accuracy)
        for page in dashboard_pages.addressed_pages()
    ],
    ids=lambda page: page.address,
)
def test_names_run_nothing_on_any_page(hostile, listed):
    heard(hostile)
    turn_to(hostile, listed.title)
    expect(hostile.locator("[data-testid=stSidebarNavLink][aria-current=page]")).to_have_text(listed.title)
    settle(hostile)
    found = hostile.locator(f"{TEXT} h3, {TEXT} .tk-title, {TEXT} [data-testid=stAlert]").filter(visible=True)
    found.first.wait_for()
    expect(hostile).to_have_url(re.compile(f"run={recorded.HOSTILE}"))
    expect(hostile.locator("[data-testid=stException]")).to_have_count(0)
    assert hostile.evaluate("window.hacked") is None
    assert_clean(hostile)


def test_names_are_shown_as_text(hostile):
    turn_to(hostile, "Kernels")
    expect(hostile.locator(".st-key-kernels-top .ytick text").filter(has_text="<script>")).to_be_visible()
