"""The history file: a DuckDB database that several CI jobs may add to at once, and that nothing here ever destroys.

DuckDB lets one process write at a time, and refuses others: they wait their turn here. What a writer adds is one
transaction, so one that dies has added all or nothing. A new file is made under another name and takes its own once it
is whole. A file that is not a history is opened read-only, and refused.
"""

import contextlib
import fcntl
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

from tracekit import conventions
from tracekit.conventions import regular_files
from tracekit.errors import InputError
from tracekit.model import schema
from tracekit.regression.history.entry import Commit, HistoryEntry, with_known_commit

_TEXT, _FLOAT, _BOOL = pl.String(), pl.Float64(), pl.Boolean()
_RUN = schema.column("run", "Name of the run by its content: the same files are the same run.", _TEXT)

VERSION = schema.table(
    "tracekit_history",
    "history file: there is one",
    schema.column("schema", "Version of these tables; a reader of an earlier one refuses a later one."),
)
RUNS = schema.table(
    "runs",
    "checked run",
    _RUN,
    schema.column(
        "digest", "Hash of all that is stored of the run: it differs where another check of it differs.", _TEXT
    ),
    schema.column("name", "Name of the run's folder.", _TEXT),
    schema.column("at_ns", "Unix time at which it was recorded, else at which it was added: their order."),
    schema.column("added_ns", "Unix time at which it was added."),
    schema.column("commit", "Commit that was trained; null where not known.", _TEXT),
    schema.column("commit_text", "Message of that commit; null where not known.", _TEXT),
    schema.column("branch", "Branch that was trained; null where not known.", _TEXT),
    schema.column("fingerprint", "Hash of what must agree for runs to be in one series.", _TEXT),
    schema.column("tool_version", "Version of tracekit that checked it.", _TEXT),
    schema.column("passed", "Whether the check passed; null where it was not checked.", _BOOL),
    schema.column("failures", "What failed the check: ids of findings, metrics, budgets.", pl.List(_TEXT)),
)
FACTS = schema.table(
    "facts",
    "run and fact of its manifest",
    _RUN,
    schema.column("field", "Name of the fact, such as model.name or versions.torch.", _TEXT),
    schema.column("value", "What the manifest says, as text.", _TEXT),
    schema.column("is_identity", "Whether it is part of the fingerprint.", _BOOL),
)
METRICS = schema.table(
    "metrics",
    "run and metric",
    _RUN,
    schema.column("metric", "Name of the metric, as tracekit compare has it; its ending is its unit.", _TEXT),
    schema.column("median", "Median over steps: of times the worst rank's, of all else the mean over ranks.", _FLOAT),
    schema.column("low", "Lower end of the median's 95% interval; null below 6 samples.", _FLOAT),
    schema.column("high", "Upper end of it.", _FLOAT),
    schema.column("samples", "Steps that it rests on."),
)
FINDINGS = schema.table(
    "findings",
    "run and finding",
    _RUN,
    schema.column("finding", "Id of the finding, the same from run to run.", _TEXT),
    schema.column("code", "Code of its rule.", _TEXT),
    schema.column("name", "Name of its rule.", _TEXT),
    schema.column("severity", "info, warning or error.", _TEXT),
    schema.Column("impact_ratio", _FLOAT, "ratio", "Share of step time lost; in findings on saves, of training time."),
    schema.column("cost_ns", "Time lost per step on the worst rank."),
    schema.column("cost_bytes", "Memory that it takes."),
    schema.column("message", "What it says.", _TEXT),
)
RUN_TABLES = (RUNS, FACTS, METRICS, FINDINGS)
"""The tables with what is known of runs."""

SCHEMA = 1
FILE = "history.duckdb"
"""The default name: the dashboard looks for it in the folder that it is opened on."""
LOCK_TIMEOUT_S = 60.0

_WAIT_S = 0.05
_MAGIC_AT, _MAGIC = 8, b"DUCK"
_TYPES = {
    "Int64": "BIGINT",
    "String": "VARCHAR",
    "Float64": "DOUBLE",
    "Boolean": "BOOLEAN",
    "List(String)": "VARCHAR[]",
}
# A file may come from elsewhere: whatever stands in it reads and writes nothing else.
_LIMITS: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "memory_limit": "1GiB",
    "threads": "2",
}
_THEN = "SET enable_progress_bar = false; SET lock_configuration = true"  # the first is an option of the connection
_KIND = re.compile(r"^[\w ]+ Error: ")
_one_at_a_time = threading.Lock()  # threads of one process would share DuckDB's own lock


@dataclass(frozen=True)
class AddedRuns:
    """How many runs were new, how many were updated, and how many were there unchanged."""

    new: int = 0
    updated: int = 0
    unchanged: int = 0


@dataclass(frozen=True, eq=False)
class History:
    """The content of a history file, tables as `history.tables` describes them; runs are in order of time."""

    runs: pl.DataFrame
    facts: pl.DataFrame
    metrics: pl.DataFrame
    findings: pl.DataFrame


def add(
    path: Path, entries: Sequence[HistoryEntry], *, commit: Commit | None = None, timeout_s: float = LOCK_TIMEOUT_S
) -> AddedRuns:
    """Add runs to a history, which is made if it is not there. A run that is in it is not added a second time.

    One that was checked otherwise since (other settings, a later tracekit) is updated; it keeps the commit that was
    known, except for what `commit` states. Raises InputError where the file is not a history, cannot be written, or
    others write to it for longer than `timeout_s`.
    """
    with _only_writer(path, timeout_s=timeout_s):
        if not os.path.lexists(path):
            _make(path)
        check(path, timeout_s=timeout_s)
        with _open(path, read_only=False, timeout_s=timeout_s) as connection:
            connection.execute("BEGIN")
            counts = [_put(connection, entry, commit or Commit()) for entry in entries]
            connection.execute("COMMIT")
            connection.execute("CHECKPOINT")  # now rather than on closing, where an error would be lost
    return AddedRuns(counts.count("new"), counts.count("renewed"), counts.count("same"))


def check(path: Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """Raise InputError where a file exists and is not a history. It is not written to."""
    if os.path.lexists(path):
        with _open(path, read_only=True, timeout_s=timeout_s) as connection:
            _refuse_other_databases(connection, path)


def read(path: Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> History:
    """Return the content of a history. Raises InputError where there is none."""
    if not path.exists():
        raise InputError(f"{path}: there is no such file; tracekit history add RUN --db {path} makes one")
    with _open(path, read_only=True, timeout_s=timeout_s) as connection:
        _refuse_other_databases(connection, path)
        runs, facts, metrics, findings = (_frame(connection, table) for table in RUN_TABLES)
    return History(runs.sort("at_ns", "added_ns", "run"), facts, metrics, findings)


@contextlib.contextmanager
def _only_writer(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Let one process of tracekit at a time write to the histories of a folder. Raises InputError after `timeout_s`.

    A process loses DuckDB's locks (fcntl) when it closes any other handle of the file; a lock of the folder (flock) is
    not lost so, and leaves no file behind. A file system without such locks leaves only those of DuckDB.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder = os.open(Path(os.path.realpath(path)).parent, os.O_RDONLY)  # links to one file have one lock
    except OSError:  # making or opening the file says what is wrong
        yield
        return
    try:
        _lock(folder, path, timeout_s=timeout_s)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, path: Path, *, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise _busy(path, timeout_s) from None
        except OSError:
            return
        else:
            return
        time.sleep(_WAIT_S)


def _busy(path: Path, timeout_s: float) -> InputError:
    return InputError(
        f"{path}: another process has been writing to it for {timeout_s:g} s; try again when it has ended"
    )


@contextlib.contextmanager
def _open(path: Path, *, read_only: bool, timeout_s: float) -> Iterator[duckdb.DuckDBPyConnection]:
    if not path.is_file():
        raise InputError(f"{path}: is not a file, so it is not a history")
    with _one_at_a_time:
        connection = _connect(path, read_only=read_only, timeout_s=timeout_s)
        try:
            yield connection
        except duckdb.Error as error:
            raise InputError(f"{path}: is damaged or cannot be written: {_first_line(error)}") from None
        finally:
            with contextlib.suppress(duckdb.Error):
                connection.close()


def _connect(path: Path, *, read_only: bool, timeout_s: float) -> duckdb.DuckDBPyConnection:
    _refuse_other_formats(path)
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return _locked_connection(path, read_only=read_only)
        except duckdb.Error as error:
            message = _first_line(error)
            if "lock on file" not in message:
                raise InputError(f"{path}: cannot be read as a history: {message}") from None
            if time.monotonic() > deadline_s:
                raise _busy(path, timeout_s) from None
        time.sleep(_WAIT_S * (0.5 + random.random()))  # noqa: S311 only that not all come back at once


def _locked_connection(path: Path, *, read_only: bool = False) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(str(path), read_only=read_only, config=_LIMITS)
    return connection.execute(_THEN)


def _refuse_other_formats(path: Path) -> None:
    # DuckDB opens some files of other formats as databases of their own, with words that help nobody.
    with regular_files.open_to_read(path) as file:
        start = file.read(_MAGIC_AT + len(_MAGIC))
    if not start.endswith(_MAGIC):
        raise InputError(f"{path}: cannot be read as a history: it is not a DuckDB file; name another")


def _make(path: Path) -> None:
    """Make an empty history, unless somebody else has just done so."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{conventions.PARTIAL_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked_connection(partial) as connection:
            for table in (VERSION, *RUN_TABLES):
                columns = ", ".join(f'"{column.name}" {_TYPES[str(column.dtype)]}' for column in table.columns)
                connection.execute(f"CREATE TABLE {table.name} ({columns})")
            connection.execute(f"INSERT INTO {VERSION.name} VALUES (?)", [SCHEMA])  # noqa: S608 a name of ours
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)  # unlike a renaming, never over a file that is there
    except (OSError, duckdb.Error) as error:
        raise InputError(f"{path}: cannot be made: {_first_line(error)}") from None
    finally:
        for file in (partial, partial.with_name(partial.name + ".wal")):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def _refuse_other_databases(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Raise InputError where a database has not our tables. A view of such a name is none."""
    table_names = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    columns = connection.execute("SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal").fetchall()
    present = {(name, column) for name, column in columns if name in table_names}
    if not any(name == VERSION.name for name, _ in present):
        raise InputError(f"{path}: is a database, but not a history of tracekit; name another file")
    row = connection.execute(f'SELECT max("schema") FROM {VERSION.name}').fetchone()  # noqa: S608
    version = row[0] if row else None
    if isinstance(version, int) and version > SCHEMA:
        raise InputError(
            f"{path}: was written by a later tracekit (history {version}, this one knows {SCHEMA}): upgrade tracekit"
        )
    missing = [f"{t.name}.{c.name}" for t in RUN_TABLES for c in t.columns if (t.name, c.name) not in present]
    if version != SCHEMA or missing:
        raise InputError(f"{path}: is not a complete history: it lacks {missing[0] if missing else 'its version'}")


def _put(connection: duckdb.DuckDBPyConnection, entry: HistoryEntry, stated: Commit) -> str:
    """Store one run; return what became of it."""
    old = connection.execute(
        'SELECT "commit", commit_text, branch, digest, added_ns FROM runs WHERE run = ?', [entry.run]
    ).fetchone()
    if old is not None:
        entry = with_known_commit(entry, Commit(old[0], old[1], old[2]), stated)
        if entry.digest == old[3]:
            return "same"
        for table in RUN_TABLES:
            connection.execute(f"DELETE FROM {table.name} WHERE run = ?", [entry.run])  # noqa: S608 a name of ours
    added_ns = time.time_ns() if old is None else old[4]
    for table, rows in _rows(entry, added_ns).items():
        marks = ", ".join("?" * len(table.columns))
        if rows:
            connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows)  # noqa: S608
    return "new" if old is None else "renewed"


def _rows(entry: HistoryEntry, added_ns: int) -> dict[schema.Table, list[list[Any]]]:
    commit = entry.commit
    run: dict[str, Any] = {
        "run": entry.run,
        "digest": entry.digest,
        "name": entry.name,
        "at_ns": added_ns if entry.at_ns is None else entry.at_ns,
        "added_ns": added_ns,
        "commit": commit.sha,
        "commit_text": commit.text,
        "branch": commit.branch,
        "fingerprint": entry.fingerprint,
        "tool_version": entry.tool_version,
        "passed": entry.passed,
        "failures": list(entry.failures),
    }
    facts = [
        {"field": field, "value": value, "is_identity": fields is entry.identity}
        for fields in (entry.identity, entry.facts)
        for field, value in fields.items()
    ]
    tables_of_run: dict[schema.Table, Iterable[dict[str, Any]]] = {
        RUNS: [run],
        FACTS: facts,
        METRICS: [vars(summary) for summary in entry.metrics],
        FINDINGS: [vars(summary) for summary in entry.findings],
    }
    return {
        table: [[_as_text({"run": entry.run, **row}[column.name]) for column in table.columns] for row in rows]
        for table, rows in tables_of_run.items()
    }


def _as_text(value: object) -> object:
    # A file's name may contain bytes that are not text.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _frame(connection: duckdb.DuckDBPyConnection, table: schema.Table) -> pl.DataFrame:
    columns = ", ".join(f'"{column.name}"' for column in table.columns)
    rows = connection.execute(f"SELECT {columns} FROM {table.name}").fetchall()  # noqa: S608 names of ours
    return pl.DataFrame(rows, schema=table.schema, orient="row")


def _first_line(error: BaseException) -> str:
    line = " ".join((str(error).splitlines() or [type(error).__name__])[0].split())
    return _KIND.sub("", line)
