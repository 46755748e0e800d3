"""Memory snapshot files of a run: RUN/rank00000.memory.pickle, those of further windows one folder below."""

import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from tracekit import conventions
from tracekit.conventions import object_storage
from tracekit.ingest.files import RemoteTrace
from tracekit.model.run import Run

MAX_TOTAL_BYTES = 128 << 20
"""Total size of the snapshots that are read without an explicit request, for example by a rule."""


@dataclass(frozen=True)
class SnapshotFile:
    """The memory snapshot file of one rank and window."""

    rank: int
    window: int
    path: str
    size_bytes: int
    modified_ns: int = 0
    """Modification time, or what stands for it: a file of the same size may hold another snapshot."""


def files(run: Run) -> tuple[SnapshotFile, ...]:
    """Snapshot files of a run, by window and rank: of a local folder, or next to remote traces.

    Files that cannot be accessed, such as broken links, are returned by `unreadable` instead.
    """
    return _scan(run)[0]


def first_files(run: Run) -> tuple[SnapshotFile, ...]:
    """First snapshot files whose sizes add up to at most MAX_TOTAL_BYTES."""
    first, remaining = [], MAX_TOTAL_BYTES
    for file in files(run):
        remaining -= file.size_bytes
        if remaining < 0:
            break
        first.append(file)
    return tuple(first)


def in_folder(folder: Path) -> list[tuple[int, Path]]:
    """Pickles in a folder or one below, each with the rank in its name, or else its place in the list.

    Only the last snapshot of a rank counts, by the order of names: torchtitan and others write one each iteration.
    """
    names = sorted(
        (p for s in conventions.SNAPSHOT_SUFFIXES for p in (*folder.glob(f"*{s}"), *folder.glob(f"*/*{s}"))),
        key=lambda path: [(text, int(number or 0)) for text, number in re.findall(r"(\D+)(\d*)", str(path))],
    )
    ranks: dict[int, Path] = {}
    for place, path in enumerate(p for p in names if p.is_file()):
        stated = re.search(r"rank[-_]?(\d{1,6})", path.name)
        ranks[int(stated[1]) if stated else place] = path
    return sorted(ranks.items())


def without_traces(path: Path) -> tuple[SnapshotFile, ...]:
    """Snapshots at a path that has no traces: those of a folder by rank, as `in_folder`, or the file."""
    listed = in_folder(path) if path.is_dir() else [(0, path)]
    states = [(rank, file, file.stat()) for rank, file in listed]
    return tuple(SnapshotFile(rank, 0, str(file), stat.st_size, stat.st_mtime_ns) for rank, file, stat in states)


def unreadable(run: Run) -> list[tuple[object, ...]]:
    """Row of RUN_DATA_QUALITY for each snapshot file that cannot be accessed."""
    return _scan(run)[1]


def _scan(run: Run) -> tuple[tuple[SnapshotFile, ...], list[tuple[object, ...]]]:
    snapshots: list[SnapshotFile] = []
    if object_storage.is_url(run.path):
        for source in run.sources:
            remote = source.origin.snapshot if isinstance(source.origin, RemoteTrace) else None
            if remote is not None:
                version = zlib.crc32((remote.version or "").encode())
                place = (source.rank, source.window, remote.shown)
                snapshots.append(SnapshotFile(*place, remote.size_bytes or 0, version))
        return tuple(snapshots), []
    folder = Path(run.path)
    folders = (folder, *sorted(folder.glob("window[0-9]*"))) if folder.is_dir() else ()
    bad: list[tuple[object, ...]] = []
    for window_folder in folders:
        window = re.fullmatch(r"window(\d+)", window_folder.name)
        for file in sorted(window_folder.glob(f"*{conventions.MEMORY_SNAPSHOT_SUFFIX}")):
            rank = re.search(r"rank(\d+)", file.name)
            if rank is None:
                continue
            try:
                stat = file.stat()
            except OSError as error:
                message = f"{file}: cannot be read: {error.strerror}"
                bad.append((int(rank[1]), str(file), "unreadable_snapshot", message, 0.0))
                continue
            number = int(window[1]) if window else 0
            snapshots.append(SnapshotFile(int(rank[1]), number, str(file), stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(snapshots, key=lambda file: (file.window, file.rank))), bad
