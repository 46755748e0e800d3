"""Which trace a file of another tool belongs to, such as an execution trace: that of the same process."""

from collections.abc import Sequence
from dataclasses import replace

from tracekit.errors import BadTraceError
from tracekit.ingest.trace_files import QualityIssue, TraceFile, word_rank


def attach(traces: Sequence[TraceFile], companions: Sequence[TraceFile], issues: list[QualityIssue]) -> list[TraceFile]:
    """Return the traces with the files of their processes; report files of no trace, or of several ranks.

    Process ids of ranks on different machines may be equal: then the rank in the file's name decides, else its folder.
    """
    joined: dict[int, list[TraceFile]] = {id(t): [] for t in traces}
    for companion in companions:
        fitting = _of_process(companion, traces)
        if len({t.rank for t in fitting}) == 1:
            for t in fitting:
                joined[id(t)].append(companion)
        else:
            issues.append(_unmatched(companion, fitting))
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
            return _narrowed(fitting, companion, rank)
    return [t for t in traces if None in (info.process_id, t.info.process_id) and t.rank == rank]


def _narrowed(fitting: list[TraceFile], companion: TraceFile, rank: int | None) -> list[TraceFile]:
    if len({t.rank for t in fitting}) == 1:
        return fitting
    if rank is not None:
        return [t for t in fitting if t.rank == rank]
    return [t for t in fitting if t.file.folder == companion.file.folder] or fitting


def _unmatched(companion: TraceFile, fitting: Sequence[TraceFile]) -> QualityIssue:
    ranks = ", ".join(str(rank) for rank in sorted({t.rank for t in fitting}))
    why = f"ranks {ranks} have this process id" if ranks else "no trace is of this process"
    message = f"{companion.file.path}: {companion.reader.name} of process {companion.info.process_id}, left out: {why}"
    return QualityIssue("unmatched_companion", message, companion.file.path)
