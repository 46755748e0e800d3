"""``tracekit schema``: the tables and columns that a query can name."""

from enum import StrEnum
from typing import Annotated

import typer

from tracekit.cli import output
from tracekit.cli.output import Output


class SchemaFormat(StrEnum):
    """What the schema can be written as."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


def schema(
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="Only this table.", show_default=False)] = None,
    *,
    schema_format: Annotated[SchemaFormat, typer.Option("--format", help="How to write it.")] = SchemaFormat.TEXT,
    out: Output = None,
) -> None:
    """List the tables of a run with their columns, units and meanings, as tracekit query knows them."""
    from tracekit.report import schema_pages
    from tracekit.sql import run_query

    # The page in docs/ is of our own tables, whatever is installed beside.
    known = run_query.TABLES if schema_format is SchemaFormat.MARKDOWN else run_query.tables()
    tables = [run_query.find_table(table)] if table else list(known.values())
    if schema_format is SchemaFormat.JSON:
        output.emit(schema_pages.as_json(tables), out)
    elif schema_format is SchemaFormat.MARKDOWN:
        output.emit(schema_pages.as_markdown(tables), out)
    else:
        output.emit(schema_pages.as_text(tables, width=output.width(out), color=output.color(out)), out)
