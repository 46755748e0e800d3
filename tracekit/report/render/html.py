"""Document -> HTML: a piece for a notebook or another page, or a page of its own that holds no script."""

from collections.abc import Sequence
from itertools import groupby

from tracekit import conventions
from tracekit.model import escaping
from tracekit.report.document import Cells, Definitions, Document, Emphasis, Line, Part, Table, Trends, items
from tracekit.report.render.cells import of_part

_STYLES = ("fragments.css", "page.css")
_MAX_TITLE = 200


def render(document: Document) -> str:
    """A document as a page, whose title is the first line. It fetches nothing and runs nothing."""
    lines = (part for section in document.sections for part in section if isinstance(part, Line))
    return page("".join(text for text, _ in _words(next(lines, Line(("tracekit",))))), fragment(document))


def page(title: str, content: str) -> str:
    """A page that shows a piece of HTML. It fetches nothing and runs nothing."""
    return escaping.page(
        "document.html.j2",
        policy="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
        style="".join(map(escaping.asset, _STYLES)),
        title=escaping.inert(title, _MAX_TITLE),
        version=conventions.VERSION,
        document=content,
        # What pages with figures and scripts have.
        figures={},
        config={},
        packed={},
        scripts=(),
        modules=(),
    )


def fragment(document: Document) -> str:
    """A document as a piece of HTML, without its style sheet (`escaping.asset("fragments.css")`)."""
    sections = [[*_pieces(section)] for section in (*document.sections, items(document.notes))]
    return escaping.fragment("document", [section for section in sections if section])


def table(part: Table | Cells | Trends) -> str:
    """A table as a piece of HTML, without its style sheet."""
    cells = of_part(part)
    kinds = [f"tk-{emphasis.name.lower()}" if emphasis else "" for emphasis in cells.emphases] or [""] * len(cells.rows)
    columns = range(len(cells.header))
    return escaping.html_table(
        [" ".join(name.split()) for name in cells.header],
        cells.rows,
        right=[number in cells.numbers for number in columns],
        classes=[[kind if number == columns[cells.emphasized] else "" for number in columns] for kind in kinds],
    )


def _pieces(section: Sequence[Part]) -> list[tuple[str, object]]:
    """Kind and content of each piece: a line, a list of lines with marks, terms with what they mean, a table."""
    pieces: list[tuple[str, object]] = []
    for is_item, parts in groupby(section, lambda part: isinstance(part, Line) and bool(part.mark)):
        if is_item:
            pieces.append(("items", [_words(part) for part in parts if isinstance(part, Line)]))
            continue
        for part in parts:
            if isinstance(part, Line):
                pieces.append(("indented" if part.indent else "line", _words(part)))
            elif isinstance(part, Definitions):
                pieces.append(("definitions", [[_words(line) for line in row] for row in part.rows]))
            else:
                pieces.append(("table", table(part)))
    return pieces


def _words(line: Line) -> list[tuple[str, str]]:
    """Text and CSS class of each word of a line."""
    words = [(word, None) if isinstance(word, str) else word for word in line.words]
    right = [(f"  {line.right}", Emphasis.STRONG)] if line.right else []
    return [(text, f"tk-{emphasis.name.lower()}" if emphasis else "") for text, emphasis in (*words, *right)]
