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
    from tracekit.sql import table_documents

    # docs/schema.md describes only tracekit's own tables, whichever plug-ins are installed.
    is_document = document_format is DocumentFormat.MARKDOWN
    documents = table_documents.own_documents() if is_document else table_documents.all_documents()
    tables = [table_documents.find(table, documents)] if table else documents
    result.write_as(document_format, schema_pages, tables)
