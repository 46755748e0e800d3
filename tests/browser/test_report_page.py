"""The HTML report as a person opens it: a file, no server, no network."""

import plotly.graph_objects as go
import pytest
from playwright.sync_api import expect

from tests.browser import recorded
from tests.browser.conftest import WAIT_MS, assert_clean, heard
from tracekit.ingest import loader
from tracekit.report import html
from tracekit.rules import engine

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
BARS = "#figure-{} .barlayer .point"
FILES_ONLY = frozenset({""})


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    recorded.write_runs(folder)
    for name in (recorded.GOOD, recorded.HOSTILE):
        run = loader.load(str(folder / name))
        (folder / f"{name}.html").write_text(html.render(engine.check(run), run), encoding="utf-8")
    return folder


def _open(page, path):
    page.goto(path.as_uri())
    page.locator(BARS.format("timeline")).first.wait_for(state="attached")


def test_it_shows_the_verdict_and_draws_its_figures_without_any_network(page, pages):
    _open(page, pages / "good.html")
    expect(page.locator(".tk-verdict b").first).to_be_visible()
    for figure in ("breakdown", "steps", "timeline"):
        expect(page.locator(f"#figure-{figure} svg.main-svg").first).to_be_visible()
    expect(page.locator(BARS.format("breakdown"))).to_have_count(4 * 2)  # parts by ranks
    assert_clean(page, FILES_ONLY)


def test_names_from_the_trace_run_nothing_and_read_as_they_are(page, pages):
    _open(page, pages / "hostile.html")
    shown = page.evaluate(
        """() => {
        const place = document.getElementById("figure-timeline");
        const curve = place.data.findIndex((trace) => trace.name === "compute");
        Plotly.Fx.hover(place, [{curveNumber: curve, pointNumber: 0}]);
        return place.querySelector(".hoverlayer").textContent;
        }"""
    )
    assert '<script>window.hacked=1</script><img src=x onerror="window.hacked=2"></script>' in shown
    assert page.evaluate("window.hacked") is None
    expect(page.locator("main img, main a, .hoverlayer a")).to_have_count(0)
    assert_clean(page, FILES_ONLY)


@pytest.mark.parametrize(
    ("trace", "mark"),
    [
        pytest.param(go.Bar(x=[1], y=["a"], orientation="h"), ".barlayer .point", marks=pytest.mark.accuracy, id="bar"),
        pytest.param(
            *(go.Scatter(x=[1, 2], y=[1, 2], mode="lines+markers"), ".scatterlayer .point"),
            marks=pytest.mark.accuracy,
            id="scatter",
        ),
        pytest.param(go.Heatmap(z=[[1, 2]]), ".heatmaplayer image", marks=pytest.mark.accuracy, id="heatmap"),
        pytest.param(
            go.Icicle(labels=["a", "b"], parents=["", "a"], values=[2, 1]), ".iciclelayer .slice", id="icicle"
        ),
    ],
)
def test_a_figure_is_drawn_by_the_part_of_plotly_that_its_page_has(page, tmp_path, trace, mark):
    file = tmp_path / "figure.html"
    file.write_text(html.render_figure(go.Figure(trace), "a figure"), encoding="utf-8")
    heard(page)
    page.goto(file.as_uri())
    page.locator(f"#figure-only {mark}").first.wait_for(state="attached")
    assert_clean(page, FILES_ONLY)


def test_dragging_across_the_timeline_zooms_into_it(page, pages):
    _open(page, pages / "good.html")
    shown = "document.getElementById('figure-timeline').layout.xaxis.range"
    before = page.evaluate(shown)
    plot = page.locator("#figure-timeline .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x - 100, y)
    page.mouse.down()
    page.mouse.move(x, y, steps=3)
    page.mouse.move(x + 100, y, steps=3)
    page.mouse.up()
    page.wait_for_function(f"([left, right]) => {shown}[0] !== left || {shown}[1] !== right", arg=before)
    left, right = page.evaluate(shown)
    assert before[0] < left < right < before[1]


def test_figures_are_legible_on_a_dark_page_and_on_paper(page, pages):
    label = page.locator("#figure-breakdown .ytick text").first
    page.emulate_media(color_scheme="light")
    _open(page, pages / "good.html")
    expect(label).to_have_css("fill", "rgb(27, 35, 48)")
    page.emulate_media(color_scheme="dark")
    expect(label).to_have_css("fill", "rgb(223, 229, 238)")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    expect(label).to_have_css("fill", "rgb(0, 0, 0)")


def test_the_browser_would_refuse_a_script_that_is_not_the_reports_own(page, pages):
    _open(page, pages / "good.html")
    page.evaluate(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 4'; document.body.append(s)"
    )
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in message for message in heard(page).errors)
