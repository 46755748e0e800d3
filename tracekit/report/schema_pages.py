"""Tables and columns -> text, JSON or the page docs/schema.md."""

import json
from collections.abc import Iterable, Sequence

from rich.console import RenderableType

from tracekit.model.table_document import TableDocument
from tracekit.report import text_layout

_INTRODUCTION = """\
# Tables and columns

The tables of a run, as `tracekit query`, `tracekit.query` and `Trace` know them. This page is written by
`tracekit schema --format markdown`.

Times are integer nanoseconds, sizes are bytes, shares are ratios from 0 to 1. A missing value is a null; an absent
table is a table without rows. A query sees the rows of all ranks in one table, with the columns `window` and
`rank`; the tables of a `Trace`, which is one rank in one window, do not have these two columns.
"""


def as_text(tables: Iterable[TableDocument], *, width: int, color: bool = False) -> str:
    """Return each table with its grain and its columns: types, units, meanings."""
    parts: list[RenderableType] = []
    for table in tables:
        cells = [
            [text_layout.line(column.name), text_layout.dim(column.unit_or_type), text_layout.line(column.meaning)]
            for column in table.columns
        ]
        heading = text_layout.title(table.name, "  one row per " + table.grain)
        parts += [heading, text_layout.indent(text_layout.grid(cells)), ""]
    return text_layout.print_to_string(parts[:-1], width=width, color=color)


def as_json(tables: Iterable[TableDocument]) -> str:
    """Return the tables as a JSON array: name, grain, and columns with name, type, unit and meaning."""
    document = [
        {
            "name": table.name,
            "grain": table.grain,
            "columns": [
                {"name": column.name, "type": column.type_name, "unit": column.unit or None, "meaning": column.meaning}
                for column in table.columns
            ],
        }
        for table in tables
    ]
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def as_markdown(tables: Sequence[TableDocument]) -> str:
    """Return the page docs/schema.md."""
    return "\n".join((_INTRODUCTION, tables_as_markdown(tables)))


def tables_as_markdown(tables: Sequence[TableDocument], heading: str = "##") -> str:
    """Return each table under a heading, with what a row is and its columns."""
    parts = []
    for table in tables:
        parts.append(f"{heading} {table.name}\n\nOne row per {table.grain}.\n\n")
        parts[-1] += "| column | type | unit | meaning |\n|---|---|---|---|"
        parts[-1] += "".join(
            f"\n| {column.name} | {column.type_name} | {column.unit} | {column.meaning.replace('|', chr(92) + '|')} |"
            for column in table.columns
        )
        parts[-1] += "\n"
    return "\n".join(parts)
