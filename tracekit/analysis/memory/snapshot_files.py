"""Memory snapshot files in a run's folder: RUN/rank00000.memory.pickle, those of further windows one folder below."""

import re
from dataclasses import dataclass
from pathlib import Path

from tracekit import conventions
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
    """Modification time: a file of the same size may hold another snapshot."""


def files(run: Run) -> tuple[SnapshotFile, ...]:
    """Return the snapshot files of a run, by window and rank; empty where the run is not a local folder.

    Files that cannot be accessed, such as broken links, are returned by `unreadable` instead.
    """
    return _scan(run)[0]


def first_files(run: Run) -> tuple[SnapshotFile, ...]:
    """Return the first snapshot files whose sizes add up to at most MAX_TOTAL_BYTES."""
    chosen, remaining = [], MAX_TOTAL_BYTES
    for file in files(run):
        remaining -= file.size_bytes
        if remaining < 0:
            break
        chosen.append(file)
    return tuple(chosen)


def unreadable(run: Run) -> list[tuple[object, ...]]:
    """Return a row of RUN_DATA_QUALITY for each snapshot file that cannot be accessed."""
    return _scan(run)[1]


def _scan(run: Run) -> tuple[tuple[SnapshotFile, ...], list[tuple[object, ...]]]:
    folder = Path(run.path)
    folders = (folder, *sorted(folder.glob("window[0-9]*"))) if folder.is_dir() else ()
    found: list[SnapshotFile] = []
    bad: list[tuple[object, ...]] = []
    for place in folders:
        window = re.fullmatch(r"window(\d+)", place.name)
        for file in sorted(place.glob(f"*{conventions.MEMORY_SNAPSHOT_SUFFIX}")):
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
            found.append(SnapshotFile(int(rank[1]), number, str(file), stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(found, key=lambda file: (file.window, file.rank))), bad
