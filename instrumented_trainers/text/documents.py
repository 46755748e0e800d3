"""Read documents from files: plain text, JSON Lines, and by `datasets` Arrow and Parquet.

A reader begins anywhere: each piece it yields has the place of the next one, in bytes or, for tables, in rows.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from instrumented_trainers.config import InvalidConfigError

PIECE_BYTES = 1 << 20
"""About how long the pieces are that plain text is read in."""


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one. `begin` and `end`: its place in the file, in bytes or rows."""

    text: bytes
    begin: int
    end: int
    ends_document: bool = True


def read(path: Path, *, field: str, begin: int = 0) -> Iterator[Piece]:
    """Yield the documents of a file from place `begin` on; `field` names the text in tables and JSON Lines.

    ``.jsonl`` has a document per line, ``.arrow`` and ``.parquet`` one per row. Any other file is one document of
    plain text, in pieces that end with a line. Raises InvalidConfigError for a file that cannot be read so.
    """
    return _READERS.get(path.suffix, _read_text)(path, field, begin)


def _read_text(path: Path, field: str, begin: int) -> Iterator[Piece]:  # noqa: ARG001 every reader takes the same
    with path.open("rb") as file:
        file.seek(begin)
        while text := file.read(PIECE_BYTES):
            text += file.readline()
            ends = not file.peek(1)  # type: ignore[attr-defined]
            yield Piece(text, begin, begin + len(text), ends)
            begin += len(text)


def _read_json_lines(path: Path, field: str, begin: int) -> Iterator[Piece]:
    with path.open("rb") as file:
        file.seek(begin)
        for line in file:
            place, begin = begin, begin + len(line)
            if line.strip():
                yield Piece(_text_of(_parse_line(line, path, place), field, f"{path}, byte {place}"), place, begin)


def _parse_line(line: bytes, path: Path, place: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InvalidConfigError(f"--data {path}, byte {place}: not a line of JSON: {error}") from error


def _read_arrow(path: Path, field: str, begin: int) -> Iterator[Piece]:
    table = _datasets(path).Dataset.from_file(str(path))
    yield from _rows((table[row] for row in range(begin, len(table))), path, field, begin)


def _read_parquet(path: Path, field: str, begin: int) -> Iterator[Piece]:
    table = _datasets(path).load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    yield from _rows(table.skip(begin), path, field, begin)


def _rows(rows: Iterable[Any], path: Path, field: str, begin: int) -> Iterator[Piece]:
    for number, row in enumerate(rows, begin):
        yield Piece(_text_of(row, field, f"{path}, row {number}"), number, number + 1)


def _text_of(row: Any, field: str, where: str) -> bytes:
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        names = ", ".join(map(str, row)) if isinstance(row, dict) else "no object"
        raise InvalidConfigError(f"--data {where}: no text in {field!r} ({names}); name its field with --text-field")
    return row[field].encode("utf-8", "replace")


def _datasets(path: Path) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise InvalidConfigError(
            f"--data {path}: needs `datasets`: pip install 'torch-tracekit[datasets]', or convert it to .jsonl"
        ) from error
    return datasets


_READERS: Mapping[str, Callable[[Path, str, int], Iterator[Piece]]] = MappingProxyType(
    {".jsonl": _read_json_lines, ".arrow": _read_arrow, ".parquet": _read_parquet}
)
