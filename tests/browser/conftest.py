"""A real Chromium without a window, and the dashboard as a process of its own."""

import contextlib
import os
import re
import shutil
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import expect

from tests.browser import recorded
from tests.support import ports
from tracekit.cli.commands.dashboard import server_command

ROOT = Path(__file__).parents[2]
# Waiting ends as soon as it can. CI has two cores, on which other tests and mypy run while Chromium starts.
WAIT_MS = 300_000
VIEWPORT = {"width": 1400, "height": 1000}
# First the shell without a window: for each page, others also start one of their address bar, a quarter of the time.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


# Until the last test of this folder: Playwright keeps an event loop in this thread for as long as it runs.
@pytest.fixture(scope="package")
def chromium():
    """Return Debian's (or another installed) Chromium, driven by Playwright."""
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not binary:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=list(FLAGS), chromium_sandbox=False)
        yield browser
        browser.close()


# At a page's own address Streamlit's script does not know yet where the server's root is, and asks below the page first
# (in its source: getPossibleBaseUris). The server has these two at its root only and says so by 404.
PROBED = re.compile(r"/\w+/_stcore/(health|host-config)")


@dataclass
class Heard:
    """What pages reported as errors and which hosts they requested ('' for files)."""

    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    probed: set[str] = field(default_factory=set)
    """The paths at which Streamlit looked for its server in vain, as it must at a page's own address."""

    def said(self, message):
        path = urlsplit(message.location["url"]).path
        if message.type == "error" and "status of 404" in message.text and PROBED.fullmatch(path):
            self.probed.add(path)
        elif message.type == "error":
            self.errors.append(message.text)

    def request(self, url: str) -> None:
        address = urlsplit(url)
        if address.scheme in ("http", "https", "ws", "wss"):
            self.hosts.add(address.hostname or "")
        elif address.scheme == "file":
            self.hosts.add("")


_HEARD: dict[int, Heard] = {}


@pytest.fixture(scope="package")
def tab(chromium):
    """The page of all tests. Its process has compiled the dashboard's scripts: a new page takes three times as long."""
    for context in _context(chromium):
        yield context.new_page()


@pytest.fixture
def context(tab):
    """Return the browser context of the page, without what earlier tests left there."""
    heard(tab)
    yield tab.context
    _reset(tab)


def stay_open(tab, address):
    """Yield the page of all tests, opened at an address, to the tests of a module that turn from page to page."""
    heard(tab)
    tab.goto(address)
    tab.locator(".tk-verdict").wait_for()
    yield tab
    _reset(tab)


@pytest.fixture
def other_context(chromium):
    """Return the context of a second person."""
    yield from _context(chromium)


@pytest.fixture
def new_page(other_context):
    """Return a page in a process of its own, for a test that closes it or adds scripts to all that it loads."""
    return other_context.new_page()


def _reset(tab):
    """Remove what tests left in the page of all tests."""
    for other in tab.context.pages[1:]:
        other.close()
    tab.context.unroute_all()
    _forget(tab)
    tab.context.clear_cookies()
    tab.set_viewport_size(VIEWPORT)
    tab.emulate_media(color_scheme="light")


def _forget(page):
    """Leave what the page shows, and forget what it has stored and where the mouse was."""
    with contextlib.suppress(PlaywrightError):  # an empty page stores nothing
        page.evaluate("localStorage.clear(); sessionStorage.clear()")
    page.goto("about:blank")
    page.mouse.move(0, 0)


def open_again(page):
    """Open the address of the page as another person would who got it as a link."""
    address = page.url
    _forget(page)
    page.goto(address)


def _context(chromium):
    context = chromium.new_context(viewport=VIEWPORT, accept_downloads=True)
    context.set_default_timeout(WAIT_MS)
    key = id(context)
    _HEARD[key] = Heard()
    # Looked up each time: `heard` puts another in its place.
    context.on("console", lambda message: _HEARD[key].said(message))
    context.on("weberror", lambda raised: _HEARD[key].errors.append(str(raised.error)))
    context.on("request", lambda request: _HEARD[key].request(request.url))
    context.on("page", lambda page: page.on("websocket", lambda socket: _HEARD[key].request(socket.url)))
    yield context
    context.close()
    del _HEARD[key]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Add to the report of a failed test what its pages show: on another machine there is nothing else to see."""
    report = yield
    if report.when == "call" and report.failed:
        for name in {"context", "other_context"} & set(item.funcargs):
            for shown in item.funcargs[name].pages:
                report.sections.append((f"{shown.url} in {name}", _text(shown)))
    return report


def _text(page):
    try:
        return page.locator("body").inner_text(timeout=5_000)[:4_000]
    except PlaywrightError as error:
        return str(error)


@pytest.fixture
def page(context, tab):
    """Return an empty page whose errors and requests are recorded."""
    return tab


def heard(page):
    """Return the errors and requests of the page's context so far, and reset them."""
    key = id(page.context)
    heard_so_far, _HEARD[key] = _HEARD[key], Heard()
    return heard_so_far


def assert_clean(page, hosts=frozenset({"127.0.0.1"})):
    """Assert that there was no error and no request except to `hosts`."""
    heard_so_far = _HEARD[id(page.context)]
    assert heard_so_far.errors == []
    assert heard_so_far.hosts <= hosts


SETTLED = """() => document.querySelector("[data-testid=stApp]")?.dataset.testScriptState === "notRunning"
    && !document.querySelector("[data-testid=stSkeleton]")
    && [...document.querySelectorAll("[data-testid=stPlotlyChart]")].every((each) => each.querySelector(".main-svg"))"""


def settle(page):
    """Wait until the page is complete: earlier clicks and keys may hit elements that move or are replaced."""
    page.wait_for_function(SETTLED, polling=100)  # by default it is called for each frame, and so there are frames


def turn_to(page, title):
    """Turn to a page by its link, again where the page before it was drawn anew meanwhile: the click is lost."""
    link = page.locator("[data-testid=stSidebarNavLink]").filter(has_text=re.compile(f"^{title}$"))
    current = page.locator("[data-testid=stSidebarNavLink][aria-current=page]")
    for _ in range(5):
        settle(page)
        link.click()
        with contextlib.suppress(AssertionError):
            expect(current).to_have_text(title, timeout=30_000)
            return
    expect(current).to_have_text(title)


def expand(page, title):
    """Expand a collapsed part of a page, and click again where a rerun of the page has lost the click."""
    part = page.locator("details").filter(has=page.locator("summary").filter(has_text=title)).first
    for _ in range(5):
        settle(page)
        part.locator("summary").click()
        with contextlib.suppress(AssertionError):
            expect(part).to_have_attribute("open", "", timeout=30_000)
            return
    expect(part).to_have_attribute("open", "")


@dataclass(frozen=True)
class Server:
    """The dashboard, opened on a folder of runs."""

    url: str
    port: int
    runs: Path
    temporary: Path
    """Where its temporary files go."""


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    recorded.write_runs(runs)
    with served(runs, tmp_path_factory.mktemp("elsewhere")) as started:
        yield started


@contextlib.contextmanager
def served(runs, elsewhere, *plugins):
    """Yield the dashboard opened on `runs`, its files in the folder `elsewhere`; `plugins` are folders of packages."""
    port = ports.free_port()
    # Another folder, so that no configuration but the dashboard's own is found: nor anything by the names of its code.
    for name in ("dashboard", "streamlit", "tracekit"):
        (elsewhere / f"{name}.py").write_text("raise SystemExit('not the one that was meant')")
    log, temporary = elsewhere / "log", elsewhere / "temporary"
    temporary.mkdir()
    path = os.pathsep.join(map(str, (ROOT, *plugins)))
    environment = {"PYTHONPATH": path, "TRACEKIT_CACHE_DIR": str(elsewhere / "cache"), "TMPDIR": str(temporary)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            server_command([str(runs)], port=port, browser=False),
            cwd=elsewhere,
            stdout=out,
            stderr=out,
            env=os.environ | environment,
        )
        try:
            _wait_until_healthy(process, port, log)
            yield Server(f"http://127.0.0.1:{port}", port, runs, temporary)
        finally:
            process.terminate()
            process.wait(300)


def _wait_until_healthy(process, port, log):
    deadline = time.monotonic() + WAIT_MS / 1000
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=20) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"the dashboard did not start:\n{log.read_text()}")
