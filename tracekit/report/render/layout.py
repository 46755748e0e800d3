"""Plain text and terminal colours: tables and paragraphs laid out for a width."""

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from tracekit.model import escaping, kernel_names

if TYPE_CHECKING:
    import polars as pl

DIM, BOLD, GOOD = "dim", "bold", "green"
SEVERITY_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}
MIN_WIDTH = 60
_MAX_CELL = 60
_MIN_TEXT = 22
_NARROW = 100


def print_to_string(parts: Sequence[RenderableType], *, width: int, color: bool) -> str:
    """Return the parts one below the other as text at most `width` wide, lines without trailing spaces."""
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


def line(*parts: tuple[str, str] | str) -> Text:
    """Return a line of (text, style) parts, made inert; it wraps if necessary."""
    return Text.assemble(
        *((escaping.inert(p, 2000), "") if isinstance(p, str) else (escaping.inert(p[0], 2000), p[1]) for p in parts)
    )


def title(text: str, after: str = "") -> Text:
    """Return a bold line, followed by a dim text."""
    return line((text, BOLD), (after, DIM))


def dim(text: str) -> Text:
    """Return a dim line."""
    return line((text, DIM))


def bullets(texts: Iterable[str]) -> list[Padding]:
    """Return a list of texts."""
    return [hanging("·", line(text)) for text in texts]


def indent(part: RenderableType, by: int = 2) -> Padding:
    """Return a part moved to the right."""
    return Padding(part, (0, 0, 0, by))


def hanging(mark: str, part: RenderableType) -> Padding:
    """Return a part with a mark before it, its further lines aligned with its first."""
    grid = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_row(line((mark, BOLD)), part)
    return indent(grid)


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[bool] = (),
    gap: int = 2,
    longest: int = _MAX_CELL,
    last_styles: Sequence[str] = (),
) -> Table:
    """Return a table without lines, of plain strings that are made inert; `right` says which columns are numbers.

    Names of kernels longer than `longest` have their short form. Text is cut where the table is too wide, and beyond
    `longest`; numbers never are. `last_styles` are the styles of each row's last cell.
    """
    sides = right or [False] * len(header)
    columns = [
        Column(
            "\n".join(map(escaping.inert, name.split("\n"))),
            header_style=DIM,
            justify="right" if side else "left",
            no_wrap=side,
        )
        for name, side in zip(header, sides, strict=True)
    ]
    grid = Table(*columns, box=None, pad_edge=False, padding=(0, gap, 0, 0))
    columns_of_cells = [_shorten_names(column, longest) for column in zip(*rows, strict=True)]
    texts = [[escaping.inert(cell, longest) for cell in row] for row in zip(*columns_of_cells, strict=True)]
    of_column = [_ColumnTexts(column) for column in zip(*texts, strict=True)]
    for row, last_style in zip(texts, last_styles or [""] * len(texts), strict=True):
        styles = [*[""] * (len(row) - 1), last_style]
        grid.add_row(*(_Cell(*cell) for cell in zip(row, of_column, styles, strict=True)))
    return grid


def _shorten_names(cells: Sequence[str], longest: int) -> Sequence[str]:
    """Return the cells of a column, names of kernels that are longer than `longest` in their short form."""
    if all(len(cell) <= longest for cell in cells):
        return cells
    forms = kernel_names.short_names(set(cells))
    return [forms[cell] if len(cell) > longest else cell for cell in cells]


class _Cell:
    """A text on one line, cut to the width of its column."""

    def __init__(self, text: str, column: "_ColumnTexts", style: str) -> None:
        self._text, self._column, self._style = text, column, style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self._text), 1), cell_len(self._text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self._column.cut(options.max_width).get(self._text, self._text)
        yield Text(text, self._style, no_wrap=True, overflow="ellipsis")


class _ColumnTexts:
    """The texts of a column, cut so that different texts stay different: similar names often differ at their end."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = set(texts)
        self._cut: dict[int, dict[str, str]] = {}

    def cut(self, width: int) -> dict[str, str]:
        """Return the cut form of each text that is longer than `width`."""
        if width not in self._cut:
            long = [text for text in self._texts if cell_len(text) > width]
            forms = kernel_names.short_names(self._texts) if long else {}
            ways = [{text: way(form, width) for text, form in forms.items()} for way in (_beginning, escaping.inert)]
            counts = [Counter(way.values()) for way in ways]
            self._cut[width] = {
                text: next((way[text] for way, n in zip(ways, counts, strict=True) if n[way[text]] == 1), ways[0][text])
                for text in long
            }
        return self._cut[width]


def _beginning(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def grid(rows: Sequence[Sequence[RenderableType]]) -> Table:
    """Return rows whose last cell wraps within its column; the other cells never wrap."""
    rows_grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for number in range(len(rows[0]) if rows else 0):
        rows_grid.add_column(no_wrap=number < len(rows[0]) - 1)
    for row in rows:
        rows_grid.add_row(*row)
    return rows_grid


def gap(width: int) -> int:
    """Return the spaces between the columns of a wide table: fewer on a narrow terminal."""
    return 1 if width < _NARROW else 2


def natural_width(part: RenderableType) -> int:
    """Return the width of a part without any limit."""
    return Console(file=io.StringIO(), width=10_000, markup=False, emoji=False).measure(part).maximum


def fit_columns(
    rows: "pl.DataFrame",
    headings: Mapping[str, str],
    drop_order: Sequence[str],
    *,
    width: int,
    least_text: int = _MIN_TEXT,
) -> "pl.DataFrame":
    """Return the columns that fit: without empty ones, and, on a narrow terminal, some of `drop_order`, first to last.

    Numbers need their full width, text `least_text` characters.
    """
    columns = without_empty_columns(rows)
    for name in drop_order:
        if _least_width(columns, headings, gap(width), least_text) <= max(width, MIN_WIDTH):
            break
        columns = columns.drop(name, strict=False)
    return columns


def _least_width(rows: "pl.DataFrame", headings: Mapping[str, str], between: int, least_text: int) -> int:
    widths = []
    for name, dtype in rows.schema.items():
        longest = max((len(escaping.cell(name, value)) for value in rows[name]), default=0)
        heading = max(map(len, headings.get(name, escaping.heading(name)).split("\n")))
        widths.append(max(heading, longest if dtype.is_numeric() else min(longest, least_text)))
    return sum(widths) + between * (len(widths) - 1)


def without_empty_columns(rows: "pl.DataFrame") -> "pl.DataFrame":
    """Return the columns that have a value."""
    return rows.select(name for name in rows.columns if rows[name].null_count() < rows.height)


def frame(
    rows: "pl.DataFrame", headings: Mapping[str, str] = MappingProxyType({}), *, gap: int = 2, longest: int = _MAX_CELL
) -> Table:
    """Return a frame as a table, its numbers in readable units by the endings of the column names.

    Columns without one of the `headings` have the heading that `escaping` gives them.
    """
    cells = ([escaping.cell(*cell) for cell in zip(rows.columns, row, strict=True)] for row in rows.iter_rows())
    return table(
        [headings.get(name, escaping.heading(name)) for name in rows.columns],
        list(cells),
        right=[dtype.is_numeric() for dtype in rows.dtypes],
        gap=gap,
        longest=longest,
    )
