"""Document -> text for a terminal: sections with an empty line between them, tables as wide as the terminal."""

import functools
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import rich.table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.text import Text

from tracekit.model import escaping, kernel_names
from tracekit.report.document import LONGEST_TEXT, Cells, Document, Emphasis, Line, Part, Table, Trends, Words, items
from tracekit.report.render.cells import MOST_BARS, of_part, of_trends

_STYLES = {
    Emphasis.STRONG: "bold",
    Emphasis.FAINT: "dim",
    Emphasis.GOOD: "green",
    Emphasis.BETTER: "bold green",
    Emphasis.WORSE: "bold red",
    Emphasis.WARNING: "bold yellow",
    Emphasis.DOUBTFUL: "yellow",
    Emphasis.NOTE: "bold cyan",
}
MIN_WIDTH, _RULER_WIDTH = 40, 100
_NARROW = 100
"""A table that does not fit into fewer characters has one space between its columns."""
_MAX_LINE = 2000
_CUT_NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d.,]*…")
_SIDE_WIDTH, _SIDE_GAP = 76, 4
"""The least width of a document next to others, and the space between them."""
_LEAST_BARS = 6
_WIDE, _OTHER_COLUMNS_WIDE, _OTHER_COLUMNS = 110, 90, 66  # characters, and those of the columns without bars


def render(document: Document, *, width: int, color: bool = False) -> str:
    """Return the document as text at most `width` columns wide."""
    return _print(renderables(document, width), width=width, color=color)


def render_several(
    overview: Part, documents: Sequence[tuple[str, Document]], *, width: int, color: bool = False
) -> str:
    """Return named documents below their overview: side by side if the width allows, else one below the other."""
    parts: list[RenderableType] = [*_part(overview, width), ""]
    side = (width - _SIDE_GAP * (len(documents) - 1)) // len(documents)
    if side >= _SIDE_WIDTH:
        grid = rich.table.Table.grid(padding=(0, _SIDE_GAP, 0, 0), pad_edge=False)
        for _ in documents:
            grid.add_column(width=side)
        columns = []
        for _, document in documents:
            column = rich.table.Table.grid()
            for part in renderables(document, side):
                column.add_row(part)
            columns.append(column)
        parts.append(grid)
        grid.add_row(*columns)
    else:
        for name, document in documents:
            ruler = f"── {name} ".ljust(min(width, _RULER_WIDTH), "─")
            parts += [_words([(ruler, Emphasis.FAINT)]), *renderables(document, width), ""]
    return _print(parts, width=width, color=color)


def renderables(document: Document, width: int) -> list[RenderableType]:
    """Return the parts of a document, which rich prints one below the other."""
    sections = [*document.sections, *([items(document.notes)] if document.notes else [])]
    parts: list[RenderableType] = []
    for number, section in enumerate(sections):
        parts += [""] if number else []
        for part in section:
            parts += _part(part, width)
    return parts


def _print(parts: Sequence[RenderableType], *, width: int, color: bool) -> str:
    console = Console(
        file=io.StringIO(),
        width=max(width, MIN_WIDTH),
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))
    assert isinstance(console.file, io.StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def _part(part: Part, width: int) -> list[RenderableType]:
    if isinstance(part, Line):
        written = [_line(part)]
    elif isinstance(part, Table | Cells):
        written = _cells(of_part(part), width)
    elif isinstance(part, Trends):
        return [_trends(part, width)]
    else:
        written = [_grid([[_words(line.words) for line in row] for row in part.rows])]
    return [Padding(block, (0, 0, 0, part.indent)) for block in written] if part.indent else written


def _line(line: Line) -> RenderableType:
    words = _words(line.words)
    if not line.wraps:
        words.no_wrap, words.overflow = True, "ignore"
    if line.right:
        grid = rich.table.Table.grid(expand=True, padding=(0, 2, 0, 0), pad_edge=False)
        grid.add_column()
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(words, _words([(line.right, Emphasis.STRONG)]))
        return grid
    if not line.mark:
        return words
    grid = rich.table.Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(_words([(line.mark, Emphasis.STRONG)]), words)
    return Padding(grid, (0, 0, 0, 2))


def _words(words: Sequence[Words]) -> Text:
    pairs = ((word, "") if isinstance(word, str) else (word[0], _STYLES[word[1]]) for word in words)
    return Text.assemble(*((escaping.inert(text, _MAX_LINE), style) for text, style in pairs))


def _grid(rows: Sequence[Sequence[RenderableType]]) -> rich.table.Table:
    """Return rows whose last cell wraps within its column; the other cells never wrap."""
    grid = rich.table.Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for number in range(len(rows[0]) if rows else 0):
        grid.add_column(no_wrap=number < len(rows[0]) - 1, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


# Tables --------------------------------------------------------------------------------------------------------------


def _cells(cells: Cells, width: int) -> list[RenderableType]:
    """The columns that fit, without lines between them; names of kernels beyond `longest_text` in their short form."""
    texts = [_column_texts(column, cells.longest_text) for column in zip(*cells.rows, strict=True)]
    texts = texts or [[] for _ in cells.header]
    header = ["\n".join(map(escaping.inert, name.split("\n"))) for name in cells.header]
    heading_widths = [max(map(len, name.split("\n"))) for name in header]
    widths = [max(width, *map(cell_len, column), 0) for width, column in zip(heading_widths, texts, strict=True)]
    cut_widths = [
        length if number in cells.numbers else max(heading_widths[number], min(length, cells.least_text))
        for number, length in enumerate(widths)
    ]
    columns, gap, room = list(range(len(header))), 1 if width < _NARROW else 2, width - cells.indent
    for number in cells.early_drop:
        if sum(widths[column] + 2 for column in columns) - 2 <= room:
            break
        columns.remove(number)
    for number in cells.drop_order:
        if sum(cut_widths[column] + gap for column in columns) - gap <= max(room, MIN_WIDTH):
            break
        columns = [column for column in columns if column != number]
    gap = 2 if sum(widths[column] + 2 for column in columns) - 2 <= room else gap
    tables, of_verdict = [], range(len(header))[cells.emphasized]
    for part in _parts_that_fit(columns, [length + gap for length in cut_widths], room + gap):
        right = [column in cells.numbers for column in part]
        emphasized = part.index(of_verdict) if of_verdict in part else None
        named = [header[column] for column in part]
        tables.append(_table(named, [texts[column] for column in part], cells.emphases, emphasized, right, gap))
        if not cells.cuts_first:
            tables[-1].columns[0].no_wrap = True
    dropped = ", ".join(header[column] for column in range(len(header)) if column not in columns)
    note = cells.dropped_note.format(dropped) if dropped else ""
    return [*tables, *([_words([(note, Emphasis.FAINT)])] if note else [])]


def _parts_that_fit(columns: Sequence[int], widths: Sequence[int], room: int) -> list[list[int]]:
    """Columns in parts that fit into the room, each with the first column, so that no number is cut.

    >>> _parts_that_fit([0, 1, 2, 3], [4, 5, 5, 5], 14)
    [[0, 1, 2], [0, 3]]
    """
    parts = [list(columns[:1])]
    for column in columns[1:]:
        if len(parts[-1]) > 1 and sum(widths[other] for other in parts[-1]) + widths[column] > room:
            parts.append(list(columns[:1]))
        parts[-1].append(column)
    return parts


def _column_texts(cells: Sequence[str], longest: int) -> list[str]:
    if any(len(cell) > longest for cell in cells):
        forms = kernel_names.short_names(set(cells))
        cells = [forms[cell] if len(cell) > longest else cell for cell in cells]
    return [escaping.inert(cell, longest) for cell in cells]


def _table(
    header: Sequence[str],
    columns: Sequence[Sequence[str]],
    emphases: Sequence[Emphasis | None],
    emphasized: int | None,
    right: Sequence[bool],
    gap: int,
    *,
    wraps_last: bool = False,
) -> rich.table.Table:
    """Return texts, made inert, as a table; one column stands out, and `right` says which ones are numbers."""
    table = rich.table.Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for name, is_number in zip(header, right, strict=True):
        table.add_column(name, header_style="dim", justify="right" if is_number else "left", no_wrap=is_number)
    column_texts = [frozenset(column) for column in columns]
    for number, row in enumerate(zip(*columns, strict=True)):
        emphasis = emphases[number] if emphases else None
        styles = [_STYLES[emphasis] if emphasis and column == emphasized else "" for column in range(len(row))]
        cells: list[RenderableType] = list(map(_Cell, row, column_texts, styles))
        table.add_row(*cells[:-1], Text(row[-1], styles[-1]) if wraps_last else cells[-1])
    return table


class _Cell:
    """A text on one line, cut to the width of its column."""

    def __init__(self, text: str, column_texts: frozenset[str], style: str) -> None:
        self._text, self._column_texts, self._style = text, column_texts, style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self._text), 1), cell_len(self._text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = _cut_texts(self._column_texts, options.max_width).get(self._text, self._text)
        yield Text(text, self._style, no_wrap=True, overflow="ellipsis")


@functools.lru_cache(maxsize=256)
def _cut_texts(texts: frozenset[str], width: int) -> Mapping[str, str]:
    """The cut form of each text of a column that is longer than `width`: different texts stay different.

    Similar names often differ at their end.
    """
    long = [text for text in texts if cell_len(text) > width]
    forms = kernel_names.short_names(texts) if long else {}
    beginnings = {text: form if len(form) <= width else form[: max(width - 1, 0)] + "…" for text, form in forms.items()}
    middles = {text: escaping.inert(form, width) for text, form in forms.items()}
    # A number that is cut reads as another number: [4, 128] would be [4, 12….
    beginnings, middles = (
        {text: _CUT_NUMBER.sub("…", form) for text, form in way.items()} for way in (beginnings, middles)
    )
    ways = [(way, Counter(way.values())) for way in (beginnings, middles)]
    return {text: next((way[text] for way, n in ways if n[way[text]] == 1), beginnings[text]) for text in long}


def _trends(trends: Trends, width: int) -> rich.table.Table:
    """Rows of trends with as many bars as fit. Narrow ones have no interval."""
    is_wide = width >= _WIDE
    bars = max(_LEAST_BARS, min(MOST_BARS, width - (_OTHER_COLUMNS_WIDE if is_wide else _OTHER_COLUMNS)))
    cells = of_trends(trends, has_interval=is_wide, bars=bars)
    texts = [_column_texts(column, LONGEST_TEXT) for column in zip(*cells.rows, strict=True)]
    right = [number in cells.numbers for number in range(len(cells.header))]
    table = _table(cells.header, texts, cells.emphases, len(texts) - 1, right, 2, wraps_last=True)
    for number in (0, -2):
        table.columns[number].no_wrap = True
        table.columns[number].min_width = max(map(len, texts[number]))
    return table
