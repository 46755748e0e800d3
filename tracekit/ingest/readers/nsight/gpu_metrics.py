"""GPU metrics of Nsight Systems reports (--gpu-metrics-devices): samples of whole GPUs, whatever process uses them.

Since 2023.4 they are in a table of their own, before as JSON in the table of generic events; see "SQLite Schema
Reference" and "GPU Metrics" in the User Guide.
"""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.normalize import numbers
from tracekit.ingest.readers.normalize.numbers import Ints
from tracekit.ingest.readers.nsight.database import Database
from tracekit.model import schema

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


def counters(database: Database, devices: Collection[int], base_ns: int) -> pl.DataFrame:
    """Return the samples of some devices, of all if none is named, columns as COUNTERS; by name and time."""
    device_of = _devices(database)
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


def _devices(database: Database) -> Mapping[int, int]:
    """Return the CUDA device of each GPU of Nsight Systems."""
    rows = database.rows(_GPUS, ("pwGpuId", "cuDevice"), "LIMIT 1024")
    return {gpu: device for gpu, device in rows if isinstance(gpu, int) and isinstance(device, int)}


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
