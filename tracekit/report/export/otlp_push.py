"""The metrics logs of a run, sent to an OpenTelemetry collector over HTTP by OpenTelemetry's exporter."""

import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import polars as pl

from tracekit import conventions
from tracekit.conventions import object_storage
from tracekit.errors import ConfigError, InputError, MissingExtraError
from tracekit.report.export import step_metrics

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import (
        Gauge,
        Metric,
        MetricExportResult,
        MetricsData,
        NumberDataPoint,
        ResourceMetrics,
        ScopeMetrics,
    )
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
except ImportError:
    raise MissingExtraError("--push needs OpenTelemetry's exporter: pip install 'torch-tracekit[otlp]'") from None

_PATH = "/v1/metrics"
# Collectors refuse requests above 4 to 20 MiB by default; 10,000 points are about 1 MB.
_REQUEST_POINTS = 10_000
_LOGGER = "opentelemetry"
_LAST_STEPS = {"rank": pl.Int64, "last_step": pl.Int64}


class Collector:
    """An OpenTelemetry collector; the variables OTEL_EXPORTER_OTLP_… state headers, certificates and timeout."""

    def __init__(self, url: str) -> None:
        """Raise ConfigError if the address is not one of HTTP."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--push {object_storage.shown(url)}: name a collector, such as http://127.0.0.1:4318")
        endpoint = urlunsplit(parts._replace(path=_PATH if parts.path in ("", "/") else parts.path))
        self.shown = object_storage.shown(endpoint)
        self._exporter = OTLPMetricExporter(endpoint=endpoint)

    def send(self, run: str, samples: pl.DataFrame) -> None:
        """Send samples, columns of `step_metrics`. Raises InputError if the collector does not take them."""
        messages = LastMessage()
        logger = logging.getLogger(_LOGGER)
        was_propagated, logger.propagate = logger.propagate, False
        logger.addHandler(messages)
        try:
            for request in requests(run, samples):
                if self._exporter.export(request) is not MetricExportResult.SUCCESS:
                    raise InputError(
                        f"{self.shown}: the collector did not take the metrics ({messages.text or 'no reason given'}); "
                        "check its address and OTEL_EXPORTER_OTLP_HEADERS"
                    )
        finally:
            logger.removeHandler(messages)
            logger.propagate = was_propagated


class UnsentSteps:
    """The steps of a folder's metrics logs that no collector has taken yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_steps: dict[int, int] = {}
        self.sent_count = 0
        """Steps that were sent, of all ranks."""

    def send(self, collector: Collector) -> None:
        """Send them; raises InputError without a log, without times, or if the collector does not take them."""
        all_samples = step_metrics.timed_samples(self._folder)
        last_steps = pl.DataFrame(
            {"rank": self._last_steps.keys(), "last_step": self._last_steps.values()}, _LAST_STEPS
        )
        samples = (
            all_samples.join(last_steps, on="rank", how="left")
            .filter(pl.col("step") > pl.col("last_step").fill_null(-1))
            .drop("last_step")
        )
        collector.send(step_metrics.run_name(self._folder), samples)
        self.sent_count += samples.select("rank", "step").n_unique()
        self._last_steps |= dict(samples.group_by("rank").agg(pl.col("step").max()).iter_rows())


class LastMessage(logging.Handler):
    """The last message of the exporter, which states only there why it failed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message in one line."""
        self.text = " ".join(record.getMessage().split())


def requests(run: str, samples: pl.DataFrame) -> Iterator[MetricsData]:
    """Yield the metrics of each rank, in requests of at most _REQUEST_POINTS points; all samples have times.

    The step is a metric of its own, not an attribute: each metric of a rank is then one time series.
    """
    steps = samples.unique(["rank", "step"], maintain_order=True).with_columns(
        name=pl.lit("step"), value=pl.col("step").cast(pl.Float64)
    )
    points_by_time = pl.concat([samples, steps]).sort("rank", "at_ns", "name")
    for (rank,), rank_samples in points_by_time.group_by("rank", maintain_order=True):
        for points in rank_samples.iter_slices(_REQUEST_POINTS):
            yield MetricsData([_rank_metrics(run, rank, points)])


def _rank_metrics(run: str, rank: object, points: pl.DataFrame) -> ResourceMetrics:
    metrics = [
        _metric(str(name), metric_points) for (name,), metric_points in points.group_by("name", maintain_order=True)
    ]
    scope = InstrumentationScope("tracekit", conventions.VERSION)
    resource = Resource(step_metrics.otlp_resource(run, int(str(rank))))
    return ResourceMetrics(resource, [ScopeMetrics(scope, metrics, "")], "")


def _metric(name: str, points: pl.DataFrame) -> Metric:
    data = [
        NumberDataPoint(attributes={}, start_time_unix_nano=0, time_unix_nano=at_ns, value=value)
        for value, at_ns in points.select("value", "at_ns").iter_rows()
    ]
    return Metric(step_metrics.otlp_name(name), None, step_metrics.otlp_unit(name), Gauge(data))
