"""Metrics of steps for Prometheus: the latest step as text, all steps with times as OpenMetrics."""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import polars as pl

from tracekit.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

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


def require_library() -> None:
    """Raise MissingExtraError if prometheus_client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "this format needs prometheus_client: pip install 'torch-tracekit[prometheus]'"
        ) from None


def latest(run: str, rows: Mapping[int, Mapping[str, float]]) -> "list[GaugeMetricFamily]":
    """Return the gauges of the latest step of each rank; `rows` has its metrics by name, and `step`."""
    points = [(name, rank, value, None) for rank, row in sorted(rows.items()) for name, value in row.items()]
    return _families(run, sorted(points, key=lambda point: point[0]))


def text(families: "Iterable[GaugeMetricFamily]") -> bytes:
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

    timed = samples.drop_nulls("at_ns").sort("name", "rank", "at_ns")
    if timed.is_empty():
        raise InputError("the times of the steps are not known: the run has no run.json or its log no step_time_ns")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StaticCollector(_families(run, timed.select("name", "rank", "value", "at_ns").rows())))
    return bytes(generate_latest(registry))  # type: ignore[no-untyped-call]


def _families(run: str, points: Iterable[tuple[str, int, float, int | None]]) -> "list[GaugeMetricFamily]":
    """Return one gauge per metric; `points` (name, rank, value, time in ns) are sorted by name."""
    from prometheus_client.core import GaugeMetricFamily

    families: dict[str, GaugeMetricFamily] = {}
    names: dict[str, str] = {}
    for name, rank, value, at_ns in points:
        if name not in names:
            names[name] = _free_name(_metric_name(name), families)
            families[names[name]] = GaugeMetricFamily(names[name], f"{name} of the step, by rank.", labels=_LABELS)
        scaled = value / _NS_PER_S if name.endswith("_ns") else value
        timestamp = None if at_ns is None else at_ns / _NS_PER_S
        families[names[name]].add_metric((run, str(rank)), scaled, timestamp=timestamp)
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
