"""One document, four renderers: each writes every part, and no name of a trace becomes markup."""

import html
import json
import re
from html.parser import HTMLParser

import polars as pl
import pytest

from tracekit.report.document import (
    Cells,
    Definitions,
    Document,
    Emphasis,
    Line,
    Part,
    Table,
    Trend,
    Trends,
    heading,
    items,
    line,
)
from tracekit.report.render import html as render_html
from tracekit.report.render import json as render_json
from tracekit.report.render import markdown, text

HOSTILE = "<img src=x onerror=alert(1)>|@all"


class Tags(HTMLParser):
    """Names of the elements of a page, those with attributes that run something, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.handlers: set[str] = set()
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.handlers |= {name for name, _ in attrs if name.startswith("on")}

    def handle_data(self, data: str) -> None:
        self.words += data.split()


def test_the_verdict_stands_out_in_whichever_column_it_is() -> None:
    cells = Cells(("", "verdict", "why"), (("step", "worse", "data"),), emphases=(Emphasis.WORSE,), emphasized=1)
    of_cells = Document(([cells],), (), {})
    assert re.search(r"\x1b\[[0-9;]*m *worse", text.render(of_cells, width=80, color=True))
    assert re.search(r'class="[^"]*tk-worse[^"]*"[^>]*>worse<', render_html.render(of_cells))


def trend(name: str) -> Trend:
    return Trend(name, "1 ms", "2 ms", "1 to 3 ms", (1.0, 2.0, float("nan")), "worse", Emphasis.WORSE)


PARTS: dict[str, tuple[Part, ...]] = {
    "line": (line("It takes ", ("12 ms", Emphasis.WORSE), HOSTILE), Line(("left",), right="right")),
    "list": items(["first item", HOSTILE]),
    "table": (Table(pl.DataFrame({"name": ["mm", HOSTILE], "dur_ns": [1000, 2_000_000]})),),
    "cells": (Cells(("", "a\nb"), (("x", "3.5 ms"), (HOSTILE, "4 ms")), (1,), (None, Emphasis.BETTER)),),
    "definitions": (Definitions(((heading("term", HOSTILE), line("meaning")),)),),
    "trends": (Trends((trend("step time"), trend(HOSTILE))),),
}
WORDS = {
    "line": ("12 ms", "right"),
    "list": ("first item",),
    "table": ("mm", "2 ms", "1 µs"),
    "cells": ("3.5 ms", "4 ms", "a b"),
    "definitions": ("term", "meaning"),
    "trends": ("step time", "1 to 3 ms", "▁█", "worse"),
}


def document(parts: tuple[Part, ...]) -> Document:
    return Document((parts,), notes=("a note",), values={"value": HOSTILE})


@pytest.mark.parametrize("kind", PARTS)
def test_each_renderer_writes_every_part_and_the_notes(kind: str) -> None:
    written = document(PARTS[kind])
    page = " ".join(Tags(render_html.render(written)).words)
    for shown in (text.render(written, width=160), page, markdown.render(written)):
        for words in (*WORDS[kind], "a note"):
            assert words in " ".join(shown.split())


@pytest.mark.parametrize("kind", PARTS)
def test_names_are_text_in_every_format(kind: str) -> None:
    written = document(PARTS[kind])
    page = Tags(render_html.render(written))
    # The page of a document runs nothing: its only script element holds data, which is empty.
    assert page.names.isdisjoint({"img", "iframe", "object", "link"})
    assert not page.handlers
    assert "script-src" not in render_html.render(written)
    assert html.escape("<img src=x") in render_html.fragment(written)
    as_markdown = markdown.render(written)
    assert not re.search(r"<img|(?<!\\)\|@|@all", as_markdown)
    assert json.loads(render_json.render(written)) == {"value": HOSTILE}


def test_the_title_of_a_page_is_its_first_line() -> None:
    page = render_html.render(document((line("red is ", ("2.0 times", Emphasis.WORSE), " slower"),)))
    assert "<title>red is 2.0 times slower</title>" in page
    assert "<title>tracekit</title>" in render_html.render(Document(()))


def test_verdicts_are_coloured_where_text_has_colours() -> None:
    cells = render_html.fragment(document(PARTS["cells"]))
    assert re.search(r'<td class="number tk-better">4 ms</td>', cells)
    assert '<span class="tk-worse">12 ms</span>' in render_html.fragment(document(PARTS["line"]))
