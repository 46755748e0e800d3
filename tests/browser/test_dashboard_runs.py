"""Runs as people find, check, compare and drop them; what the address says; what nobody may reach."""

import gzip
import http.client
import json
import re
import shutil
import socket
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser import recorded
from tests.browser.conftest import WAIT_MS, assert_clean, heard, settle
from tests.browser.grid import ROWS, cells, row_of, select

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)

HOSTILE_FOLDERS = (
    '<img src=x onerror="window.hacked=5">',
    "\u202egnp.exe ![x](javascript:window.hacked=6)",
    "😀" * 60,
    "<script>window.hacked=7<⁄script>" + "a" * 200,
)


@pytest.fixture(scope="module")
def folder(server):
    """Return the server's folder with more runs in it: some of hostile names, and one with a link that leads out."""
    before = set(server.runs.iterdir())
    for name in HOSTILE_FOLDERS:
        shutil.copytree(server.runs / recorded.GOOD, server.runs / name)
    outside = server.runs.parent / "outside"
    outside.mkdir()
    secret = outside / "rank00000.pt.trace.json.gz"
    shutil.copy(server.runs / recorded.GOOD / secret.name, secret)
    shutil.copytree(server.runs / recorded.GOOD, server.runs / "linked")
    (server.runs / "linked" / secret.name).unlink()
    (server.runs / "linked" / secret.name).symlink_to(secret)
    yield server.runs
    for path in set(server.runs.iterdir()) - before:
        shutil.rmtree(path)
    shutil.rmtree(outside)


def _button(page, name):
    return page.get_by_role("button", name=name)


def test_runs_are_listed_looked_through_checked_opened_and_compared(page, server, folder):
    page.goto(server.url)
    expect(page.locator(".tk-title b").filter(has_text="Runs")).to_be_visible()
    expect(page).to_have_url(re.compile("/runs"))
    expect(page.locator(ROWS)).to_have_count(3 + len(HOSTILE_FOLDERS) + 1)  # the list may be one of a moment before
    assert any("unreadable" in cell for cell in cells(page)[row_of(page, "linked")])
    find = page.get_by_placeholder("Search name")
    find.fill("good")
    find.press("Enter")
    expect(page).to_have_url(re.compile("find=good"))
    expect(page.locator(".tk-title span")).to_have_text(re.compile("1 of 8 shown"))
    good = page.locator(ROWS)
    expect(good).to_have_count(1)
    expect(good).to_contain_text("2 warnings")  # it is checked while the list is open
    expect(good).to_contain_text("10,10,9.2")  # its steps in ms
    expect(page.locator(".tk-headline")).not_to_contain_text("runs checked")  # until then rows move as results arrive
    select(page, "good")
    expect(_button(page, "Open this run")).to_be_enabled()
    settle(page)
    _button(page, "Open this run").click()
    expect(page.locator(".tk-verdict b").first).to_be_visible()
    expect(page).to_have_url(re.compile(r"/\?.*run=good"))
    page.go_back()
    page.get_by_placeholder("Search name").wait_for()
    find = page.get_by_placeholder("Search name")
    find.fill("ddp")
    find.press("Enter")
    expect(page.locator(".tk-title span")).not_to_have_text(re.compile("1 of 8"))
    expect(page.locator(".tk-headline")).not_to_contain_text("runs checked")
    select(page, "good")
    expect(_button(page, "Open this run")).to_be_enabled()
    select(page, "hostile")
    expect(_button(page, "Compare 2")).to_be_enabled()
    settle(page)
    _button(page, "Compare 2").click()
    expect(page.locator(".tk-headline b").filter(has_text="a step")).to_be_visible()
    expect(page).to_have_url(re.compile(r"/compare\?.*run=good.*compare=hostile"))
    table = page.locator("table.tracekit").filter(has_text="step time")
    expect(table).to_contain_text("exposed communication")
    settle(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").first.click()
    table = Path(download.value.path()).read_text()
    assert table.startswith("metric,good,hostile\n")
    assert "step time" in table
    assert page.evaluate("window.hacked") is None
    assert_clean(page)


def test_runs_of_hostile_names_open_and_run_nothing(page, server, folder):
    page.goto(f"{server.url}/?run=good")
    for name in HOSTILE_FOLDERS[:2]:
        start = name.replace("\u202e", "�")[:12]
        settle(page)
        page.get_by_role("combobox", name=re.compile("Run")).first.click()
        page.get_by_role("option").filter(has_text=start).first.click()
        expect(page.locator(".tk-title b").filter(has_text=start)).to_be_visible()
        expect(page.locator(".tk-verdict b").first).to_be_visible()
    assert page.evaluate("window.hacked") is None
    assert_clean(page)


@pytest.mark.accuracy  # links of charts, ranges and shared views are opened every day
def test_a_link_shows_what_another_person_chose(page, server):
    page.goto(f"{server.url}/?run=good&bars=by+step&rank=1")
    expect(page.get_by_role("radio", name="by step")).to_be_checked()
    expect(page.locator("[data-testid=stSelectbox]").filter(has_text="Rank").locator("input")).to_have_value("1")
    settle(page)
    page.get_by_role("radio", name="by rank").click()
    expect(page).to_have_url(re.compile(r"bars=by\+rank"))
    page.go_back()
    expect(page.get_by_role("radio", name="by step")).to_be_checked()
    page.goto(f"{server.url}/?run=good&bars=%3Cimg%3E&rank=999")
    expect(page.get_by_role("radio", name="by rank")).to_be_checked()
    expect(page.locator(".tk-verdict b").first).to_be_visible()
    assert_clean(page)


def test_the_diagnosis_is_found_by_the_name_of_the_overview(page, server):
    page.goto(f"{server.url}/overview?run=good&bars=by+step")
    expect(page).to_have_url(re.compile(r"/\?.*run=good"))
    expect(page.get_by_role("radio", name="by step")).to_be_checked()
    expect(page.locator("[data-testid=stSidebarNavLink][aria-current=page]")).to_have_text("Diagnosis")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert_clean(page)
    assert heard(page).probed == {"/overview/_stcore/health", "/overview/_stcore/host-config"}


def test_a_run_with_a_link_that_leads_out_is_not_read(page, server, folder):
    page.goto(f"{server.url}/?run=linked")
    expect(page.locator("[data-testid=stAlert]")).to_contain_text("rank00000.pt.trace.json.gz is a link to a path")
    assert "tk-verdict" not in page.content().split("</style>")[-1]
    assert_clean(page)


@pytest.fixture
def uploaded(tmp_path):
    trace = recorded._trace(0, "my_secret_kernel", 3000, "main")
    path = tmp_path / "rank00000.<b>.pt.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return path


def _upload(page, *paths):
    chooser = page.locator("[data-testid=stFileUploader] input[type=file]")
    if not chooser.count():
        page.get_by_text("Upload a trace").click()
    chooser.set_input_files([str(path) for path in paths])


@pytest.mark.accuracy  # test_other_visitors does the same without files
def test_an_uploaded_trace_is_visible_to_one_person_and_removed_with_the_page(
    context, other_context, server, uploaded, tmp_path
):
    page = context.new_page()
    page.goto(f"{server.url}/?run=good")
    expect(page.locator(".tk-verdict b").first).to_be_visible()
    settle(page)
    _upload(page, uploaded)
    title = page.locator(".tk-title b").filter(has_text="uploaded: rank00000._b_.pt.trace.json.gz")
    expect(title).to_be_visible()
    expect(page.locator(".tk-verdict b").first).to_be_visible()
    files = list(server.temporary.glob("tracekit-upload-*/*"))
    assert [path.name for path in files] == ["rank00000._b_.pt.trace.json.gz"]
    assert files[0].parent.stat().st_mode & 0o077 == 0
    other = other_context.new_page()
    other.goto(page.url)
    expect(other.locator(".tk-verdict b").first).to_be_visible()
    assert "uploaded: " not in other.locator("[data-testid=stSidebar]").inner_text()
    bad = tmp_path / "bad.json"
    bad.write_text("no trace at all")
    settle(other)
    _upload(other, bad)
    expect(other.locator("[data-testid=stAlert]").first).to_contain_text("bad.json: ")
    assert "tracekit-upload-" not in other.locator("body").inner_text()
    assert "my_secret_kernel" not in other.content()
    expect(title).to_be_visible()  # what another chooses and drops changes nothing here
    assert_clean(other)
    assert_clean(page)
    page.close()
    other.close()
    deadline = time.monotonic() + 300
    while list(server.temporary.glob("tracekit-upload-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(server.temporary.glob("tracekit-upload-*")) == []


@pytest.mark.accuracy  # unit/dashboard has such snapshots
def test_an_uploaded_memory_snapshot_without_traces_is_drawn_on_the_page_memory(page, server, tmp_path):
    packed = Path(__file__).parents[1] / "recordings" / "out_of_memory" / "leak" / "rank00000.memory.pickle.gz"
    snapshot = tmp_path / "oom.pickle"
    snapshot.write_bytes(gzip.decompress(packed.read_bytes()))
    page.goto(f"{server.url}/memory?run=good")
    expect(page.locator(".tk-title b").first).to_be_visible()
    settle(page)
    _upload(page, snapshot)
    expect(page.locator(".tk-title b").filter(has_text="uploaded: oom.memory.pickle")).to_be_visible()
    expect(page.get_by_text("Allocated at the peak", exact=True)).to_be_visible()
    expect(page.locator(".js-plotly-plot .yaxislayer-above").get_by_text("parameters")).to_be_visible()
    settle(page)
    assert_clean(page)


def _answer(server, request):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request.encode())
        return connection.recv(200).decode("latin-1").splitlines()[0]


@pytest.mark.parametrize(
    "headers",
    ["Host: evil.example\r\n", "Host: 127.0.0.1:{port}\r\nOrigin: http://evil.example\r\n"],
    ids=["a name that another site lets point here", "a page of another site"],
)
def test_other_sites_cannot_talk_to_it(server, headers):
    upgrade = (
        "GET /_stcore/stream HTTP/1.1\r\n" + headers.format(port=server.port) + "Connection: Upgrade\r\n"
        "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    assert " 403 " in _answer(server, upgrade)


def test_nobody_uploads_without_a_token_of_a_session(server):
    body = "--x\r\nContent-Disposition: form-data; name=f; filename=f\r\n\r\n{}\r\n--x--\r\n"
    request = (
        f"PUT /_stcore/upload_file/some-session/some-file HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    assert re.search(r" (400|403) ", _answer(server, request))


@pytest.mark.parametrize(
    "path", ["/media/../../../../etc/passwd", "/app/static/../../../etc/passwd", "/..%2f..%2f..%2fetc/passwd"]
)
def test_a_path_outside_is_not_served(server, path):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"root:" not in answer


def test_an_answer_does_not_wait_for_the_one_before_to_be_acknowledged(server):
    """Nagle's algorithm against delayed acknowledgements: 40 ms for each answer, hundreds of which make a page."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    took_s = []
    # At first, a kernel acknowledges at once. A busy machine delays an answer, too, but not each of hundreds.
    while len(took_s) < 40 or (min(took_s[20:]) >= 0.03 and len(took_s) < 400):
        began_s = time.monotonic()
        connection.request("GET", "/_stcore/health")
        connection.getresponse().read()
        took_s.append(time.monotonic() - began_s)
    connection.close()
    assert min(took_s[20:]) < 0.03
