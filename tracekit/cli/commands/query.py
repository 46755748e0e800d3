"""``tracekit query``: one SELECT over the tables of a run."""

import sys
from enum import StrEnum
from typing import Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.output import Output
from tracekit.cli.run_loading import RunArgument, UseCache
from tracekit.errors import ConfigError

_ROWS_OF_TABLE = 100
_GIB = 1 << 30


class RowFormat(StrEnum):
    """What the rows of a query can be written as."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


def query(
    run: RunArgument,
    sql: Annotated[
        str, typer.Argument(metavar="SQL", help="One SELECT, or - to read it from stdin; tracekit schema lists tables.")
    ],
    *,
    row_format: Annotated[RowFormat, typer.Option("--format", help="How to write the rows.")] = RowFormat.TABLE,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.01, help="Stop a query that runs longer.")
    ] = 60,
    memory_gib: Annotated[
        float, typer.Option("--memory", metavar="GIB", min=0.01, help="Stop a query that needs more memory.")
    ] = 4,
    max_rows: Annotated[
        int | None,
        typer.Option("--max-rows", min=0, help="Write no more rows.  [default: 100 of a table, else all]"),
    ] = None,
    cache: UseCache = True,
    out: Output = None,
) -> None:
    """Ask a run in SQL: one SELECT in DuckDB's dialect over the tables of all ranks.

    The tables of ranks have the columns "window" and rank in front. A query reads the tables and nothing else: no file,
    no network, no setting. Times are ns, sizes bytes, shares 0 to 1.
    """
    if row_format is RowFormat.PARQUET and out is None:
        raise ConfigError("--format parquet writes no text: name a file with --output")
    from tracekit.sql import run_query

    limit = _ROWS_OF_TABLE if max_rows is None and row_format is RowFormat.TABLE else max_rows
    memory_bytes = int(memory_gib * _GIB)
    most = None if limit is None else limit + 1
    text = sys.stdin.read() if sql == "-" else sql
    with run_query.open_query(text, timeout_s=timeout_s, memory_bytes=memory_bytes, max_rows=most) as question:
        opened = run_loading.open_run(run, cache=cache)
        with output.progress() as bar:
            rows = question.run(opened, bar.trace_callback(len(opened.sources)))
    shown = rows if limit is None else rows.head(limit)
    if row_format is RowFormat.PARQUET:
        assert out is not None
        with output.atomic_file(out) as file:
            shown.write_parquet(file)
        return
    from tracekit.report import query_rows as written

    if row_format is RowFormat.TABLE:
        more = rows.height > shown.height
        output.emit(written.as_text(shown, width=output.width(out), color=output.color(out), more=more), out)
    else:
        output.emit_rows(written.as_csv(shown) if row_format is RowFormat.CSV else written.as_json(shown), out)
