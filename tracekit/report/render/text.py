"""Document -> text for a terminal: sections with an empty line between them, tables as wide as the terminal."""

from rich.console import RenderableType
from rich.text import Text

from tracekit.report.document import Cells, Definitions, Document, Emphasis, Line, Part, Table, Trends, items
from tracekit.report.render import layout, trends

_STYLES = {
    Emphasis.STRONG: layout.BOLD,
    Emphasis.FAINT: layout.DIM,
    Emphasis.GOOD: layout.GOOD,
    Emphasis.BETTER: "bold green",
    Emphasis.WORSE: "bold red",
    Emphasis.DOUBTFUL: "yellow",
}


def render(document: Document, *, width: int, color: bool = False) -> str:
    """Return the document as text at most `width` columns wide."""
    sections = [*document.sections, *([items(document.notes)] if document.notes else [])]
    parts: list[RenderableType] = []
    for number, section in enumerate(sections):
        parts += [""] if number else []
        parts += [_part(part, width) for part in section]
    return layout.print_to_string(parts, width=width, color=color)


def _part(part: Part, width: int) -> RenderableType:
    if isinstance(part, Line):
        return _line(part)
    if isinstance(part, Table):
        columns = layout.fit_columns(part.rows, part.headings, part.drop_order, width=width)
        return layout.frame(columns, part.headings, gap=layout.gap(width), longest=part.longest_text)
    if isinstance(part, Trends):
        return trends.table(part, [_STYLES[row.emphasis] for row in part.rows], width)
    shown = _cells(part) if isinstance(part, Cells) else _definitions(part)
    return layout.indent(shown) if part.is_indented else shown


def _line(line: Line) -> RenderableType:
    words = _words(line)
    if not line.wraps:
        words.no_wrap, words.overflow = True, "ignore"
    if line.mark:
        return layout.hanging(line.mark, words)
    return layout.indent(words) if line.is_indented else words


def _words(line: Line) -> Text:
    return layout.line(*(word if isinstance(word, str) else (word[0], _STYLES[word[1]]) for word in line.words))


def _cells(cells: Cells) -> RenderableType:
    return layout.table(cells.header, cells.rows, right=[name in cells.numbers for name in cells.header])


def _definitions(part: Definitions) -> RenderableType:
    return layout.grid([[_words(line) for line in row] for row in part.rows])
