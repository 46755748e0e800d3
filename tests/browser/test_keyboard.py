"""The dashboard without a mouse: from the list of runs to a run, its timeline, a slice and back, by keys alone."""

import contextlib
import re

import pytest
from playwright import sync_api as playwright
from playwright.sync_api import expect

from tests.browser import recorded
from tests.browser.conftest import WAIT_MS, assert_clean, settle
from tests.browser.grid import TABLE, row_of
from tests.browser.test_timeline_page import Shown

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
MOST_TABS = 150  # a table that is redrawn loses the focus
MOST_KEYS, KEY_WAIT_MS = 100, 10_000
ROW = "() => { const row = /-(\\d+)$/.exec(document.activeElement.id); return row && +row[1] }"
HAS_FOCUS = "e => e.getRootNode().activeElement === e"
# What a theme may show focus by: a ring, a border, a shadow, another ground.
LOOK = """async e => {
    await Promise.all(e.getAnimations().map(each => each.finished));
    const s = getComputedStyle(e);
    return [s.outlineStyle, s.outlineColor, s.boxShadow, s.borderColor, s.backgroundColor].join();
}"""


def _tab_to(page, found):
    """Press Tab until an element has the focus."""
    for _ in range(MOST_TABS):
        if found.evaluate(HAS_FOCUS):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{MOST_TABS} times Tab did not lead to {found}")


def _go_to_row(page, number):
    """Go up or down the table to a row. A table that is drawn again loses the focus: then a person begins again."""
    for _ in range(MOST_KEYS):
        row = page.evaluate(ROW)
        if row == number:
            return
        if row is None:
            canvas = page.locator(f"{TABLE} canvas").first
            if canvas.evaluate(HAS_FOCUS):  # drawn again with the focus, but without a row that has it
                page.keyboard.press("Shift+Tab")
            _tab_to(page, canvas)
        else:
            page.keyboard.press("ArrowDown" if row < number else "ArrowUp")
        # A person sees that the table has taken the key, or that it has not.
        with contextlib.suppress(playwright.TimeoutError):
            page.wait_for_function(f"row => ({ROW})() !== row", arg=row, timeout=KEY_WAIT_MS)
    raise AssertionError(f"{MOST_KEYS} keys did not lead to row {number}")


def _assert_focus_shows(focused, *others):
    """Assert that an element, or one of those around it, looks otherwise with the focus than without."""
    shown = (focused, *others)
    with_focus = [each.evaluate(LOOK) for each in shown]
    focused.evaluate("e => e.blur()")
    without = [each.evaluate(LOOK) for each in shown]
    focused.focus()
    assert with_focus != without


def test_a_run_is_found_opened_and_searched_through_by_keys_alone(page, server):
    page.goto(f"{server.url}/runs")
    settle(page)
    _go_to_row(page, row_of(page, recorded.GOOD))
    page.keyboard.press("Shift+Space")
    opens = page.get_by_role("button", name="Open this run")
    expect(opens).to_be_enabled()
    _tab_to(page, opens)
    _assert_focus_shows(opens)
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(rf"/\?.*run={recorded.GOOD}"))
    expect(page.locator(".tk-verdict b").first).to_be_visible()
    link = page.locator("[data-testid=stSidebarNavLink]").filter(has_text="Timeline")
    _tab_to(page, link)
    _assert_focus_shows(link)
    page.keyboard.press("Enter")
    shown = Shown(page)
    shown.wait_until_sharp()
    _tab_to(page, shown.root)
    _assert_focus_shows(shown.root, shown.root.locator(".plot"))
    whole = shown.length
    page.keyboard.press("w")
    shown.wait(f"e.to - e.from < {whole} && e.sharp === 'true'")
    start_ns, length = shown.view[0], shown.length
    page.keyboard.press("d")
    shown.wait(f"+e.from > {start_ns}")
    page.keyboard.press("a")
    shown.wait(f"+e.from === {start_ns}")
    page.keyboard.press("s")
    shown.wait(f"e.to - e.from > {length}")
    page.keyboard.press("/")
    search = shown.root.locator("input")
    assert search.evaluate(HAS_FOCUS)
    _assert_focus_shows(search)
    page.keyboard.type("allreduce")
    shown.wait("e.matches === '6'")
    page.keyboard.press("Enter")
    shown.wait("e.match === '1' && e.details === 'shown'")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(shown.root.locator(".details")).to_be_hidden()
    assert shown.root.evaluate(HAS_FOCUS)
    assert_clean(page)


def test_a_finding_leads_to_its_place_on_the_timeline_which_the_next_key_moves(page, server):
    page.goto(f"{server.url}/?run={recorded.GOOD}")
    expect(page.locator(".tk-verdict b").first).to_be_visible()
    settle(page)
    evidence = page.locator("[data-testid=stExpander] summary", has_text="Evidence").filter(visible=True).first
    _tab_to(page, evidence)
    page.keyboard.press("Enter")
    show = page.get_by_role("button", name="Show in the timeline").filter(visible=True).first
    show.wait_for()
    _tab_to(page, show)
    page.keyboard.press("Enter")
    shown = Shown(page)
    shown.wait("e.sharp === 'true' && e.to - e.from < 20e6")
    assert shown.root.evaluate(HAS_FOCUS)
    length = shown.length
    page.keyboard.press("w")
    shown.wait(f"e.to - e.from < {length} && e.seq === e.requested")
    assert_clean(page)
