"""Every page audited by axe-core, in both themes, wide and narrow.

There is no serious or critical item, nothing is cut off, no page fails.
"""

import contextlib
import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from playwright.sync_api import expect

from tests.browser import conftest, recorded
from tests.browser.conftest import WAIT_MS, assert_clean, heard, settle
from tests.support.dashboard_pages import addressed_pages
from tests.support.selection import others_in_accuracy

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
ROOT, JOB = Path(__file__).parents[2], "job"
WIDE, NARROW = {"width": 1440, "height": 1000}, {"width": 800, "height": 1000}
SEVERE = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
    .filter((found) => ["serious", "critical"].includes(found.impact))
    .flatMap((found) => found.nodes.map((node) => `${found.id}: ${node.html.slice(0, 200)} ${node.failureSummary}`))"""
# A text whose box is narrower than three letters of it stands one letter below the other.
COLUMNS_OF_LETTERS = """() => [...document.querySelectorAll("[data-testid=stMain] :is(td, th, p, h2, h3, button)")]
    .filter((e) => {
        const range = document.createRange();
        range.selectNodeContents(e);
        const {width, height} = range.getBoundingClientRect();
        return e.textContent.trim().length > 5 && width && width < 30 && height > 60;
    }).map((e) => e.textContent)"""
# Buttons side by side of which some are outside of their control.
CUT_BUTTONS = """() => [...document.querySelectorAll("[data-testid=stMain] [data-testid=stButtonGroup] > div")]
    .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"""
# Where the page scrolls sideways: what reaches beyond its edge, except what scrolls by itself.
CUT_OFF = """() => {
    const main = document.querySelector("[data-testid=stMain]");
    return main.scrollWidth <= main.clientWidth ? [] : [...main.querySelectorAll("*")]
        .filter((e) => e.getBoundingClientRect().right > innerWidth && !e.closest(".tk-table"))
        .map((e) => `${e.tagName} ${e.dataset.testid ?? ""} ${e.getAttribute("class")}`);
}"""


# What pages are made of: the list, cards with evidence, the canvas, a table with figures, a form, two runs.
EVERYDAY = [
    ("runs", "Runs"),
    ("diagnosis", "Diagnosis"),
    ("timeline", "Timeline"),
    ("kernels", "Kernels"),
    ("plan", "Plan"),
    ("compare", "Compare"),
]


@pytest.fixture(scope="module")
def axe():
    """Return the script of axe-core."""
    package = pytest.importorskip("axe_playwright_python.base", reason="needs axe-playwright-python")
    return package.AXE_FILE_PATH.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def job(server):
    """The run of a job with an attempts log and saves, listed as long as these tests run."""
    shutil.copytree(ROOT / "sample_traces" / "ci" / "green", server.runs / JOB)
    for name in ("attempts.jsonl", "rank00000.checkpoint.jsonl"):
        shutil.copy(ROOT / "tests" / "recordings" / "goodput" / name, server.runs / JOB / name)
    yield
    shutil.rmtree(server.runs / JOB)


@pytest.fixture(scope="module")
def visited(tab, server):
    """Return one page for all tests: to load it again would cost more CPU time than all that they do with it."""
    yield from conftest.stay_open(tab, f"{server.url}/?run={recorded.GOOD}")


def _open(page, server, address, title):
    """Turn to the page by its link; an address with choices is loaded."""
    if "?" in address:
        page.goto(f"{server.url}/{address}" if "run=" in address else f"{server.url}/{address}&run={recorded.GOOD}")
    else:
        page.locator("[data-testid=stSidebarNavLink]").filter(has_text=re.compile(f"^{title}$")).click()
    expect(page.locator("[data-testid=stSidebarNavLink][aria-current=page]")).to_have_text(title)


@pytest.mark.parametrize(
    ("address", "title"),
    others_in_accuracy(
        [
            *((page.address, page.title) for page in addressed_pages()),
            ("runs?view=charts", "Runs"),
            ("diagnosis?trust=True&savings=True", "Diagnosis"),
            ("timeline?range=0-9000000", "Timeline"),
            ("timeline?path=True", "Timeline"),
            ("ranks?tab=exposed communication", "Ranks and communication"),
            ("ranks?tab=bandwidth", "Ranks and communication"),
            ("ranks?tab=contention", "Ranks and communication"),
            ("kernels?what=operators", "Kernels"),
            ("kernels?what=call stacks", "Kernels"),
            (f"memory?tab=checkpoints&run={JOB}", "Memory and checkpoints"),
            (f"memory?tab=goodput&run={JOB}", "Memory and checkpoints"),
        ],
        EVERYDAY,
    ),
)
@pytest.mark.usefixtures("job")
def test_a_page_has_no_serious_item_and_fits(visited, server, axe, address, title):
    page = visited
    heard(page)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(WIDE)
    _open(page, server, address, title)
    for theme, size in (("light", WIDE), ("dark", NARROW)):
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size(size)
        expect(page.locator("[data-testid=stApp]")).to_have_css("color-scheme", theme)
        settle(page)
        page.evaluate(axe)
        assert page.evaluate(SEVERE) == [], theme
        assert page.evaluate(COLUMNS_OF_LETTERS) == []
        assert page.evaluate(CUT_BUTTONS) == [], size
        with contextlib.suppress(PlaywrightTimeout):  # figures take the width of a resized window a moment later
            page.wait_for_function(f"({CUT_OFF})().length === 0", timeout=20_000)
        assert page.evaluate(CUT_OFF) == [], size
    expect(page.locator("[data-testid=stException]")).to_have_count(0)
    assert_clean(page)


@pytest.mark.accuracy  # how a page moves depends on when its parts arrive
def test_the_headline_of_a_page_stays_where_it_is_first_shown(new_page, server):
    page = new_page
    page.add_init_script(
        """window.moved = []; new PerformanceObserver((list) => window.moved.push(...list.getEntries().map(
            (e) => [e.startTime, e.value]))).observe({type: "layout-shift", buffered: true});
        const timer = setInterval(() => { if (document.querySelector(".tk-headline")) {
            window.shownAt = performance.now(); clearInterval(timer); } }, 10)"""
    )

    def moved(address):
        page.goto(f"{server.url}/{address}?run={recorded.GOOD}")
        page.locator(".tk-headline").first.wait_for()
        settle(page)
        return page.evaluate("window.moved.filter(([at]) => at > window.shownAt).reduce((sum, [, by]) => sum + by, 0)")

    for address in ("diagnosis", "timeline"):
        # On a loaded machine what is drawn together arrives in pieces. The limit: what the Core Web Vitals call good.
        assert any(moved(address) <= 0.1 for _ in range(6)), address
