"""The metrics logs of a local run as one table, and as files of OpenTelemetry, Prometheus and TensorBoard.

No trace is needed.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from tracekit import conventions
from tracekit.conventions import log_parts
from tracekit.errors import InputError, MissingExtraError
from tracekit.ingest.readers.logs import MetricsLogs, read_manifest
from tracekit.ingest.readers.reader import TraceInfo
from tracekit.model import escaping, schema

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily


COLUMNS = schema.columns("rank step name value at_ns", name=pl.String, value=pl.Float64)
_LOG = re.compile(
    rf"(rank(\d{{1,7}}))(?:\.part\d+)?({re.escape(conventions.METRICS_SUFFIX)})"
    rf"(?:{re.escape(conventions.PARTIAL_SUFFIX)})?"
)
_STEP_TIME = "step_time_ns"

_UNITS = {"_ns": "ns", "_bytes": "By", "_ratio": "1", "_per_second": "1/s"}

_PREFIX = "tracekit"
_LABELS = ("run", "rank")
_NS_PER_S = 1e9


class StaticCollector:
    """What prometheus_client reads metrics from."""

    def __init__(self, families: "Iterable[GaugeMetricFamily]") -> None:
        self._families = list(families)

    def collect(self) -> "Iterable[GaugeMetricFamily]":
        """Return the metrics."""
        return self._families


def samples(folder: Path) -> pl.DataFrame:
    """Return the metrics of all steps and ranks, by rank, name and step. Columns COLUMNS.

    `at_ns` is the end of the step since 1970: the manifest's time of creation, plus the step times until then. It is
    null where one of these is not known, and early by the time that passes between steps, such as in saves. Raises
    InputError if the folder has no metrics log.
    """
    stated = read_manifest(folder / conventions.MANIFEST_FILE)
    created_ns = None if stated is None else stated.created_ns
    parts = [_of_rank(rank, paths, created_ns) for rank, paths in logs(folder).items()]
    return pl.concat(parts).sort("rank", "name", "step", maintain_order=True)


def timed_samples(folder: Path) -> pl.DataFrame:
    """Samples whose times are known, columns COLUMNS; raises InputError without a metrics log or without times."""
    return _with_times(samples(folder))


def run_name(folder: Path) -> str:
    """Return the name of a run's folder, with '?' for bytes that are not text."""
    return folder.resolve().name.encode("utf-8", "replace").decode()


def logs(folder: Path) -> dict[int, list[Path]]:
    """Return the files of the metrics logs in a folder by rank, in order. Raises InputError without one."""
    if not folder.is_dir():
        raise InputError(f"{folder}: metrics are exported from a local folder, and this is none; name a run's folder")
    names = {path.name for path in folder.iterdir()}
    logs_by_rank = {int(match[2]): match[1] + match[3] for name in sorted(names) if (match := _LOG.fullmatch(name))}
    if not logs_by_rank:
        raise InputError(
            f"{folder}: no metrics log (rank*{conventions.METRICS_SUFFIX}) in this folder; record with tracekit"
        )
    return {
        rank: [folder / name for name in log_parts.files(log, names.__contains__)]
        for rank, log in sorted(logs_by_rank.items())
    }


def otlp_lines(run: str, samples: pl.DataFrame) -> Iterator[bytes]:
    """Yield the line of each rank of the samples, columns of `step_metrics`. Raises InputError without times."""
    for (rank,), rank_samples in _with_times(samples).group_by("rank", maintain_order=True):
        metrics = [_metric(str(name), points) for (name,), points in rank_samples.group_by("name", maintain_order=True)]
        resource = {
            "attributes": [
                _whole(key, value) if isinstance(value, int) else _otlp_text(key, value)
                for key, value in otlp_resource(run, int(str(rank))).items()
            ]
        }
        scope = {"name": "tracekit", "version": conventions.VERSION}
        scoped = [{"scope": scope, "metrics": metrics}]
        yield json.dumps({"resourceMetrics": [{"resource": resource, "scopeMetrics": scoped}]}).encode() + b"\n"


def otlp_resource(run: str, rank: int) -> dict[str, str | int]:
    """Attributes of what sent the metrics, in OpenTelemetry's terms."""
    return {"service.name": "tracekit", "tracekit.run": run, "rank": rank}


def otlp_name(name: str) -> str:
    """Name of a metric of the logs in OpenTelemetry."""
    return f"{_PREFIX}.{name}"


def otlp_unit(name: str) -> str:
    """Unit of a metric of the logs by UCUM, from the ending of its name; empty without one."""
    return next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")


def is_being_written(folder: Path) -> bool:
    """Whether a rank still writes its metrics log."""
    return any(folder.glob(f"rank*{conventions.METRICS_SUFFIX}{conventions.PARTIAL_SUFFIX}"))


def require_library() -> None:
    """Raise MissingExtraError if prometheus_client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "this format needs prometheus_client: pip install 'torch-tracekit[prometheus]'"
        ) from None


def prometheus_latest(run: str, rows: Mapping[int, Mapping[str, float]]) -> "list[GaugeMetricFamily]":
    """Return the gauges of the latest step of each rank; `rows` has its metrics by name, and `step`."""
    points = [(name, rank, value, None) for rank, row in sorted(rows.items()) for name, value in row.items()]
    return _families(run, sorted(points, key=lambda point: point[0]))


def prometheus_text(families: "Iterable[GaugeMetricFamily]") -> bytes:
    """Return gauges in Prometheus' text format 0.0.4."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(StaticCollector(families))
    return bytes(generate_latest(registry))


def history(run: str, samples: pl.DataFrame) -> bytes:
    """Return all samples (columns of `step_metrics`) in OpenMetrics, with times, as promtool backfills them.

    Raises InputError if the times are not known.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.openmetrics.exposition import generate_latest

    timed = _with_times(samples).sort("name", "rank", "at_ns")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StaticCollector(_families(run, timed.select("name", "rank", "value", "at_ns").rows())))
    return bytes(generate_latest(registry))  # type: ignore[no-untyped-call]


def write_tensorboard(samples: pl.DataFrame, out: Path) -> None:
    """Write samples (columns of `step_metrics`) into the folders rank00000, … of a new folder.

    Raises InputError if the folder has files, MissingExtraError without TensorBoard.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise MissingExtraError("this format needs TensorBoard: pip install 'torch-tracekit[tensorboard]'") from None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: is not an empty folder; name a new one, which tensorboard --logdir then shows")
    for (rank,), rank_samples in samples.sort("rank", "step").group_by("rank", maintain_order=True):
        writer = EventFileWriter(str(out / f"rank{rank:05}"))
        for (step,), of_step in rank_samples.group_by("step", maintain_order=True):
            values = [
                Summary.Value(tag=escaping.inert(name, len(name)), simple_value=value)
                for name, value in of_step["name", "value"].iter_rows()
            ]
            wall_time_s = (of_step["at_ns"][0] or 0) / 1e9
            writer.add_event(Event(wall_time=wall_time_s, step=step, summary=Summary(value=values)))
        writer.close()


def _with_times(samples: pl.DataFrame) -> pl.DataFrame:
    timed = samples.drop_nulls("at_ns")
    if timed.is_empty():
        raise InputError("the times of the steps are not known: the run has no run.json or its log no step_time_ns")
    return timed


def _of_rank(rank: int, paths: Iterable[Path], created_ns: int | None) -> pl.DataFrame:
    parts = [MetricsLogs().read(str(path), TraceInfo(), rank=rank, window=0).metrics for path in paths]
    metrics = pl.concat([schema.METRICS.empty(), *parts])
    metrics = metrics.unique(["step", "name"], keep="last", maintain_order=True)
    times = metrics.filter(pl.col("name") == _STEP_TIME).sort("step")
    elapsed = pl.col("value").clip(0, 1e15).cum_sum().cast(pl.Int64)
    ends = times.select("step", at_ns=elapsed + pl.lit(created_ns, pl.Int64))
    timed = metrics.join(ends, on="step", how="left", maintain_order="left")
    return schema.select(timed.with_columns(rank=pl.lit(rank, pl.Int64)), COLUMNS)


def _metric(name: str, points: pl.DataFrame) -> dict[str, Any]:
    listed = [
        {"attributes": [_whole("step", step)], "timeUnixNano": str(at_ns), "asDouble": value}
        for step, value, at_ns in points.select("step", "value", "at_ns").iter_rows()
    ]
    return {"name": otlp_name(name), "unit": otlp_unit(name), "gauge": {"dataPoints": listed}}


def _otlp_text(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}


def _whole(key: str, value: object) -> dict[str, Any]:
    return {"key": key, "value": {"intValue": str(value)}}  # int64 is text in the JSON of protobuf


def _families(run: str, points: Iterable[tuple[str, int, float, int | None]]) -> "list[GaugeMetricFamily]":
    """Return one gauge per metric; `points` (name, rank, value, time in ns) are sorted by name."""
    from prometheus_client.core import GaugeMetricFamily

    families: dict[str, GaugeMetricFamily] = {}
    names: dict[str, str] = {}
    for name, rank, value, at_ns in points:
        if name not in names:
            names[name] = _free_name(_metric_name(name), families)
            families[names[name]] = GaugeMetricFamily(
                names[name], f"{escaping.inert(name)} of the step, by rank.", labels=_LABELS
            )
        scaled = value / _NS_PER_S if name.endswith("_ns") else value
        timestamp = None if at_ns is None else at_ns / _NS_PER_S
        families[names[name]].add_metric((escaping.inert(run), str(rank)), scaled, timestamp=timestamp)
    return list(families.values())


def _metric_name(name: str) -> str:
    """Return a name in Prometheus' spelling, with its base unit.

    >>> _metric_name("step_time_ns"), _metric_name("grad norm/layer.1")
    ('tracekit_step_time_seconds', 'tracekit_grad_norm_layer_1')
    """
    unit = f"{name.removesuffix('_ns')}_seconds" if name.endswith("_ns") else name
    return f"{_PREFIX}_{re.sub(r'[^a-zA-Z0-9_]', '_', unit)}"


def _free_name(name: str, used: Mapping[str, object]) -> str:
    """Return a name that is not used yet: names that differ in other characters only get a number."""
    count = 1
    candidate = name
    while candidate in used:
        count += 1
        candidate = f"{name}_{count}"
    return candidate
