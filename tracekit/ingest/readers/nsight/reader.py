"""Nsight Systems exports (SQLite) to Traces: one for each process that is a rank."""

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from tracekit.errors import BadTraceError
from tracekit.ingest.readers.kineto import reader as kineto
from tracekit.ingest.readers.nsight import database, gpu_metrics, mpi_calls, names, os_calls, processes, ranges
from tracekit.ingest.readers.nsight.database import Database
from tracekit.ingest.readers.nsight.events import Tables
from tracekit.ingest.readers.nsight.processes import RankProcess
from tracekit.ingest.readers.reader import TraceInfo
from tracekit.model import environment, schema
from tracekit.model.trace import Trace

_GPU = "TARGET_INFO_GPU"
_GPU_PROPERTIES = {
    "id": "id", "totalMemory": "totalGlobalMem", "smCount": "numSms", "computeMajor": "computeMajor",
    "computeMinor": "computeMinor",
}  # fmt: skip
_WARNING = 2
_MOST_DIAGNOSTICS = 5
_MOST_LENGTH = 300


def traces(path: str) -> Sequence[TraceInfo]:
    """Return the traces of a file. Raises BadTraceError if it is damaged, or has no GPU work, ranges or MPI calls."""
    with database.opened(path) as found:
        listed = processes.ranks(found, ranges.communicators(found, names.Texts(found)))
        facts = environment.environment(_header(found, None))
        _require_content(path, found)
        start_ns = _start_ns(found)
    return [
        TraceInfo(
            rank=None if of.is_rank_assumed and len(listed) == 1 else of.rank,
            world_size=of.world_size,
            start_ns=start_ns,
            process_id=of.process_id,
            environment=facts,
            shares_file=len(listed) > 1,
        )
        for of in listed
    ]


def read(path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:
    """Return the trace of a process. Raises BadTraceError if the file does not have it any more."""
    with database.opened(path) as found:
        texts = names.Texts(found)
        communicators = ranges.communicators(found, texts)
        listed = processes.ranks(found, communicators)
        of = next((each for each in listed if each.process_id == info.process_id), None)
        if of is None:
            raise BadTraceError(f"{path}: process {info.process_id} is no longer in this file; load it again")
        tables = Tables(found, texts, of.global_id)
        tables.add_calls()
        tables.add_ranges(ranges.read(found, texts), communicators)
        tables.add_mpi(mpi_calls.read(found, texts, of.global_id))
        calls = os_calls.read(found, texts, of.global_id)
        tables.add_os_calls(calls)
        tables.add_device()
        events = tables.events(_header(found, of))
        issues = pl.DataFrame(list(_issues(found, of)), schema.DATA_QUALITY.schema, orient="row")
        base_ns = _start_ns(found) or 0
        further = {
            "io_calls": os_calls.file_calls(calls, base_ns),
            "counters": gpu_metrics.counters(found, events.device["device"].drop_nulls().unique().to_list(), base_ns),
        }
    trace = kineto.build_trace(events, path, rank=rank, window=window, further=issues)
    return trace.replace(**further)


def _require_content(path: str, found: Database) -> None:
    """Raise BadTraceError if a report has nothing that a trace could show."""
    shown = (*processes.DEVICE_TABLES, "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", *processes.MPI_TABLES)
    if not any(found.rows(table, ("start",), "LIMIT 1") for table in shown):
        raise BadTraceError(
            f"{path}: this Nsight Systems report has no GPU work, CUDA calls or NVTX ranges, and no MPI calls; record "
            "it with: nsys profile --trace cuda,nvtx,osrt"
        )


def _start_ns(found: Database) -> int | None:
    """Return the Unix time at which the recording began."""
    rows = found.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",), "LIMIT 1")
    start_ns = rows[0][0] if rows else None
    return start_ns if isinstance(start_ns, int) and 0 < start_ns < 1 << 62 else None


def _header(found: Database, of: RankProcess | None) -> dict[str, Any]:
    """Return what a Kineto header would state: start, devices, versions, rank."""
    header: dict[str, Any] = {"baseTimeNanoseconds": _start_ns(found) or 0, "deviceProperties": _devices(found)}
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        for key, value in found.rows(table, ("name", "value")):
            if key == "EXPORT_PRODUCT_VERSION" and isinstance(value, str):
                header["nsight_systems_version"] = value[:_MOST_LENGTH]
    if of is not None and of.world_size is not None:
        header["distributedInfo"] = {"rank": of.rank, "world_size": of.world_size}
    return header


def _devices(found: Database) -> list[dict[str, Any]]:
    rows = found.rows(_GPU, ("name", *_GPU_PROPERTIES), "LIMIT 1024")
    return [
        {"name": str(name)[:_MOST_LENGTH]}
        | {key: value for key, value in zip(_GPU_PROPERTIES.values(), values, strict=True) if isinstance(value, int)}
        for name, *values in rows
        if name is not None
    ]


def _issues(found: Database, of: RankProcess) -> Iterator[tuple[str, str, float]]:
    if of.is_rank_assumed:
        message = (
            "The report does not state the ranks of its processes, so they are numbered in the order of their devices: "
            f"process {of.process_id} is rank {of.rank}."
        )
        yield "rank_guessed", message, 0.0
    rows = found.each("DIAGNOSTIC_EVENT", ("text", "severity"))
    severe = (text for text, severity in rows if isinstance(severity, int) and severity >= _WARNING)
    texts = dict.fromkeys(" ".join(text.split())[:_MOST_LENGTH] for text in severe if isinstance(text, str))
    for text in list(texts)[:_MOST_DIAGNOSTICS]:
        yield "profiler_diagnostic", f"Nsight Systems reported: {text.rstrip('.')}.", 0.0
