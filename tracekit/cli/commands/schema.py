"""``tracekit schema``: the tables and columns that a query can name."""

from typing import Annotated

import typer

from tracekit.cli.options import DocumentFormat, DocumentFormatOption, OutputOptions, expand_options


@expand_options
def schema(
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="Only this table.", show_default=False)] = None,
    *,
    document_format: DocumentFormatOption = DocumentFormat.TEXT,
    result: OutputOptions,
) -> None:
    """List the tables that tracekit query reads, with the unit and meaning of each column."""
    from tracekit.report import schema_pages
    from tracekit.sql import run_query

    # docs/schema.md describes only tracekit's own tables, whichever plug-ins are installed.
    known = run_query.TABLES if document_format is DocumentFormat.MARKDOWN else run_query.tables()
    tables = [run_query.find_table(table)] if table else list(known.values())
    result.write_as(document_format, schema_pages, tables)
