"""The HTML report as a person opens it: a file, no server, no network."""

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser import recorded
from tests.browser.conftest import errors_of, hosts_asked
from tracekit import checking, loading
from tracekit.reports import html

pytestmark = pytest.mark.browser
WAIT_S = 40
BARS = "#figure-{} .barlayer .point"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    recorded.write_runs(folder)
    for name in (recorded.GOOD, recorded.HOSTILE):
        run = loading.load(str(folder / name))
        (folder / f"{name}.html").write_text(html.render(checking.check(run), run), encoding="utf-8")
    return folder


def _open(browser, page):
    browser.get(page.as_uri())
    WebDriverWait(browser, WAIT_S).until(lambda b: b.find_elements(By.CSS_SELECTOR, BARS.format("timeline")))


def test_it_shows_the_verdict_and_draws_its_figures_without_any_network(browser, pages):
    _open(browser, pages / "good.html")
    assert browser.find_element(By.CSS_SELECTOR, ".tk-verdict b").is_displayed()
    for figure in ("breakdown", "steps", "timeline"):
        assert browser.find_element(By.CSS_SELECTOR, f"#figure-{figure} svg.main-svg").is_displayed()
    assert len(browser.find_elements(By.CSS_SELECTOR, BARS.format("breakdown"))) == 4 * 2  # parts by ranks
    assert errors_of(browser) == []
    assert hosts_asked(browser) == {""}


def test_names_from_the_trace_run_nothing_and_read_as_they_are(browser, pages):
    _open(browser, pages / "hostile.html")
    shown = browser.execute_script(
        """
        const place = document.getElementById("figure-timeline");
        const curve = place.data.findIndex((trace) => trace.name === "compute");
        Plotly.Fx.hover(place, [{curveNumber: curve, pointNumber: 0}]);
        return place.querySelector(".hoverlayer").textContent;
        """
    )
    assert "<script>window.hacked=1</script><img src=x" in shown
    assert browser.execute_script("return window.hacked") is None
    assert not browser.find_elements(By.CSS_SELECTOR, "main img, main a, .hoverlayer a")
    assert errors_of(browser) == []
    assert hosts_asked(browser) == {""}


def test_dragging_across_the_timeline_zooms_into_it(browser, pages):
    _open(browser, pages / "good.html")
    shown = "return document.getElementById('figure-timeline').layout.xaxis.range"
    before = browser.execute_script(shown)
    plot = browser.find_element(By.CSS_SELECTOR, "#figure-timeline .nsewdrag")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(browser).move_to_element_with_offset(plot, -100, 0).click_and_hold().move_by_offset(
        100, 0
    ).move_by_offset(100, 0).release().perform()
    WebDriverWait(browser, WAIT_S).until(lambda b: b.execute_script(shown) != before)
    left, right = browser.execute_script(shown)
    assert before[0] < left < right < before[1]


def test_figures_are_legible_on_a_dark_page_and_on_paper(browser, pages):
    def ink():
        label = browser.find_element(By.CSS_SELECTOR, "#figure-breakdown .ytick text")
        return browser.execute_script("return getComputedStyle(arguments[0]).fill", label)

    def wait_for(colour):
        # A figure that is drawn anew in other colours drops the label that was just found.
        waiting = WebDriverWait(browser, WAIT_S, ignored_exceptions=[StaleElementReferenceException])
        waiting.until(lambda _: ink() == colour)

    def prefer(scheme):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    try:
        prefer("light")
        _open(browser, pages / "good.html")
        wait_for("rgb(27, 35, 48)")
        prefer("dark")
        wait_for("rgb(223, 229, 238)")
        browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
        wait_for("rgb(0, 0, 0)")
    finally:
        prefer("light")


def test_the_browser_would_refuse_a_script_that_is_not_the_reports_own(browser, pages):
    _open(browser, pages / "good.html")
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 4'; document.body.append(s)"
    )
    assert browser.execute_script("return window.hacked") is None
    assert any("Content Security Policy" in message for message in errors_of(browser))
