"""Checkpoints of torch.distributed.checkpoint, files of torch.save and of safetensors: each read and checked.

The metadata of torch.distributed.checkpoint states the shard and bytes of each entry. A file of torch.save, alone or in
a shard, is a zip archive with a CRC32 of each entry. The header of safetensors states the place of each tensor.
"""

import json
import re
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from tracekit.conventions import regular_files
from tracekit.ingest import pickle_child, pickles, untrusted_json
from tracekit.ingest.pickles import OverBudgetError, PickleError

WHOLE, DAMAGED, UNREADABLE = "whole", "damaged", "unreadable"
_OF_RANK_0 = (".metadata", "seal.json")  # written by the coordinator
_RANK_OF_FILE = re.compile(r"^__(\d{1,9})_\d+\.distcp$|(?:^|[_-])rank[-_]?(\d{1,9})(?!\d)")


@dataclass(frozen=True)
class Problem:
    """One problem: the file, and the rank that wrote it if the file name states it."""

    file: str
    what: str
    rank: int | None = None
    is_readable: bool = True
    """False if the file could not be read, so that it may be whole."""


@dataclass(frozen=True)
class Part:
    """The result of one kind of check in a folder; `checked_bytes` are verified by a checksum."""

    kind: str
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    files: int = 0
    total_bytes: int = 0
    checked_bytes: int = 0


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """One checkpoint: path, format, problems, what could not be verified, and what to do."""

    path: str
    kinds: tuple[str, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    files: int
    total_bytes: int
    checked_bytes: int
    remedy: str = ""

    @property
    def status(self) -> str:
        """Return DAMAGED, UNREADABLE if the only problems are files that cannot be read, else WHOLE."""
        if any(problem.is_readable for problem in self.problems):
            return DAMAGED
        return UNREADABLE if self.problems else WHOLE


ZIP_MAGIC = b"PK\x03\x04"
ZIP_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
_CHUNK_BYTES = 1 << 20


class _Window:
    """A byte range of a file, as a file. It is closed with the file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, position: int, whence: int = 0) -> int:
        self._at = max(0, position + (0, self._at, self._length)[whence])
        return self._at

    def read(self, count: int = -1) -> bytes:
        remaining = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        data = self._file.read(remaining if count < 0 else min(count, remaining))
        self._at += len(data)
        return data


METADATA_FILE = ".metadata"
SHARD_SUFFIX = ".distcp"
_MAX_METADATA_BYTES = 2 << 30


@dataclass(frozen=True)
class _Entry:
    name: str
    offset: int
    length: int


SAFETENSORS_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as the library itself allows
_MAX_INDEX_BYTES = 1 << 30


class _DamagedError(ValueError):
    pass


def check_distributed(folder: Path) -> Part:
    """Return the problems of a distributed checkpoint, by its storage index and the CRC32 of its entries."""
    part = Part("torch.distributed.checkpoint")
    try:
        with regular_files.open_to_read(folder / METADATA_FILE) as file:
            size = regular_files.size(file)
            if size > _MAX_METADATA_BYTES:
                raise PickleError(f"has {size:,} bytes, more than this reads")
            index = _index(json.loads(pickles.read(pickle_child.METADATA, file)[0]))
    except OSError as error:
        return replace(part, problems=(unreadable(METADATA_FILE, error),))
    except OverBudgetError as error:
        return replace(part, problems=(replace(problem(METADATA_FILE, str(error)), is_readable=False),))
    except PickleError as error:
        return replace(part, problems=(problem(METADATA_FILE, str(error)),))
    shards = [_shard(folder, file, entries) for file, entries in sorted(index.items())]
    unchecked = sum(shard.total_bytes - shard.checked_bytes for shard in shards if not shard.problems)
    note = f"{METADATA_FILE} and {unchecked:,} bytes of shards have no checksum: they were not verified"
    return replace(
        part,
        problems=tuple(damage for shard in shards for damage in shard.problems),
        notes=(note if unchecked else f"{METADATA_FILE} has no checksum: it was read, but not verified",),
        files=1 + len(shards),
        total_bytes=size + sum(shard.total_bytes for shard in shards),
        checked_bytes=sum(shard.checked_bytes for shard in shards),
    )


def check_safetensors(folder: Path, names: list[str], indexes: list[str]) -> Part:
    """Return the problems of safetensors files, and of indexes that name files of either format."""
    problems: list[Problem] = []
    tensors: dict[str, set[str]] = {}
    total = 0
    for name in names:
        try:
            size, tensors[name] = _tensors(folder / name)
            total += size
        except OSError as error:
            problems.append(unreadable(name, error))
        except _DamagedError as error:
            problems.append(problem(name, str(error)))
    damaged = {damage.file for damage in problems}
    for index in indexes:
        problems.extend(_against_index(folder, index, tensors, damaged))
    notes = ("safetensors holds no checksums: headers and sizes were verified, not the weights",) if names else ()
    return Part("safetensors" if names else "index", tuple(problems), notes, len(names) + len(indexes), total)


def zip_damage(file: BinaryIO, offset: int, length: int) -> tuple[str | None, int]:
    """Return the problem of an archive of torch.save, or None, and the number of bytes verified by CRC32.

    Without CRC32 (another format, or torch was configured to write none) no byte is verified, and there is no problem.
    Raises OSError.
    """
    file.seek(offset)
    if file.read(len(ZIP_MAGIC)) != ZIP_MAGIC:
        return None, 0
    with _errors_collected() as errors:
        with zipfile.ZipFile(_Window(file, offset, length)) as packed:
            entries = packed.infolist()
            # torch does not compress; a compressed entry could be a zip bomb.
            has_checksums = any(entry.CRC for entry in entries)
            if not has_checksums or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                return None, 0
            for entry in entries:
                with packed.open(entry) as data:
                    while data.read(_CHUNK_BYTES):
                        pass
        return None, length
    return errors[0], 0


@contextmanager
def _errors_collected() -> Iterator[list[str]]:
    errors: list[str] = []
    try:
        yield errors
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error) as error:
        errors.append(str(error) or type(error).__name__)


def check_zip_archives(folder: Path, names: list[str]) -> Part:
    """Return the problems of files of torch.save."""
    problems, notes, total, checked = [], [], 0, 0
    for name in names:
        try:
            with regular_files.open_to_read(folder / name) as file:
                size = regular_files.size(file)
                damage, verified_bytes = zip_damage(file, 0, size)
        except OSError as error:
            problems.append(unreadable(name, error))
            continue
        total, checked = total + size, checked + verified_bytes
        if damage or not size:
            problems.append(problem(name, f"is damaged: {damage}" if damage else "is empty"))
        elif not verified_bytes:
            notes.append(f"{name} holds no checksums: its bytes were not verified")
    return Part("torch.save", tuple(problems), tuple(notes), len(names), total, checked)


def problem(file: str, what: str) -> Problem:
    """Return a problem of a file, with the rank in its name."""
    return Problem(file, what, rank_of(file))


def unreadable(file: str, error: OSError) -> Problem:
    """Return the problem of a file that is missing or cannot be read."""
    if isinstance(error, FileNotFoundError):
        return problem(file, "is missing")
    return Problem(file, f"cannot be read: {error.strerror or error}", rank_of(file), is_readable=False)


def rank_of(file: str) -> int | None:
    """Rank that wrote a file, by its name.

    >>> rank_of("__12_0.distcp"), rank_of("model_rank3.pt"), rank_of(".metadata"), rank_of("model.safetensors")
    (12, 3, 0, None)
    """
    if file in _OF_RANK_0:
        return 0
    match = _RANK_OF_FILE.search(file)
    return int(match[1] or match[2]) if match else None


def combine(path: str, parts: Iterable[Part]) -> VerifiedCheckpoint:
    """Return the combined result of all checks of one checkpoint."""
    parts = list(parts)
    return VerifiedCheckpoint(
        path,
        kinds=tuple(part.kind for part in parts),
        problems=tuple(problem for part in parts for problem in part.problems),
        notes=tuple(note for part in parts for note in part.notes),
        files=sum(part.files for part in parts),
        total_bytes=sum(part.total_bytes for part in parts),
        checked_bytes=sum(part.checked_bytes for part in parts),
    )


def _index(entries: Iterable[tuple[Any, Any, Any, Any]]) -> Mapping[str, Sequence[_Entry]]:
    """Entries of each shard, by the shard's name."""
    by_file: defaultdict[str, list[_Entry]] = defaultdict(list)
    for name, file, offset, length in entries:
        if type(file) is not str or type(offset) is not int or type(length) is not int or min(offset, length) < 0:
            raise PickleError(f"says of {name} that it lies at no possible place")
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise PickleError(f"says that {name} lies outside of the checkpoint, in {file[:99]}")
        by_file[file].append(_Entry(name, offset, length))
    return by_file


def _shard(folder: Path, file: str, entries: Sequence[_Entry]) -> Part:
    needed = max(entry.offset + entry.length for entry in entries)
    checked = 0
    try:
        with regular_files.open_to_read(folder / file) as data:
            size = regular_files.size(data)
            if size < needed:
                lost = sum(entry.offset + entry.length > size for entry in entries)
                what = f"has {size:,} bytes, {needed:,} are needed: it was cut"
                what += f", and {lost} of {len(entries)} entries are lost"
                return Part("", (problem(file, what),), files=1, total_bytes=size)
            for entry in sorted(entries, key=lambda entry: entry.offset):
                wrong, vouched = zip_damage(data, entry.offset, entry.length)
                if wrong:
                    what = f"is damaged in {entry.name}, at byte {entry.offset:,}: {wrong}"
                    return Part("", (problem(file, what),), files=1, total_bytes=size)
                checked += vouched
    except OSError as error:
        return Part("", (unreadable(file, error),), files=1)
    return Part("", files=1, total_bytes=needed, checked_bytes=checked)


def _tensors(path: Path) -> tuple[int, set[str]]:
    """Return size and tensors of a file. Raises OSError, or _DamagedError if header and size disagree."""
    with regular_files.open_to_read(path) as file:
        size = regular_files.size(file)
        length_bytes = file.read(_LENGTH_BYTES)
        if len(length_bytes) < _LENGTH_BYTES:
            raise _DamagedError(f"has {size} bytes: it was cut in its header")
        (length,) = struct.unpack("<Q", length_bytes)
        if length > min(_MAX_HEADER_BYTES, size):
            raise _DamagedError(f"has {size:,} bytes and declares a header of {length:,}: it was cut, or is damaged")
        raw = file.read(length)
    try:
        header: Mapping[str, Any] = untrusted_json.parse(raw)
        spans = sorted(_span(tensor["data_offsets"]) for name, tensor in header.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _DamagedError(f"has a header that cannot be read ({error})") from None
    data_end = 0
    for begin, end in spans:
        if begin != data_end or end < begin:
            raise _DamagedError(f"has a header with a hole, or an overlap, at byte {data_end:,} of its data")
        data_end = end
    needed = _LENGTH_BYTES + length + data_end
    if size != needed:
        how = "it was cut" if size < needed else "something was added"
        raise _DamagedError(f"has {size:,} bytes, {needed:,} by its header: {how}")
    return size, {name for name in header if name != "__metadata__"}


def _span(offsets: object) -> tuple[int, int]:
    match offsets:
        case [int(begin), int(end)] if begin >= 0:
            return begin, end
    raise TypeError(f"data_offsets are {offsets!r:.80}")


def _against_index(folder: Path, index: str, tensors: Mapping[str, set[str]], damaged: set[str]) -> list[Problem]:
    try:
        with regular_files.open_to_read(folder / index) as opened:
            if regular_files.size(opened) > _MAX_INDEX_BYTES:
                return [problem(index, "is larger than any index")]
            places = untrusted_json.parse(opened.read())["weight_map"].items()
    except OSError as error:
        return [unreadable(index, error)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return [problem(index, f"is damaged ({error})")]
    by_file: dict[str, list[str]] = {}
    for tensor, file in places:
        by_file.setdefault(str(file), []).append(tensor)
    problems = []
    files = {path.name for path in folder.iterdir()}
    for file, names in sorted(by_file.items()):
        if file not in files:
            problems.append(problem(file, f"is missing: {index} looks there for {len(names)} tensors"))
        elif file in tensors and (lost := [name for name in names if name not in tensors[file]]):
            problems.append(problem(file, f"lacks {lost[0]} and {len(lost) - 1} more tensors of {index}"))
    return [damage for damage in problems if damage.file not in damaged]
