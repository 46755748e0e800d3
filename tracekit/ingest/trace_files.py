"""Traces known from file headers, before they are read, and what is wrong with the files of a run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.ingest.files import File
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model.manifest import MAX_RANKS

_RANK_WORD = re.compile(r"(?:rank|worker)[-_]?(\d+)(?!\d)", re.I)


@dataclass(frozen=True)
class QualityIssue:
    """One row of a run's data_quality."""

    kind: str
    message: str
    path: str | None = None
    rank: int | None = None
    affected_ratio: float = 0.0


@dataclass(frozen=True)
class TraceFile:
    """One trace of a file, known from the header before the trace is read."""

    file: File
    reader: Reader
    info: TraceInfo
    job: tuple[object, ...]
    """Folder of the manifest, world size and job id."""
    rank: int = -1
    is_rank_assumed: bool = False
    """Whether neither the header nor a name such as rank3 states the rank."""
    window: int = 0
    companions: tuple["TraceFile", ...] = ()
    """Files that other tools recorded of the same process."""


def word_rank(file: File) -> int | None:
    """Return the number after rank or worker in the name of a file, or else of its folder."""
    match = _RANK_WORD.search(file.name) or _RANK_WORD.search(file.folder.rpartition("/")[2])
    return int(match[1]) if match and len(match[1]) < 8 and int(match[1]) < MAX_RANKS else None


def first_paths(paths: Sequence[str]) -> str:
    """Return the first paths of many, and how many more there are."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
