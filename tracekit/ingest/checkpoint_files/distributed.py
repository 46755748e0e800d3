"""Checkpoints of torch.distributed.checkpoint: `.metadata` states the shard and bytes of each entry."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tracekit.ingest import pickle_child, pickles
from tracekit.ingest.checkpoint_files import result, zip_archives
from tracekit.ingest.checkpoint_files.result import Part
from tracekit.ingest.pickles import PickleError

METADATA_FILE = ".metadata"
SHARD_SUFFIX = ".distcp"
_MAX_METADATA_BYTES = 2 << 30


@dataclass(frozen=True)
class _Entry:
    name: str
    offset: int
    length: int


def check(folder: Path) -> Part:
    """Return the problems of a distributed checkpoint, by its storage index and the CRC32 of its entries."""
    part = Part("torch.distributed.checkpoint")
    try:
        size = (folder / METADATA_FILE).stat().st_size
        if size > _MAX_METADATA_BYTES:
            raise PickleError(f"has {size:,} bytes, more than this reads")
        with (folder / METADATA_FILE).open("rb") as file:
            index = _index(json.loads(pickles.read(pickle_child.METADATA, file)[0]))
    except OSError as error:
        return replace(part, problems=(result.unreadable(METADATA_FILE, error),))
    except PickleError as error:
        return replace(part, problems=(result.problem(METADATA_FILE, str(error)),))
    shards = [_shard(folder, file, entries) for file, entries in sorted(index.items())]
    unchecked = sum(shard.total_bytes - shard.checked_bytes for shard in shards if not shard.problems)
    note = f"{METADATA_FILE} and {unchecked:,} bytes of shards have no checksum: they were not verified"
    return replace(
        part,
        problems=tuple(problem for shard in shards for problem in shard.problems),
        notes=(note if unchecked else f"{METADATA_FILE} has no checksum: it was read, but not verified",),
        files=1 + len(shards),
        total_bytes=size + sum(shard.total_bytes for shard in shards),
        checked_bytes=sum(shard.checked_bytes for shard in shards),
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
        size = (folder / file).stat().st_size
        if size < needed:
            lost = sum(entry.offset + entry.length > size for entry in entries)
            what = (
                f"has {size:,} bytes, {needed:,} are needed: it was cut, and {lost} of {len(entries)} entries are lost"
            )
            return Part("", (result.problem(file, what),), files=1, total_bytes=size)
        with (folder / file).open("rb") as data:
            for entry in sorted(entries, key=lambda entry: entry.offset):
                wrong, vouched = zip_archives.damage(data, entry.offset, entry.length)
                if wrong:
                    what = f"is damaged in {entry.name}, at byte {entry.offset:,}: {wrong}"
                    return Part("", (result.problem(file, what),), files=1, total_bytes=size)
                checked += vouched
    except OSError as error:
        return Part("", (result.unreadable(file, error),), files=1)
    return Part("", files=1, total_bytes=needed, checked_bytes=checked)
