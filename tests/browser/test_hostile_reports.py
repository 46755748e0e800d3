"""Reports and notebook output of a run whose every name is hostile, in a browser: nothing runs or is fetched."""

import pytest

import tracekit as library
from tests.browser.conftest import assert_clean, heard
from tests.integration import test_hostile_names as hostile
from tests.support.cli_runner import tracekit

pytestmark = pytest.mark.browser
run = hostile.run
COMMANDS = {
    "check": ("check", "--fail-on", "never", "-v", "--format", "html"),
    "summary": ("summary", "--format", "html"),
    "kernels": ("kernels", "--format", "html"),
    "whatif": ("whatif", "--format", "html"),
    "memory": ("memory", "--format", "html"),
}
SHOWN = ("run", "report", "timeline")


@pytest.fixture(scope="module")
def pages(run, tmp_path_factory):
    """Paths of the pages by what wrote them."""
    folder = tmp_path_factory.mktemp("pages")
    written = {}
    for name, (command, *options) in COMMANDS.items():
        written[name] = folder / f"{name}.html"
        done = tracekit(command, run, *options, "--out", written[name])
        assert done.returncode == 0, done.stderr
    loaded = library.load(run, cache=False)
    for name, value in zip(SHOWN, (loaded, loaded.check(), loaded.timeline()), strict=True):
        written[name] = folder / f"notebook-{name}.html"
        written[name].write_text(f"<!doctype html><meta charset=utf-8>{value._repr_html_()}", encoding="utf-8")
    return written


@pytest.mark.parametrize("name", [*COMMANDS, *SHOWN])
def test_a_browser_runs_and_fetches_nothing_that_a_name_states(page, pages, name):
    heard(page)
    dialogs = []

    def dismiss(dialog):
        dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", dismiss)
    try:
        page.goto(pages[name].as_uri())
        assert any(frame.locator("body").inner_text() for frame in page.frames)  # a notebook's timeline is a frame
        page.locator("details").evaluate_all("all => all.forEach((one) => { one.open = true })")
        images = page.locator("img").evaluate_all("all => all.map((one) => one.getAttribute('src'))")
        links = page.locator("a").evaluate_all("all => all.map((one) => one.protocol)")
    finally:
        page.remove_listener("dialog", dismiss)
    assert dialogs == []
    assert [source for source in images if not source.startswith("data:")] == []
    assert "javascript:" not in links
    assert_clean(page, hosts=frozenset({""}))
