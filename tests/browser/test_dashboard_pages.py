"""The dashboard as a person uses it, in a real browser, against a real server."""

import re
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from tests.browser import recorded
from tests.browser.conftest import WAIT_MS, assert_clean, settle, turn_to

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)


def _visible(page, selector, containing=""):
    """Return the first visible element that `selector` finds with the text given, as soon as there is one."""
    found = page.locator(selector).filter(has_text=containing, visible=True).first
    found.wait_for()
    return found


def _open(page, server, run):
    page.goto(f"{server.url}/?run={quote(run)}")
    _visible(page, "[data-testid=stSidebar]")


def test_overview_shows_verdict_findings_and_breakdown(page, server):
    _open(page, server, recorded.GOOD)
    assert "%" in _visible(page, ".tk-verdict b").inner_text()
    assert _visible(page, ".tk-finding", "COMM001").inner_text().startswith("warning")
    assert _visible(page, ".tk-finding p.fix").inner_text()
    bars = _visible(page, ".js-plotly-plot .barlayer")
    expect(bars.locator(".point")).to_have_count(4 * 2)  # parts by ranks
    assert_clean(page)


@pytest.mark.accuracy  # unit/dashboard compares runs, test_accessibility opens the page
def test_several_runs_are_compared(page, server):
    _open(page, server, recorded.GOOD)
    turn_to(page, "Compare")
    table = _visible(page, "table.tracekit", "step time")
    assert recorded.GOOD in table.inner_text()
    assert recorded.HOSTILE in table.inner_text()
    _visible(page, ".js-plotly-plot .barlayer")
    frames = page.locator(".st-key-comparison-stacks .slice .slicetext")
    expect(frames.filter(has_text="ProfilerStep").first).to_be_visible()
    expect(frames.filter(has_text="gemm_kernel")).to_have_count(0)  # the other run has another kernel
    settle(page)
    page.get_by_text("as wide as before", exact=True).click()
    expect(page).to_have_url(re.compile("changed_width=before"))
    expect(frames.filter(has_text="gemm_kernel").first).to_be_visible()
    assert_clean(page)


def test_a_run_that_cannot_be_read_shows_why_and_the_others_work(page, server):
    _open(page, server, recorded.TRUNCATED)
    _visible(page, "[data-testid=stAlert]")
    assert_clean(page)
    turn_to(page, "Compare")
    _visible(page, "table.tracekit", recorded.GOOD)


def test_names_from_a_trace_run_nothing_and_fetch_nothing(page, server):
    _open(page, server, recorded.HOSTILE)
    _visible(page, ".js-plotly-plot .barlayer")
    settle(page)
    _visible(page, "[data-testid=stExpander] summary", "Evidence").click()
    assert page.evaluate("window.hacked") is None
    assert_clean(page)


@pytest.mark.accuracy  # test_other_visitors tries such addresses without a browser
@pytest.mark.parametrize("requested", ["../../../../etc/passwd\0", recorded.GOOD + "/../truncated"])
def test_an_address_can_only_name_a_listed_run(page, server, requested):
    _open(page, server, requested)
    said = _visible(page, "[data-testid=stAlert]", "There is no run named")
    assert requested.strip("\0") in said.inner_text()
    expect(page.locator(".tk-title b")).to_have_count(0)  # no other run is opened in its place
    expect(page).not_to_have_url(re.compile("etc"))
    settle(page)
    _visible(page, "button", "Open ").click()
    _visible(page, "[data-testid=stAlert], .tk-verdict")
    expect(page.locator("[data-testid=stAlert]").filter(has_text="There is no run named")).to_have_count(0)
    assert_clean(page)


@pytest.fixture
def elsewhere():
    """Return an HTTP server on this machine that records the path of each request in `paths`."""

    class Recording(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.paths.append(self.path)
            self.send_response(404)
            self.end_headers()

        do_HEAD = do_POST = do_PUT = do_OPTIONS = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Recording) as server:
        server.paths = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_url_in_an_address_is_never_requested(page, server, elsewhere):
    # The dashboard reads URLs, but only those that it was opened on: a link must not make it request others.
    url = f"http://127.0.0.1:{elsewhere.server_port}/run/"
    for address in ("", "timeline"):
        page.goto(f"{server.url}/{address}?run={quote(url, safe='')}&compare={quote(url + 'other', safe='')}")
        _visible(page, "[data-testid=stSidebar]")
        settle(page)
        expect(page).not_to_have_url(re.compile(str(elsewhere.server_port)))
    assert elsewhere.paths == []
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(url, timeout=60)
    assert elsewhere.paths == ["/run/"]  # a request would have been recorded


def test_the_server_listens_to_this_machine_only(server):
    table = Path("/proc/net/tcp")
    if not table.exists():
        pytest.skip("needs Linux's /proc/net/tcp")
    sockets = [line.split() for line in table.read_text().splitlines()[1:] + _lines(table.with_name("tcp6"))]
    listening = {local for _, local, _, state, *_ in sockets if state == "0A" and int(local[-4:], 16) == server.port}
    assert listening == {f"0100007F:{server.port:04X}"}


def _lines(path):
    return path.read_text().splitlines()[1:] if path.exists() else []


def test_titles_and_files_name_the_run_and_the_page(page, server):
    _open(page, server, recorded.GOOD)
    _visible(page, ".js-plotly-plot .barlayer")
    settle(page)
    expect(page).to_have_title(f"Diagnosis · {recorded.GOOD} · tracekit")
    with page.expect_download() as download:
        _visible(page, "[class*=st-key-download-html] button").click()
    assert download.value.suggested_filename == f"{recorded.GOOD}-breakdown_by_rank.html"
    figure = page.locator(".js-plotly-plot").first
    figure.hover()
    with page.expect_download() as download:
        figure.locator("[data-title*=Download], [data-title*=png]").first.click()
    assert download.value.suggested_filename == f"{recorded.GOOD}-breakdown_by_rank.png"
    turn_to(page, "Runs")
    expect(page).to_have_title("Runs · tracekit")
    assert_clean(page)


# Which message is a page's first depends on the machine's load: on a busy one another may be cut off.
@pytest.mark.accuracy
def test_a_page_that_lost_its_connection_as_it_began_is_loaded_again(new_page, server):
    page, connections, messages_left = new_page, [], []

    def route(connection):
        to_server = connection.connect_to_server()
        connections.append(connection)

        def pass_on(message):
            if connection is not connections[0] or not messages_left or messages_left.pop():
                connection.send(message)
            else:
                messages_left.append(False)  # nothing after it arrives either

        to_server.on_message(pass_on)

    page.route_web_socket("**/_stcore/stream*", route)
    page.goto(f"{server.url}/sql?run={recorded.GOOD}")
    page.locator(".tk-title").wait_for()
    settle(page)
    messages_left += [False, True]  # of the next page only the first message arrives, which empties the one before it
    page.locator("[data-testid=stSidebarNavLink]").filter(has_text=re.compile("^Plan$")).click()
    page.wait_for_function("document.querySelector('[data-testid=stMain]').innerText.trim() === ''")
    connections[0].close(code=1011)
    page.locator(".tk-title").wait_for()
    assert len(connections) > 2  # it connected again in vain, and was then loaded


def test_a_page_without_figures_loads_what_draws_them_once_for_the_next_page(new_page, server):
    requested = []
    new_page.on("request", lambda request: requested.append(request.url))
    with new_page.expect_response(lambda response: "/PlotlyChart." in response.url) as loaded:
        new_page.goto(f"{server.url}/sql?run={recorded.GOOD}")
    assert loaded.value.ok
    expect(new_page.get_by_test_id("stPlotlyChart")).to_have_count(0)
    turn_to(new_page, "Diagnosis")
    _visible(new_page, ".js-plotly-plot .barlayer")
    assert len([url for url in requested if "/PlotlyChart." in url]) == 1
    assert_clean(new_page)
