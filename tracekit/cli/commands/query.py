"""``tracekit query``: one SELECT over the tables of a run."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output
from tracekit.cli.options import ExecutorOptions, OutputOptions, RunOptions, expand_options
from tracekit.errors import ConfigError, InputError

if TYPE_CHECKING:
    import polars as pl

_DEFAULT_ROWS = 100
_GIB = 1 << 30


class RowFormat(StrEnum):
    """Formats of a query's rows."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


@expand_options
def query(
    source: RunOptions,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT, or - to read it from stdin.")],
    *,
    row_format: Annotated[RowFormat, typer.Option("--format", help="Output format.")] = RowFormat.TABLE,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.01, help="Stop the query after this time.")
    ] = 60,
    memory_gib: Annotated[
        float, typer.Option("--memory", metavar="GIB", min=0.01, help="Stop the query if it needs more memory.")
    ] = 4,
    max_rows: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Write at most N rows.  [default: table 100, else all]")
    ] = None,
    executor: ExecutorOptions,
    result: OutputOptions,
) -> None:
    """Query a run in SQL: one SELECT in DuckDB's dialect over the tables of all ranks.

    Tables of ranks start with the columns "window" and rank; tracekit explain --kind table lists all. A query can read
    only these tables: no file, no network, no setting. Times are in ns, sizes in bytes, shares from 0 to 1.
    """
    if row_format is RowFormat.PARQUET and result.out is None:
        raise ConfigError("--format parquet is a binary format: name a file with --out")
    if os.path.exists(sql):  # noqa: PTH110 a long SELECT is no error
        raise ConfigError(f"{sql} is a file or folder, not a SELECT; the run comes first: tracekit query RUN SQL")
    limit = _DEFAULT_ROWS if max_rows is None and row_format is RowFormat.TABLE else max_rows
    memory_bytes = int(memory_gib * _GIB)
    # One row more shows whether rows are left out.
    max_read = None if limit is None else limit + 1
    statement = _from_stdin() if sql == "-" else sql
    with executor.open([source.run]) as opened:
        from tracekit.sql import run_query

        query = run_query.open_query(statement, timeout_s=timeout_s, memory_bytes=memory_bytes, max_rows=max_read)
        with query as sandboxed:
            run = source.open(opened)
            with output.progress() as bar:
                rows = sandboxed.run(run, bar.trace_callback(len(run.sources)))
    _write(rows if limit is None else rows.head(limit), rows.height, row_format, result)


def _write(rows: "pl.DataFrame", count: int, row_format: RowFormat, result: OutputOptions) -> None:
    """Write the rows that are shown, of `count` in total."""
    if row_format is RowFormat.PARQUET:
        assert result.out is not None
        from tracekit.model import table_store

        with output.atomic_file(result.out) as file:
            table_store.write_parquet(rows, Path(file.name))
        return
    from tracekit.report import query_rows

    if row_format is RowFormat.TABLE:
        result.write_in(query_rows.document(rows, more=count > rows.height))
    else:
        text = query_rows.as_csv(rows) if row_format is RowFormat.CSV else query_rows.as_json(rows)
        output.emit_rows(text, result.out)


def _from_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(f"query: stdin is not UTF-8 text: {error.reason} at byte {error.start:,}") from None
