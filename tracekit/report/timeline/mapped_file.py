"""Arrays and tables in one memory-mapped file with a checksum.

Arrays, then Parquet tables, then a table of contents in JSON, then its position and the checksum of all before it.
A truncated or corrupt file is not opened.
"""

import io
import json
import mmap
import os
import struct
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import polars as pl
from isal import isal_zlib

_MAGIC = b"tracekit tiles 2"
_TAIL = struct.Struct("<QQI4x16s")  # position and length of the contents, checksum, magic
_ALIGNED = 8
_CHUNK_BYTES = 4 << 20

Array = npt.NDArray[Any]


class DamagedError(Exception):
    """The file is truncated or corrupt."""


class Writer:
    """Writes arrays and tables by name, then the contents; only their positions stay in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0
        self._checksum = 0
        self._places: dict[str, tuple[int, int]] = {}

    def array(self, name: str, values: Array) -> None:
        """Append an array of one dimension."""
        self._append(name, np.ascontiguousarray(values).view(np.uint8).data)

    def table(self, name: str, table: pl.DataFrame) -> None:
        """Append a table."""
        packed = io.BytesIO()
        table.write_parquet(packed, compression="zstd", compression_level=1, statistics=False)
        self._append(name, packed.getbuffer())

    def finish(self, metadata: dict[str, Any]) -> None:
        """Append the contents, with `metadata`, and flush the file."""
        contents = json.dumps({"places": self._places, "metadata": metadata}).encode()
        begin = self._at
        self._write(contents)
        self._file.write(_TAIL.pack(begin, len(contents), self._checksum, _MAGIC))
        self._file.flush()

    def _append(self, name: str, data: memoryview) -> None:
        self._places[name] = (self._at, len(data))
        self._write(data)
        self._write(bytes(-len(data) % _ALIGNED))

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._checksum = isal_zlib.crc32(data, self._checksum)
        self._at += len(data)


class MappedFile:
    """A file that `Writer` wrote, mapped into memory: its arrays are read on access."""

    def __init__(self, file: BinaryIO) -> None:
        """Map a file, which may be closed afterwards. Raises DamagedError."""
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes < _TAIL.size:
            raise DamagedError("truncated")
        file.seek(size_bytes - _TAIL.size)
        begin, length, checksum, magic = _TAIL.unpack(file.read(_TAIL.size))
        if magic != _MAGIC or begin + length + _TAIL.size != size_bytes or checksum != _checksum(file, begin + length):
            raise DamagedError("corrupt")
        self.size_bytes = size_bytes
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        contents = json.loads(self._map[begin : begin + length])
        self._places: dict[str, tuple[int, int]] = contents["places"]
        self.metadata: dict[str, Any] = contents["metadata"]

    def array(self, name: str, dtype: npt.DTypeLike) -> Array:
        """Return an array, which cannot be written to."""
        begin, length = self._places[name]
        kind = np.dtype(dtype)
        return np.frombuffer(self._map, kind, length // kind.itemsize, begin)

    def table(self, name: str) -> pl.DataFrame:
        """Return a table."""
        begin, length = self._places[name]
        return pl.read_parquet(self._map[begin : begin + length])


def _checksum(file: BinaryIO, length: int) -> int:
    # Read, not mapped: mapped pages count as memory of this process.
    file.seek(0)
    checksum, remaining = 0, length
    buffer = bytearray(_CHUNK_BYTES)
    with memoryview(buffer) as view:
        while remaining:
            got = file.readinto(view[: min(remaining, _CHUNK_BYTES)])  # type: ignore[attr-defined]
            if not got:
                raise DamagedError("truncated")
            checksum = isal_zlib.crc32(view[:got], checksum)
            remaining -= got
    return int(checksum)
