"""Numbers and headings of all pages as a person reads them: in words of the field, and no value that shows as zero."""

import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("streamlit")

from tests.support.dashboard_pages import html_of, page

SAMPLES = Path(__file__).parents[3] / "sample_traces"
RUNS = ("gpu/slow-rank", "parallelism/pipeline-interleaved", "demo-fsdp2")
CHECK_BOX_PX, NARROW_PX = 33, 800 - 184 - 2 * 16
"""Width of the box that selects a run, and of a table in a window of 800 pixels: without menu and margins."""
PLACES = ("start", "end", "at")
VIEWS = [
    ("diagnosis", {"trust": "True", "savings": "True"}),
    ("timeline", {}),
    *(
        ("ranks", {"tab": tab})
        for tab in ("waiting", "exposed communication", "bandwidth", "contention", "mesh", "pipeline")
    ),
    *(("kernels", {"what": what}) for what in ("kernels", "operators", "modules", "roofline")),
    ("memory", {}),
    ("memory", {"tab": "checkpoints"}),
]
_TAG = re.compile(r"<(?:style|script)\b.*?</(?:style|script)>|<[^>]*>", re.DOTALL)
_UNREADABLE = re.compile(r"\b(nan|NaN|None|inf|NaT|null)\b|\d\.\d{4,}|\d{8,}|\de[+-]\d|(?<![\d.,])-?0\.0{2,}(?!\d)")
_FORMAT = re.compile(r"%\.(?P<digits>\d)(?P<kind>[fg])(?P<unit>.*)")
_IDENTIFIER = re.compile(r"[a-z]_[a-z]| per s$")


def _texts(app):
    """Sentences, headings and cells of HTML that a page shows."""
    for kind in ("caption", "markdown", "subheader", "info"):
        yield from (element.value for element in app.get(kind))
    yield from filter(None, (line.strip() for line in unescape(_TAG.sub("\n", html_of(app))).split("\n")))


def _columns(app):
    """Heading, format and values of the columns with numbers of all tables of a page."""
    for frame in app.dataframe:
        columns = json.loads(frame.proto.columns or "{}")
        for name in frame.value.select_dtypes("number").columns:
            column = columns.get(name, {})
            form = _FORMAT.match(column.get("type_config", {}).get("format") or "")
            yield column.get("label") or name, form, frame.value[name].dropna().to_list()


def _written(form, value):
    """A number as a browser writes it: sprintf-js has no exponent from a millionth on."""
    digits = int(form["digits"])
    return f"{value:.{digits}f}" if form["kind"] == "f" else np.format_float_positional(float(f"{value:.{digits}g}"))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("address", "query"), VIEWS, ids=[f"{a}-{'-'.join(q.values())}" for a, q in VIEWS])
def test_numbers_have_few_digits_and_none_but_zero_shows_as_zero(address, query, run):
    app = page(address, SAMPLES / run, **query)
    assert not app.exception
    assert not [text for text in _texts(app) if _UNREADABLE.search(text)]
    for heading, form, values in _columns(app):
        assert not _IDENTIFIER.search(heading)
        for value in values if form else ():
            text = _written(form, value)
            assert float(text) == pytest.approx(value, rel=0.006, abs=0.06 if "%%" in form["unit"] else 0.5e-9)
            assert len(text.replace(".", "").strip("0-")) <= (3 if heading not in PLACES else 6) or "%%" in form["unit"]


def test_the_links_to_runs_are_inside_a_window_of_800_pixels():
    (runs,) = page("runs", SAMPLES / "ci").dataframe
    widths = {name: column.get("width") for name, column in json.loads(runs.proto.columns).items()}
    columns = list(runs.value.columns)
    assert CHECK_BOX_PX + sum(widths[name] for name in columns[: columns.index("open") + 1]) <= NARROW_PX
