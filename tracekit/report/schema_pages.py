"""Tables and columns -> text, JSON or the page docs/schema.md."""

import json
from collections.abc import Iterable, Sequence

import polars as pl
from rich.console import RenderableType

from tracekit.model.schema import Column, Table
from tracekit.report import text_layout

_INTRODUCTION = """\
# Tables and columns

The tables of a run, as `tracekit query`, `tracekit.query` and `Trace` know them. This page is written by
`tracekit schema --format markdown`.

Times are integer nanoseconds, sizes are bytes, shares are ratios from 0 to 1. A missing value is a null; an absent
table is a table without rows. A query sees the rows of all ranks in one table, with the columns `window` and
`rank`; the tables of a `Trace`, which is one rank in one window, do not have these two columns.
"""


def as_text(tables: Iterable[Table], *, width: int, color: bool = False) -> str:
    """Return each table with its grain and its columns: types, units, meanings."""
    parts: list[RenderableType] = []
    for table in tables:
        cells = [
            [text_layout.line(column.name), text_layout.dim(unit_or_type(column)), text_layout.line(column.meaning)]
            for column in table.columns
        ]
        heading = text_layout.title(table.name, "  one row per " + table.grain)
        parts += [heading, text_layout.indented(text_layout.grid(cells)), ""]
    return text_layout.print_to_string(parts[:-1], width=width, color=color)


def as_json(tables: Iterable[Table]) -> str:
    """Return the tables as a JSON array: name, grain, and columns with name, type, unit and meaning."""
    document = [
        {
            "name": table.name,
            "grain": table.grain,
            "columns": [
                {"name": column.name, "type": _dtype(column), "unit": column.unit or None, "meaning": column.meaning}
                for column in table.columns
            ],
        }
        for table in tables
    ]
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def as_markdown(tables: Sequence[Table]) -> str:
    """Return the page docs/schema.md."""
    return "\n".join((_INTRODUCTION, tables_as_markdown(tables)))


def tables_as_markdown(tables: Sequence[Table], heading: str = "##") -> str:
    """Return each table under a heading, with what a row is and its columns."""
    parts = []
    for table in tables:
        parts.append(f"{heading} {table.name}\n\nOne row per {table.grain}.\n\n")
        parts[-1] += "| column | type | unit | meaning |\n|---|---|---|---|"
        parts[-1] += "".join(
            f"\n| {column.name} | {_dtype(column)} | {column.unit} | {column.meaning.replace('|', chr(92) + '|')} |"
            for column in table.columns
        )
        parts[-1] += "\n"
    return "\n".join(parts)


def unit_or_type(column: Column) -> str:
    """Return a column's unit, or its type where it has none, in a word or two."""
    return column.unit or _dtype(column)


def _dtype(column: Column) -> str:
    dtype = column.dtype
    return f"list of {_NAMES[str(dtype.inner)]}" if isinstance(dtype, pl.List) else _NAMES[str(dtype)]


_NAMES = {"Int64": "integer", "String": "text", "Float64": "number", "Boolean": "true or false"}
