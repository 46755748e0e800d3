"""``tracekit export``: a run for other programs and people: Perfetto, a page to share, Prometheus, OpenTelemetry, …."""

import contextlib
import importlib.util
import subprocess
import tempfile
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, cast
from urllib.parse import parse_qsl, urlsplit

import typer

from tracekit import conventions
from tracekit.cli import output, run_loading
from tracekit.cli.options import RunOptions, SelectedWork, expand_options
from tracekit.conventions import object_storage, python_child, regular_files
from tracekit.errors import ConfigError, InputError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import GaugeMetricFamily

    from tracekit.cli.watch.rank_log import LogTail
    from tracekit.model.run import Run

TIMELINE = "timeline"
_DEFAULT_PAGE = "diagnosis"
_ZIP_LEVEL = 2


class ExportFormat(StrEnum):
    """Formats of other programs."""

    PERFETTO = "perfetto"
    HTML = "html"
    PROMETHEUS = "prometheus"
    OPENMETRICS = "openmetrics"
    OTLP = "otlp"
    TENSORBOARD = "tensorboard"


ADDRESS = "127.0.0.1"
_PUSH_INTERVAL_S = 10
_FIRST_BYTES = 64 << 10
_MAX_VALUE = 1e300


class LatestMetrics:
    """The latest numbers of each rank's metrics log, read on as the logs grow; what prometheus_client collects from."""

    def __init__(self, folder: Path) -> None:
        """Start at the end of the logs. Raises InputError if the folder has none."""
        from tracekit.report.export import step_metrics

        step_metrics.logs(folder)
        self._folder = folder
        self._tails: dict[int, LogTail] = {}
        self._rows: dict[int, dict[str, float]] = {}

    def collect(self) -> "Iterable[GaugeMetricFamily]":
        """Return the gauges of the latest step that has reached each log."""
        from tracekit.cli.watch.rank_log import LogTail
        from tracekit.report.export import step_metrics

        for rank in step_metrics.logs(self._folder):
            path = self._folder / conventions.rank_file(rank, conventions.METRICS_SUFFIX)
            tail = self._tails.setdefault(rank, LogTail(path, first_bytes=_FIRST_BYTES))
            rows = tail.read()
            while tail.is_behind:
                rows += tail.read()
            if rows:
                self._rows[rank] = {
                    name: float(value)
                    for name, value in rows[-1].items()
                    if name != "rank"
                    and isinstance(value, int | float)
                    and not isinstance(value, bool)
                    and abs(value) < _MAX_VALUE
                }
        return step_metrics.prometheus_latest(step_metrics.run_name(self._folder), self._rows)


@expand_options
def export(
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="File to write, such as run.pftrace; compressed if the name ends in .gz. Of tensorboard: a folder.",
        ),
    ] = None,
    export_format: Annotated[ExportFormat, typer.Option("--format", help="See above.")] = ExportFormat.PERFETTO,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS:]PORT",
            help="Prometheus: serve the latest step in place of a file, on 127.0.0.1 without an address.",
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Otlp: send all steps to a collector, and further ones while ranks write."),
    ] = None,
    findings: Annotated[
        bool,
        typer.Option("--findings/--no-findings", help="Perfetto: add a track with the findings of tracekit check."),
    ] = True,
    critical_path: Annotated[
        bool, typer.Option("--critical-path", help="Perfetto: add a track with the critical path of the step.")
    ] = False,
    view: Annotated[
        str, typer.Option(metavar="LINK", help="Html: a link of the dashboard, or its end, such as 'kernels?by=name'.")
    ] = TIMELINE,
    work: SelectedWork,
    source: RunOptions,
) -> None:
    """Write a run for another program, or a view of it for another person.

    \b
    perfetto     one trace of all ranks on one clock, for ui.perfetto.dev
    html         a page of the dashboard as one file of at most 5 MB, without a
                 network; pages except the timeline need the extra [dashboard]
    prometheus   the latest step of each rank, as text for the node exporter,
                 or served by --serve
    openmetrics  all steps with their times, as promtool backfills them
    otlp         all steps as OpenTelemetry JSON lines, or sent by --push
    tensorboard  all steps as scalars, a folder per rank

    In a Perfetto trace, each rank is a process, and each stream or thread a track. Slices that overlap others without
    nesting get an additional track, so none is dropped. The last four formats write the metrics logs of a local folder.
    They need no traces, and the training may still be running.
    """  # noqa: D301 click keeps the lines of a paragraph after \b
    if serve is not None:
        _serve(_folder_of_logs(source), serve, export_format, out)
        return
    if push is not None:
        _push(_folder_of_logs(source), push, export_format, out)
        return
    if out is None:
        raise ConfigError(
            "--out PATH is needed, or --serve PORT with --format prometheus, or --push URL with --format otlp"
        )
    if export_format is ExportFormat.HTML:
        write_page(source, view, out)
        return
    if export_format is not ExportFormat.PERFETTO:
        _write_metrics(_folder_of_logs(source), export_format, out)
        return
    _write_perfetto(source, work, out, findings=findings, with_path=critical_path)


def _folder_of_logs(source: RunOptions) -> Path:
    """Folder of the metrics logs. Raises InputError if there is no folder of the role."""
    folder = Path(source.run)
    return folder if source.role is None else run_loading.role_folder(folder, source.role)


def serve_address(text: str) -> tuple[str, int]:
    """Address and port of `--serve`; raises ConfigError if there is no port.

    >>> serve_address("9464"), serve_address("0.0.0.0:9464"), serve_address("[::1]:0")
    (('127.0.0.1', 9464), ('0.0.0.0', 9464), ('::1', 0))
    """
    address, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(
            f"--serve {text}: name a port from 0 to 65535, or an address and a port, such as 0.0.0.0:9464"
        )
    return address.removeprefix("[").removesuffix("]") or ADDRESS, int(port)


def _serve(folder: Path, place: str, export_format: ExportFormat, out: Path | None) -> None:
    """Serve the metrics at /metrics until interrupted. Raises InputError if the address cannot be used."""
    from tracekit.report.export import step_metrics

    if out is not None or export_format not in (ExportFormat.PROMETHEUS, ExportFormat.OPENMETRICS):
        raise ConfigError("--serve is for --format prometheus, without --out")
    address, port = serve_address(place)
    step_metrics.require_library()
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(LatestMetrics(folder))
    try:
        server, thread = start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise InputError(f"--serve {place}: {error.strerror}; choose another address or port") from None
    shown = f"[{address}]" if ":" in address else address
    output.notify(f"metrics of {folder} at http://{shown}:{server.server_port}/metrics; stop with Ctrl-C")
    try:
        while thread.is_alive():
            time.sleep(1)
    except KeyboardInterrupt:
        server.shutdown()


def _push(folder: Path, url: str, export_format: ExportFormat, out: Path | None) -> None:
    """Send the metrics to a collector, and further steps until no rank writes or the user interrupts.

    Raises InputError if the collector does not take the first or the last steps; others are sent again with the next.
    """
    if out is not None or export_format is not ExportFormat.OTLP:
        raise ConfigError("--push is for --format otlp, without --out")
    from tracekit.model import units
    from tracekit.report.export import otlp_push, step_metrics

    collector = otlp_push.Collector(url)
    unsent = otlp_push.UnsentSteps(folder)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            is_running = step_metrics.is_being_written(folder)  # asked first: steps may come while others are sent
            try:
                unsent.send(collector)
            except InputError as error:
                if not is_running or not unsent.sent_count:
                    raise
                output.notify(f"{error}; they are sent again with the next steps")
            if not is_running:
                break
            time.sleep(_PUSH_INTERVAL_S)
    output.notify(f"{folder}: {units.count(unsent.sent_count, 'step')} sent to {collector.shown}")


def _write_metrics(folder: Path, export_format: ExportFormat, out: Path) -> None:
    """Write the metrics logs of a folder."""
    from tracekit.model import units
    from tracekit.report.export import step_metrics

    run, samples = step_metrics.run_name(folder), step_metrics.samples(folder)
    if export_format is ExportFormat.TENSORBOARD:
        step_metrics.write_tensorboard(samples, out)
    elif export_format is ExportFormat.OTLP:
        _write_bytes(b"".join(step_metrics.otlp_lines(run, samples)), out)
    else:
        step_metrics.require_library()
        is_latest = export_format is ExportFormat.PROMETHEUS
        latest = step_metrics.prometheus_text(LatestMetrics(folder).collect()) if is_latest else None
        _write_bytes(step_metrics.history(run, samples) if latest is None else latest, out)
    ranks = samples["rank"].n_unique()
    output.notify(f"{out}: {units.count(samples['name'].n_unique(), 'metric')} of {units.count(ranks, 'rank')}")


def _write_bytes(content: bytes, out: Path) -> None:
    with output.atomic_file(out) as file, _compress(file, out) as packed:
        packed.write(content)


def _write_perfetto(source: RunOptions, work: SelectedWork, out: Path, *, findings: bool, with_path: bool) -> None:
    from tracekit.model import units
    from tracekit.replay.graph.critical_path import path
    from tracekit.report.export import perfetto
    from tracekit.rules import engine

    step, selected = work.step, work.rank_numbers()
    run = source.open()
    with output.progress() as bar:
        callback = bar.trace_callback(len(run.sources) * (2 if findings else 1))
        report_findings = engine.check(run, on_progress=callback).findings if findings else ()
        explained = path.critical_path(run, step) if with_path else None
        with output.atomic_file(out) as file, _compress(file, out) as packed:
            written = perfetto.write(
                run, packed, findings=report_findings, path=explained, step=step, ranks=selected, on_progress=callback
            )
    extra = f"; {units.count(written.own_tracks, 'track')} added for overlapping slices" if written.own_tracks else ""
    output.notify(
        f"{out}: {units.count(written.slices, 'slice')} of {units.count(written.traces, 'trace')}{extra}; "
        "open at ui.perfetto.dev"
    )
    _report_unaligned(run)


def _report_unaligned(run: "Run") -> None:
    """Report which ranks of several are not on the run's clock."""
    import polars as pl

    from tracekit.model import units

    unaligned = run.offsets.filter(pl.col("residual_ns").is_null())["rank"].unique()
    if len(unaligned) and len(run.ranks) > 1:
        several = len(unaligned) > 1
        output.notify(
            f"{units.numbers('rank', unaligned)} share{'' if several else 's'} too few collectives: "
            f"{'each is' if several else 'it is'} on its own clock in the file"
        )


@contextlib.contextmanager
def _compress(file: BinaryIO, out: Path) -> Iterator[BinaryIO]:
    if out.suffix != ".gz":
        yield file
        return
    from isal import igzip

    # Neither a time nor a name inside: the same run gives the same bytes.
    with igzip.IGzipFile(filename="", mode="wb", compresslevel=_ZIP_LEVEL, fileobj=file, mtime=0) as packed:
        yield cast("BinaryIO", packed)


def write_page(source: RunOptions, link: str, out: Path) -> None:
    """Write the page of a run that a link names. Raises InputError if there is no such page or run."""
    address, query = split_link(link)
    if address == TIMELINE:
        content = _timeline(source, query)
    else:
        path = source.run if source.role is None else str(run_loading.role_folder(Path(source.run), source.role))
        content = _dashboard_page(path, address, query)
    with output.atomic_file(out) as file:
        file.write(content)
    from tracekit.model import units

    output.notify(f"{out}: {address} of the run, {units.size(len(content))}")


def split_link(link: str) -> tuple[str, str]:
    """Return the page's address and the query of a link, or of its end.

    >>> split_link("http://localhost:8501/kernels?run=a&by=name"), split_link("ranks"), split_link("localhost:8501/")
    (('kernels', 'run=a&by=name'), ('ranks', ''), ('diagnosis', ''))
    """
    parts = urlsplit(link)
    return parts.path.rpartition("/")[2] or _DEFAULT_PAGE, parts.query


def _timeline(source: RunOptions, query: str) -> bytes:
    from tracekit.report import shared_view
    from tracekit.rules import engine

    run = source.open()
    with output.progress() as bar:
        report = engine.check(run, on_progress=bar.trace_callback(len(run.sources)))
    return shared_view.render(shared_view.timeline_view(report, run, dict(parse_qsl(query)))).encode()


def _dashboard_page(run: str, address: str, query: str) -> bytes:
    place = run if object_storage.is_url(run) else str(Path(run).resolve())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "page.html"
        spec = importlib.util.find_spec("dashboard") if importlib.util.find_spec("streamlit") else None
        script = Path(spec.origin).parent / "server" / "shared_page.py" if spec and spec.origin else None
        if script is None or not script.is_file():
            raise MissingExtraError(
                "pages other than the timeline need the dashboard: pip install 'torch-tracekit[dashboard]'"
            )
        command = python_child.script_command(script, place, address, query, str(out))
        done = subprocess.run(  # noqa: S603 our own
            command, env=python_child.environment(), capture_output=True, text=True, check=False
        )
        if not out.is_file():
            lines = done.stderr.strip().splitlines() or ["the page cannot be drawn"]
            raise InputError(f"{run}: {lines[-1]}")
        return regular_files.read_bytes(out)
