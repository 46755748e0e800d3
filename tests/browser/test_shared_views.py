"""A page of the dashboard downloaded as one file and opened from disk without a network."""

import re
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from playwright.sync_api import expect

import tracekit
from tests.browser import recorded
from tests.browser.conftest import WAIT_MS, assert_clean, settle
from tests.support.selection import others_in_accuracy
from tracekit.ingest import loader
from tracekit.report import shared_view, timeline
from tracekit.report.shared_view import Figure, SharedView
from tracekit.report.timeline_view import embedding, message
from tracekit.report.timeline_view.embedding import PageState
from tracekit.report.timeline_view.message import View
from tracekit.rules import engine

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
FILES_ONLY = frozenset({""})
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "demo-yafsdp"
NOTE = '</script><img src=x onerror="window.hacked=1"> slow & more'


@pytest.fixture(scope="module")
def without_network(chromium):
    """Return a page of a browser that has no network."""
    context = chromium.new_context(offline=True, viewport={"width": 1200, "height": 900})
    context.set_default_timeout(WAIT_MS)
    yield context.new_page()
    context.close()


@pytest.fixture
def offline(without_network):
    """Return the page, which afterwards must have reported no error and requested nothing but files."""
    page, said, requested = without_network, [], []
    listeners = {
        "console": lambda line: said.append(line.text) if line.type == "error" else None,
        "pageerror": lambda error: said.append(str(error)),
        "request": lambda request: requested.append(request.url),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    yield page
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    page.goto("about:blank")
    assert said == []
    assert [url for url in requested if not url.startswith("file:")] == []


def test_a_cell_of_a_notebook_shows_the_timeline_in_its_own_frame(offline, tmp_path):
    shown = tracekit.load(SAMPLE).timeline(max_bytes=100_000)._repr_html_()
    (tmp_path / "cell.html").write_text(f"<!doctype html><meta charset=utf-8><p>a notebook</p>{shown}")
    offline.goto((tmp_path / "cell.html").as_uri())
    frame = offline.frame_locator("iframe")
    expect(frame.get_by_role("heading", name="demo-yafsdp")).to_be_visible()
    expect(frame.get_by_role("button", name="Fit steps")).to_be_visible()
    drawn = "() => Boolean(document.getElementById('timeline').shadowRoot.querySelector('canvas'))"
    assert offline.frames[1].evaluate(drawn)


def _download(page, folder):
    """Download the page that is shown; return the file."""
    settle(page)
    page.get_by_role("button", name="Share").click()
    button = page.get_by_role("button", name="Download this page").last
    expect(page.get_by_text("It contains what the page shows")).to_be_visible()
    with page.expect_download() as caught:
        button.click()
    file = folder / caught.value.suggested_filename
    caught.value.save_as(file)
    assert file.stat().st_size <= shared_view.MAX_BYTES
    return file


def _data(page):
    return page.evaluate("({...document.getElementById('timeline').shadowRoot.querySelector('.timeline').dataset})")


def _wait(page, condition):
    page.wait_for_function(
        "() => { const e = document.getElementById('timeline')?.shadowRoot.querySelector('.timeline')?.dataset;"
        f" return e && ({condition}); }}"
    )


def test_a_shared_timeline_shows_what_the_link_shows_and_can_be_searched_and_zoomed(page, server, offline, tmp_path):
    start, end = 2_000_000, 12_000_000
    query = f"run={recorded.GOOD}&from={start}&to={end}&range=3000000-7000000&note={quote(NOTE)}"
    page.goto(f"{server.url}/timeline?{query}")
    page.locator(".timeline[data-sharp=true]").wait_for()
    page.locator(".timeline").focus()
    page.locator(".timeline").press("p")
    file = _download(page, tmp_path)
    assert re.fullmatch(r"good-timeline\.html", file.name)
    assert_clean(page)

    offline.goto(file.as_uri())
    _wait(offline, "e.sharp === 'true'")
    shown = _data(offline)
    assert (int(shown["from"]), int(shown["to"])) == (start, end)
    assert shown["range"] == "4000000"
    root = offline.locator("#timeline")
    expect(root.locator("input.note")).to_have_value(NOTE)
    expect(root.get_by_role("region", name="Time by rank")).to_be_visible()
    root.locator("input[type=search]").fill("gemm")
    _wait(offline, "+e.matches > 0")
    root.locator(".timeline").press("Home")
    _wait(offline, f"e.from === '0' && +e.to > {end} && e.sharp === 'true'")
    assert offline.evaluate("window.hacked") is None


def test_the_page_selects_the_slices_that_the_server_does(offline, tmp_path):
    scene = timeline.open_scene(loader.load(str(SAMPLE)))
    span = scene.span[1] - scene.span[0]
    data = embedding.embed(scene, PageState((0, span)), 50_000_000).data
    (tmp_path / "page.html").write_text("<p>empty", encoding="utf-8")
    offline.goto((tmp_path / "page.html").as_uri())
    script = embedding.embedded_script().replace(
        "\nopenEmbedded();", "\nwindow.EmbeddedScene = EmbeddedScene;\nwindow.inflated = inflated;"
    )
    offline.add_script_tag(content=script, type="module")
    offline.wait_for_function("() => Boolean(window.EmbeddedScene)")
    offline.evaluate("async (text) => { window.scene = new EmbeddedScene(await inflated(text)); }", _base64(data))
    tracks = tuple(scene.tracks["track"])
    first, past = message.steps_span(scene)
    for start, end, pixels in ((0, span, 1200), (first, past, 900), (first + 10**7, first + 4 * 10**7, 1500)):
        view = View(3, start, end, pixels, tracks[::2])
        wanted = message.tile(scene, view)
        asked = {"seq": 3, "start": start, "end": end, "pixels": pixels, "tracks": list(view.tracks)}
        answer = offline.evaluate(
            """(view) => { const tile = window.scene.tile(view);
            const columns = Object.fromEntries(Object.entries(tile.columns).map(([n, c]) => [n, [...c]]));
            const labels = columns.name.map((n) => tile.labels[n] ?? null);
            return {...tile, columns, labels, names: columns.name.map((n) => tile.names[n])}; }""",
            asked,
        )
        of_server = {name: np.asarray(column) for name, column in wanted["columns"].items()}
        assert [answer[name] for name in ("start", "end", "pixels")] == [wanted[n] for n in ("start", "end", "pixels")]
        assert len(answer["names"]) == len(of_server["start"]) > 100
        for name in ("track", "row", "start", "dur", "kind", "count", "fill"):
            assert answer["columns"][name] == of_server[name].tolist(), name
        assert answer["names"] == [wanted["names"][number] for number in of_server["name"]]
        assert answer["labels"] == [wanted["labels"].get(number) for number in of_server["name"]]
        merged = [number == message.MERGED for number in answer["columns"]["id"]]
        assert merged == (of_server["id"] == message.MERGED).tolist()
        assert sorted(map(str, answer["bands"])) == sorted(map(str, wanted["bands"]))


def _base64(data):
    import base64

    return base64.b64encode(data).decode()


def test_hostile_names_are_text_and_run_nothing(server, offline, tmp_path):
    run = loader.load(str(server.runs / recorded.HOSTILE))
    report = engine.check(run)
    parameters = {"finding": report.findings[0].id, "range": "0-9000000", "note": NOTE, "pins": "0-1"}
    page = shared_view.render(shared_view.timeline_view(report, run, parameters))
    file = tmp_path / "hostile.html"
    file.write_text(page, encoding="utf-8")
    scripts = re.findall(r"<script[ >]", page)
    assert len(scripts) == len(re.findall(r"</script>", page)) == 4  # figures, config, data, module
    offline.goto(file.as_uri())
    _wait(offline, "e.sharp === 'true'")
    root = offline.locator("#timeline")
    root.locator("input[type=search]").fill("onerror")
    _wait(offline, "+e.matches > 0")
    root.locator("button.next").click()
    expect(root.locator(".details h4")).to_contain_text(
        '<script>window.hacked=1</script><img src=x onerror="window.hacked=2">'
    )
    expect(offline.locator("main img, main a")).to_have_count(0)
    assert offline.evaluate("window.hacked") is None


def test_hostile_text_in_every_place_of_a_view_stays_text(offline, tmp_path):
    import plotly.graph_objects as go

    figure = go.Figure(go.Bar(x=[1], y=["</script><script>window.hacked=1</script>"], name="<!--<script>"))
    figure.update_layout(title="</script><script>window.hacked=2</script>")
    name = "</script><script>window.hacked=3</script>"
    view = SharedView(name, name, name, [Figure(name, figure)], [name])
    page = shared_view.render(view)
    assert len(re.findall(r"<script[ >]", page)) == 4  # figures, config, Plotly, the page's own
    assert "<!--" not in page
    file = tmp_path / "view.html"
    file.write_text(page, encoding="utf-8")
    offline.goto(file.as_uri())
    expect(offline.locator("svg.main-svg").first).to_be_visible()
    assert offline.evaluate("window.hacked") is None
    expect(offline.locator("h1")).to_have_text(name)


@pytest.mark.parametrize("address", others_in_accuracy(["diagnosis", "kernels?by=op"], ["diagnosis"]))
def test_a_shared_page_shows_its_headline_figures_and_tables(page, server, offline, tmp_path, address):
    page.goto(f"{server.url}/{address}{'&' if '?' in address else '?'}run={recorded.GOOD}")
    page.locator(".tk-headline").first.wait_for()
    settle(page)
    headline = page.locator(".tk-headline b").first.inner_text()
    figures = page.locator("[data-testid=stPlotlyChart]").count()
    file = _download(page, tmp_path)
    offline.goto(file.as_uri())
    expect(offline.locator(".tk-headline b").first).to_have_text(headline)
    expect(offline.locator("h1")).to_have_text(recorded.GOOD)
    if figures:
        expect(offline.locator(".figure svg.main-svg:first-child")).to_have_count(figures)
    assert offline.locator("table.tracekit").count() > 0


def test_a_figure_is_downloaded_as_svg_with_the_name_of_its_run(page, server, offline, tmp_path):
    def downloaded(shown, figure):
        shown.locator(figure).first.hover()
        with shown.expect_download() as caught:
            shown.locator(".modebar-btn[data-title='Download as SVG']").first.click()
        assert re.search(r"good.*\.svg$", caught.value.suggested_filename)
        caught.value.save_as(tmp_path / "figure.svg")
        return (tmp_path / "figure.svg").read_text(encoding="utf-8")

    page.goto(f"{server.url}/kernels?run={recorded.GOOD}")
    page.locator(".modebar-btn.tk-svg").first.wait_for(state="attached")
    settle(page)
    of_page = downloaded(page, "[data-testid=stPlotlyChart]")
    offline.goto(_download(page, tmp_path).as_uri())
    for text in (of_page, downloaded(offline, ".figure")):
        assert text.startswith("<svg")
        assert f"{recorded.GOOD} · Kernels" in text
