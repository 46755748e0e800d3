"""Tables of a SQLite file that may be damaged or hostile, and what the texts of an Nsight Systems report name.

Its schema's code is never run, rows are bounded.
"""

import contextlib
import re
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.conventions import regular_files
from tracekit.errors import BadTraceError
from tracekit.ingest.decompression import Blocks
from tracekit.ingest.readers.normalize.numbers import MISSING, Ints

MAGIC = b"SQLite format 3\0"
_BATCH = 1 << 15
_LEAST_ROW_BYTES = 4
"""A row takes more bytes of a file: more rows than that come from pages that refer to each other in circles."""
_MOST_TEXT_BYTES = 16 << 20
_MOST_STEPS = 200
"""Instructions of SQLite's virtual machine for each byte of the file, beyond any scan of its tables."""
_EVERY = 1 << 20


class Database:
    """The tables of an open file, by name. Tables and columns that are not there have no rows, and missing values."""

    def __init__(self, path: str, connection: sqlite3.Connection, size_bytes: int) -> None:
        self.path = path
        self._connection = connection
        self._most_rows = size_bytes // _LEAST_ROW_BYTES
        self._columns = self._plain_tables()

    def has(self, table: str, *columns: str) -> bool:
        """Return whether there is a table with these columns."""
        return table in self._columns and set(columns) <= self._columns[table]

    def integers(self, table: str, columns: Sequence[str], where: str = "") -> dict[str, Ints]:
        """Return integer columns of the rows that fit `where`; MISSING where a value is no integer.

        Raises BadTraceError if the file is damaged.
        """
        if table not in self._columns:
            return {name: np.empty(0, np.int64) for name in columns}
        terms = ", ".join(self._integer(table, name) for name in columns)
        query = f'SELECT {terms} FROM "{table}" {where}'  # noqa: S608  the table exists, its columns are listed
        parts = [
            np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * len(columns)).reshape(-1, len(columns))
            for rows in self._batches(query)
        ]
        values = np.concatenate(parts) if parts else np.empty((0, len(columns)), np.int64)
        return {name: values[:, i].copy() for i, name in enumerate(columns)}

    def floats(self, table: str, column: str, where: str = "") -> npt.NDArray[np.float64]:
        """Return a column of the rows that fit `where`; infinity where a value is not a number."""
        if not self.has(table, column):
            return np.empty(0, np.float64)
        term = f"CASE WHEN typeof(\"{column}\") IN ('integer', 'real') THEN \"{column}\" + 0.0 ELSE 9e999 END"
        query = f'SELECT {term} FROM "{table}" {where}'  # noqa: S608  table and column exist
        parts = [np.fromiter(chain.from_iterable(rows), np.float64, len(rows)) for rows in self._batches(query)]
        return np.concatenate(parts) if parts else np.empty(0, np.float64)

    def rows(self, table: str, columns: Sequence[str], where: str = "") -> list[tuple[object, ...]]:
        """Return the rows that fit `where`, with values of any type; None for columns that are not there."""
        return list(self.each(table, columns, where))

    def each(self, table: str, columns: Sequence[str], where: str = "") -> Iterator[tuple[object, ...]]:
        """Yield the rows that `rows` returns."""
        if table in self._columns:
            terms = ", ".join(f'"{name}"' if self._is_column(table, name) else "NULL" for name in columns)
            query = f'SELECT {terms} FROM "{table}" {where}'  # noqa: S608  the table exists, its columns are listed
            yield from chain.from_iterable(self._batches(query))

    def _is_column(self, table: str, name: str) -> bool:
        return name in self._columns[table] or name == "rowid"

    def _integer(self, table: str, name: str) -> str:
        if not self._is_column(table, name):
            return str(MISSING + 1) + " - 1"  # the least int64, which SQL cannot spell
        return f'CASE WHEN typeof("{name}") = \'integer\' THEN "{name}" ELSE {MISSING + 1} - 1 END'

    def _plain_tables(self) -> dict[str, frozenset[str]]:
        """Return the columns of each plain table; views and virtual tables would run code of the file."""
        tables = chain.from_iterable(self._batches("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
        plain = [
            name
            for name, sql in tables
            if isinstance(name, str) and isinstance(sql, str) and name.replace("_", "").isalnum()
            if sql.lstrip().upper().startswith("CREATE TABLE")
        ]
        return {
            name: frozenset(str(row[1]) for row in chain.from_iterable(self._batches(f'PRAGMA table_info("{name}")')))
            for name in plain
        }

    def _batches(self, query: str) -> Iterator[list[tuple[object, ...]]]:
        count = 0
        try:
            cursor = self._connection.execute(query)
            while batch := cursor.fetchmany(_BATCH):
                count += len(batch)
                if count > max(self._most_rows, _BATCH):
                    raise BadTraceError(f"{self.path}: a table has more rows than its bytes can hold; export it again")
                yield batch
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            raise BadTraceError(f"{self.path}: damaged SQLite file ({error}); export it again") from None


UNKNOWN = "?"

_VERSION = re.compile(r"(?:_ptsz|_ptds)?_v\d+$|(?:_ptsz|_ptds)$")
_MOST_NAME = 64 << 10
_FEW = 1000
# Enumerations of CUPTI (CUpti_ActivityMemcpyKind, CUpti_ActivityMemoryKind); tables of the report name them, too.
_COPIES = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
    11: "HtoD", 12: "DtoH", 13: "DtoD",
}  # fmt: skip
_MEMORY_KINDS = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device", 6: "Managed"}
# github.com/pytorch/pytorch torch/csrc/autograd/profiler_legacy.cpp and profiler/util.cpp, getNvtxStr.
_OPERATOR = re.compile(
    r"(?P<name>[^,]+(?:,(?! (?:seq|op_id|sizes|input_op_ids) = )[^,]*)*?)"
    r"(?:, seq = (?P<seq>-?\d{1,18}))?(?:, op_id = \d+)?(?:, sizes = (?P<sizes>\[.*?\]))?(?:, input_op_ids = .*)?$",
    re.S,
)
_MARKS = (", seq = ", ", op_id = ", ", sizes = ")
_STEP = re.compile(
    r"(?:(?:train|training)[ _-]?)?(step|iteration|iter|global[ _]step|batch|ProfilerStep)[ _:#=-]*(\d{1,15})$", re.I
)


class Texts:
    """The texts that rows refer to by id. Most rows of large reports name texts of their own, so each is read once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._few: dict[int, str] = {}

    def get(self, key: object) -> str:
        """Return the text of an id; ? where there is none."""
        if not isinstance(key, int):
            return UNKNOWN
        if key not in self._few:
            rows = self._database.rows("StringIds", ("value",), f"WHERE id = {key} LIMIT 1")
            value = rows[0][0] if rows else None
            self._few[key] = value[:_MOST_NAME] if isinstance(value, str) else UNKNOWN
        return self._few[key]

    def of_all(self, keys: Ints) -> tuple[pl.Series, Ints]:
        """Return the distinct texts of ids, and the place of each id's text among them; ? where there is none."""
        distinct, inverse = np.unique(keys, return_inverse=True)
        texts = [UNKNOWN] * len(distinct)
        place = dict(zip(distinct.tolist(), range(len(distinct)), strict=True))
        few = f"WHERE id IN ({', '.join(map(str, place))})" if len(place) <= _FEW else ""  # they are found by an index
        for key, value in self._database.each("StringIds", ("id", "value"), few):
            if isinstance(value, str) and (i := place.get(key)) is not None:
                texts[i] = value[:_MOST_NAME]
        return pl.Series("name", texts, dtype=pl.String), np.asarray(inverse, np.int64).copy()


@dataclass(frozen=True)
class Operator:
    """An operator that PyTorch's emit_nvtx annotated."""

    name: str
    sequence: int
    sizes: str | None
    """Shapes of its inputs, as JSON."""


@contextlib.contextmanager
def open_database(path: str) -> Iterator[Database]:
    """Open a SQLite file, plain or compressed. Raises BadTraceError if it cannot be read."""
    with _plain(path) as plain:
        size_bytes = plain.stat().st_size
        try:
            connection = sqlite3.connect(f"{plain.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        except sqlite3.Error as error:
            raise BadTraceError(f"{path}: {error}; check the path and its permissions") from None
        with contextlib.closing(connection):
            for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON", "mmap_size = 0"):
                connection.execute(f"PRAGMA {pragma}")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_TEXT_BYTES)
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            budget = iter(range(max(size_bytes * _MOST_STEPS // _EVERY, 100)))
            connection.set_progress_handler(lambda: int(next(budget, None) is None), _EVERY)
            yield Database(path, connection, size_bytes)


def operator(text: str) -> Operator | None:
    """Return the operator that a range of PyTorch's emit_nvtx names; None for other ranges.

    >>> operator("aten::mm, seq = 7, op_id = 12, sizes = [[2, 3], [3, 4]]")
    Operator(name='aten::mm', sequence=7, sizes='[[2, 3], [3, 4]]')
    """
    if not any(mark in text for mark in _MARKS):
        return None
    match = _OPERATOR.match(text)
    return None if match is None else Operator(match["name"], max(int(match["seq"] or 0), 0), match["sizes"])


def of_call(name: str) -> str:
    """Return the name of a CUDA function without the version that CUPTI appends.

    >>> of_call("cudaLaunchKernel_ptsz_v7000"), of_call("cuMemcpyAsync")
    ('cudaLaunchKernel', 'cuMemcpyAsync')
    """
    return _VERSION.sub("", name)


def of_copy(kind: int, source: int, target: int) -> str:
    """Return the name of a copy, as PyTorch's profiler writes it.

    >>> of_copy(1, 1, 2)
    'Memcpy HtoD (Pinned -> Device)'
    """
    places = (_MEMORY_KINDS.get(place, "Unknown") for place in (source, target))
    return f"Memcpy {_COPIES.get(kind, 'Unknown')} ({' -> '.join(places)})"


def of_memset(kind: int) -> str:
    """Return the name of a memory set, as PyTorch's profiler writes it."""
    return f"Memset ({_MEMORY_KINDS.get(kind, 'Unknown')})"


def step_names(ranges: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Return the profiler's name of a step for each name that marks one, such as "step 12" or "iteration 12".

    `ranges` are names with their total duration in ns. Of several words for steps, the one that lasts longest counts.

    >>> step_names([("step 3", 90), ("batch 7", 20), ("forward", 50)])
    {'step 3': 'ProfilerStep#3'}
    """
    marks: dict[str, dict[str, str]] = defaultdict(dict)
    total_ns: dict[str, int] = defaultdict(int)
    for name, dur_ns in ranges:
        if (match := _STEP.match(name)) is not None:
            marks[match[1].lower()][name] = f"ProfilerStep#{int(match[2])}"
            total_ns[match[1].lower()] += dur_ns
    return marks[max(total_ns, key=lambda word: total_ns[word])] if total_ns else {}


@contextlib.contextmanager
def _plain(path: str) -> Iterator[Path]:
    """Yield the path of the file's decompressed content."""
    blocks = Blocks(path)
    content = iter(blocks)
    first = next(content, b"")
    with regular_files.open_to_read(path) as file:
        if file.read(len(MAGIC)) == MAGIC:
            yield Path(path)
            return
    with tempfile.NamedTemporaryFile(prefix="tracekit-", suffix=".sqlite") as copy:
        for block in chain([first], content):
            copy.write(block)
        copy.flush()
        if blocks.broken:
            raise BadTraceError(f"{path}: {blocks.broken}; copy or compress it again")
        yield Path(copy.name)
