"""The rows of a query -> text, CSV or JSON, without readable units: users of SQL compute with the values."""

import json

import polars as pl
from rich.console import RenderableType

from tracekit.model import escaping, units
from tracekit.report.render import layout
from tracekit.report.render.json import to_json_value

_MIN_TEXT = 24
_ROWS_AT_ONCE = 10_000
"""Rows are Python objects, which need many times the memory of a table, so few at a time."""
_EXACT = 1e6  # larger numbers need more than six digits


def as_text(rows: pl.DataFrame, *, width: int, color: bool = False, more: bool = False) -> str:
    """Return the rows as a table at most `width` wide; columns that do not fit are named below it.

    `more` says that the query has more rows than these.
    """
    right = [dtype.is_numeric() for dtype in rows.dtypes]
    cells = [[_cell(value) for value in row] for row in rows.iter_rows()]
    gap = layout.gap(width)
    fitting = _fitting_count(rows.columns, cells, right, width, gap)
    table = layout.table(
        rows.columns[:fitting],
        [row[:fitting] for row in cells],
        right=right[:fitting],
        gap=gap,
        longest=escaping.MAX_TEXT,
    )
    parts: list[RenderableType] = [table, layout.dim(_size(rows, more))]
    omitted = rows.columns[fitting:]
    if omitted:
        parts.append(layout.dim(f"columns not shown: {', '.join(omitted)}: select fewer, or --format csv"))
    return layout.print_to_string(parts, width=width, color=color)


def as_csv(rows: pl.DataFrame) -> str:
    """Return the rows as CSV with a header; lists and structs as JSON, a missing value as an empty field."""
    nested = [name for name, dtype in rows.schema.items() if dtype.is_nested()]
    flat = rows.with_columns(
        pl.Series(name, [None if value is None else json.dumps(to_json_value(value)) for value in rows[name].to_list()])
        for name in nested
    )
    binary = [name for name, dtype in flat.schema.items() if dtype == pl.Binary]
    return flat.with_columns(pl.col(name).bin.encode("hex") for name in binary).write_csv()


def as_json(rows: pl.DataFrame) -> str:
    """Return the rows as a JSON array of objects; NaN and infinity as null."""
    if rows.is_empty():
        return "[]\n"
    parts = (
        json.dumps([to_json_value(row) for row in part.iter_rows(named=True)], indent=2, allow_nan=False)
        for part in rows.iter_slices(_ROWS_AT_ONCE)
    )
    return "[\n" + ",\n".join(part[2:-2] for part in parts) + "\n]\n"


def _size(rows: pl.DataFrame, more: bool) -> str:
    counted = units.count(rows.height, "row")
    return f"the first {counted}: allow more with --max-rows, or write them with --format csv" if more else counted


def _fitting_count(header: list[str], cells: list[list[str]], right: list[bool], width: int, gap: int) -> int:
    """Number of columns that fit: full numbers, cut text, and at least the first column."""
    room = max(width, layout.MIN_WIDTH) + gap
    for count in range(1, len(header) + 1):
        widest = max(map(len, [header[count - 1], *(row[count - 1] for row in cells)]))
        room -= (widest if right[count - 1] else min(widest, _MIN_TEXT)) + gap
        if room < 0:
            return max(count - 1, 1)
    return len(header)


def _cell(value: object) -> str:
    if value is None:
        return "—"
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < _EXACT else f"{value:.0f}"
    return json.dumps(to_json_value(value)) if isinstance(value, list | dict) else str(value)
