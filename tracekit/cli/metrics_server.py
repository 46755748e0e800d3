"""The latest step of each rank of a running training, for Prometheus: as text, and served on this machine only."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracekit.cli.watch.rank_log import LogTail
from tracekit.errors import InputError
from tracekit.report.export import step_metrics

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

ADDRESS = "127.0.0.1"
_FIRST_BYTES = 64 << 10


class LatestMetrics:
    """The latest numbers of each rank's metrics log, read on as the logs grow; what prometheus_client collects from."""

    def __init__(self, folder: Path) -> None:
        """Start at the end of the logs. Raises InputError if the folder has none."""
        step_metrics.logs(folder)
        self._folder = folder
        self._tails: dict[int, LogTail] = {}
        self._rows: dict[int, dict[str, float]] = {}

    def collect(self) -> "Iterable[GaugeMetricFamily]":
        """Return the gauges of the latest step that has reached each log."""
        for rank, path in step_metrics.logs(self._folder).items():
            complete_path = path.with_name(path.name.removesuffix(".partial"))
            tail = self._tails.setdefault(rank, LogTail(complete_path, first_bytes=_FIRST_BYTES))
            rows = tail.read()
            while tail.is_behind:
                rows += tail.read()
            if rows:
                self._rows[rank] = _numbers(rows[-1])
        return step_metrics.prometheus_latest(step_metrics.run_name(self._folder), self._rows)


def serve(folder: Path, port: int) -> None:
    """Serve the metrics at http://127.0.0.1:PORT/metrics until interrupted. Raises InputError if the port is in use."""
    from prometheus_client import CollectorRegistry, start_http_server

    from tracekit.cli import output

    registry = CollectorRegistry(auto_describe=False)
    registry.register(LatestMetrics(folder))
    try:
        server, thread = start_http_server(port, addr=ADDRESS, registry=registry)
    except OSError as error:
        raise InputError(f"port {port}: {error.strerror}; choose another with --serve") from None
    output.notify(f"metrics of {folder} at http://{ADDRESS}:{server.server_port}/metrics; stop with Ctrl-C")
    try:
        while thread.is_alive():
            time.sleep(1)
    except KeyboardInterrupt:
        server.shutdown()


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if name != "rank" and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    }
