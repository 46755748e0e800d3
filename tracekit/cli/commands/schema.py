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
    is_page = document_format is DocumentFormat.MARKDOWN
    documents = table_documents.own_documents() if is_page else table_documents.all_documents()
    tables = [table_documents.find(table, documents)] if table else documents
    if is_page:
        result.emit(schema_pages.as_markdown(tables))
        return
    write = result.write_json if document_format is DocumentFormat.JSON else result.write_text
    write(schema_pages.document(tables))
