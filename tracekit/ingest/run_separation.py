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
    chosen = max(runs, key=lambda run: (len({t.rank for t in run}), max(t.info.start_ns or 0 for t in run)))
    for run in runs:
        if run is not chosen:
            count = "1 file is" if len(run) == 1 else f"{len(run)} files are"
            message = (
                f"{count} of another run ({_difference(run, chosen)}) and left out: "
                f"{first_paths([t.file.path for t in run])}; load each run by itself."
            )
            issues.append(QualityIssue("mixed_jobs", message, run[0].file.path, affected_ratio=len(run) / len(ranked)))
    return chosen


def _runs(ranked: Sequence[TraceFile]) -> list[list[TraceFile]]:
    jobs: dict[_Key, list[TraceFile]] = defaultdict(list)
    for t in ranked:
        jobs[t.job].append(t)
    _assign_unstated_jobs(jobs)
    return [run for job in jobs.values() for run in _separated(job)]


def _assign_unstated_jobs(jobs: dict[_Key, list[TraceFile]]) -> None:
    """Assign files without a stated job to the only stated job of their folder, if that job lacks their ranks."""
    for job in [job for job in jobs if job[1] is None]:
        others = [other for other in jobs if other[1] is not None and other[0] == job[0]]
        if len(others) != 1:
            continue
        taken = {t.rank for t in jobs[others[0]]}
        wanted = [t for t in jobs[job] if t.rank not in taken and t.rank < cast("int", others[0][1])]
        if len(wanted) == len(jobs[job]):
            jobs[others[0]] += jobs.pop(job)


def _separated(job: Sequence[TraceFile]) -> list[list[TraceFile]]:
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
    own = run.get(t.rank)
    return not (any(_contradict(window, t) for window in own) if own else _contradict(next(iter(run.values()))[0], t))


def _contradict(a: TraceFile, b: TraceFile) -> bool:
    """Return whether two traces of a job cannot be of one run."""
    other_environment = bool(_environment_difference(a, b))
    if a.rank == b.rank:
        is_claimed = a.job[0] != ""  # a folder with a manifest is one run, even if it was restarted
        return other_environment or (not is_claimed and _differ(a.info.process_id, b.info.process_id))
    starts = (a.info.start_ns, b.info.start_ns)
    apart = None not in starts and abs(cast("int", starts[0]) - cast("int", starts[1])) > HOUR_NS
    if a.is_rank_assumed or b.is_rank_assumed:
        return other_environment or apart
    return other_environment and apart


def _differ(a: object, b: object) -> bool:
    return a is not None and b is not None and a != b


def _environment_difference(a: TraceFile, b: TraceFile) -> list[str]:
    """Return the names of what both traces state and differs, the device first."""
    own, other = a.info.environment, b.info.environment
    names = [name for name in own if name in other and own[name] != other[name]]
    return sorted(names, key=lambda name: (name != DEVICE, name))


def _difference(run: Sequence[TraceFile], chosen: Sequence[TraceFile]) -> str:
    """Return in words why a run is not the chosen one."""
    if run[0].job != chosen[0].job:
        pairs = zip(_JOB_PARTS, run[0].job, chosen[0].job, strict=True)
        return "; ".join(f"{name} {_stated(own)}, not {_stated(other)}" for name, own, other in pairs if own != other)
    own, other = next(((a, b) for a in run for b in chosen if _contradict(a, b)), (run[0], chosen[0]))
    if names := _environment_difference(own, other):
        name = names[0]
        return f"{name} {own.info.environment[name]}, not {other.info.environment[name]}"
    if own.rank == other.rank:
        return f"rank {own.rank} is process {own.info.process_id}, not {other.info.process_id}"
    return "recorded more than an hour apart, and not both state a rank"


def _stated(value: object) -> object:
    return "not stated" if value is None else value
