"""Read files of any size in pieces, decompressed if gzip, split where no pattern can match across pieces."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from isal import igzip, isal_zlib

from tracekit.conventions import redaction, regular_files
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest.budget import Budget
from tracekit.model import units

_GZIP_MAGIC = b"\x1f\x8b"
_PIECE_BYTES = 4 << 20
_MAX_PIECE_BYTES = 64 << 20
_GZIP_LEVEL = 6
_ISAL_ERROR = cast("type[Exception]", isal_zlib.error)


def is_gzip(path: Path) -> bool:
    """Return whether a file is gzip, by its first bytes."""
    with regular_files.open_to_read(path) as file:
        return file.read(2) == _GZIP_MAGIC


def pieces(path: Path) -> Iterator[bytes]:
    """Yield a JSON file's text in pieces that end outside of strings.

    Raises BadTraceError if the file cannot be read to its end.
    """
    buffer = b""
    try:
        with _open_stream(path) as file:
            budget = Budget.of_file(str(path), path.stat().st_size)
            while block := file.read(_PIECE_BYTES):
                budget.unpack(len(block))
                buffer += block
                end = redaction.safe_end(buffer)
                if end:
                    yield buffer[:end]
                    buffer = buffer[end:]
                elif len(buffer) > _MAX_PIECE_BYTES:
                    raise BadTraceError(
                        f"{path}: no end of a line or value in {units.size(len(buffer))}; record it again"
                    )
    except (EOFError, zlib.error, gzip.BadGzipFile, igzip.BadGzipFile, _ISAL_ERROR) as error:
        raise BadTraceError(f"{path}: cannot be read to its end: {error}; remove it or record it again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    if buffer:
        yield buffer


def write(path: Path, text: Iterator[bytes], *, compressed: bool) -> None:
    """Write pieces to a new file. A gzip header states neither file name nor time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as plain:
        if not compressed:
            plain.writelines(text)
            return
        with gzip.GzipFile(filename="", fileobj=plain, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0) as packed:
            for piece in text:
                packed.write(piece)


def _open_stream(path: Path) -> IO[bytes]:
    file = regular_files.open_to_read(path)
    is_packed = file.peek(2)[:2] == _GZIP_MAGIC
    return cast("IO[bytes]", igzip.IGzipFile(fileobj=file)) if is_packed else file
