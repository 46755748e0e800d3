"""Traces known from file headers, before they are read, and what is wrong with the files of a run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tracekit.errors import BadTraceError
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


def attach_companions(
    traces: Sequence[TraceFile], companions: Sequence[TraceFile], issues: list[QualityIssue]
) -> list[TraceFile]:
    """Return the traces with the files of their processes; report files of no trace, or of several ranks.

    A file that was not named, but lies next to a trace that was, may be of another process without a report. Process
    ids of ranks on different machines may be equal: then the rank in the file's name decides, else its folder.
    """
    joined: dict[int, list[TraceFile]] = {id(t): [] for t in traces}
    for companion in companions:
        fitting = _of_process(companion, traces)
        if len({t.rank for t in fitting}) == 1 and all(_can_join(companion, t) for t in fitting):
            for t in fitting:
                joined[id(t)].append(companion)
        elif fitting or not companion.file.is_neighbor:
            issues.append(_unmatched_issue(companion, fitting))
    return [replace(t, companions=tuple(joined[id(t)])) for t in traces]


def without_traces(companion: TraceFile) -> BadTraceError:
    """Return the error of a path that has files of other tools, but no trace that they could belong to."""
    name = companion.reader.name
    article = "an" if name[0] in "aeiou" else "a"
    return BadTraceError(
        f"{companion.file.path}: this is {article} {name}, not a profiler trace; {companion.reader.usage}"
    )


def _of_process(companion: TraceFile, traces: Sequence[TraceFile]) -> list[TraceFile]:
    """Return the traces of a file's process, else of the process that started it, else, if unknown, of its rank."""
    info, rank = companion.info, word_rank(companion.file)
    traces = [t for t in traces if (t.file.remote is None) == (companion.file.remote is None)]
    for process_id in (info.process_id, info.parent_process_id):
        fitting = [t for t in traces if process_id is not None and t.info.process_id == process_id]
        if fitting:
            return _narrow(fitting, companion, rank)
    return [t for t in traces if None in (info.process_id, t.info.process_id) and t.rank == rank]


def _narrow(fitting: list[TraceFile], companion: TraceFile, rank: int | None) -> list[TraceFile]:
    if len({t.rank for t in fitting}) == 1:
        return fitting
    if rank is not None:
        return [t for t in fitting if t.rank == rank]
    return [t for t in fitting if t.file.folder == companion.file.folder] or fitting


def _can_join(companion: TraceFile, t: TraceFile) -> bool:
    return t.reader.has_record_ids or not companion.reader.is_joined_by_record_ids


def _unmatched_issue(companion: TraceFile, fitting: Sequence[TraceFile]) -> QualityIssue:
    ranks = sorted({t.rank for t in fitting})
    why = "no trace is of this process"
    if len(ranks) > 1:
        why = f"ranks {', '.join(map(str, ranks))} have this process id"
    elif ranks:
        why = f"the {fitting[0].reader.name} of this process has no ids of record functions to join it by"
    message = f"{companion.file.path}: {companion.reader.name} of process {companion.info.process_id}, left out: {why}"
    return QualityIssue("unmatched_companion", message, companion.file.path)
