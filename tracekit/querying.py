"""SQL over the tables of a run: one SELECT, in a DuckDB that reaches no file, no network and no setting."""

import contextlib
import difflib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa

from tracekit import schema
from tracekit.analysis import breakdown
from tracekit.errors import InputError
from tracekit.schema import Column, Table
from tracekit.trace import RUN_DOUBTS, Run

TIMEOUT_S = 60.0
MEMORY_BYTES = 4 << 30
_BATCH_ROWS = 10_000
_RESERVED = re.compile(r'(?i)(?<!")\b(window|group)\b(?!"|\s+by\b)')
_THREADS = 4
# What else DuckDB offers in FROM reads files, addresses of memory or the settings of the process.
_TABLE_FUNCTIONS = frozenset({"range", "generate_series", "unnest", "repeat", "json_each", "json_tree"})
_SEAL = (
    "SET enable_progress_bar = false",
    "SET python_enable_replacements = false",  # a name is a table, never a variable of ours
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET allow_community_extensions = false",
    "SET temp_directory = ''",  # what doesn't fit in memory fails; nothing is written
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)

_PLACE = (
    Column("window", pl.Int64(), "", "Profiled window of the run, from 0."),
    Column("rank", pl.Int64(), "", "Global rank of the process."),
)


def _ns(name: str, meaning: str) -> Column:
    return Column(name, pl.Int64(), "ns", meaning)


BREAKDOWN = Table(
    "breakdown",
    "step, rank and device: where the time of the step's device window goes",
    (
        Column("step", pl.Int64(), "", "Training step; null where the trace marks none."),
        Column("device", pl.Int64(), "", "Device index; null on a CPU run."),
        _ns("start_ns", "Start of the device window."),
        _ns("duration_ns", "Its length: compute + exposed communication + exposed copy + idle, exactly."),
        _ns("compute_ns", "Time in which any lane computes."),
        _ns("communication_ns", "Time in which any lane communicates."),
        _ns("copy_ns", "Time in which any lane copies or sets memory."),
        _ns("overlapped_ns", "Communication while another lane computes."),
        _ns("exposed_communication_ns", "Communication that no compute hides."),
        _ns("exposed_copy_ns", "Copies that neither compute nor communication hides."),
        _ns("idle_ns", "The rest."),
    ),
)

TABLES: Mapping[str, Table] = {
    table.name: replace(table, columns=(*_PLACE, *table.columns)) for table in (*schema.TABLES.values(), BREAKDOWN)
} | {RUN_DOUBTS.name: RUN_DOUBTS}
"""Every table that a query can name, with its columns as a query sees them."""


def query(
    run: Run,
    sql: str,
    *,
    timeout_s: float = TIMEOUT_S,
    memory_bytes: int = MEMORY_BYTES,
    max_rows: int | None = None,
) -> pl.DataFrame:
    """Return what one SELECT finds in the tables of a run, at most `max_rows` rows of it.

    The tables are TABLES: those of all ranks one below the other, with columns window and rank in front. Only the
    tables that `sql` names are put together. Raises InputError if `sql` is not one SELECT, names what isn't there,
    fails, or needs more time or memory than allowed; the result itself counts as memory.
    """
    statement, named = _check(sql, timeout_s, memory_bytes)
    with _sealed(memory_bytes) as connection:
        for name, frame in _frames(run, named):
            connection.register(name, frame.to_arrow())
        with _told(connection, timeout_s, memory_bytes):
            return _narrowed(_fetch(connection, statement, memory_bytes, max_rows))


def check(sql: str) -> None:
    """Raise InputError if `sql` is not one SELECT over TABLES and their columns. Needs no run, so it costs no time."""
    _check(sql, TIMEOUT_S, MEMORY_BYTES)


def find_table(name: str) -> Table:
    """Return the table of a name. Raises InputError, with the names near it, if there is none."""
    if name.lower() in TABLES:
        return TABLES[name.lower()]
    raise InputError(f"{name}: no such table{_near(name, list(TABLES))}; the tables are {', '.join(TABLES)}")


def _check(sql: str, timeout_s: float, memory_bytes: int) -> tuple[str, list[str]]:
    """Return the one statement of `sql` and the tables that it may read."""
    statement = _only_statement(sql)
    named = _named(statement)
    with _sealed(memory_bytes) as connection, _told(connection, timeout_s, memory_bytes):
        for name, table in TABLES.items():
            connection.register(name, table.empty().to_arrow())
        connection.execute("EXPLAIN " + statement)
    return statement, named


def _only_statement(sql: str) -> str:
    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        raise InputError(_explained(error, sql)) from None
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        kinds = ", ".join(str(each.type).rsplit(".", 1)[-1] for each in statements) or "nothing"
        raise InputError(f"query: {kinds} given; a query is one SELECT, and changes nothing")
    return statements[0].query.strip().rstrip(";")


def _named(statement: str) -> list[str]:
    """Return the tables that a SELECT may read. Raises InputError where it calls a table function that is not allowed.

    A name that is only written as a text counts too: that costs time, never an answer.
    """
    texts: set[str] = set()
    for node in _nodes(_parsed(statement)):
        if isinstance(node, str):
            texts.add(node.lower())
        elif node.get("type") == "TABLE_FUNCTION":
            function = node.get("function", {}).get("function_name", "?")
            if function not in _TABLE_FUNCTIONS:
                raise InputError(
                    f"query: {function}() is not allowed: a query reads the run's tables only ({', '.join(TABLES)})"
                )
    return [name for name in TABLES if name in texts]


def _parsed(statement: str) -> dict[str, Any]:
    try:
        with duckdb.connect(":memory:") as connection:
            row = connection.execute("SELECT json_serialize_sql(?)", [statement]).fetchone()
        tree: dict[str, Any] = json.loads(row[0]) if row else {}
    except (duckdb.Error, RecursionError) as error:
        raise InputError(f"query: too deep to be checked ({type(error).__name__}); write it shorter") from None
    if tree.get("error", True):
        raise InputError(f"query: not a SELECT that can be checked ({tree.get('error_message', 'no reason given')})")
    return tree


def _nodes(tree: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
    """Yield every object and text of a parsed statement. Not by recursion: expressions may nest deeper than Python."""
    left: list[Any] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, dict | str):
            yield node
        if isinstance(node, dict | list):
            left.extend(node.values() if isinstance(node, dict) else node)


@contextlib.contextmanager
def _sealed(memory_bytes: int) -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(":memory:", config={"threads": _THREADS}) as connection:
        for setting in (f"SET memory_limit = '{max(memory_bytes >> 20, 1)}MiB'", *_SEAL):
            connection.execute(setting)
        yield connection


@contextlib.contextmanager
def _told(connection: duckdb.DuckDBPyConnection, timeout_s: float, memory_bytes: int) -> Iterator[None]:
    """Interrupt what runs too long, and say what went wrong in our words."""
    late = threading.Event()

    def stop() -> None:
        late.set()
        connection.interrupt()

    timer = threading.Timer(timeout_s, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        if late.is_set():
            raise InputError(
                f"query: stopped after {timeout_s:g} s; ask for less, or allow more with --timeout"
            ) from None
        if "out of memory" in str(error).lower():
            raise InputError(
                f"query: needs more than {memory_bytes / 2**30:.3g} GiB; ask for less, or allow more with --memory"
            ) from None
        raise InputError(_explained(error)) from None
    finally:
        timer.cancel()


def _frames(run: Run, named: list[str]) -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield the tables named, put together in one pass over the traces; the others empty."""
    parts: dict[str, list[pl.DataFrame]] = {name: [] for name in named if name in schema.TABLES}
    if parts:
        for trace in run.traces():
            place = (pl.lit(trace.window, pl.Int64).alias("window"), pl.lit(trace.rank, pl.Int64).alias("rank"))
            for name, frames in parts.items():
                frames.append(getattr(trace, name).select(*place, pl.all()))
    for name, table in TABLES.items():
        if parts.get(name):
            yield name, pl.concat(parts.pop(name))
        elif name == BREAKDOWN.name and name in named:
            yield name, run.table(breakdown.by_step)
        else:
            yield name, run.doubts if name == RUN_DOUBTS.name else table.empty()


def _fetch(
    connection: duckdb.DuckDBPyConnection, statement: str, memory_bytes: int, max_rows: int | None
) -> pl.DataFrame:
    # A relation streams; what execute() returns lies whole in memory already.
    relation = connection.sql(statement)
    to_reader = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader  # its name before DuckDB 1.4
    batches = to_reader(_BATCH_ROWS)
    kept, size_bytes, rows = [], 0, 0
    for batch in batches:
        kept.append(batch)
        rows += batch.num_rows
        size_bytes += batch.nbytes
        if size_bytes > memory_bytes:
            raise InputError(
                f"query: the result is larger than {memory_bytes / 2**30:.3g} GiB; add a LIMIT, or use --memory"
            )
        if max_rows is not None and rows >= max_rows:
            break
    found = pl.from_arrow(pa.Table.from_batches(kept, batches.schema))
    assert isinstance(found, pl.DataFrame)
    return found if max_rows is None else found.head(max_rows)


def _narrowed(found: pl.DataFrame) -> pl.DataFrame:
    """Return whole numbers as Int64 where they fit: DuckDB adds them up in 128 bits, which few programs read."""
    whole = [name for name, dtype in found.schema.items() if isinstance(dtype, pl.Decimal) and not dtype.scale]
    whole += [name for name, dtype in found.schema.items() if dtype == pl.Int128]
    narrow = found.with_columns(pl.col(name).cast(pl.Int64, strict=False) for name in whole)
    wide = [name for name in whole if narrow[name].null_count() != found[name].null_count()]
    return narrow.with_columns(found[name] for name in wide)


def _explained(error: Exception, sql: str = "") -> str:
    """Return DuckDB's complaint on one line, with what to try next."""
    told = str(error)
    first = " ".join(re.split(r"\n\n|\nCandidate|\n?Did you mean", told)[0].split())
    reason = re.sub(r"^\w+(?: \w+)* Error: ", "", first).rstrip("!")
    table = re.search(r"Table with name (\S+) does not exist", told)
    if table:
        return f"query: no table {table[1]}{_near(table[1], list(TABLES))}; the tables are {', '.join(TABLES)}"
    if isinstance(error, duckdb.ParserException) and _RESERVED.search(sql):
        return f'query: {reason}; in SQL the columns window and group need double quotes: "window", "group"'
    near = re.search(r"(?:Candidate bindings:|Did you mean) (.+?)\??(?:\n|$)", told)
    if near:
        return f"query: {reason}; did you mean {near[1]}? tracekit schema lists tables and columns"
    column = re.search(r'column named "(\w+)"', told)
    columns = sorted({column.name for table in TABLES.values() for column in table.columns})
    hint = _near(column[1], columns) if column else ""
    return f"query: {reason}{hint}; tracekit schema lists tables and columns"


def _near(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=2)
    return f", did you mean {' or '.join(close)}?" if close else ""
