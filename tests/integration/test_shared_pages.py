"""`tracekit export --format html`: a page of the dashboard as one file, from the command line."""

import base64
import gzip
import json
import re

import pytest

from tests.browser import recorded
from tests.support import loaded_runs
from tests.support.cli_runner import tracekit
from tracekit.report import shared_view

LINK = "http://localhost:8501/timeline?run=other&from=1000&to=9000000&range=2000-3000&note=a%20%3C%2Fscript%3E&pins=0-1"
runs_loaded_once = loaded_runs.runs_loaded_once
pytestmark = pytest.mark.usefixtures("runs_loaded_once")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    recorded.write_runs(folder)
    return folder / recorded.HOSTILE


def _embedded(page):
    packed = re.search(r'<script type="text/plain" id="timeline-data">([A-Za-z0-9+/=]+)</script>', page)[1]
    data = gzip.decompress(base64.b64decode(packed))
    return json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")])


def test_a_link_of_the_timeline_is_written_with_its_part_range_note_and_pins(run, tmp_path):
    out = tmp_path / "view.html"
    done = tracekit("export", run, "--format", "html", "--view", LINK, "--out", out)
    assert done.returncode == 0, done.stderr
    page = out.read_text(encoding="utf-8")
    assert len(page) < shared_view.MAX_BYTES
    embedded = _embedded(page)
    assert embedded["view"] == {"from": 1000, "to": 9_000_000}
    assert embedded["address"] == "range=2000-3000&note=a+%3C%2Fscript%3E&pins=0-1"
    assert embedded["range"]["tables"]
    assert 'id="plotly"' not in page  # no figure, so no script for figures


@pytest.mark.parametrize(
    "query", ["from=9&to=3", "from=-1&to=x", "range=1-99999999999999999999", "pins=1;2", "finding=none", "window=0"]
)
def test_a_link_that_makes_no_sense_opens_the_whole_run(run, tmp_path, query):
    out = tmp_path / "view.html"
    done = tracekit("export", run, "--format", "html", "--view", f"timeline?{query}", "--out", out)
    assert done.returncode == 0, done.stderr
    embedded = _embedded(out.read_text(encoding="utf-8"))
    assert embedded["view"]["to"] > embedded["view"]["from"] >= 0
    assert (embedded["range"], embedded["address"], embedded["finding"]) == (None, "", None)


def test_another_page_is_drawn_with_the_choices_of_the_link(run, tmp_path):
    pytest.importorskip("streamlit")
    out = tmp_path / "kernels.html"
    done = tracekit("export", run, "--format", "html", "--view", "kernels?by=kind&run=x", "--out", out)
    assert done.returncode == 0, done.stderr
    page = out.read_text(encoding="utf-8")
    assert len(page) < shared_view.MAX_BYTES
    assert "Choices: by=kind." in page
    assert "tk-headline" in page
    assert 'class="figure" id="figure-kernels-top' in page
    assert "<script>window" not in page


def test_an_unknown_page_and_an_unknown_window_are_refused(run, tmp_path):
    pytest.importorskip("streamlit")
    out = tmp_path / "view.html"
    done = tracekit("export", run, "--format", "html", "--view", "nowhere", "--out", out)
    assert (done.returncode, out.exists()) == (2, False)
    assert "there is no page nowhere of a run; there are diagnosis, timeline" in done.stderr
    done = tracekit("export", run, "--format", "html", "--view", "timeline?window=7", "--out", out)
    assert (done.returncode, out.exists()) == (2, False)
    assert "no trace of window 7" in done.stderr
