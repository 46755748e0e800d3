"""Perfetto files to Traces: exports of tracekit as they were, others by the categories of PyTorch's profiler."""

from collections.abc import Sequence

from tracekit.errors import BadTraceError
from tracekit.ingest.readers.normalize import distributed_job
from tracekit.ingest.readers.perfetto import events, exported, packets, pytorch_slices
from tracekit.ingest.readers.perfetto.exported import TraceFacts
from tracekit.ingest.readers.reader import TraceInfo
from tracekit.model import environment
from tracekit.model.trace import Trace


def traces(path: str) -> Sequence[TraceInfo]:
    """Return the traces of a file: of an export with their ranks, else one for each rank. Raises BadTraceError."""
    trace_events = events.of_packets(packets.read(path))
    if not exported.is_export(trace_events):
        return pytorch_slices.traces(path, trace_events)
    traces, run = exported.facts(trace_events)
    infos = [_info(stated, shares_file=len(traces) > 1) for stated in traces]
    if not infos:
        raise BadTraceError(f"{path}: this Perfetto trace is damaged: no rank of the export can be read")
    first = infos[0]
    return [TraceInfo(**{**vars(first), "manifest": run.manifest or None, "run_issues": run.issues}), *infos[1:]]


def read(path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:
    """Return the trace of a file, or of one rank of it. Raises BadTraceError if the rank is not in it any more."""
    trace_events = events.of_packets(packets.read(path, info.part))
    if not exported.is_export(trace_events):
        return pytorch_slices.trace(path, trace_events, info, rank=rank, window=window)
    stated = next((s for s in exported.facts(trace_events)[0] if (s.rank, s.window) == (info.rank, info.window)), None)
    if stated is None:
        raise BadTraceError(f"{path}: rank {rank} is no longer in this file; load it again")
    of_trace = trace_events.packets.of_sequence(stated.sequence)
    if len(of_trace.begin) < len(trace_events.packets.begin):
        trace_events = events.of_packets(of_trace)
    return exported.trace(trace_events, stated, path, rank=rank, window=window)


def _info(stated: TraceFacts, *, shares_file: bool) -> TraceInfo:
    info, header = distributed_job.distributed_info(stated.header), stated.header
    trace_id, job_id = header.get("trace_id"), header.get("tw_job")
    return TraceInfo(
        rank=stated.rank,
        window=stated.window,
        world_size=distributed_job.stated_rank(info.get("world_size"), lowest=1),
        job_id=job_id if isinstance(job_id, str) else None,
        start_ns=stated.first_ns,
        recording_id=None if trace_id is None else f"{trace_id} {stated.rank} {stated.window}",
        process_id=int(stated.process) if stated.process and stated.process.isdecimal() else None,
        environment=environment.environment(header),
        shares_file=shares_file,
        part=stated.part,
    )
