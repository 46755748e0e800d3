"""Which trace a file of another tool belongs to, such as an execution trace: that of the same process."""

from collections.abc import Sequence
from dataclasses import replace

from tracekit.errors import BadTraceError
from tracekit.ingest.trace_files import QualityIssue, TraceFile, word_rank


def attach(traces: Sequence[TraceFile], companions: Sequence[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
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
