"""Nsight Systems exports (SQLite) to Traces: one for each process that is a rank, with the GPU metrics as counters."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.errors import BadTraceError
from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.normalize import numbers, sqlite_tables
from tracekit.ingest.readers.normalize.numbers import Ints
from tracekit.ingest.readers.normalize.sqlite_tables import Database
from tracekit.ingest.readers.normalize.trace import build_trace
from tracekit.ingest.readers.nsight import mpi_calls, processes, report_texts
from tracekit.ingest.readers.nsight.events import Tables, read_communicators, read_ranges
from tracekit.ingest.readers.nsight.processes import RankProcess
from tracekit.ingest.readers.reader import TraceInfo
from tracekit.model import environment, schema
from tracekit.model.trace import Trace

MAX_SAMPLES = 100_000
"""Samples of a metric; of more, the mean of as many neighbours as needed is one."""
_SAMPLES, _NAMES, _GPUS = "GPU_METRICS", "TARGET_INFO_GPU_METRICS", "TARGET_INFO_GPU"
_EVENTS, _TYPES, _SOURCES = "GENERIC_EVENTS", "GENERIC_EVENT_TYPES", "GENERIC_EVENT_SOURCES"
_SOURCE = "GpuMetrics"
_GPU_BITS = 0xFF  # of a type's id: the GPU, as Nsight Systems numbers them
_MOST_METRICS, _MOST_JSON_METRICS = 4096, 256
_MOST_NAME = 200
_CLOCK = "Clock Frequency"
_WRAPS = 1 << 32
_LEAST_HZ = 1e5  # no clock has as many MHz, none as few Hz

Floats = npt.NDArray[np.float64]

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
    with sqlite_tables.open_database(path) as report:
        listed = processes.ranks(report, read_communicators(report, report_texts.Texts(report)))
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
    with sqlite_tables.open_database(path) as report:
        texts = report_texts.Texts(report)
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
            "counters": counters(report, events.device["device"].drop_nulls().unique().to_list(), base_ns),
        }
    trace = build_trace(events, path, rank=rank, window=window, further=issues)
    return trace.replace(**further)


def counters(database: Database, devices: Collection[int], base_ns: int) -> pl.DataFrame:
    """Return the samples of some devices, of all if none is named, columns as COUNTERS; by name and time."""
    rows = database.rows(_GPUS, ("pwGpuId", "cuDevice"), "LIMIT 1024")
    device_of = {gpu: device for gpu, device in rows if isinstance(gpu, int) and isinstance(device, int)}
    metrics = _of_table(database) if database.has(_SAMPLES, "metricId", "value") else _of_generic_events(database)
    parts = []
    for gpu, name, at_ns, value in metrics:
        device = device_of.get(gpu, gpu)
        usable = (at_ns > -numbers.MOST_NS) & (at_ns < numbers.MOST_NS) & np.isfinite(value)
        if (not devices or device in devices) and usable.any():
            at_ns, value = _thin(at_ns[usable], _in_mhz(value[usable]) if _CLOCK in name else value[usable])
            columns = {"at_ns": at_ns + base_ns, "value": value}
            parts.append(pl.DataFrame(columns).with_columns(device=pl.lit(device), name=pl.lit(name[:_MOST_NAME])))
    return schema.COUNTERS.conform(pl.concat(parts)) if parts else schema.COUNTERS.empty()


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
    header: dict[str, Any] = {
        "baseTimeNanoseconds": _start_ns(report) or 0,
        "deviceProperties": _devices(report),
        environment.RECORDS_ANY_PROGRAM: True,
    }
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


def _of_table(database: Database) -> Iterator[tuple[int, str, Ints, Floats]]:
    """Yield GPU, name, times and values of each metric; one at a time, as there may be many million samples."""
    listed = database.rows(_NAMES, ("typeId", "metricId", "metricName"), f"LIMIT {_MOST_METRICS}")
    for kind, metric, name in sorted({row for row in listed if _is_metric(*row)}, key=str):
        assert isinstance(kind, int)
        where = f"WHERE typeId = {kind} AND metricId = {metric}"
        yield kind & _GPU_BITS, str(name), _times(database, _SAMPLES, where), database.floats(_SAMPLES, "value", where)


def _is_metric(kind: object, metric: object, name: object) -> bool:
    return isinstance(kind, int) and isinstance(metric, int) and isinstance(name, str)


def _of_generic_events(database: Database) -> Iterator[tuple[int, str, Ints, Floats]]:
    sources = [s for s, data in database.rows(_SOURCES, ("sourceId", "data")) if _object(data).get("Name") == _SOURCE]
    kinds = [kind for kind, source in database.rows(_TYPES, ("typeId", "sourceId")) if source in sources]
    for kind in sorted(kind for kind in kinds if isinstance(kind, int)):
        where = f"WHERE typeId = {kind}"
        at_ns = _times(database, _EVENTS, where)
        values: dict[str, Floats] = {}
        for row, (data,) in enumerate(database.each(_EVENTS, ("data",), where)):
            for name, value in _object(data).items():
                if name in values or len(values) < _MOST_JSON_METRICS:
                    values.setdefault(name, np.full(len(at_ns), np.nan))[row] = _number(value)
        yield from ((kind & _GPU_BITS, name, at_ns, values[name]) for name in sorted(values))


def _times(database: Database, table: str, where: str) -> Ints:
    """Return times on the clock of the report; of old versions, that of the recording is all there is."""
    times = database.integers(table, ("timestamp", "rawTimestamp"), where)
    return np.where(times["timestamp"] == numbers.MISSING, times["rawTimestamp"], times["timestamp"])


def _thin(at_ns: Ints, value: Floats) -> tuple[Ints, Floats]:
    order = np.argsort(at_ns, kind="stable")
    first = np.arange(0, len(order), -(-len(order) // MAX_SAMPLES))
    counts = np.diff(first, append=len(order))
    return at_ns[order][first], np.add.reduceat(value[order], first) / counts


def _in_mhz(value: Floats) -> Floats:
    """Return clock frequencies in MHz; versions that call them MHz write Hz, and 32 bits of these, with a sign."""
    positive = np.where(value < 0, value + _WRAPS, value)
    return np.where(positive >= _LEAST_HZ, positive / 1e6, positive)


def _object(text: object) -> Mapping[str, object]:
    try:
        parsed = untrusted_json.parse(text) if isinstance(text, str) else None
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, str | int | float) else np.nan
    except (ValueError, OverflowError):
        return np.nan
