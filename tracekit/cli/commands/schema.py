"""``tracekit schema``: the tables and columns that a query can name."""

from enum import StrEnum
from typing import Annotated

import typer

from tracekit.cli.options import OutputOptions, expand_options


class SchemaFormat(StrEnum):
    """Formats of the schema."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


@expand_options
def schema(
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="Only this table.", show_default=False)] = None,
    *,
    schema_format: Annotated[SchemaFormat, typer.Option("--format", help="Output format.")] = SchemaFormat.TEXT,
    result: OutputOptions,
) -> None:
    """List the tables that tracekit query reads, with the unit and meaning of each column."""
    from tracekit.report import schema_pages
    from tracekit.sql import run_query

    # docs/schema.md describes only tracekit's own tables, whichever plug-ins are installed.
    known = run_query.TABLES if schema_format is SchemaFormat.MARKDOWN else run_query.tables()
    tables = [run_query.find_table(table)] if table else list(known.values())
    if schema_format is SchemaFormat.JSON:
        result.emit(schema_pages.as_json(tables))
    elif schema_format is SchemaFormat.MARKDOWN:
        result.emit(schema_pages.as_markdown(tables))
    else:
        result.emit(schema_pages.as_text(tables, **result.style))
