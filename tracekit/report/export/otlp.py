"""Metrics of steps for OpenTelemetry: OTLP in JSON, a line per rank, as the collector's file receiver reads it.

Format: opentelemetry.io/docs/specs/otel/protocol/file-exporter, ExportMetricsServiceRequest with gauges.
"""

import json
from collections.abc import Iterator
from typing import Any

import polars as pl

from tracekit import conventions
from tracekit.errors import InputError

_UNITS = {"_ns": "ns", "_bytes": "By", "_ratio": "1", "_per_second": "1/s"}


def lines(run: str, samples: pl.DataFrame) -> Iterator[bytes]:
    """Yield the line of each rank of the samples, columns of `step_metrics`. Raises InputError without times."""
    timed = samples.drop_nulls("at_ns")
    if timed.is_empty():
        raise InputError("the times of the steps are not known: the run has no run.json or its log no step_time_ns")
    for (rank,), rank_samples in timed.group_by("rank", maintain_order=True):
        metrics = [_metric(str(name), points) for (name,), points in rank_samples.group_by("name", maintain_order=True)]
        resource = {"attributes": [_text("service.name", "tracekit"), _text("tracekit.run", run), _whole("rank", rank)]}
        scope = {"name": "tracekit", "version": conventions.VERSION}
        scoped = [{"scope": scope, "metrics": metrics}]
        yield json.dumps({"resourceMetrics": [{"resource": resource, "scopeMetrics": scoped}]}).encode() + b"\n"


def _metric(name: str, points: pl.DataFrame) -> dict[str, Any]:
    unit = next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")
    listed = [
        {"attributes": [_whole("step", step)], "timeUnixNano": str(at_ns), "asDouble": value}
        for step, value, at_ns in points.select("step", "value", "at_ns").iter_rows()
    ]
    return {"name": f"tracekit.{name}", "unit": unit, "gauge": {"dataPoints": listed}}


def _text(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}


def _whole(key: str, value: object) -> dict[str, Any]:
    return {"key": key, "value": {"intValue": str(value)}}  # int64 is text in the JSON of protobuf
