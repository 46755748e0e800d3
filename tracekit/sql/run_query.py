"""SQL over the tables of a run: one SELECT, in a process without access to files, network or settings."""

import contextlib
import difflib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import polars as pl
import pyarrow as pa

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.compute import device_counters, kernel_sequences, unknown_work
from tracekit.analysis.host import launch_queues, module_tree
from tracekit.analysis.parallelism import axis_communication, expert_pairs, group_axes, pipeline_bubbles, ring_overlap
from tracekit.analysis.parallelism.pipeline_actions import ACTIONS, pipeline_actions
from tracekit.analysis.quality import trace_quality
from tracekit.analysis.time import breakdown
from tracekit.errors import InputError
from tracekit.model import plugins, schema
from tracekit.model.run import OFFSETS, RUN_DATA_QUALITY, Run, RunFact
from tracekit.model.schema import Column, Table
from tracekit.model.source import Source
from tracekit.model.trace import TraceTable
from tracekit.replay.allocator.facts import run_snapshots
from tracekit.replay.graph.critical_path import path as critical_path
from tracekit.sql import sandbox
from tracekit.sync import alignment

Rows: TypeAlias = pl.DataFrame | Sequence[Path]
"""The rows of a table: in memory, or in Parquet files that the query's process reads as far as it needs them."""

TIMEOUT_S = 60.0
MEMORY_BYTES = 4 << 30
_GRACE_S = 1.0
_RESERVED = re.compile(r'(?i)(?<!")\b(window|group)\b(?!"|\s+by\b)')
_PROGRAM = Path(__file__).with_name("sandbox.py")
_PASSED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ", "LANG", "LC_ALL")

_RANK_COLUMNS = (
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

_SNAPSHOT_NAMES = {name: f"snapshot_{name}" for name in schema.SNAPSHOT_TABLES}
TABLES: Mapping[str, Table] = {
    **{t.name: replace(t, columns=(*_RANK_COLUMNS, *t.columns)) for t in (*schema.TABLES.values(), BREAKDOWN)},
    **{t.name: t for t in (OFFSETS, collective_instances.INSTANCES, collective_instances.WAITS, RUN_DATA_QUALITY)},
    **{
        t.name: replace(t, columns=(*_RANK_COLUMNS, *t.columns))
        for t in (
            ACTIONS,
            module_tree.MODULES,
            launch_queues.QUEUES,
            kernel_sequences.SEQUENCES,
            unknown_work.UNKNOWN_WORK,
            device_counters.DEVICE_METRICS,
        )
    },
    **{t.name: t for t in (pipeline_bubbles.BUBBLES, group_axes.AXES, axis_communication.AXIS_COMMUNICATION)},
    **{t.name: t for t in (expert_pairs.PAIRS, ring_overlap.RINGS, critical_path.PATHS)},
    **{
        name: replace(t, name=name, columns=(*_RANK_COLUMNS, *t.columns))
        for name, t in zip(_SNAPSHOT_NAMES.values(), schema.SNAPSHOT_TABLES.values(), strict=True)
    },
}
"""Every table that a query can name, with its columns."""

_DERIVED: dict[str, RunFact] = {
    "data_quality": lambda run: run.table(trace_quality.data_quality),
    BREAKDOWN.name: lambda run: run.table(breakdown.by_step),
    OFFSETS.name: lambda run: run.offsets,
    collective_instances.INSTANCES.name: lambda run: run.run_table(collective_instances.instances),
    collective_instances.WAITS.name: lambda run: run.run_table(collective_instances.waits),
    ACTIONS.name: lambda run: run.table(pipeline_actions),
    launch_queues.QUEUES.name: lambda run: run.table(launch_queues.launch_queues),
    kernel_sequences.SEQUENCES.name: lambda run: run.table(kernel_sequences.kernel_sequences),
    unknown_work.UNKNOWN_WORK.name: lambda run: run.table(unknown_work.unknown_work),
    device_counters.DEVICE_METRICS.name: lambda run: run.table(device_counters.device_counters),
    module_tree.MODULES.name: lambda run: run.table(module_tree.modules),
    pipeline_bubbles.BUBBLES.name: lambda run: run.run_table(pipeline_bubbles.pipeline_bubbles),
    group_axes.AXES.name: lambda run: run.run_table(group_axes.group_axes),
    critical_path.PATHS.name: lambda run: run.run_table(critical_path.critical_paths),
    expert_pairs.PAIRS.name: lambda run: run.run_table(expert_pairs.expert_pairs),
    ring_overlap.RINGS.name: lambda run: run.run_table(ring_overlap.ring_overlap),
    axis_communication.AXIS_COMMUNICATION.name: lambda run: run.run_table(axis_communication.axis_communication),
    RUN_DATA_QUALITY.name: lambda run: pl.concat([run.data_quality, alignment.data_quality(run)]),
    **{table_name: run_snapshots.table(name) for name, table_name in _SNAPSHOT_NAMES.items()},
}
"""Tables that are derived from a run rather than read, and their functions."""


@dataclass(frozen=True)
class DerivedTable:
    """A table of a plug-in, from the entry point group ``tracekit.tables``: its columns, and a function of a run."""

    table: Table
    measure: RunFact


def tables() -> Mapping[str, Table]:
    """Return TABLES and those of plug-ins, from the entry point group ``tracekit.tables``.

    Raises InputError if a plug-in's table has the name of another table.
    """
    return {**TABLES, **{name: derived.table for name, derived in _plugin_tables().items()}}


def _plugin_tables() -> dict[str, DerivedTable]:
    added: dict[str, DerivedTable] = {}
    for point in plugins.entry_points(group="tracekit.tables"):
        derived: DerivedTable = point.load()
        name = derived.table.name
        if name in TABLES or name in added:
            raise InputError(f"{point.value}: there is already a table {name}; remove one of the two packages")
        added[name] = derived
    return added


def query(
    run: Run,
    sql: str,
    *,
    timeout_s: float = TIMEOUT_S,
    memory_bytes: int = MEMORY_BYTES,
    max_rows: int | None = None,
) -> pl.DataFrame:
    """Return the result of one SELECT over the tables of a run, at most `max_rows` rows.

    The tables are TABLES: those of all ranks concatenated, with columns window and rank in front. Only tables that
    `sql` names are built. Raises InputError if `sql` is not one SELECT, names an unknown table or column, fails, or
    needs more time or memory than allowed; the result counts as memory.
    """
    with open_query(sql, timeout_s=timeout_s, memory_bytes=memory_bytes, max_rows=max_rows) as sandboxed:
        return sandboxed.run(run)


def check(sql: str) -> None:
    """Raise InputError if `sql` is not one SELECT over TABLES and their columns. Needs no run."""
    with open_query(sql):
        pass


def find_table(name: str) -> Table:
    """Return the table of a name. Raises InputError with similar names if there is none."""
    known = tables()
    if name.lower() in known:
        return known[name.lower()]
    raise InputError(f"{name}: no such table{_suggestion(name, list(known))}; the tables are {', '.join(known)}")


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
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=_environment(),
        )
        self._is_timed_out = False
        self._table_names: list[str] = []
        self._tables = tables()

    def check(self) -> None:
        """Validate the query and get the tables that it names. Raises InputError if it is invalid."""
        limits = {"timeout_s": self._timeout_s, "memory_bytes": self._memory_bytes, "max_rows": self._max_rows}
        with self._deadline():
            empty = [table.empty() for table in self._tables.values()]
            self._send({"sql": self._sql, "tables": list(self._tables), **limits}, empty)
            self._table_names = self._read_line()["named"]

    def run(self, run: Run, on_progress: Callable[[Source], None] | None = None) -> pl.DataFrame:
        """Return the result of the query on a run."""
        return self.execute(self.collect_tables(run, on_progress))

    def collect_tables(self, run: Run, on_progress: Callable[[Source], None] | None = None) -> dict[str, Rows]:
        """Return the tables of a run that the query names."""
        return dict(_tables(run, self._table_names, on_progress))

    def execute(self, tables: Mapping[str, Rows]) -> pl.DataFrame:
        """Return the result of the query on these tables."""
        streamed = {name: rows for name, rows in tables.items() if isinstance(rows, pl.DataFrame)}
        files = {name: [] if name in streamed else [str(path) for path in rows] for name, rows in tables.items()}
        self._send({"tables": files}, streamed.values())
        with self._deadline():
            self._read_line()
            with self._explain_exit(), pa.ipc.open_stream(self._stdout) as stream:
                result = stream.read_all()
            self._read_line()
        rows = _narrow_integers(_to_polars(result))
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
                rows = table.to_arrow()
                with pa.ipc.new_stream(pipe, rows.schema) as stream:
                    stream.write_table(rows)
            pipe.flush()

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
        except (EOFError, OSError, pa.ArrowException):
            code = self._process.wait()
            is_killed = code in (-signal.SIGABRT, -signal.SIGKILL)  # the process ran out of memory
            kind = sandbox.TIMED_OUT if self._is_timed_out else sandbox.OUT_OF_MEMORY if is_killed else ""
            raise self._failure(kind, str(code)) from None

    def _failure(self, kind: str, message: str) -> InputError:
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
    variables = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
    paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 '' is the current folder
    return variables | {"PYTHONPATH": os.pathsep.join(paths), "MALLOC_ARENA_MAX": "2"}


def _tables(run: Run, named: Sequence[str], on_progress: Callable[[Source], None] | None) -> Iterator[tuple[str, Rows]]:
    """Yield the named tables; those that are read are built in one pass over the traces."""
    plugins = _plugin_tables()
    derived = _DERIVED | {name: plugin.measure for name, plugin in plugins.items()}
    run.measure([TraceTable(name) for name in named if name not in derived], on_progress)
    for name in named:
        if name not in derived:
            yield name, run.parts(TraceTable(name)) or run.table(TraceTable(name))
        else:
            rows = derived[name](run)
            yield name, plugins[name].table.conform(rows) if name in plugins else rows


def _to_polars(rows: pa.Table) -> pl.DataFrame:
    """Return rows as a frame; repeated column names get a number."""
    columns: dict[str, pl.Series] = {}
    for name, values in zip(rows.column_names, rows.columns, strict=True):
        unique, number = name, 0
        while unique in columns:
            number += 1
            unique = f"{name}_{number}"
        columns[unique] = pl.Series(unique, pl.from_arrow(values))
    return pl.DataFrame(list(columns.values()))


def _narrow_integers(rows: pl.DataFrame) -> pl.DataFrame:
    """Return integers as Int64 if they fit: DuckDB sums them in 128 bits, which few programs can read."""
    whole = [name for name, dtype in rows.schema.items() if isinstance(dtype, pl.Decimal) and not dtype.scale]
    whole += [name for name, dtype in rows.schema.items() if dtype == pl.Int128]
    narrow = rows.with_columns(pl.col(name).cast(pl.Int64, strict=False) for name in whole)
    wide = [name for name in whole if narrow[name].null_count() != rows[name].null_count()]
    return narrow.with_columns(rows[name] for name in wide)


def _explain_error(kind: str, message: str, sql: str, known: Mapping[str, Table]) -> str:
    """Return DuckDB's error on one line, with a suggestion."""
    first = " ".join(re.split(r"\n\n|\nCandidate|\n?Did you mean", message)[0].split())
    reason = re.sub(r"^\w+(?: \w+)* Error: ", "", first).rstrip("!")
    table = re.search(r"Table with name (\S+) does not exist", message)
    if table:
        return f"query: no table {table[1]}{_suggestion(table[1], list(known))}; the tables are {', '.join(known)}"
    if kind == "ParserException" and _RESERVED.search(sql):
        return f'query: {reason}; in SQL the columns window and group need double quotes: "window", "group"'
    near = re.search(r"(?:Candidate bindings:|Did you mean) (.+?)\??(?:\n|$)", message)
    if near:
        return f"query: {reason}; did you mean {near[1]}? tracekit schema lists tables and columns"
    column = re.search(r'column named "(\w+)"', message)
    columns = sorted({column.name for table in known.values() for column in table.columns})
    hint = _suggestion(column[1], columns) if column else ""
    return f"query: {reason}{hint}; tracekit schema lists tables and columns"


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=2)
    return f", did you mean {' or '.join(close)}?" if close else ""
