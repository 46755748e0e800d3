"""One name, one number: every named number of the pages, the HTML report and the commands' output of a sample."""

import functools
import json
from pathlib import Path

import pytest

from dashboard import pages
from dashboard.pages.page import Needs
from tests.support import cli_runner, dashboard_pages, shown_numbers
from tests.support.selection import others_in_accuracy

SAMPLES = Path(__file__).parents[2] / "sample_traces"
RUNS = sorted(str(path.parent.relative_to(SAMPLES)) for path in SAMPLES.rglob("run.json"))
EVERYDAY = ("gpu/slow-rank",)
WHOLE_PAGE = {"diagnosis": {"savings": "True", "trust": "True"}, "timeline": {"path": "True"}}
"""Parameters that open the parts of a page that are shown on request."""


def _page_numbers(name):
    for page in pages.all_pages():
        if page.needs not in (Needs.RUN, Needs.WORK, Needs.SELECTION):
            continue
        for tab in [tab.name for tab in page.tabs] or [""]:
            parameters = WHOLE_PAGE.get(page.address, {}) | ({"tab": tab} if tab else {})
            shown = dashboard_pages.page(page.address, SAMPLES / name, **parameters)
            assert not shown.exception
            place = f"page {page.address} {tab}".strip()
            yield from shown_numbers.of_html(dashboard_pages.html_of(shown), place)
            for caption in (*shown.caption, *shown.markdown):
                yield from shown_numbers.of_text(caption.value, place)
            for frame in shown.dataframe:
                yield from shown_numbers.of_frame(frame, place)


def _printed(*words):
    return cli_runner.tracekit(*words).stdout


def _command_numbers(name):
    path = str(SAMPLES / name)
    report = _printed("check", path, "--fail-on", "never", "--format", "json")
    yield from shown_numbers.of_report(json.loads(report), "check --format json")
    yield from shown_numbers.of_text(_printed("check", path, "--fail-on", "never", "-v"), "check -v")
    yield from shown_numbers.of_html(_printed("check", path, "--fail-on", "never", "--format", "html"), "HTML report")
    for change in json.loads(_printed("compare", path, path, "--format", "json"))["changes"]:
        yield from shown_numbers.of_metric(change, "compare --format json")
    summary = {"findings": [], "summary": json.loads(_printed("summary", path, "--format", "json"))}
    yield from shown_numbers.of_report(summary, "summary --format json")


@functools.cache
def numbers(name):
    """The values of each name of a sample, with the places that have them."""
    return shown_numbers.values_by_name([*_page_numbers(name), *_command_numbers(name)])


@pytest.mark.parametrize("name", others_in_accuracy(RUNS, EVERYDAY))
def test_no_name_has_two_values(name):
    by_name = numbers(name)
    assert "median step" in by_name  # the mean is named beside costs only, which a healthy run has none of
    contradictions = {name: dict(values) for name, values in by_name.items() if len(values) > 1}
    assert contradictions == {}
