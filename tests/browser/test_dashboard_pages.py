"""The dashboard as a person uses it, in a real browser, against a real server."""

import re
import time
from pathlib import Path

import pytest
from selenium.common.exceptions import ElementNotInteractableException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser import recorded
from tests.browser.conftest import errors_of, hosts_asked

pytestmark = pytest.mark.browser
WAIT_S = 40
_GONE = (StaleElementReferenceException,)


def _visible(browser, selector, containing=""):
    """Return the first visible element that `selector` finds with the text given, as soon as there is one."""

    def found(b):
        elements = b.find_elements(By.CSS_SELECTOR, selector)
        return next((e for e in elements if e.is_displayed() and containing in e.text), None)

    return WebDriverWait(browser, WAIT_S, ignored_exceptions=_GONE).until(found, f"no {selector} with {containing!r}")


def _click(browser, selector, containing):
    """Click on what `_visible` finds, once it stays where it is: what unfolds moves at first."""

    def clicked(b):
        element = _visible(b, selector, containing)
        before = element.rect
        time.sleep(0.3)
        if element.rect != before or not element.rect["height"]:
            return False
        element.click()
        return True

    WebDriverWait(browser, WAIT_S, ignored_exceptions=(*_GONE, ElementNotInteractableException)).until(clicked)


def _open(browser, server, run):
    browser.get(f"{server.url}/?run={run}")
    _visible(browser, "[data-testid=stSidebar]")


def _turn_to(browser, page):
    _visible(browser, "[data-testid=stTopNavLink]", page).click()


def _assert_clean(browser):
    assert errors_of(browser) == []
    assert hosts_asked(browser) == {"127.0.0.1"}


def test_overview_shows_verdict_findings_and_breakdown(browser, server):
    _open(browser, server, recorded.GOOD)
    assert "%" in _visible(browser, ".tk-verdict b").text
    assert _visible(browser, ".tk-finding h3", "COMM001").text.startswith("warning")
    assert _visible(browser, ".tk-finding p.fix").text
    bars = _visible(browser, ".js-plotly-plot .barlayer")
    assert len(bars.find_elements(By.CSS_SELECTOR, ".point")) == 4 * 2  # parts by ranks
    _assert_clean(browser)


def test_a_finding_leads_to_its_moment_in_the_timeline(browser, server):
    _open(browser, server, recorded.GOOD)
    code = re.findall(r"[A-Z]+\d{3}", _visible(browser, ".tk-finding h3").text)[0]
    _visible(browser, "[data-testid=stExpander] summary", "Evidence").click()
    _click(browser, "[data-testid=stExpander] button", "Show in the timeline")
    _visible(browser, ".js-plotly-plot .ytick", "findings")
    _visible(browser, ".js-plotly-plot .ytick", "communication")
    assert re.search(r"rank \d · step \d", _visible(browser, "[data-testid=stCaptionContainer]", "rank").text)
    assert code in _visible(browser, ".tk-finding h3").text
    _assert_clean(browser)


def test_several_runs_are_compared(browser, server):
    _open(browser, server, recorded.GOOD)
    _turn_to(browser, "Compare")
    table = _visible(browser, "table.tracekit", "step time")
    assert recorded.GOOD in table.text
    assert recorded.HOSTILE in table.text
    _visible(browser, ".js-plotly-plot .barlayer")
    _assert_clean(browser)


def test_a_run_that_cannot_be_read_shows_why_and_the_others_work(browser, server):
    _open(browser, server, recorded.TRUNCATED)
    _visible(browser, "[data-testid=stAlert]")
    _assert_clean(browser)
    _turn_to(browser, "Compare")
    _visible(browser, "table.tracekit", recorded.GOOD)


def test_names_from_a_trace_run_nothing_and_fetch_nothing(browser, server):
    _open(browser, server, recorded.HOSTILE)
    _visible(browser, ".js-plotly-plot .barlayer")
    _visible(browser, "[data-testid=stExpander] summary", "Evidence").click()
    _turn_to(browser, "Timeline")
    _visible(browser, ".js-plotly-plot .ytick", "compute")
    _visible(browser, ".js-plotly-plot .barlayer text", "<script>")
    assert browser.execute_script("return window.hacked") is None
    _assert_clean(browser)


@pytest.mark.parametrize("asked", ["../../../../etc/passwd%00", recorded.GOOD + "/../truncated"])
def test_an_address_can_only_name_a_listed_run(browser, server, asked):
    _open(browser, server, asked)
    title = _visible(browser, ".tk-title b", recorded.GOOD)
    assert title.text == recorded.GOOD
    assert "etc" not in browser.current_url


def test_the_server_listens_to_this_machine_only(server):
    table = Path("/proc/net/tcp")
    if not table.exists():
        pytest.skip("needs Linux's /proc/net/tcp")
    sockets = [line.split() for line in table.read_text().splitlines()[1:] + _lines(table.with_name("tcp6"))]
    listening = {local for _, local, _, state, *_ in sockets if state == "0A" and int(local[-4:], 16) == server.port}
    assert listening == {f"0100007F:{server.port:04X}"}


def _lines(path):
    return path.read_text().splitlines()[1:] if path.exists() else []
