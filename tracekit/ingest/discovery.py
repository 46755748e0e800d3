"""Whose each trace file is: rank, window and job, from its header, name and first bytes, not by reading it whole."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

from tracekit.errors import BadTraceError
from tracekit.ingest import decompression
from tracekit.ingest.files import File, natural_key
from tracekit.ingest.readers.kineto import reader, stream
from tracekit.ingest.readers.kineto.header import MOST_RANKS

_RANK_WORD = re.compile(r"(?:rank|worker)[-_]?(\d+)(?!\d)", re.I)
_NUMBER = re.compile(r"(?:^|[_-])(\d+)(?=[._-]|$)")
_STAMP = re.compile(r"\.(\d{10,19})\.(?:pt\.)?trace\.json")
_WINDOW_FOLDER = re.compile(r"/window(\d+)/")
_FIRST_TIME = re.compile(rb'"ts"\s*:\s*"?(\d+(?:\.\d+)?)')
_REMOTE_HEAD_BYTES = 4 << 20
_TRACE_NAME = (".trace.json", ".trace.json.gz", ".trace.json.zst")
_HOUR_NS = 3_600_000_000_000
_SAME_START_NS = 1_000_000


@dataclass(frozen=True)
class QualityIssue:
    """One row of a run's issues."""

    kind: str
    message: str
    path: str | None = None
    rank: int | None = None
    affected_ratio: float = 0.0


@dataclass(frozen=True)
class TraceFile:
    """A trace file with what is known of it before it is read."""

    file: File
    header: Mapping[str, Any] = field(repr=False)
    begins_ns: int | None = None
    rank: int = -1
    window: int = 0
    is_merged: bool = False
    job: tuple[object, ...] = ()

    @property
    def world_size(self) -> int | None:
        """Return the number of ranks in the job, as the file states it."""
        return _size(_info(self.header).get("world_size"))


def identify(
    files: Sequence[File],
    *,
    manifests: Iterable[str] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[list[TraceFile], list[QualityIssue]]:
    """Tell the rank, window and job of each file; what is left out, guessed or odd is said as a issue.

    `manifests` are the folders of runs' manifests. Raises BadTraceError if no file is a trace.
    """
    issues: list[QualityIssue] = []
    seen: list[TraceFile] = []
    for done, file in enumerate(files, 1):
        listed = _look(file, len(files), issues)
        seen += [replace(listed, job=_job(listed, manifests))] if listed else []
        if on_progress:
            on_progress(done, len(files))
    if not seen:
        raise BadTraceError(issues[0].message if issues else "no trace")
    ranked = _ranked(seen, issues)
    placed = _windows(_without_copies(_one_job(ranked, issues), issues), issues)
    return sorted(placed, key=lambda t: (t.window, t.rank)), issues


def missing_ranks(listed: Sequence[TraceFile], told_world_size: object, absent: set[int | None]) -> list[QualityIssue]:
    """Return a issue for each window that lacks ranks; `absent` are ranks whose files were spoken of already."""
    told = [size for t in listed if (size := t.world_size) is not None]
    highest = max((t.rank for t in listed), default=-1) + 1
    world_size = max(_size(told_world_size) or 0, highest, *told, 0)
    by_window: dict[int, set[int]] = defaultdict(set)
    for t in listed:
        by_window[t.window].add(t.rank)
    every = set().union(*by_window.values()) | {rank for rank in absent if rank is not None}
    issues = []
    if len(every) < world_size:
        lacking = _numbers(sorted(set(range(world_size)) - every))
        message = f"{len(every)} of {world_size} ranks have a trace (not {lacking}); what the others did is not known."
        issues.append(QualityIssue("missing_ranks", message, affected_ratio=1 - len(every) / world_size))
    for window, ranks in sorted(by_window.items()):
        if ranks | absent < every:
            gone = sorted(every - ranks - absent)
            message = f"Window {window} has no trace of rank {_numbers(gone)}, other windows do."
            issues.append(QualityIssue("missing_ranks", message, affected_ratio=len(gone) / len(every)))
    return issues


# One file ------------------------------------------------------------------------------------------------------------


def _look(file: File, count: int, issues: list[QualityIssue]) -> TraceFile | None:
    try:
        with file.local(first_bytes=_REMOTE_HEAD_BYTES) as path:
            header = stream.read_header(path)
            if header is None and count > 1:
                issues.append(_stray(file, path, count))
                return None
            is_silent = not _info(header or {}) and file.system is None
            is_merged = header is not None and is_silent and reader.is_merged(path)
            return TraceFile(file, header or {}, _begins_ns(path, header or {}), is_merged=is_merged)
    except BadTraceError as error:
        if count == 1:
            raise
        issues.append(QualityIssue("unreadable", str(error), file.path, _word_rank(file), 1 / count))
        return None


def _stray(file: File, path: str, count: int) -> QualityIssue:
    """Return what to say of a file without events: that it is somebody else's, or that it should have been a trace."""
    rank = _word_rank(file)
    if rank is None and file.size_bytes and not file.name.endswith(_TRACE_NAME):
        return QualityIssue("not_a_trace", f"{file.path}: not a profiler trace, left out", file.path)
    try:
        reader.is_merged(path)
    except BadTraceError as error:
        return QualityIssue("unreadable", str(error), file.path, rank, 1 / count)
    return QualityIssue("unreadable", f"{file.path}: holds no events; record it again", file.path, rank, 1 / count)


def _begins_ns(path: str, header: Mapping[str, Any]) -> int | None:
    """Return about when the recording began: its first event's time, which is close to the first in time."""
    found = _FIRST_TIME.search(next(iter(decompression.Blocks(path)), b""))
    base = _whole(header.get("baseTimeNanoseconds")) or 0
    return None if found is None else base + round(float(found[1]) * 1000)


def _info(header: Mapping[str, Any]) -> Mapping[str, Any]:
    info = header.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _size(value: object) -> int | None:
    size = _whole(value)
    return size if size is not None and 0 < size <= MOST_RANKS else None


def _job(listed: TraceFile, manifests: Iterable[str]) -> tuple[object, ...]:
    folder = max((m for m in manifests if f"{listed.file.folder}/".startswith(f"{m}/")), key=len, default="")
    job_id = listed.header.get("tw_job")
    return (folder, listed.world_size, job_id if isinstance(job_id, str) else None)


# Ranks ---------------------------------------------------------------------------------------------------------------


def _ranked(seen: list[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
    """Give each file its rank: by its header, else its name, else its order."""
    stated = {id(t): rank for t in seen if (rank := reader.rank_of(t.header)) is not None}
    silent = [t for t in seen if id(t) not in stated]
    named = _named_ranks([t.file for t in silent])
    free = iter(sorted(set(range(len(seen))) - set(stated.values()) - set(named.values())))
    ranked = []
    for t in seen:
        rank, how = stated.get(id(t)), ""
        if rank is None and (rank := named.get(t.file.path)) is not None:
            how = f"the trace doesn't state its rank; taken as rank {rank} from its name"
        elif rank is None:
            rank = next(free, len(seen))
            how = f"neither trace nor name state a rank; taken as rank {rank} from the order of files"
        if how and len(seen) > 1:
            issues.append(QualityIssue("rank_guessed", f"{t.file.path}: {how}", t.file.path, rank))
        ranked.append(replace(t, rank=rank))
    return ranked


def _named_ranks(files: Sequence[File]) -> dict[str, int]:
    """Return the ranks that names tell: after the word rank or worker, else the one number that tells them apart."""
    by_word = {f.path: rank for f in files if (rank := _word_rank(f)) is not None}
    rest = [f for f in files if f.path not in by_word]
    numbers = {f.path: [int(n) for n in _NUMBER.findall(f.name)] for f in rest}
    most = max(1024, 2 * len(files))  # beyond it, a number is a process id, a port or a date
    for place in range(min((len(n) for n in numbers.values()), default=0)):
        column = [n[place] for n in numbers.values()]
        if len(set(column)) == len(column) and max(column) < most:
            return by_word | dict(zip(numbers, column, strict=True))
    return by_word


def _word_rank(file: File) -> int | None:
    found = _RANK_WORD.search(file.name) or _RANK_WORD.search(file.folder.rpartition("/")[2])
    return int(found[1]) if found and len(found[1]) < 8 and int(found[1]) < MOST_RANKS else None


# Jobs ----------------------------------------------------------------------------------------------------------------


def _one_job(ranked: list[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
    """Return the files of the job with most ranks (of several such, the latest); the others are left out, aloud."""
    jobs: dict[tuple[object, ...], list[TraceFile]] = defaultdict(list)
    for t in ranked:
        jobs[t.job].append(t)
    _adopt(jobs)
    if len(jobs) == 1:
        return next(iter(jobs.values()))
    chosen = max(jobs, key=lambda job: (len({t.rank for t in jobs[job]}), max(t.begins_ns or 0 for t in jobs[job])))
    for job, others in jobs.items():
        if job != chosen:
            message = (
                f"{len(others)} files belong to another job ({_difference(job, chosen)}) and are left out: "
                f"{_some([t.file.path for t in others])}; load them by themselves."
            )
            share = len(others) / len(ranked)
            issues.append(QualityIssue("mixed_jobs", message, others[0].file.path, affected_ratio=share))
    left_out = {t.file.path for job in jobs if job != chosen for t in jobs[job]}
    issues[:] = [d for d in issues if d.kind != "rank_guessed" or d.path not in left_out]
    return jobs[chosen]


def _adopt(jobs: dict[tuple[object, ...], list[TraceFile]]) -> None:
    """Give files that don't state their job to the only one beside them, where their ranks are still wanted there."""
    for job in [job for job in jobs if job[1] is None]:
        others = [other for other in jobs if other[1] is not None and other[0] == job[0]]
        if len(others) != 1:
            continue
        taken = {t.rank for t in jobs[others[0]]}
        wanted = [t for t in jobs[job] if t.rank not in taken and t.rank < cast("int", others[0][1])]
        if len(wanted) == len(jobs[job]):
            jobs[others[0]] += jobs.pop(job)


def _difference(job: tuple[object, ...], chosen: tuple[object, ...]) -> str:
    names = ("folder", "world size", "job id")
    told = [
        f"{name} {mine if mine is not None else 'not stated'}, not {theirs if theirs is not None else 'not stated'}"
        for name, mine, theirs in zip(names, job, chosen, strict=True)
        if mine != theirs
    ]
    return "; ".join(told)


# Copies and windows --------------------------------------------------------------------------------------------------


def _without_copies(listed: list[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
    """Leave out second files of one recording: the same recording's id, the same bytes, or the same start."""
    by_rank: dict[tuple[int, int], list[TraceFile]] = defaultdict(list)
    for t in sorted(listed, key=lambda t: (-t.file.size_bytes, natural_key(t.file.path))):
        alike = by_rank[t.rank, _window_folder(t) or 0]
        first = next((kept for kept in alike if _same_recording(kept, t)), None)
        if first is None:
            alike.append(t)
            continue
        message = f"{t.file.path}: a second trace of rank {t.rank}, the same recording as {first.file.name}; left out"
        issues.append(QualityIssue("duplicate_rank", message, t.file.path, t.rank))
    return [t for kept in by_rank.values() for t in kept]


def _same_recording(a: TraceFile, b: TraceFile) -> bool:
    trace_id = a.header.get("trace_id")
    if trace_id is not None and trace_id == b.header.get("trace_id"):
        return True
    if a.begins_ns is None or b.begins_ns is None:
        return a.file.size_bytes == b.file.size_bytes
    return abs(a.begins_ns - b.begins_ns) < _SAME_START_NS


def _windows(listed: list[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
    """Number the windows: by the folders that the recorder makes, else by time, else by folder."""
    if any(_window_folder(t) is not None for t in listed):
        placed = [replace(t, window=_window_folder(t) or 0) for t in listed]
    elif (times := _times(listed)) is not None:
        placed = _by_time(listed, times, issues)
    else:
        folders = sorted({t.file.folder for t in listed}, key=natural_key)
        several = len({t.rank for t in listed}) < len(listed)
        placed = [replace(t, window=folders.index(t.file.folder) if several else 0) for t in listed]
    _say_folders(placed, issues)
    return _one_each(placed, issues)


def _window_folder(listed: TraceFile) -> int | None:
    found = _WINDOW_FOLDER.search(f"/{listed.file.path}")
    return int(found[1]) if found else None


def _say_folders(placed: list[TraceFile], issues: list[QualityIssue]) -> None:
    """Say that folders were taken as windows of one job, unless their names differ in numbers only."""
    folders = {t.window: t.file.folder for t in placed}
    stems = {re.sub(r"\d+", "", f"/{folder}/") for folder in folders.values()} - {"/"}
    if (
        len(set(folders.values())) == len(folders) > 1
        and len(stems) > 1
        and not any(_window_folder(t) is not None for t in placed)
    ):
        told = ", ".join(f"{folder} as window {window}" for window, folder in sorted(folders.items()))
        issues.append(
            QualityIssue(
                "windows_assumed", f"Folders are taken as windows of one job: {told}; if not, load each by itself."
            )
        )


def _times(listed: list[TraceFile]) -> list[int] | None:
    """Return when each recording began, or, where not every file tells, ended by its name; None where they do not."""
    begins = [t.begins_ns for t in listed if t.begins_ns is not None]
    if len(begins) == len(listed):
        return begins
    stamps = [int(found[1].ljust(19, "0")) for t in listed if (found := _STAMP.search(t.file.name))]
    return stamps if len(stamps) == len(listed) else None


def _by_time(listed: list[TraceFile], times: list[int], issues: list[QualityIssue]) -> list[TraceFile]:
    """Number the windows by time: a new one begins where a rank comes again, or after a long pause."""
    ordered = sorted(zip(times, listed, strict=True), key=lambda pair: (pair[0], pair[1].rank))
    of_rank: dict[int, list[int]] = defaultdict(list)
    for at, t in ordered:
        of_rank[t.rank].append(at)
    repeats = [b - a for starts in of_rank.values() for a, b in pairwise(starts)]
    pause_ns = min([_HOUR_NS, *(gap // 2 for gap in repeats)])
    placed: list[TraceFile] = []
    window, began, there = 0, ordered[0][0], set[int]()
    for at, t in ordered:
        if t.rank in there or at - began > pause_ns:
            if at - began > _HOUR_NS:
                hours = (at - began) / _HOUR_NS
                message = (
                    f"Windows {window} and {window + 1} began {hours:.1f} h apart; if these are two jobs, load each"
                )
                issues.append(QualityIssue("windows_assumed", message + " by itself.", t.file.path))
            window, began, there = window + 1, at, set()
        there.add(t.rank)
        placed.append(replace(t, window=window))
    return placed


def _one_each(placed: list[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
    kept: dict[tuple[int, int], TraceFile] = {}
    for t in placed:
        first = kept.setdefault((t.window, t.rank), t)
        if first is not t:
            message = f"{t.file.path}: a second trace of rank {t.rank} in window {t.window}, left out"
            issues.append(QualityIssue("duplicate_rank", message, t.file.path, t.rank))
    return list(kept.values())


# Words ---------------------------------------------------------------------------------------------------------------


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _numbers(ranks: Sequence[int]) -> str:
    """Return ranks in short: 0, 2-5 and so on, at most eight pieces."""
    pieces: list[list[int]] = []
    for rank in ranks:
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    told = [str(a) if a == b else f"{a}-{b}" for a, b in pieces]
    return ", ".join(told[:8]) + (" …" if len(told) > 8 else "")
