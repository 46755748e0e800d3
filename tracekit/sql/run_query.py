"""SQL over the tables of a run: one SELECT, in a process without access to files, network or settings."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import polars as pl

from tracekit import errors
from tracekit.conventions import python_child
from tracekit.errors import InputError
from tracekit.model import schema
from tracekit.model.fact import Fact, Scope, TraceTable
from tracekit.model.run import OnTrace, Run, require_run
from tracekit.model.schema import Table
from tracekit.model.table_document import TableDocument
from tracekit.sql import table_documents

Rows: TypeAlias = pl.DataFrame | Sequence[Path]
"""The rows of a table: in memory, or in Parquet files that the query's process reads as far as it needs them."""

READ = frozenset(schema.TABLES) - {schema.DATA_QUALITY.name}
"""The tables that are read from traces; `run_tables` has the facts that measure the others."""
TIMEOUT_S = 60.0
MEMORY_BYTES = 4 << 30
_GRACE_S = 1.0
_RESERVED = re.compile(r'(?i)(?<!")\b(window|group)\b(?!"|\s+by\b)')
_PROGRAM = Path(__file__).with_name("sandbox.py")


def query(
    run: Run, sql: str, *, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES, max_rows: int | None = None
) -> pl.DataFrame:
    """Return the result of one SELECT over the tables of a run.

    The tables (docs/schema.md) contain all ranks, with columns window and rank in front; only those that `sql` names
    are built. Columns ending in _ns are int64 nanoseconds, in _bytes bytes, in _ratio shares from 0 to 1.

    Args:
        run: The run, from `load`.
        sql: One SELECT, in DuckDB's dialect.
        timeout_s: The most time that the query may take, in seconds.
        memory_bytes: The most memory that the query and its result may take.
        max_rows: The most rows to return; None: all.

    Raises:
        InputError: `sql` is not one SELECT, names an unknown table or column, fails, or needs more time or memory
            than allowed.
        TypeError: `run` is not a run, such as a path, which `load` reads.
    """
    require_run(run)
    with open_query(sql, timeout_s=timeout_s, memory_bytes=memory_bytes, max_rows=max_rows) as sandboxed:
        return sandboxed.run(run)


def check(sql: str) -> None:
    """Raise InputError if `sql` is not one SELECT over known tables and their columns. Needs no run."""
    with open_query(sql):
        pass


@contextlib.contextmanager
def open_query(
    sql: str, *, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES, max_rows: int | None = None
) -> Iterator["SandboxedQuery"]:
    """Yield a validated query, before any trace is read. Raises InputError like `query`."""
    sandboxed = SandboxedQuery(sql, timeout_s=timeout_s, memory_bytes=memory_bytes, max_rows=max_rows)
    try:
        sandboxed.check()
        yield sandboxed
    finally:
        sandboxed.close()


class SandboxedQuery:
    """A query in its own process; `tracekit.sql.sandbox` describes the protocol."""

    def __init__(self, sql: str, *, timeout_s: float, memory_bytes: int, max_rows: int | None) -> None:
        """Start the process without sending the query."""
        self._sql, self._timeout_s, self._memory_bytes, self._max_rows = sql, timeout_s, memory_bytes, max_rows
        self._process = subprocess.Popen(  # noqa: S603 our own file; stdin has the query
            python_child.script_command(_PROGRAM),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=_environment(),
        )
        self._is_timed_out = False
        self._table_names: list[str] = []
        self._tables = {document.name: document for document in table_documents.all_documents()}

    def check(self) -> None:
        """Validate the query and get the tables that it names. Raises InputError if it is invalid."""
        limits = {"timeout_s": self._timeout_s, "memory_bytes": self._memory_bytes, "max_rows": self._max_rows}
        with self._deadline():
            empty = [Table.of(document).empty() for document in self._tables.values()]
            self._send({"sql": self._sql, "tables": list(self._tables), **limits}, empty)
            self._table_names = self._read_line()["named"]

    def run(self, run: Run, on_progress: OnTrace | None = None) -> pl.DataFrame:
        """Return the result of the query on a run, its columns as SELECT names them.

        Raises InputError where it fails, takes too long or needs too much memory.
        """
        return self.execute(self.collect_tables(run, on_progress))

    def collect_tables(self, run: Run, on_progress: OnTrace | None = None) -> dict[str, Rows]:
        """Return the tables of a run that the query names, by name: rows, or paths of Parquet files."""
        return dict(_rows(run, self._table_names, on_progress))

    def execute(self, tables: Mapping[str, Rows]) -> pl.DataFrame:
        """Return the result of the query on these tables."""
        streamed = {name: rows for name, rows in tables.items() if isinstance(rows, pl.DataFrame)}
        files = {name: [] if name in streamed else [str(path) for path in rows] for name, rows in tables.items()}
        self._send({"tables": files}, streamed.values())
        with self._deadline():
            batches = list(self._read_batches())
        rows = _narrow_integers(pl.concat(batches))
        return rows if self._max_rows is None else rows.head(self._max_rows)

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                cast("BinaryIO", pipe).close()
        self._process.wait()

    @property
    def _stdout(self) -> BinaryIO:
        return cast("BinaryIO", self._process.stdout)

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        """Kill the process if it does not stop the query in time itself."""

        def stop() -> None:
            self._is_timed_out = True
            self._process.kill()

        timer = threading.Timer(self._timeout_s + _GRACE_S, stop)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _send(self, line: dict[str, Any], tables: Iterable[pl.DataFrame]) -> None:
        pipe = cast("BinaryIO", self._process.stdin)
        with self._explain_exit():
            pipe.write(json.dumps(line).encode() + b"\n")
            for table in tables:
                table.write_ipc_stream(pipe, compat_level=pl.CompatLevel.oldest())
            pipe.flush()

    def _read_batches(self) -> Iterator[pl.DataFrame]:
        """Yield the result batch by batch; the first batch has no rows."""
        while "size_bytes" in (message := self._read_line()):
            with self._explain_exit():
                batch = self._stdout.read(message["size_bytes"])
                if len(batch) < message["size_bytes"]:
                    raise EOFError
                yield pl.read_ipc_stream(io.BytesIO(batch))

    def _read_line(self) -> dict[str, Any]:
        with self._explain_exit():
            line = self._stdout.readline()
            if not line:
                raise EOFError
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise self._failure(**message["error"])
        return message

    @contextlib.contextmanager
    def _explain_exit(self) -> Iterator[None]:
        """Raise InputError with the reason if the process no longer answers."""
        try:
            yield
        except (EOFError, OSError, pl.exceptions.PolarsError):
            from tracekit.sql import sandbox

            code = self._process.wait()
            is_killed = code in (-signal.SIGABRT, -signal.SIGKILL)  # the process ran out of memory
            kind = sandbox.OUT_OF_MEMORY if is_killed else ""
            raise self._failure(sandbox.TIMED_OUT if self._is_timed_out else kind, str(code)) from None

    def _failure(self, kind: str, message: str) -> InputError:
        from tracekit.sql import sandbox  # with DuckDB, which only the other process needs for queries that succeed

        if kind == sandbox.TIMED_OUT:
            return InputError(
                f"query: stopped after {self._timeout_s:g} s; simplify it, or allow more time with --timeout"
            )
        if kind == sandbox.OUT_OF_MEMORY:
            limit = f"{self._memory_bytes / 2**30:.3g} GiB"
            return InputError(f"query: needs more than {limit}; simplify it, or allow more memory with --memory")
        if kind == sandbox.REFUSED:
            return InputError(f"query: {message}")
        if not kind:
            return InputError(f"query: its process failed with exit code {message}; write the query in another way")
        return InputError(_explain_error(kind, message, self._sql, self._tables))


def _environment() -> dict[str, str]:
    """Return the environment of the process: the paths of its modules, and no variable with private data."""
    paths = [os.path.abspath(path) for path in sys.path if path]  # noqa: PTH100 '' is the current folder: not safe
    return python_child.bare_environment() | {"PYTHONPATH": os.pathsep.join(paths), "MALLOC_ARENA_MAX": "2"}


def _rows(run: Run, table_names: Sequence[str], on_progress: OnTrace | None) -> Iterator[tuple[str, Rows]]:
    """Yield the named tables; those of traces are measured in one pass."""
    facts = {name: _fact(name) for name in table_names}
    of_traces = [fact for fact in facts.values() if fact.scope is Scope.TRACE]
    run.measure(of_traces, on_progress)
    for name, fact in facts.items():
        yield name, (run.parts(fact) if fact in of_traces else ()) or run.table(fact)


def _fact(name: str) -> Fact[Any]:
    if name in READ:
        return TraceTable(name)
    from tracekit.sql import run_tables  # with all derived facts

    return run_tables.facts()[name]


def _narrow_integers(rows: pl.DataFrame) -> pl.DataFrame:
    """Return integers as Int64 if they fit: DuckDB sums them in 128 bits, which few programs can read."""
    integers = [name for name, dtype in rows.schema.items() if isinstance(dtype, pl.Decimal) and not dtype.scale]
    integers += [name for name, dtype in rows.schema.items() if dtype == pl.Int128]
    narrow = rows.with_columns(pl.col(name).cast(pl.Int64, strict=False) for name in integers)
    wide = [name for name in integers if narrow[name].null_count() != rows[name].null_count()]
    return narrow.with_columns(rows[name] for name in wide)


def _explain_error(kind: str, message: str, sql: str, documents: Mapping[str, TableDocument]) -> str:
    """Return DuckDB's error on one line, with a suggestion."""
    first = " ".join(re.split(r"\n\n|\nCandidate|\n?Did you mean", message)[0].split())
    reason = re.sub(r"^\w+(?: \w+)* Error: ", "", first).rstrip("!")
    table = re.search(r"Table with name (\S+) does not exist", message)
    if table:
        similar = errors.did_you_mean(table[1], documents)
        return f"query: no table {table[1]}{similar}; the tables are {', '.join(documents)}"
    if kind == "ParserException" and _RESERVED.search(sql):
        return f'query: {reason}; in SQL the columns window and group need double quotes: "window", "group"'
    near = re.search(r"(?:Candidate bindings:|Did you mean) (.+?)\??(?:\n|$)", message)
    if near:
        return f"query: {reason}; did you mean {near[1]}? tracekit explain --kind table lists tables and columns"
    column = re.search(r'column named "(\w+)"', message)
    columns = sorted({column.name for table in documents.values() for column in table.columns})
    hint = errors.did_you_mean(column[1], columns) if column else ""
    return f"query: {reason}{hint}; tracekit explain --kind table lists tables and columns"
