"""Many runs drawn together, in a real browser: grouped by a setting, limited by the filters, in one link."""

import contextlib
import json
import os
import re
import shutil

import pytest
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from playwright.sync_api import expect

from tests.browser import recorded
from tests.browser.conftest import WAIT_MS, assert_clean, open_again, settle

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)
RUNS, HOST = (0, 1, 2, 10), '<img src=x onerror="window.hacked=1">'


@pytest.fixture(scope="module")
def sweep(server):
    """Add runs that differ in batch and host, and so in step time."""
    folder = server.runs / "sweep"
    folder.mkdir()
    for number in RUNS:
        run = folder / f"run{number:02}"
        recorded.write_run(run, kernel="gemm", communication_us=1000 * (1 + number % 3), ranks=(0,))
        manifest = json.loads((run / "run.json").read_text())
        manifest |= {"arguments": {"batch": 2 ** (number % 3)}, "host": HOST if number % 2 else "node-a"}
        (run / "run.json").write_text(json.dumps(manifest))
        _age(run)
    yield folder
    shutil.rmtree(folder)


def _age(run):
    for file in run.iterdir():
        os.utime(file, (1_790_000_000,) * 2)


def _names_drawn(page):
    """The names of the runs that the figure of step times draws, by the data that Plotly has of it."""
    return page.locator("[class*=st-key-runs-step] .js-plotly-plot").evaluate(
        "(plot) => [...new Set(plot.data.flatMap((trace) => (trace.customdata ?? []).map(([name]) => name)))].sort()"
    )


def _legend(page):
    return page.locator("[class*=st-key-runs-step] .legendtext").all_text_contents()


def test_checked_runs_are_drawn_by_a_setting_and_a_link_shows_the_same(page, server, sweep):
    _open_checked(page, f"{server.url}/runs?view=charts&find=sweep", RUNS)
    group = page.get_by_role("combobox", name=re.compile("Group by"))
    group.click()
    page.get_by_role("option", name=re.compile(r"^arguments\.batch")).click()
    expect(page).to_have_url(re.compile(r"group=arguments\.batch"))
    settle(page)
    assert _legend(page) == ["1", "2", "4"]
    expect(page.locator("[class*=st-key-runs-settings] .js-plotly-plot")).to_be_visible()
    drawn = _legend(page), _names_drawn(page)
    open_again(page)
    page.locator("[class*=st-key-runs-step] .legendtext").first.wait_for()
    settle(page)
    assert (_legend(page), _names_drawn(page)) == drawn
    assert_clean(page)


def test_filters_limit_what_is_drawn_and_hostile_settings_are_text(page, server, sweep):
    _open_checked(page, f"{server.url}/runs?view=charts&find=sweep%2Frun0&group=host&metrics=step_time_ns", RUNS[:3])
    assert any("<img" in text for text in _legend(page))
    assert page.locator("[data-testid=stPlotlyChart] img[src=x]").count() == 0
    assert page.evaluate("window.hacked") is None
    assert_clean(page)


@pytest.mark.accuracy  # charts of other pages are clicked every day
def test_a_click_on_a_point_offers_to_open_its_run(page, server, sweep):
    _open_checked(page, f"{server.url}/runs?view=charts&find=sweep%2Frun01&metrics=step_time_ns", RUNS[1:2])
    point = page.locator("[class*=st-key-runs-step] .scatterlayer .points path.point").last
    offer = page.get_by_role("button", name="Open sweep/run01")
    for _ in range(10):
        box = point.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        with contextlib.suppress(PlaywrightTimeout):
            offer.wait_for(timeout=30_000)
            break  # else the figure took another width between the two, and the point had moved
    offer.click()
    expect(page.locator(".tk-title b").filter(has_text="sweep/run01")).to_be_visible()
    assert_clean(page)


def _open_checked(page, address, numbers):
    """Open charts of runs, which are checked meanwhile, and wait for those with these numbers."""
    page.goto(address)
    names = [f"sweep/run{number:02}" for number in numbers]
    figure = page.locator("[class*=st-key-runs-step] .main-svg").first
    for _ in range(60):  # a check of a small run takes a second or two, on a busy machine ten
        with contextlib.suppress(PlaywrightTimeout):
            figure.wait_for(timeout=2_000)
            settle(page)
            if _names_drawn(page) == names:
                return
        page.wait_for_timeout(1_000)
    assert _names_drawn(page) == names
