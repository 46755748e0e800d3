"""The timeline as a person uses it: keys, mouse, links, search, details, in a real browser against a real server."""

import re
import shutil
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from playwright.sync_api import expect

from tests.browser import recorded
from tests.browser.conftest import WAIT_MS, assert_clean, heard, open_again, settle
from tracekit.model import escaping

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
SAMPLE = "sample"
RECORDED = Path(__file__).parents[2] / "sample_traces" / "demo-yafsdp"
STEP_NS, KERNEL_NS = recorded.STEP_US * 1000, 5_000_000
PERFETTO = """<script>
addEventListener("message", (event) => {
  if (event.data === "PING") event.source.postMessage("PONG", "*");
  else document.title = `${event.data.perfetto.fileName} ${event.data.perfetto.buffer.byteLength}`;
});
</script>"""


@pytest.fixture(scope="module")
def sample(server):
    """Return the name of a recorded run of some 100,000 slices, listed as long as these tests run."""
    shutil.copytree(RECORDED, server.runs / SAMPLE)
    yield SAMPLE
    shutil.rmtree(server.runs / SAMPLE)


class Shown:
    """The timeline of a page, read by its data attributes."""

    def __init__(self, page):
        self.page = page
        self.root = page.locator(".timeline")
        self.canvas = self.root.locator(".scroller canvas")

    def __getitem__(self, name):
        return self.root.evaluate("(e, name) => e.dataset[name]", name)

    @property
    def view(self):
        return int(self["from"]), int(self["to"])

    @property
    def length(self):
        return self.view[1] - self.view[0]

    def wait(self, condition):
        """Wait for a condition on `e`, the root's attributes."""
        self.root.wait_for()
        self.page.wait_for_function(
            "() => { const parts = [...document.querySelectorAll('[data-testid=stBidiComponentIsolated]')];"
            " const e = parts.map((part) => part.shadowRoot?.querySelector('.timeline')).find(Boolean)?.dataset;"
            f" return e && ({condition}); }}"
        )

    def wait_until_sharp(self):
        self.wait("e.sharp === 'true' && e.seq === e.requested")

    def press(self, *keys):
        self.root.focus()
        for key in keys:
            self.page.keyboard.press(key)

    def x_of(self, at_ns):
        box, left = self.canvas.bounding_box(), int(self["left"])
        start_ns, end_ns = self.view
        return box["x"] + left + (box["width"] - left) * (at_ns - start_ns) / (end_ns - start_ns)

    def point_at(self, at_ns, text):
        """Move the mouse down along a moment until the tooltip holds `text`."""
        box = self.canvas.bounding_box()
        tip = self.root.locator(".tip")
        for y in range(int(box["y"]) + 30, int(box["y"] + box["height"]), 9):
            self.page.mouse.move(self.x_of(at_ns), y)
            if tip.is_visible() and text in tip.inner_text():
                return tip
        raise AssertionError(f"nothing at {at_ns} ns is called {text!r}")


def _open(page, server, run, **address):
    query = "".join(f"&{name.rstrip('_')}={value}" for name, value in address.items())
    page.goto(f"{server.url}/timeline?run={quote(run)}{query}")
    shown = Shown(page)
    shown.wait_until_sharp()
    return shown


def _assert_clean(page, **hosts):
    """Assert the same as `assert_clean`, for a page that may also request `hosts`."""
    assert_clean(page, {"127.0.0.1", *hosts.get("hosts", ())})


def _address(page):
    return {name: values[-1] for name, values in parse_qs(urlsplit(page.url).query).items()}


def test_keys_wheel_and_drag_move_the_view_and_a_sharper_tile_follows(page, server, sample):
    shown = _open(page, server, sample)
    whole, first_seq = shown.length, int(shown["seq"])
    assert shown.view[0] == 0
    assert int(shown["rectangles"]) > 500
    shown.press("w", "w", "w", "w")
    shown.wait(f"e.to - e.from < {0.3 * whole} && +e.seq > {first_seq} && e.sharp === 'true'")
    assert float(shown["latencyMs"]) > 0
    start_ns, end_ns = shown.view
    shown.press("d")
    # Both ends are rounded to the ns, so that the same length may differ by one.
    shown.wait(f"+e.from > {start_ns} && Math.abs(e.to - e.from - {end_ns - start_ns}) <= 1")
    shown.press("ArrowLeft", "a")
    shown.wait(f"+e.from < {start_ns}")
    before, at_ns = shown.length, sum(shown.view) / 2
    page.mouse.move(shown.x_of(at_ns), shown.canvas.bounding_box()["y"] + 60)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    shown.wait(f"e.to - e.from < {0.8 * before}")
    assert shown.view[0] < at_ns < shown.view[1]
    shown.wait_until_sharp()
    start_ns = shown.view[0]
    page.mouse.down()
    page.mouse.move(shown.x_of(at_ns) - 80, shown.canvas.bounding_box()["y"] + 60, steps=3)
    page.mouse.up()
    shown.wait(f"+e.from > {start_ns}")
    shown.wait_until_sharp()
    expect(page).to_have_url(re.compile(f"from={shown.view[0]}&to={shown.view[1]}"))
    page.keyboard.down("Shift")
    page.mouse.down()
    page.mouse.move(shown.x_of(shown.view[0]) + 300, shown.canvas.bounding_box()["y"] + 60, steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    shown.wait("+e.range > 0")
    expect(shown.root.locator("[role=status]").last).to_contain_text("Range from")
    shown.press("Home")
    shown.wait(f"e.to - e.from >= {whole}")
    shown.press("?")
    expect(shown.root.get_by_role("dialog")).to_contain_text("zoom in and out")
    for scheme, is_right in (("dark", "< 40"), ("light", "> 220")):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(
            f"(c) => c.getContext('2d').getImageData(3, 3, 1, 1).data[1] {is_right}", arg=shown.canvas.element_handle()
        )
    _assert_clean(page)


def test_rows_deeper_than_a_track_has_room_for_stand_on_no_other_track(page):
    layout = escaping.asset("timeline/layout.js")
    tracks = [{"track": n, "rank": 0, "group": "host", "label": "", "role": "host", "rows": 80} for n in (0, 70_000)]
    heights = page.evaluate(
        f"tracks => {{ {layout}; const at = new Layout(tracks, []);"
        "return [at.placeOf(0, 79, 'host'), at.placeOf(0, 80, 'host'), at.placeOf(70000, 0, 'host')]; }",
        tracks,
    )
    assert heights[1] is None
    assert heights[0]["y"] + heights[0]["heightPx"] < heights[2]["y"]


def test_a_rank_is_labelled_with_its_place_in_the_mesh(page):
    layout = escaping.asset("timeline/layout.js")
    tracks = [{"track": n, "rank": n, "group": "host", "label": "", "role": "host", "rows": 1} for n in (0, 1)]
    labels = page.evaluate(
        f"tracks => {{ {layout}; const at = new Layout(tracks, [], {{ 1: 'pp 1' }});"
        "return at.lines.filter((line) => line.type === 'rank').map((line) => line.label); }",
        tracks,
    )
    assert labels == ["rank 0", "rank 1 · pp 1"]


def test_a_click_shows_details_arrows_link_slices_and_a_search_steps_through_matches(page, server):
    shown = _open(page, server, recorded.GOOD)
    at_ns = int(0.3 * STEP_NS)
    tip = shown.point_at(at_ns, "gemm_kernel<float, 128>")
    expect(tip).to_contain_text("rank 0")
    page.mouse.down()
    page.mouse.up()
    details = shown.root.locator(".details")
    expect(details).to_contain_text("gemm_kernel<float, 128>")
    shown.wait("e.details === 'shown' && e.arrows === '1'")
    expect(details).to_contain_text("cudaLaunchKernel")
    picked = shown["selected"]
    details.locator("li button.link").first.click()
    shown.wait(f"e.selected && e.selected !== '{picked}' && e.details === 'shown'")
    expect(details.locator("h4")).to_have_text("cudaLaunchKernel")
    shown.press("Escape")
    expect(details).to_be_hidden()
    shown.wait("e.selected === ''")
    shown.root.locator("input").fill("allreduce")
    shown.wait("e.matches === '6'")
    page.keyboard.press("Enter")
    shown.wait("e.match === '1' && e.details === 'shown'")
    first = shown["selected"]
    page.keyboard.press("Enter")
    shown.wait("e.match === '2'")
    page.keyboard.press("Shift+Enter")
    shown.wait(f"e.match === '1' && e.selected === '{first}' && e.details === 'shown'")
    expect(shown.root.locator(".count")).to_contain_text("1 of 6")
    shown.root.locator("input").fill("no such slice")
    shown.wait("e.matches === '0'")
    expect(shown.root.locator(".count")).to_have_text("no match")
    _assert_clean(page)


def test_a_finding_leads_to_its_moment_and_the_link_leads_there_again(page, server):
    page.goto(f"{server.url}/?run={recorded.GOOD}")
    page.locator(".js-plotly-plot .barlayer").first.wait_for()
    settle(page)
    page.locator("[data-testid=stExpander] summary", has_text="Evidence").filter(visible=True).first.click()
    page.get_by_role("button", name="Show in the timeline").filter(visible=True).first.click()
    shown = Shown(page)
    shown.wait("e.sharp === 'true' && e.to - e.from < 20e6")
    page.locator(".tk-finding .tk-code").wait_for()
    code = re.findall(r"[A-Z]+\d{3}", page.locator(".tk-finding .tk-code").inner_text())[0]
    expect(shown.root.locator(".details h4")).to_contain_text(code)
    expect(page).to_have_url(re.compile("from="))
    address = _address(page)
    assert code in address["finding"]
    assert (int(address["from"]), int(address["to"])) == shown.view
    length = shown.length
    shown.press("w")
    shown.wait(f"e.to - e.from < {length} && e.seq === e.requested")
    expect(page).to_have_url(re.compile(f"from={shown.view[0]}&to={shown.view[1]}"))
    view = shown.view
    open_again(page)
    again = Shown(page)
    again.wait_until_sharp()
    assert again.view == view
    page.locator(".tk-finding .tk-code").wait_for()
    _assert_clean(page)


def test_who_comes_back_from_another_page_finds_the_timeline_as_it_was(page, server):
    shown = _open(page, server, recorded.GOOD)
    shown.press("w", "w", "d")
    shown.wait_until_sharp()
    view = shown.view
    expect(page).to_have_url(re.compile(f"from={view[0]}&to={view[1]}"))  # written once the view has settled
    for name, sign in (("Ranks and communication", "[class*=st-key-ranks-map]"), ("Timeline", ".timeline")):
        settle(page)
        page.locator("[data-testid=stSidebarNavLink]").filter(has_text=re.compile(f"^{name}$")).click()
        page.locator(sign).first.wait_for()
    back = Shown(page)
    back.wait_until_sharp()
    assert back.view == view
    assert int(back["rectangles"]) > 0
    back.press("s")
    back.wait(f"e.to - e.from > {view[1] - view[0]} && e.sharp === 'true'")
    _assert_clean(page)


def test_names_from_a_trace_are_shown_as_text_only(page, server):
    shown = _open(page, server, recorded.HOSTILE, from_="9e99", to="<b>", finding="<img>")
    assert shown.view[0] == 0
    tip = shown.point_at(int(0.3 * STEP_NS), "<script>")
    assert tip.locator("script, img").count() == 0
    page.mouse.down()
    page.mouse.up()
    shown.wait("e.details === 'shown'")
    details = shown.root.locator(".details")
    assert "<img src=x onerror=" in details.inner_text()
    assert details.locator("script, img").count() == 0
    shown.root.locator("input").fill("<script>")
    shown.wait("+e.matches > 0")
    settle(page)
    page.get_by_text("Show what is in view as a table").click()
    page.locator("[data-testid=stDataFrame]").wait_for()
    assert page.evaluate("window.hacked") is None
    _assert_clean(page)


def test_a_link_opens_the_part_it_names_and_the_run_is_handed_to_perfetto_on_a_click_only(page, server, context):
    context.route("https://ui.perfetto.dev/**", lambda route: route.fulfill(body=PERFETTO, content_type="text/html"))
    shown = _open(page, server, recorded.GOOD, from_=STEP_NS, to=STEP_NS + KERNEL_NS)
    assert shown.view == (STEP_NS, STEP_NS + KERNEL_NS)
    settle(page)
    page.get_by_text("Perfetto and offline use").click()
    page.get_by_role("button", name="Write the file").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download", exact=False).last.click()
    size = Path(download.value.path()).stat().st_size
    assert size > 1000
    assert "ui.perfetto.dev" not in heard(page).hosts
    with context.expect_page() as opened:
        page.get_by_role("button", name="Open in Perfetto").click()
    expect(opened.value).to_have_title(f"good.pftrace {size}")
    _assert_clean(page, hosts={"ui.perfetto.dev"})
