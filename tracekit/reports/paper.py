"""Plain text and terminal colours: tables and paragraphs laid out for a width."""

import io
from collections.abc import Sequence

import polars as pl
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from tracekit import markup

DIM, BOLD, GOOD = "dim", "bold", "green"
SEVERITY_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}
MIN_WIDTH = 60
_MAX_CELL = 60


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
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def line(*parts: tuple[str, str] | str) -> Text:
    """Return a line of (text, style) parts, made inert; it wraps where it must."""
    return Text.assemble(
        *((markup.inert(p, 2000), "") if isinstance(p, str) else (markup.inert(p[0], 2000), p[1]) for p in parts)
    )


def indented(part: RenderableType, by: int = 2) -> Padding:
    """Return a part moved to the right."""
    return Padding(part, (0, 0, 0, by))


def hanging(mark: str, part: RenderableType) -> Padding:
    """Return a part with a mark before it, its further lines aligned with its first."""
    grid = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_row(line((mark, BOLD)), part)
    return indented(grid)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[bool] = (), gap: int = 2) -> Table:
    """Return a table without lines, of plain strings that are made inert; `right` says which columns are numbers.

    Where it is too wide, text is cut; numbers never are.
    """
    sides = right or [False] * len(header)
    columns = [
        Column(
            "\n".join(map(markup.inert, name.split("\n"))),
            header_style=DIM,
            justify="right" if side else "left",
            no_wrap=side,
        )
        for name, side in zip(header, sides, strict=True)
    ]
    made = Table(*columns, box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for row in rows:
        made.add_row(*(Text(markup.inert(cell, _MAX_CELL), no_wrap=True, overflow="ellipsis") for cell in row))
    return made


def grid(rows: Sequence[Sequence[RenderableType]]) -> Table:
    """Return rows whose last cell wraps within its own column, and whose others never do."""
    made = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for number in range(len(rows[0]) if rows else 0):
        made.add_column(no_wrap=number < len(rows[0]) - 1)
    for row in rows:
        made.add_row(*row)
    return made


def natural_width(part: RenderableType) -> int:
    """Return how many columns a part takes where it has all the room it wants."""
    return Console(file=io.StringIO(), width=10_000, markup=False, emoji=False).measure(part).maximum


def frame(rows: pl.DataFrame) -> Table:
    """Return a frame as a table, its numbers in readable units by the endings of the column names."""
    return table(
        [markup.heading(name) for name in rows.columns],
        [[markup.cell(name, value) for name, value in zip(rows.columns, row, strict=True)] for row in rows.iter_rows()],
        right=[dtype.is_numeric() for dtype in rows.dtypes],
    )
