"""Document -> text for a terminal: sections with an empty line between them, tables as wide as the terminal."""

import math
from collections.abc import Sequence

import rich.table
from rich.console import RenderableType
from rich.text import Text

from tracekit.report.document import Cells, Definitions, Document, Emphasis, Line, Part, Table, Trend, Trends, items
from tracekit.report.render import layout

_BARS = "▁▂▃▄▅▆▇█"
_MOST_BARS, _LEAST_BARS = 40, 10
_WIDE, _OTHER_COLUMNS_WIDE, _OTHER_COLUMNS = 110, 90, 66  # characters, and those of the columns without bars

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


def table(trends: Trends, styles: Sequence[str], width: int) -> rich.table.Table:
    """Rows of trends with as many bars as fit; `styles` are those of the verdicts. Narrow ones have no interval."""
    is_wide = width >= _WIDE
    bar_count = max(_LEAST_BARS, min(_MOST_BARS, width - (_OTHER_COLUMNS_WIDE if is_wide else _OTHER_COLUMNS)))
    rows = [_row(trend, bar_count, is_wide=is_wide) for trend in trends.rows]
    header = ["", "first", "latest", *(["95% interval"] if is_wide else []), "runs", ""]
    right = [False, True, True, *([True] if is_wide else []), False, False]
    drawn = layout.table(header, rows, right=right, last_styles=styles)
    for column in (0, -2):
        drawn.columns[column].no_wrap = True
        drawn.columns[column].min_width = max(len(row[column]) for row in rows)
    return drawn


def sparkline(values: Sequence[float]) -> str:
    """Numbers as a line of bars from the smallest to the largest; a space where there is none.

    >>> sparkline([1.0, 2.0, float("nan"), 8.0])
    '▁▂ █'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    # A range of less than one percent is drawn flat, so that noise is not enlarged.
    span = max(high - low, abs(high) * 0.01) or 1.0
    levels = [None if not math.isfinite(value) else round((value - low) / span * (len(_BARS) - 1)) for value in values]
    return "".join(" " if level is None else _BARS[level] for level in levels)


def _part(part: Part, width: int) -> RenderableType:
    if isinstance(part, Line):
        return _line(part)
    if isinstance(part, Table):
        columns = layout.fit_columns(part.rows, part.headings, part.drop_order, width=width)
        return layout.frame(columns, part.headings, gap=layout.gap(width), longest=part.longest_text)
    if isinstance(part, Trends):
        return table(part, [_STYLES[row.emphasis] for row in part.rows], width)
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


def _row(trend: Trend, bar_count: int, *, is_wide: bool) -> list[str]:
    interval = [trend.interval] if is_wide else []
    return [trend.name, trend.first, trend.latest, *interval, sparkline(trend.values[-bar_count:]), trend.verdict]
