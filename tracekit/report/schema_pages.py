"""Tables and columns as a document, or as the page docs/schema.md."""

from collections.abc import Sequence

from tracekit.model.table_document import TableDocument
from tracekit.report.document import Definitions, Document, Section, faint, heading, line

_INTRODUCTION = """\
# Tables and columns

The tables of a run, as `tracekit query`, `tracekit.query` and `Trace` know them. This page is written by
`tracekit explain --kind table --format markdown`.

Times are integer nanoseconds, sizes are bytes, shares are ratios from 0 to 1. A missing value is a null; an absent
table is a table without rows. A query sees the rows of all ranks in one table, with the columns `window` and
`rank`; the tables of a `Trace`, which is one rank in one window, do not have these two columns.
"""


def document(tables: Sequence[TableDocument]) -> Document:
    """Each table with its grain and its columns: names, types, units, meanings."""
    values = [
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
    return Document(tuple(map(_section, tables)), values=values, is_ascii=False)


def _section(table: TableDocument) -> Section:
    rows = [(line(column.name), faint(column.unit_or_type), line(column.meaning)) for column in table.columns]
    return [heading(table.name, f"  one row per {table.grain}"), Definitions(tuple(rows), indent=2)]


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
