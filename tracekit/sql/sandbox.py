"""One SQL query in a separate process without access to files, network or settings; the caller can kill it.

DuckDB limits only the time and memory that it counts. A single call such as repeat('x', 4e9) or levenshtein of long
texts exceeds both, and only the operating system can stop it: so `tracekit.sql.run_query` starts this file as a
program. It imports DuckDB and Arrow but nothing of tracekit, so it starts quickly.

Protocol: stdin has a line of JSON (sql, tables, timeout_s, memory_bytes, max_rows) and each table without rows as an
Arrow stream; stdout has a line with the tables that the query names. Then stdin has a line with the names of those
tables, each with the Parquet files that it is in, and the rows of those that are in none; stdout has the result in
batches, each a line with its size in bytes and an Arrow stream, then a line with `done`. The first batch has no rows. A
line with `error` (kind, message) ends the exchange.
"""

import contextlib
import itertools
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import duckdb
import pyarrow as pa

REFUSED, TIMED_OUT, OUT_OF_MEMORY = "refused", "late", "memory"
_BATCH_ROWS = 10_000
_THREADS = 4
_HEADROOM_BYTES = 768 << 20
_MAX_FILES = 64
# DuckDB's other table functions read files, memory addresses or settings of the process.
_TABLE_FUNCTIONS = frozenset({"range", "generate_series", "unnest", "repeat", "json_each", "json_tree"})
_FORBIDDEN_FUNCTIONS = frozenset({"current_setting", "getenv", "getvariable", "write_log", "pg_sleep", "sleep_ms"})
# Types that Arrow or Polars lack, or of which DuckDB has values beyond theirs, such as infinite dates.
_EXOTIC = re.compile(r"INTERVAL|BIGNUM|UNION|VARIANT|GEOMETRY|DATE|TIME")
_LOCKDOWN = (
    "SET enable_progress_bar = false",
    "SET python_enable_replacements = false",  # a name is a table, never a Python variable
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET allow_community_extensions = false",
    "SET temp_directory = ''",  # a query that does not fit in memory fails instead of writing to disk
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


class RefusedError(Exception):
    """A query that is not allowed. The message is for the user."""


def main() -> None:
    """Run one query."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    request = json.loads(source.readline())
    memory_bytes: int = request["memory_bytes"]
    try:
        with connect(memory_bytes) as connection:
            table_names: list[str] = request["tables"]
            _register(connection, dict.fromkeys(table_names, ()), source)
            _limit_process(memory_bytes)
            with _deadline(connection, request["timeout_s"]):
                statement, read_tables = validate(connection, request["sql"], table_names)
            _send(sink, {"named": read_tables})
            line = source.readline()
            if not line:
                return
            _register(connection, json.loads(line)["tables"], source)
            _limit_process(memory_bytes)
            with _deadline(connection, request["timeout_s"]):
                _answer(connection, statement, sink, memory_bytes=memory_bytes, max_rows=request["max_rows"])
    except (RefusedError, TimeoutError, MemoryError, duckdb.Error, pa.ArrowException, OSError) as error:
        _send(sink, {"error": {"kind": _kind(error), "message": str(error)}})


@contextlib.contextmanager
def connect(memory_bytes: int) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a DuckDB that can read only registered tables."""
    with duckdb.connect(":memory:", config={"threads": _THREADS}) as connection:
        for setting in (f"SET memory_limit = '{max(memory_bytes >> 20, 1)}MiB'", *_LOCKDOWN):
            connection.execute(setting)
        yield connection


def validate(connection: duckdb.DuckDBPyConnection, sql: str, table_names: Sequence[str]) -> tuple[str, list[str]]:
    """Return `sql` as one SELECT, and those of `table_names` that it may read.

    Raises RefusedError or duckdb.Error if it is no SELECT or names an unknown table or column.
    """
    statements = duckdb.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        kinds = ", ".join(str(parsed.type).rsplit(".", 1)[-1] for parsed in statements) or "nothing"
        hint = ": list the values of a PIVOT, ON … IN (…)" if "MULTI" in kinds else ""
        raise RefusedError(f"{kinds} given; a query must be one SELECT{hint}")
    statement = statements[0].query.strip().rstrip(";")
    # A table name inside a string counts too: that costs time but changes no result.
    nodes = list(_nodes(_parse(statement)))
    cte_names = {entry["key"].lower() for node in nodes if isinstance(node, dict) for entry in _ctes(node)}
    texts: set[str] = set()
    for node in nodes:
        if isinstance(node, str):
            texts.add(node.lower())
        else:
            _check(node, {*table_names, *cte_names}, table_names)
    read_tables = [name for name in table_names if name in texts]
    connection.execute("EXPLAIN " + statement)
    return statement, read_tables


def _check(node: dict[str, Any], readable: set[str], table_names: Sequence[str]) -> None:
    kind = node.get("type")
    if kind == "TABLE_FUNCTION":
        function = node.get("function", {}).get("function_name", "?")
        if function not in _TABLE_FUNCTIONS:
            tables = ", ".join(table_names)
            raise RefusedError(f"{function}() is not allowed; a query can read only the run's tables ({tables})")
    elif kind == "FUNCTION" and str(node.get("function_name", "")).lower() in _FORBIDDEN_FUNCTIONS:
        raise RefusedError(f"{node['function_name']}() is not allowed; a query can read only the run's tables")
    elif kind == "BASE_TABLE" and (
        str(node.get("table_name", "")).lower() not in readable
        or node.get("schema_name", "").lower() not in ("", "main")
    ):
        raise duckdb.CatalogException(f"Table with name {node.get('table_name')} does not exist!")


def _ctes(node: dict[str, Any]) -> list[dict[str, Any]]:
    cte_map = node.get("cte_map")
    return cte_map.get("map", []) if isinstance(cte_map, dict) else []


def _parse(statement: str) -> dict[str, Any]:
    try:
        with duckdb.connect(":memory:") as connection:
            row = connection.execute("SELECT json_serialize_sql(?)", [statement]).fetchone()
        tree: dict[str, Any] = json.loads(row[0]) if row else {}
    except (duckdb.Error, RecursionError) as error:
        raise RefusedError(f"nested too deeply to validate ({type(error).__name__}); simplify it") from None
    if tree.get("error", True):
        raise RefusedError(f"not a SELECT that can be validated ({tree.get('error_message', 'no reason given')})")
    return tree


def _nodes(tree: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
    """Yield every object and string of a parsed statement, not recursively: expressions may nest very deeply."""
    pending: list[Any] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict | str):
            yield node
        if isinstance(node, dict | list):
            pending.extend(node.values() if isinstance(node, dict) else node)


# Limits --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _deadline(connection: duckdb.DuckDBPyConnection, timeout_s: float) -> Iterator[None]:
    """Interrupt a query that runs too long. Raises TimeoutError."""
    is_timed_out = threading.Event()

    def stop() -> None:
        is_timed_out.set()
        connection.interrupt()

    timer = threading.Timer(timeout_s, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError):
        if is_timed_out.is_set():
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()


def _limit_process(memory_bytes: int) -> None:
    """Limit this process to `memory_bytes` and some headroom, and to no written file, beyond DuckDB's own limits."""
    try:
        import resource

        with open("/proc/self/statm") as file:  # noqa: PTH123 starts faster without pathlib
            current_bytes = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return  # not Linux: DuckDB's own limits and the caller's timeout must suffice
    limits = {
        resource.RLIMIT_AS: current_bytes + memory_bytes + _HEADROOM_BYTES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _MAX_FILES,  # open files stay open
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _kind(error: Exception) -> str:
    if isinstance(error, RefusedError):
        return REFUSED
    if isinstance(error, TimeoutError):
        return TIMED_OUT
    text = str(error).lower()
    if isinstance(error, MemoryError) or "out of memory" in text or "bad_alloc" in text or "malloc of size" in text:
        return OUT_OF_MEMORY
    return type(error).__name__


# Input and output ----------------------------------------------------------------------------------------------------


def _register(connection: duckdb.DuckDBPyConnection, tables: Mapping[str, Sequence[str]], source: BinaryIO) -> None:
    """Register tables by name: those in Parquet files, which a query reads as far as it needs them, and the others."""
    for name, files in tables.items():
        if files:
            from pyarrow import dataset  # few queries need it

            connection.register(name, dataset.dataset(list(files), format="parquet"))
        else:
            with pa.ipc.open_stream(source) as stream:
                connection.register(name, stream.read_all())


def _answer(
    connection: duckdb.DuckDBPyConnection, statement: str, sink: BinaryIO, *, memory_bytes: int, max_rows: int | None
) -> None:
    # A relation streams; a result of execute() is in memory as a whole.
    relation = _as_plain_types(connection, connection.sql(statement), statement)
    to_reader = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader  # its name before DuckDB 1.4
    batches = to_reader(_BATCH_ROWS)
    schema = pa.schema(
        field.with_name(name) for field, name in zip(batches.schema, _unique_names(batches.schema.names), strict=True)
    )
    _send_batch(sink, schema)
    size_bytes = rows = 0
    for batch in batches:
        size_bytes += batch.nbytes
        rows += batch.num_rows
        if size_bytes > memory_bytes:
            raise RefusedError(f"the result is larger than {memory_bytes / 2**30:.3g} GiB; add a LIMIT, or --memory")
        _send_batch(sink, schema, pa.RecordBatch.from_arrays(batch.columns, schema=schema))
        if max_rows is not None and rows >= max_rows:
            break
    _send(sink, {"done": True})


def _send_batch(sink: BinaryIO, schema: pa.Schema, *batches: pa.RecordBatch) -> None:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, schema) as out:
        for batch in batches:
            out.write_batch(batch)
    content = stream.getvalue()
    _send(sink, {"size_bytes": content.size})
    sink.write(content)


def _unique_names(names: Sequence[str]) -> list[str]:
    """Return the names of columns, those that were used before with a number."""
    unique: list[str] = []
    for name in names:
        number = next(n for n in itertools.count() if (f"{name}_{n}" if n else name) not in unique)
        unique.append(f"{name}_{number}" if number else name)
    return unique


def _as_plain_types(
    connection: duckdb.DuckDBPyConnection, relation: duckdb.DuckDBPyRelation, statement: str
) -> duckdb.DuckDBPyRelation:
    """Return the rows with columns of uncommon types as text."""
    exotic = [bool(_EXOTIC.search(str(column_type))) for column_type in relation.types]
    if not any(exotic):
        return relation
    places = [f"c{i}" for i in range(len(exotic))]
    columns = [
        f"""{f"{place}::VARCHAR" if text else place} AS "{name.replace('"', '""')}\""""
        for place, text, name in zip(places, exotic, relation.columns, strict=True)
    ]
    return connection.sql(f"SELECT {', '.join(columns)} FROM ({statement}\n) AS t({', '.join(places)})")  # noqa: S608


def _send(sink: BinaryIO, message: dict[str, Any]) -> None:
    sink.write(json.dumps(message).encode() + b"\n")
    sink.flush()


if __name__ == "__main__":
    main()
