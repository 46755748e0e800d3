"""Tables of a SQLite file that may be damaged or hostile: its schema's code is never run, rows are bounded."""

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

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
