"""The rows of a query as a document, CSV or JSON, without readable units: users of SQL compute with the values."""

import csv
import io
import json

import polars as pl

from tracekit.model import escaping, units
from tracekit.report.document import Cells, Document, faint
from tracekit.report.render.json import to_json_value

_MIN_TEXT = 24
_ROWS_AT_ONCE = 10_000
"""Rows are Python objects, which need many times the memory of a table, so few at a time."""
_EXACT = 1e6  # larger numbers need more than six digits


def document(rows: pl.DataFrame, *, more: bool = False) -> Document:
    """The rows as a table; columns that do not fit are named below it. `more`: the query has more rows than these."""
    counted = units.count(rows.height, "row")
    size = f"the first {counted}: allow more with --max-rows, or write them with --format csv" if more else counted
    cells = Cells(
        tuple(rows.columns),
        tuple(tuple(map(_cell, row)) for row in rows.iter_rows()),
        tuple(number for number, dtype in enumerate(rows.dtypes) if dtype.is_numeric()),
        drop_order=tuple(range(rows.width - 1, 0, -1)),
        dropped_note="columns not shown: {}: select fewer, or --format csv",
        least_text=_MIN_TEXT,
        longest_text=escaping.MAX_TEXT,
    )
    return Document(([cells, faint(size)],))


def as_csv(rows: pl.DataFrame) -> str:
    """Return the rows as CSV with a header; lists and structs as JSON, a missing value as an empty field.

    A text that a spreadsheet would take for a formula begins with an apostrophe, and control characters but line ends
    and tabs become '�'.
    """
    nested = [name for name, dtype in rows.schema.items() if dtype.is_nested() or dtype == pl.Object]
    flat = rows.with_columns(
        pl.Series(name, [None if value is None else json.dumps(to_json_value(value)) for value in rows[name].to_list()])
        for name in nested
    )
    binary = [name for name, dtype in flat.schema.items() if dtype == pl.Binary]
    plain = flat.with_columns(pl.col(name).bin.encode("hex") for name in binary)
    texts = [name for name, dtype in plain.schema.items() if isinstance(dtype, pl.String | pl.Categorical | pl.Enum)]
    inert = (
        pl.col(name).cast(pl.String).str.replace_all(escaping.CONTROLS, "�").str.replace(escaping.FORMULA, "'${0}")
        for name in texts
    )
    # Written apart: columns of a query may have equal names once they are escaped.
    header = io.StringIO()
    csv.writer(header, lineterminator="\n").writerow(map(escaping.csv_cell, rows.columns))
    return header.getvalue() + plain.with_columns(inert).write_csv(include_header=False)


def as_json(rows: pl.DataFrame) -> str:
    """Return the rows as a JSON array of objects; NaN and infinity as null."""
    if rows.is_empty():
        return "[]\n"
    parts = (
        json.dumps([to_json_value(row) for row in part.iter_rows(named=True)], indent=2, allow_nan=False)
        for part in rows.iter_slices(_ROWS_AT_ONCE)
    )
    return "[\n" + ",\n".join(part[2:-2] for part in parts) + "\n]\n"


def _cell(value: object) -> str:
    if value is None:
        return "—"
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < _EXACT else f"{value:.0f}"
    return json.dumps(to_json_value(value)) if isinstance(value, list | dict) else str(value)
