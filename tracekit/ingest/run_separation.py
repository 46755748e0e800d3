"""Which of several runs the traces of a folder belong to: a job's ranks and windows are one run, all others are not."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import cast

from tracekit.ingest.trace_files import QualityIssue, TraceFile, first_paths
from tracekit.model.environment import DEVICE

HOUR_NS = 3_600_000_000_000
_JOB_PARTS = ("folder", "world size", "job id")

_Key = tuple[object, ...]


def latest_run(ranked: list[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
    """Return the traces of the run with most ranks (the latest of several); report the others as left out.

    Traces are of one run if they agree on what their headers state: folder of the manifest, world size, job id. Windows
    of a rank must also be of one process on one kind of device with the same software. Ranks may differ in these,
    unless they were recorded far apart, or a rank is only assumed from the order of files or a number in a name.
    """
    runs = _runs(ranked)
    if len(runs) == 1:
        return runs[0]
    latest = max(runs, key=lambda run: (len({t.rank for t in run}), max(t.info.start_ns or 0 for t in run)))
    for run in runs:
        if run is not latest:
            count = "1 file is" if len(run) == 1 else f"{len(run)} files are"
            message = (
                f"{count} of another run ({_difference(run, latest)}) and left out: "
                f"{first_paths([t.file.path for t in run])}; load each run by itself."
            )
            issues.append(QualityIssue("mixed_jobs", message, run[0].file.path, affected_ratio=len(run) / len(ranked)))
    return latest


def _runs(ranked: Sequence[TraceFile]) -> list[list[TraceFile]]:
    jobs: dict[_Key, list[TraceFile]] = defaultdict(list)
    for t in ranked:
        jobs[t.job].append(t)
    _assign_unstated_jobs(jobs)
    return [run for job in jobs.values() for run in _separate(job)]


def _assign_unstated_jobs(jobs: dict[_Key, list[TraceFile]]) -> None:
    """Assign files without a stated job to the only stated job of their folder, if that job lacks their ranks."""
    for job in [job for job in jobs if job[1] is None]:
        stated_jobs = [other for other in jobs if other[1] is not None and other[0] == job[0]]
        if len(stated_jobs) != 1:
            continue
        ranks = {t.rank for t in jobs[stated_jobs[0]]}
        fitting = [t for t in jobs[job] if t.rank not in ranks and t.rank < cast("int", stated_jobs[0][1])]
        if len(fitting) == len(jobs[job]):
            jobs[stated_jobs[0]] += jobs.pop(job)


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
