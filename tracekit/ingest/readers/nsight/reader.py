"""Nsight Systems exports (SQLite) to Traces: one for each process that is a rank."""

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from tracekit.errors import BadTraceError
from tracekit.ingest.readers.normalize.trace import build_trace
from tracekit.ingest.readers.nsight import database, gpu_metrics, mpi_calls, processes
from tracekit.ingest.readers.nsight.database import Database
from tracekit.ingest.readers.nsight.events import Tables, read_communicators, read_ranges
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
    with database.open_database(path) as report:
        listed = processes.ranks(report, read_communicators(report, database.Texts(report)))
        facts = environment.environment(_header(report, None))
        _require_content(path, report)
        start_ns = _start_ns(report)
    return [
        TraceInfo(
            rank=None if process.is_rank_assumed and len(listed) == 1 else process.rank,
            world_size=process.world_size,
            start_ns=start_ns,
            process_id=process.process_id,
            environment=facts,
            shares_file=len(listed) > 1,
        )
        for process in listed
    ]


def read(path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:
    """Return the trace of a process. Raises BadTraceError if the file does not have it any more."""
    with database.open_database(path) as report:
        texts = database.Texts(report)
        communicators = read_communicators(report, texts)
        listed = processes.ranks(report, communicators)
        process = next((p for p in listed if p.process_id == info.process_id), None)
        if process is None:
            raise BadTraceError(f"{path}: process {info.process_id} is no longer in this file; load it again")
        tables = Tables(report, texts, process.global_id)
        tables.add_calls()
        tables.add_ranges(read_ranges(report, texts), communicators)
        tables.add_mpi(mpi_calls.read_mpi(report, texts, process.global_id))
        calls = mpi_calls.read_os(report, texts, process.global_id)
        tables.add_os_calls(calls)
        tables.add_device()
        events = tables.events(_header(report, process))
        issues = pl.DataFrame(list(_issues(report, process)), schema.DATA_QUALITY.schema, orient="row")
        base_ns = _start_ns(report) or 0
        further = {
            "io_calls": mpi_calls.file_calls(calls, base_ns),
            "counters": gpu_metrics.counters(report, events.device["device"].drop_nulls().unique().to_list(), base_ns),
        }
    trace = build_trace(events, path, rank=rank, window=window, further=issues)
    return trace.replace(**further)


def _require_content(path: str, report: Database) -> None:
    """Raise BadTraceError if a report has nothing that a trace could show."""
    tables = (*processes.DEVICE_TABLES, "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", *processes.MPI_TABLES)
    if not any(report.rows(table, ("start",), "LIMIT 1") for table in tables):
        raise BadTraceError(
            f"{path}: this Nsight Systems report has no GPU work, CUDA calls or NVTX ranges, and no MPI calls; record "
            "it with: nsys profile --trace cuda,nvtx,osrt"
        )


def _start_ns(report: Database) -> int | None:
    """Return the Unix time at which the recording began."""
    rows = report.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",), "LIMIT 1")
    start_ns = rows[0][0] if rows else None
    return start_ns if isinstance(start_ns, int) and 0 < start_ns < 1 << 62 else None


def _header(report: Database, process: RankProcess | None) -> dict[str, Any]:
    """The header that Kineto would write: start, devices, versions, rank."""
    header: dict[str, Any] = {"baseTimeNanoseconds": _start_ns(report) or 0, "deviceProperties": _devices(report)}
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        for key, value in report.rows(table, ("name", "value")):
            if key == "EXPORT_PRODUCT_VERSION" and isinstance(value, str):
                header["nsight_systems_version"] = value[:_MOST_LENGTH]
    if process is not None and process.world_size is not None:
        header["distributedInfo"] = {"rank": process.rank, "world_size": process.world_size}
    return header


def _devices(report: Database) -> list[dict[str, Any]]:
    rows = report.rows(_GPU, ("name", *_GPU_PROPERTIES), "LIMIT 1024")
    return [
        {"name": str(name)[:_MOST_LENGTH]}
        | {key: value for key, value in zip(_GPU_PROPERTIES.values(), values, strict=True) if isinstance(value, int)}
        for name, *values in rows
        if name is not None
    ]


def _issues(report: Database, process: RankProcess) -> Iterator[tuple[str, str, float]]:
    if process.is_rank_assumed:
        message = (
            "The report does not state the ranks of its processes, so they are numbered in the order of their devices: "
            f"process {process.process_id} is rank {process.rank}."
        )
        yield "rank_guessed", message, 0.0
    rows = report.each("DIAGNOSTIC_EVENT", ("text", "severity"))
    severe = (text for text, severity in rows if isinstance(severity, int) and severity >= _WARNING)
    texts = dict.fromkeys(" ".join(text.split())[:_MOST_LENGTH] for text in severe if isinstance(text, str))
    for text in list(texts)[:_MOST_DIAGNOSTICS]:
        yield "profiler_diagnostic", f"Nsight Systems reported: {text.rstrip('.')}.", 0.0
