from html.parser import HTMLParser

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from tracekit.model import escaping


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


def _parsed(html):
    parser = _Tags()
    parser.feed(html)
    return parser


@given(st.text())
def test_escaped_text_contains_no_tag_and_unescapes_to_the_original(text):
    parsed = _parsed(f"<p>{escaping.escape(text, 10_000)}</p>")
    assert parsed.tags == ["p"]
    assert parsed.text == escaping.inert(text, 10_000)


@given(st.text(max_size=500), st.integers(2, 50))
def test_inert_text_respects_its_limit_and_stays_on_one_line(text, limit):
    inert = escaping.inert(text, limit)
    assert len(inert) <= limit
    assert not set(inert) & set("\n\r\t\0\u202e\u2066")


def test_html_tables_contain_their_cells_as_text():
    html = escaping.frame(pl.DataFrame({"na<b>me": ["<script>alert(1)</script>"], "dur_ns": [1_500_000]}))
    parsed = _parsed(html)
    assert set(parsed.tags) == {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert "<script>alert(1)</script>" in parsed.text
    assert "1.5" in parsed.text


def test_a_missing_value_is_shown_as_a_dash():
    assert escaping.cell("dur_ns", None) == "—"
    assert "None" not in escaping.frame(pl.DataFrame({"unit": [None]}, schema={"unit": pl.String}))
