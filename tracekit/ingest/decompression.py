"""Read a file in blocks, decompressed: plain, gzip (one or more members) or zstd."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from isal import igzip_lib

from tracekit.conventions import regular_files
from tracekit.errors import BadTraceError
from tracekit.ingest.budget import Budget

_READ_BYTES = 1 << 18
BLOCK_BYTES = 1 << 18  # small enough to stay in the CPU cache until it is parsed
_IGZIP_ERROR = cast("type[Exception]", igzip_lib.error)
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Blocks:
    """The decompressed content of a file in blocks of about 256 KiB; iterate once.

    If the first block is known, the file is opened only for what follows it. Afterwards `broken` states why
    decompression stopped early; None if it did not. `budget` is that of the file, from the first block on. Raises
    BadTraceError if the file is missing, cannot be read, or unpacks to more than its budget.
    """

    def __init__(self, path: str, first: bytes | None = None) -> None:
        self.path = path
        self.broken: str | None = None
        self.budget = Budget.of_file(path, 0)
        self._first = first

    def __iter__(self) -> Iterator[bytes]:
        blocks = self._read()
        if self._first is not None:
            yield self._first
            next(blocks, None)
        yield from blocks

    def _read(self) -> Iterator[bytes]:
        try:
            with regular_files.open_to_read(self.path) as file:
                self.budget = Budget.of_file(self.path, regular_files.size(file))
                blocks = self._unpack(file)
                first = next(blocks, b"")
                self.budget.unpack(len(first))
                yield first.removeprefix(_BYTE_ORDER_MARK)
                for block in blocks:
                    self.budget.unpack(len(block))
                    yield block
        except FileNotFoundError:
            raise BadTraceError(f"{self.path}: no such file; check the path") from None
        except OSError as error:
            raise BadTraceError(f"{self.path}: {error.strerror or error}; check the path and its permissions") from None

    def _unpack(self, file: BinaryIO) -> Iterator[bytes]:
        first = file.read(_READ_BYTES)
        if first.startswith(_GZIP):
            return self._gunzip(file, first)
        if first.startswith(_ZSTD):
            return self._unzstd(file)
        return _rest(file, first)

    def _gunzip(self, file: BinaryIO, packed: bytes) -> Iterator[bytes]:
        """Decompress all members; like gzip, ignore zeros and other bytes after the last."""
        while packed.startswith(_GZIP):
            member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
            while not member.eof:
                try:
                    block = member.decompress(packed, BLOCK_BYTES)
                except (_IGZIP_ERROR, OSError, ValueError) as error:
                    self.broken = f"the gzip file is damaged ({error})"
                    return
                if block:
                    yield block
                packed = b""
                if not member.eof and member.needs_input:
                    packed = file.read(_READ_BYTES)
                    if not packed:
                        self.broken = "the gzip file ends early"
                        return
            packed = member.unused_data.lstrip(b"\0") or file.read(_READ_BYTES)

    def _unzstd(self, file: BinaryIO) -> Iterator[bytes]:
        import pyarrow as pa  # slow to import, and few traces are zstd

        file.seek(0)
        try:
            with pa.CompressedInputStream(pa.PythonFile(file), "zstd") as stream:
                while block := stream.read(BLOCK_BYTES):
                    yield block
        except OSError as error:
            self.broken = f"the zstd file is damaged or ends early ({error})"


def lines(blocks: Blocks, most_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file, which draw on its budget; of one longer than `most_bytes` the first part only."""
    rest = b""
    for block in blocks:
        complete = (rest + block).split(b"\n")
        blocks.budget.build(len(complete))
        rest = complete.pop()[:most_bytes]
        yield from complete
    yield rest


class Unpacked:
    """The decompressed content of a file, to be read from its beginning. Raises BadTraceError as `Blocks` does."""

    def __init__(self, path: str | Path) -> None:
        """Open the file."""
        self._blocks = iter(Blocks(str(path)))
        self._rest = b""

    def read(self, size: int = BLOCK_BYTES, /) -> bytes:
        """Return the next `size` bytes, less at the end."""
        parts, length = [self._rest], len(self._rest)
        while length < size and (block := next(self._blocks, b"")):
            parts.append(block)
            length += len(block)
        content = b"".join(parts)
        self._rest = content[size:]
        return content[:size]


def is_compressed(path: str | Path) -> bool:
    """Return whether a file is gzip or zstd by its first bytes. Raises OSError."""
    with regular_files.open_to_read(path) as file:
        return file.read(4).startswith((_GZIP, _ZSTD))


def _rest(file: BinaryIO, block: bytes) -> Iterator[bytes]:
    while block:
        yield block
        block = file.read(_READ_BYTES)
