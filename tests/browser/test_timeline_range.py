"""A range of the timeline added up, the overview of the run, and the link that carries both, in a real browser."""

import contextlib
import re
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from playwright.sync_api import expect

import tracekit
from tests.browser import recorded
from tests.browser.conftest import WAIT_MS, assert_clean, open_again, settle
from tests.browser.test_timeline_page import Shown
from tracekit.model import escaping, units
from tracekit.report import timeline
from tracekit.report.timeline_view import message

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
RUN, SAMPLE = "slow", Path(__file__).parents[2] / "sample_traces" / "gpu" / "compiled"
NOTE = '<img src=x onerror="window.hacked=1"> slow part & more'


@pytest.fixture(scope="module")
def run(server):
    """Return the name of a run on a GPU with collectives of known sizes, listed as long as these tests run."""
    shutil.copytree(SAMPLE, server.runs / RUN)
    yield RUN
    shutil.rmtree(server.runs / RUN)


@pytest.fixture(scope="module")
def scene():
    run = tracekit.load(SAMPLE)
    return run, timeline.open_scene(run)


def _open(page, server, run, query=""):
    address = f"{server.url}/timeline?run={quote(run)}{query}"
    for _ in range(5):
        page.goto(address)
        with contextlib.suppress(PlaywrightTimeout):
            page.locator(".timeline").wait_for(timeout=30_000)
            break  # else the run, which was just copied, was not listed yet, and another one's page was asked for
    shown = Shown(page)
    shown.wait_until_sharp()
    return shown


def _rows(shown, title):
    """The cells of a table of the panel: first cell -> the others."""
    region = shown.root.get_by_role("region", name=re.compile(f"^{title}"))
    rows = region.locator("tbody tr")
    cells = [rows.nth(at).locator("th, td").all_inner_texts() for at in range(rows.count())]
    return {first: rest for first, *rest in cells}


def _assert_totals(shown, scene, start_ns, end_ns):
    run, laid = scene
    window = (laid.span[0] + start_ns, laid.span[0] + end_ns)
    totals = timeline.range_totals(laid, window)
    (rank,) = totals.by_rank.to_dicts()
    (rates,) = timeline.range_rates(run, laid, window).to_dicts()
    (cells,) = _rows(shown, "Time by rank").values()
    parts = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
    assert cells[:4] == [f"{units.duration(rank[p])} · {units.share(rank[p] / (end_ns - start_ns))}" for p in parts]
    assert cells[-1] == f"{units.operations(rates['flops'] / rank['compute_ns'] * 1e9)}/s"
    first = totals.by_name.row(0, named=True)
    (name,) = timeline.names(laid, [first["name_id"]])
    by_name = _rows(shown, "Time by kernel")
    name = escaping.inert(name, message.MAX_NAME)
    assert next(iter(by_name)) == name
    assert by_name[name][1:3] == [f"{first['count']:,}", units.duration(first["total_ns"])]


def test_a_dragged_range_is_added_up_and_a_link_shows_it_with_its_note(page, server, run, scene):
    shown = _open(page, server, run)
    width = shown.canvas.bounding_box()["width"]
    y = shown.canvas.bounding_box()["y"] + 10  # on the ruler
    left, right = shown.x_of(shown.view[0] + 0.3 * shown.length), shown.x_of(shown.view[0] + 0.6 * shown.length)
    page.mouse.move(left, y)
    page.mouse.down()
    page.mouse.move(right, y, steps=4)
    page.mouse.up()
    shown.wait("e.totals === 'shown'")
    start_ns, end_ns = map(int, re.search(r"range=(\d+)-(\d+)", page.url).groups())
    assert start_ns == pytest.approx(shown.view[0] + 0.3 * shown.length, abs=3 * shown.length / width)
    _assert_totals(shown, scene, start_ns, end_ns)
    assert shown.canvas.bounding_box()["width"] == width, "details narrow the plot"
    shown.root.get_by_label("Note on the range").fill(NOTE)
    expect(page).to_have_url(re.compile("note="))
    settle(page)
    open_again(page)
    again = Shown(page)
    again.wait("e.totals === 'shown'")
    expect(again.root.get_by_label("Note on the range")).to_have_value(NOTE)
    _assert_totals(again, scene, start_ns, end_ns)
    assert again.root.locator("img, script").count() == 0
    assert page.evaluate("window.hacked") is None
    again.press("Escape")
    expect(page).not_to_have_url(re.compile("range="))
    expect(again.root.locator(".details")).to_be_hidden()
    assert_clean(page)


def test_keys_select_the_range_of_the_view_and_of_a_slice(page, server, run, scene):
    shown = _open(page, server, run)
    shown.press("w", "w")
    shown.wait_until_sharp()
    shown.press("m")
    shown.wait("e.totals === 'shown'")
    start_ns, end_ns = map(int, re.search(r"range=(\d+)-(\d+)", page.url).groups())
    assert (start_ns, end_ns) == pytest.approx(shown.view, abs=1)
    _assert_totals(shown, scene, start_ns, end_ns)
    shown.press("Escape", "]")
    shown.wait("e.selected !== ''")
    shown.press("m")
    shown.wait("e.totals === 'shown'")
    expect(shown.root.locator(".details h4")).to_contain_text("Range from")
    shown.root.get_by_role("button", name="Zoom to the range").click()
    shown.wait("Math.abs(e.to - e.from - e.range) <= 40 + 2")
    assert_clean(page)


def test_fit_steps_shows_the_steps_and_the_overview_moves_the_view(page, server, run, scene):
    shown = _open(page, server, run)
    shown.root.get_by_role("button", name="Fit steps").click()
    shown.wait_until_sharp()
    _, laid = scene
    steps = laid.bands.filter(kind="step")
    first_ns, past_ns = steps["start_ns"].min() - laid.span[0], steps["end_ns"].max() - laid.span[0]
    assert shown.view[0] <= first_ns
    assert past_ns <= shown.view[1]
    assert shown.length <= 1.07 * (past_ns - first_ns)
    shown.press("w", "w", "w", "w")
    shown.wait_until_sharp()
    before = shown.view
    overview = shown.root.get_by_role("scrollbar", name="Part of the run in view")
    box = overview.bounding_box()
    page.mouse.click(box["x"] + 0.95 * box["width"], box["y"] + box["height"] / 2)
    shown.wait(f"+e.from > {before[0]} && e.sharp === 'true'")
    assert shown.length == pytest.approx(before[1] - before[0], abs=2)
    moved = shown.view
    overview.focus()
    page.keyboard.press("ArrowLeft")
    shown.wait(f"+e.from < {moved[0]}")
    assert 0 <= int(overview.get_attribute("aria-valuenow")) <= 100
    assert " from " in overview.get_attribute("aria-valuetext")
    assert_clean(page)


def test_addresses_with_other_ranges_are_ignored(page, server):
    for text in ("9-1e9", "<b>"):
        shown = _open(page, server, recorded.GOOD, f"&range={quote(text)}&note={quote(NOTE)}")
        assert shown["range"] == ""
        assert page.evaluate("window.hacked") is None
    assert_clean(page)


def test_a_pinned_lane_stays_at_the_top_and_in_the_link(page, server, run, scene, context):
    page.set_viewport_size({"width": 1400, "height": 500})  # so low that the lanes scroll
    shown = _open(page, server, run)
    shown.press("]")
    shown.wait("e.selected !== ''")
    track = shown["selected"].split("/")[0]
    shown.press("p")
    shown.wait(f"e.pinned === '{track}' && e.sharp === 'true'")
    expect(page).to_have_url(re.compile(f"pins={track}"))
    # The server may send an address that is older than the pin.
    page.evaluate("history.replaceState(history.state, '', location.pathname + '?run=slow')")
    expect(page).to_have_url(re.compile(f"pins={track}"))
    label = scene[1].tracks.row(int(track), named=True)["label"]
    tip = shown.root.locator(".tip")

    def point_at_pinned(x, text):
        for _ in range(20):  # the page may still move what is on it
            shown.canvas.scroll_into_view_if_needed()
            box = shown.canvas.bounding_box()
            page.mouse.move(box["x"] + x + 5, box["y"] + 5)
            page.mouse.move(box["x"] + x, box["y"] + 26 + 17 + 8)  # below the ruler and the marks of one finding
            page.wait_for_timeout(200)
            if tip.is_visible() and text in tip.inner_text():
                break
        expect(tip).to_contain_text(text)

    point_at_pinned(60, f"0 · {label}")
    moved = shown.root.locator(".scroller").evaluate("(e) => { e.scrollTop = 60; return e.scrollTop; }")
    assert moved > 0
    point_at_pinned(60, f"0 · {label}")
    other = context.new_page()
    other.goto(page.url)
    Shown(other).wait(f"e.pinned === '{track}' && e.sharp === 'true'")
    other.close()
    point_at_pinned(int(shown["left"]) - 10, "Unpin")
    page.mouse.down()
    page.mouse.up()
    shown.wait("e.pinned === ''")
    expect(page).not_to_have_url(re.compile("pins="))
    assert_clean(page)
