"""The traces in a folder's files: which belong to one run, and the files of other tools that belong to a trace."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tracekit.errors import BadTraceError
from tracekit.ingest.files import File, natural_key
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model.environment import DEVICE
from tracekit.model.manifest import MAX_RANKS

_PROFILER_INFO = re.compile(r"profiler_info(?:_(?P<rank>\d{1,7}))?\.json|profiler_metadata\.json")
_RANK_WORD = re.compile(
    r"(?:(?<![a-z])(?P<axis>local|node|group|[tdpcesmvz]p|data|model|pipeline|tensor|expert|context|sequence|replica|shard)"
    r"[-_]?)?(?:rank|worker)[-_]?(?P<number>\d+)(?!\d)",
    re.I,
)
"""A rank in a name, with the axis or machine of which it is, if stated: `rank3`, `tp_rank_1`, `local_rank0`."""
_NODE_WORD = re.compile(r"(?:node|host|machine)[-_]?\d", re.I)


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
    job_rank: int | None = None
    """The rank in the job, where the file states only that on its host."""
    rank: int = -1
    is_rank_assumed: bool = False
    """Whether neither the header nor a name such as rank3 states the rank."""
    window: int = 0
    companions: tuple["TraceFile", ...] = ()
    """Files that other tools recorded of the same process."""


HOUR_NS = 3_600_000_000_000
SAME_START_NS = 1_000_000
"""Recordings of one process that begin within this time are copies of one."""
_ONE_START_NS = 60_000_000_000
"""Ranks begin to record at one step. Another attempt at a job takes longer to start processes and load the model."""
_JOB_PARTS = ("folder", "world size", "job id")

_Key = tuple[object, ...]


def word_rank(file: File) -> int | None:
    """Return the number after rank or worker in the name of a file, or else of its folder.

    It is not the rank where the name also has the rank of another axis, or a machine beside a local rank.
    """
    for name in (file.name, file.folder.rpartition("/")[2]):
        matches = list(_RANK_WORD.finditer(name))
        of_world = [match for match in matches if match["axis"] is None]
        is_ambiguous = len(matches) > 1 or (matches and matches[0]["axis"] == "local" and _NODE_WORD.search(name))
        if matches and not of_world and is_ambiguous:
            return None
        for match in (of_world or matches)[:1]:
            number = match["number"]
            return int(number) if len(number) < 8 and int(number) < MAX_RANKS else None
    return None


def without_profiler_infos(files: Sequence[File]) -> tuple[Sequence[File], dict[str, int]]:
    """Files without those in which Ascend's profiler describes a recording, and the rank that each states, by folder.

    It writes `profiler_info_RANK.json` to the folder of its `trace_view.json`, or to the parent of that folder.
    """
    infos = {file: match for file in files if (match := _PROFILER_INFO.fullmatch(file.name)) is not None}
    ranks = {file.folder: int(match["rank"]) for file, match in infos.items() if match["rank"]}
    candidates = [file for file in files if file not in infos]
    return candidates or files, {folder: rank for folder, rank in ranks.items() if rank < MAX_RANKS}


def with_profiler_rank(t: TraceFile, rank_of_folder: Mapping[str, int]) -> TraceFile:
    """The trace with the rank that Ascend's profiler states in its folder or the parent, if it has none itself."""
    folders = (t.file.folder, t.file.folder.rpartition("/")[0])
    rank = next((rank_of_folder[folder] for folder in folders if folder in rank_of_folder), None)
    return t if rank is None or t.info.rank is not None else replace(t, info=replace(t.info, rank=rank))


def with_ranks_of_all_hosts(traces: list[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
    """The traces; of files that count the devices of one host each, the ranks of a host follow those of the one before.

    Hosts are told apart by the names of files in one folder: other folders are other recordings.
    """
    of_hosts = [t for t in traces if t.reader.has_ranks_of_host]
    names_of_folder: dict[str, set[str]] = defaultdict(set)
    devices: dict[str, int] = {}
    for t in of_hosts:
        names_of_folder[t.file.folder].add(t.file.name)
        devices[t.file.name] = max(devices.get(t.file.name, 0), (t.info.rank or 0) + 1)
    if all(t.info.rank is None for t in of_hosts) or max(map(len, names_of_folder.values()), default=0) < 2:
        return traces
    first_rank: dict[str, int] = {}
    for name in sorted(devices, key=natural_key):
        first_rank[name] = sum(devices[other] for other in first_rank)
        message = (
            f"{name}: its devices are numbered for one host; ranks {first_rank[name]} to "
            f"{first_rank[name] + devices[name] - 1} are assumed from the order of hosts"
        )
        issues.append(QualityIssue("rank_guessed", message))
    return [
        replace(t, job_rank=first_rank[t.file.name] + (t.info.rank or 0)) if t.reader.has_ranks_of_host else t
        for t in traces
    ]


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


def with_one_world_size(traces: list[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
    """The traces; of a folder's files of distinct ranks, few that state another number of ranks have that of the rest.

    They are of one job if their names state these ranks, the usual number has room for them, and they began together:
    files of another job have ranks of these, too, or began at another time.
    """
    of_folder: dict[_Key, list[TraceFile]] = defaultdict(list)
    for t in traces:
        if t.info.world_size is not None and t.job_rank is None:
            of_folder[t.file.folder, t.job[0], t.job[2]].append(t)
    corrected: dict[int, TraceFile] = {}
    for listed in of_folder.values():
        sizes = Counter(t.info.world_size for t in listed)
        usual, count = sizes.most_common(1)[0]
        if len(sizes) == 1 or 2 * count <= len(listed) or not _has_distinct_named_ranks(listed, usual or 0):
            continue
        starts_ns = sorted(t.info.start_ns for t in listed if t.info.start_ns is not None)
        if len(starts_ns) < len(listed) or starts_ns[-1] - starts_ns[0] > _ONE_START_NS:
            continue
        for t in listed:
            if t.info.world_size != usual:
                message = (
                    f"{t.file.path}: states {t.info.world_size} ranks, and the traces next to it {usual}: read as "
                )
                message += f"one of {usual}"
                issues.append(QualityIssue("world_size", message, t.file.path, word_rank(t.file)))
                job = (t.job[0], usual, t.job[2])
                corrected[id(t)] = replace(t, info=replace(t.info, world_size=usual), job=job)
    return [corrected.get(id(t), t) for t in traces]


def _has_distinct_named_ranks(traces: Sequence[TraceFile], world_size: int) -> bool:
    ranks = [word_rank(t.file) for t in traces]
    is_stated_alike = all(t.info.rank in (None, rank) for t, rank in zip(traces, ranks, strict=True))
    in_world = all(rank is not None and rank < world_size for rank in ranks)
    return is_stated_alike and in_world and len(set(ranks)) == len(ranks)


def latest_run(
    ranked: list[TraceFile], issues: list[QualityIssue]
) -> tuple[list[TraceFile], tuple[list[TraceFile], ...]]:
    """Return the traces of the run with most ranks (the latest of several), and of the others, reported as left out.

    Traces are of one run if they agree on what their headers state: folder of the manifest, world size, job id. Windows
    of a rank must also be of one process on one kind of device with the same software. Ranks may differ in these,
    unless they were recorded far apart, or a rank is only assumed from the order of files or a number in a name.
    """
    runs = _runs(ranked)
    if len(runs) == 1:
        return runs[0], ()
    latest = max(runs, key=lambda run: (len({t.rank for t in run}), max(t.info.start_ns or 0 for t in run)))
    for run in runs:
        if run is not latest:
            count = "1 file is" if len(run) == 1 else f"{len(run)} files are"
            message = (
                f"{count} of another run ({_difference(run, latest)}) and left out: "
                f"{first_paths([t.file.path for t in run])}; load each run by itself."
            )
            issues.append(QualityIssue("mixed_jobs", message, run[0].file.path, affected_ratio=len(run) / len(ranked)))
    return latest, tuple(run for run in runs if run is not latest)


def _of_process(companion: TraceFile, traces: Sequence[TraceFile]) -> list[TraceFile]:
    """Return the traces of a file's process, else of the process that started it, else, if unknown, of its rank."""
    info, rank = companion.info, word_rank(companion.file)
    traces = [t for t in traces if (t.file.remote is None) == (companion.file.remote is None)]
    for process_id in (info.process_id, info.parent_process_id):
        fitting = [t for t in traces if process_id is not None and t.info.process_id == process_id]
        if fitting:
            if len({t.rank for t in fitting}) == 1:
                return fitting
            if rank is not None:
                return [t for t in fitting if t.rank == rank]
            return [t for t in fitting if t.file.folder == companion.file.folder] or fitting
    return [t for t in traces if None in (info.process_id, t.info.process_id) and t.rank == rank]


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


def _runs(ranked: Sequence[TraceFile]) -> list[list[TraceFile]]:
    jobs: dict[_Key, list[TraceFile]] = defaultdict(list)
    for t in ranked:
        jobs[t.job].append(t)
    # Assign files without a stated job to the only stated job of their folder, if that job lacks their ranks.
    for job in [job for job in jobs if job[1] is None]:
        stated_jobs = [other for other in jobs if other[1] is not None and other[0] == job[0]]
        if len(stated_jobs) != 1:
            continue
        ranks = {t.rank for t in jobs[stated_jobs[0]]}
        fitting = [t for t in jobs[job] if t.rank not in ranks and t.rank < cast("int", stated_jobs[0][1])]
        if len(fitting) == len(jobs[job]):
            jobs[stated_jobs[0]] += jobs.pop(job)
    return [run for job in jobs.values() for run in _separate(job)]


def _separate(job: Sequence[TraceFile]) -> list[list[TraceFile]]:
    """Return the runs among traces whose headers state the same job."""
    runs: list[dict[int, list[TraceFile]]] = []
    # By folder and time: the ranks of a run were recorded together.
    for t in sorted(job, key=lambda t: (t.file.folder, t.info.start_ns or 0, t.rank)):
        run = next((run for run in runs if _belongs(t, run)), None)
        if run is None:
            runs.append(run := {})
        run.setdefault(t.rank, []).append(t)
    return [[t for windows in run.values() for t in windows] for run in runs]


def _belongs(t: TraceFile, run: Mapping[int, Sequence[TraceFile]]) -> bool:
    """Return whether a trace may be of a run, given by rank."""
    traces = run.get(t.rank) or next(iter(run.values()))[:1]
    return not any(_contradict(trace, t) for trace in traces)


def _contradict(a: TraceFile, b: TraceFile) -> bool:
    """Return whether two traces of a job cannot be of one run."""
    other_environment = bool(_environment_difference(a, b))
    if a.rank == b.rank:
        is_claimed = a.job[0] != ""  # a folder with a manifest is one run, even if it was restarted
        return other_environment or (not is_claimed and _differ(a.info.process_id, b.info.process_id))
    starts = (a.info.start_ns, b.info.start_ns)
    is_apart = None not in starts and abs(cast("int", starts[0]) - cast("int", starts[1])) > HOUR_NS
    if a.is_rank_assumed or b.is_rank_assumed:
        return other_environment or is_apart
    return other_environment and is_apart


def _differ(a: object, b: object) -> bool:
    return a is not None and b is not None and a != b


def _environment_difference(a: TraceFile, b: TraceFile) -> list[str]:
    """Names of the facts that both traces state and that differ, the device first."""
    environment, other = a.info.environment, b.info.environment
    names = [name for name in environment if name in other and environment[name] != other[name]]
    return sorted(names, key=lambda name: (name != DEVICE, name))


def _difference(run: Sequence[TraceFile], latest: Sequence[TraceFile]) -> str:
    """Return in words why a run is not the chosen one."""
    if run[0].job != latest[0].job:
        pairs = zip(_JOB_PARTS, run[0].job, latest[0].job, strict=True)
        return "; ".join(f"{name} {_shown(part)}, not {_shown(other)}" for name, part, other in pairs if part != other)
    trace, other = next(((a, b) for a in run for b in latest if _contradict(a, b)), (run[0], latest[0]))
    if names := _environment_difference(trace, other):
        name = names[0]
        return f"{name} {trace.info.environment[name]}, not {other.info.environment[name]}"
    if trace.rank == other.rank:
        return f"rank {trace.rank} is process {trace.info.process_id}, not {other.info.process_id}"
    return "recorded more than an hour apart, and not both state a rank"


def _shown(value: object) -> object:
    return "not stated" if value is None else value
