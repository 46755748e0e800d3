"""Roles of a job: groups of processes that run different programs at the same time, such as trainer and rollout.

Each role has process groups, rank numbers and steps of its own, so it is a run of its own. That groups of files are
roles of one job is decided by their processes and the time of their recordings; folders and names only label them.
"""

import itertools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tracekit.ingest import files
from tracekit.ingest.trace_files import HOUR_NS, SAME_START_NS, TraceFile
from tracekit.model import escaping
from tracekit.model.intervals import Window
from tracekit.model.trace import Trace

MAX_ROLES = 16
"""With more groups of files, a folder is one of several runs: to know when each was recorded, traces are read."""
_UNIX_NS = 10**18
"""September 2001. Earlier times are of a clock that started with its machine, which says nothing of other machines."""
_MAX_NAME = 40
_WINDOW_FOLDER = re.compile(r"/window\d+$")
_WORDS = re.compile(r"[A-Za-z]+")
_WORDS_OF_TRACES = frozenset(("rank", "pt", "trace", "json", "gz", "zst"))


@dataclass(frozen=True)
class Role:
    """A group of processes, with the files of their traces and the path that its run has."""

    name: str
    traces: Sequence[TraceFile]
    path: str


@dataclass(frozen=True)
class _Group:
    """Traces that were recorded in `span`, and the role that their manifest states."""

    traces: Sequence[TraceFile]
    span: Window
    stated_name: str | None


def find_roles(
    run: Sequence[TraceFile],
    other_runs: Sequence[Sequence[TraceFile]],
    *,
    root: str,
    stated_name: Callable[[Sequence[TraceFile]], str | None],
    read: Callable[[TraceFile], Trace | None],
) -> list[Role]:
    """Roles of the job that a run is part of: the run's first, then those of the other runs; none without others.

    Another run is a role of the same job if it was recorded at the same time, and is no copy. Of runs with one name
    that were recorded one after the other, attempts at one role, only the latest is a role. Reads the first and the
    last trace of each candidate.

    Args:
        run: The traces of the run.
        other_runs: The traces of other runs in the same folder.
        root: The path of the folder.
        stated_name: Returns the role that the manifest of some traces states, or None.
        read: Returns a trace, or None where it cannot be read.
    """
    candidates = [other for other in other_runs if _may_cooperate(run, other)]
    if not candidates or len(candidates) >= MAX_ROLES:
        return []
    recorded = [
        _Group(traces, span, stated_name(traces))
        for traces in (run, *candidates)
        for span in [_recorded_span(traces, read)]
        if span is not None
    ]
    if not recorded or recorded[0].traces is not run:
        return []
    groups = [recorded[0], *(group for group in recorded[1:] if _overlap(group.span, recorded[0].span))]
    names = _names(groups)
    latest = _latest_attempts(groups, names)
    if len(latest) < 2:
        return []
    unique_names = _distinct([names[number] for number in latest])
    paths = _paths([groups[number].traces for number in latest], root)
    return [
        Role(name, groups[number].traces, path) for name, number, path in zip(unique_names, latest, paths, strict=True)
    ]


def _may_cooperate(run: Sequence[TraceFile], other: Sequence[TraceFile]) -> bool:
    """Whether two runs began within an hour, and no recording of the one is a copy of one of the other."""
    starts, other_starts = ([t.info.start_ns for t in traces if t.info.start_ns is not None] for traces in (run, other))
    if not starts or not other_starts:
        return False
    if max(min(starts), min(other_starts)) - min(max(starts), max(other_starts)) > HOUR_NS:
        return False
    # Processes of two containers may have one id, and those of one host may start in the same millisecond: not both.
    recordings = defaultdict[int | None, list[int]](list)
    for t in run:
        recordings[t.info.process_id].append(t.info.start_ns or 0)
    for t in other:
        starts = recordings[t.info.process_id] + recordings[None]
        starts = list(itertools.chain(*recordings.values())) if t.info.process_id is None else starts
        if any(abs(start_ns - (t.info.start_ns or 0)) < SAME_START_NS for start_ns in starts):
            return False
    return True


def _recorded_span(traces: Sequence[TraceFile], read: Callable[[TraceFile], Trace | None]) -> Window | None:
    """First and last time of a run by its first and last trace; None where no Unix time is known."""
    ordered = sorted(traces, key=lambda t: (t.info.start_ns or 0, t.file.path))
    read_traces = [read(t) for t in dict.fromkeys((ordered[0], ordered[-1]))]
    times = [time_ns for trace in read_traces if trace is not None for time_ns in recorded_times(trace)]
    return (min(times), max(times)) if times and min(times) >= _UNIX_NS else None


def recorded_times(trace: Trace) -> list[int]:
    """First start and last end of what the host or a device of a trace does, in ns; empty where it does nothing."""
    return [
        int(str(time_ns))
        for table in (trace.ops, trace.activities)
        if not table.is_empty()
        for time_ns in (table["start_ns"].min(), (table["start_ns"] + table["dur_ns"]).max())
    ]


def _overlap(a: Window, b: Window) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _latest_attempts(groups: Sequence[_Group], names: Sequence[str]) -> list[int]:
    """Numbers of the groups, the first one among them, without those that a later group of the same name replaced."""
    latest: list[int] = []
    for number in (0, *sorted(range(1, len(groups)), key=lambda number: groups[number].span, reverse=True)):
        rivals = [other for other in latest if names[other] == names[number]]
        if all(_overlap(groups[number].span, groups[other].span) for other in rivals):
            latest.append(number)
    return sorted(latest)


# Names and paths -----------------------------------------------------------------------------------------------------


def _names(groups: Sequence[_Group]) -> list[str]:
    """Name of each group: the role that it states, else its folder, else words in its file names, else "role"."""
    folder_of_all = files.common_folder(t.file for group in groups for t in group.traces)
    folders = [_folder(group.traces) for group in groups]
    words = [_common_words(group.traces) for group in groups]
    shared_words = set.intersection(*map(set, words)) | _WORDS_OF_TRACES
    names = []
    for group, folder, file_words in zip(groups, folders, words, strict=True):
        is_alone = folder != folder_of_all and folders.count(folder) == 1
        of_folder = os.path.relpath(folder, folder_of_all) if is_alone else ""
        of_files = "_".join(word for word in file_words if word not in shared_words)
        names.append(escaping.inert(group.stated_name or of_folder or of_files or "role", _MAX_NAME))
    return names


def _common_words(traces: Sequence[TraceFile]) -> list[str]:
    """Words that the names of all files have, in their order."""
    words = [list(dict.fromkeys(_WORDS.findall(t.file.name.lower()))) for t in traces]
    return [word for word in words[0] if all(word in words_of_file for words_of_file in words)]


def _distinct(names: Sequence[str]) -> list[str]:
    """Names with a number behind those that several groups have."""
    counts, seen = Counter(names), Counter[str]()
    distinct = []
    for name in names:
        distinct.append(f"{name} {seen[name]}" if counts[name] > 1 else name)
        seen[name] += 1
    return distinct


def _folder(traces: Sequence[TraceFile]) -> str:
    """Innermost folder with all files, or above the recorder's folders of windows."""
    return _WINDOW_FOLDER.sub("", files.common_folder(t.file for t in traces))


def _paths(groups: Sequence[Sequence[TraceFile]], root: str) -> list[str]:
    """Path of each group's run: its folder, if no other group has files in it; else that of all."""
    folders = [_folder(traces) for traces in groups]
    return [
        folder
        if folder
        and not any(
            f"{t.file.folder}/".startswith(f"{folder}/")
            for other, traces in enumerate(groups)
            if other != number
            for t in traces
        )
        else root
        for number, folder in enumerate(folders)
    ]
