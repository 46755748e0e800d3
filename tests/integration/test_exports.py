"""Metrics logs for Prometheus, OpenTelemetry and TensorBoard, read back by their own libraries."""

import gzip
import http.server
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from importlib.util import find_spec

import polars as pl
import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

import tracekit
from tests.support import cli_runner
from tests.support.cli_runner import ROOT
from tracekit import conventions
from tracekit.conventions import device_metrics
from tracekit.errors import InputError, MissingExtraError
from tracekit.report.export import step_metrics

RUN = ROOT / "tests" / "recordings" / "dftracer"
needs_exporter = pytest.mark.skipif(
    not (find_spec("opentelemetry") and find_spec("opentelemetry.exporter")), reason="needs the extra [otlp]"
)


def rows(rank, folder=RUN):
    return [json.loads(line) for line in (folder / f"rank0000{rank}.metrics.jsonl").read_text().splitlines()]


def export(out, export_format, folder=RUN):
    return cli_runner.tracekit("export", folder, "--format", export_format, "--out", out)


def gauges(text):
    return {
        (sample.name, int(sample.labels["rank"])): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def expected_gauges(row, rank):
    seconds = {f"tracekit_{n.removesuffix('_ns')}_seconds": v / 1e9 for n, v in row.items() if n.endswith("_ns")}
    others = {f"tracekit_{n}": v for n, v in row.items() if not n.endswith("_ns")}
    return {(name, rank): pytest.approx(value) for name, value in (seconds | others).items()}


def test_prometheus_has_the_latest_step_of_each_rank(tmp_path):
    assert export(tmp_path / "run.prom", "prometheus").returncode == 0
    found = gauges((tmp_path / "run.prom").read_text())
    assert found == expected_gauges(rows(0)[-1], 0) | expected_gauges(rows(1)[-1], 1)


def test_openmetrics_has_all_steps_at_their_times(tmp_path):
    assert export(tmp_path / "run.om", "openmetrics").returncode == 0
    families = list(openmetrics_parser.text_string_to_metric_families((tmp_path / "run.om").read_text()))
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) == sum(len(row) - 1 for rank in (0, 1) for row in rows(rank))
    losses = [(s.value, float(s.timestamp)) for s in samples if s.name == "tracekit_loss" and s.labels["rank"] == "1"]
    assert [loss for loss, _ in losses] == pytest.approx([row["loss"] for row in rows(1)])
    assert losses == sorted(losses, key=lambda pair: pair[1])


def test_times_of_steps_agree_with_the_trace():
    trace = tracekit.load(RUN, cache=False).trace(0)
    samples = step_metrics.samples(RUN)
    for step, end_ns in trace.steps.select("step", "host_end_ns").rows():
        (at_ns,) = set(samples.filter(rank=0, step=step)["at_ns"])
        assert 0 <= end_ns - at_ns < 200_000_000  # the time between steps: here a save


def test_otlp_is_what_the_protocol_says(tmp_path):
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    json_format = pytest.importorskip("google.protobuf.json_format")
    assert export(tmp_path / "run.jsonl", "otlp").returncode == 0
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        (of_rank,) = json_format.Parse(line, service.ExportMetricsServiceRequest()).resource_metrics
        attributes = {a.key: a.value for a in of_rank.resource.attributes}
        assert (attributes["rank"].int_value, attributes["tracekit.run"].string_value) == (rank, "dftracer")
        found = {m.name.removeprefix("tracekit."): m for m in of_rank.scope_metrics[0].metrics}
        for name in set(rows(rank)[0]) - {"step"}:
            points = found[name].gauge.data_points
            assert [p.as_double for p in points] == [row[name] for row in rows(rank)]
            assert [p.attributes[0].value.int_value for p in points] == [row["step"] for row in rows(rank)]
        assert found["step_time_ns"].unit == "ns"


def test_tensorboard_shows_all_steps(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert export(tmp_path / "boards", "tensorboard").returncode == 0
    for rank in (0, 1):
        board = accumulator.EventAccumulator(str(tmp_path / "boards" / f"rank0000{rank}"))
        board.Reload()
        assert set(board.Tags()["scalars"]) == set(rows(rank)[0]) - {"step"}
        for name in board.Tags()["scalars"]:
            scalars = board.Scalars(name)
            assert [s.step for s in scalars] == [row["step"] for row in rows(rank)]
            assert [s.value for s in scalars] == pytest.approx([row[name] for row in rows(rank)])
    again = export(tmp_path / "boards", "tensorboard")
    assert again.returncode == 2
    assert "is not an empty folder" in again.stderr


def test_a_running_training_is_served_on_this_machine(tmp_path):
    log = tmp_path / "rank00000.metrics.jsonl.partial"
    log.write_text('{"step": 0, "loss": 2.5, "step_time_ns": 500000000}\n')
    command = [sys.executable, "-m", "tracekit", "export", str(tmp_path), "--format", "prometheus", "--serve", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = re.search(r"http://127\.0\.0\.1:\d+/metrics", server.stderr.readline())[0]

            def scraped():
                with urllib.request.urlopen(url, timeout=60) as answer:
                    return gauges(answer.read().decode())

            first = {("tracekit_step", 0): 0, ("tracekit_loss", 0): 2.5, ("tracekit_step_time_seconds", 0): 0.5}
            assert scraped() == first
            with log.open("a") as file:
                file.write('{"step": 1, "loss": 2.25}\n{"step": 2, "lo')
            assert scraped() == {("tracekit_step", 0): 1, ("tracekit_loss", 0): 2.25}
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(300) == 0


def test_metrics_whose_names_differ_in_other_characters_stay_apart():
    families = step_metrics.prometheus_latest("run", {0: {"a/b": 1.0, "a b": 2.0}})
    assert gauges(step_metrics.prometheus_text(families).decode()) == {
        ("tracekit_a_b", 0): 2.0,
        ("tracekit_a_b_2", 0): 1.0,
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--format", "otlp"), "--out PATH is needed"),
        (("--serve", "0"), "--serve is for --format prometheus"),
        (("--format", "prometheus", "--serve", "0", "--out", "x"), "--serve is for --format prometheus, without --out"),
        (("--format", "nosuch", "--out", "x"), "nosuch"),
    ],
)
def test_options_that_do_not_fit_are_named(arguments, said):
    ended = cli_runner.tracekit("export", RUN, *arguments)
    assert ended.returncode == 2
    assert said in ended.stderr


def test_a_folder_without_logs_or_times_is_named(tmp_path):
    with pytest.raises(InputError, match="no metrics log"):
        step_metrics.samples(tmp_path)
    with pytest.raises(InputError, match="this is none"):
        step_metrics.samples(tmp_path / "nothing")
    shutil.copy(RUN / "rank00000.metrics.jsonl", tmp_path)
    assert step_metrics.samples(tmp_path)["at_ns"].null_count() == step_metrics.samples(tmp_path).height
    for export_format in ("otlp", "openmetrics"):
        ended = export(tmp_path / "out", export_format, tmp_path)
        assert ended.returncode == 2
        assert "the times of the steps are not known" in ended.stderr


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"torch-tracekit\[prometheus\]"):
        step_metrics.require_library()
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(MissingExtraError, match=r"torch-tracekit\[tensorboard\]"):
        step_metrics.write_tensorboard(step_metrics.samples(RUN), tmp_path / "boards")


class CollectorStandIn:
    """An OTLP collector on this machine that keeps what it takes; it answers with `status`."""

    def __init__(self, status=200):
        service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
        self.requests = requests = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                requests.append((self.path, dict(self.headers), service.ExportMetricsServiceRequest.FromString(body)))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def points(self):
        """Values by rank, metric and time, with the unit of each metric."""
        return {
            (attributes["rank"].int_value, metric.name.removeprefix("tracekit."), point.time_unix_nano): point.as_double
            for _, _, request in self.requests
            for resource in request.resource_metrics
            for attributes in [{a.key: a.value for a in resource.resource.attributes}]
            for metric in resource.scope_metrics[0].metrics
            for point in metric.gauge.data_points
        }


def push(url, folder=RUN, **environment):
    return cli_runner.tracekit("export", folder, "--format", "otlp", "--push", url, **environment)


def expected_points(folder=RUN):
    samples = step_metrics.samples(folder)
    steps = samples.unique(["rank", "step"]).with_columns(name=pl.lit("step"), value=pl.col("step").cast(pl.Float64))
    rows_of_samples = pl.concat([samples, steps]).select("rank", "name", "at_ns", "value").rows()
    return {(rank, name, at_ns): value for rank, name, at_ns, value in rows_of_samples}


@needs_exporter
def test_a_collector_gets_all_steps_at_their_times():
    with CollectorStandIn() as collector:
        done = push(collector.url, OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20abc")
    assert done.returncode == 0, done.stderr
    assert collector.points() == expected_points()
    assert {(path, headers["authorization"]) for path, headers, _ in collector.requests} == {
        ("/v1/metrics", "Bearer abc")
    }
    assert {value for key, value in collector.points().items() if key[1] == "step"} == {row["step"] for row in rows(0)}


@needs_exporter
def test_steps_that_come_later_are_sent_alone(tmp_path):
    from tracekit.report.export import otlp_push

    shutil.copy(RUN / "run.json", tmp_path)
    log = tmp_path / "rank00000.metrics.jsonl.partial"
    lines = (RUN / "rank00000.metrics.jsonl").read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:2]))
    unsent = otlp_push.UnsentSteps(tmp_path)
    with CollectorStandIn() as collector:
        unsent.send(otlp_push.Collector(collector.url))
        first = collector.points()
        log.write_text("".join(lines))
        collector.requests.clear()
        unsent.send(otlp_push.Collector(collector.url))
        later = collector.points()
        collector.requests.clear()
        unsent.send(otlp_push.Collector(collector.url))
        assert not collector.requests
    assert first | later == expected_points(tmp_path)
    assert not set(first) & set(later)
    assert unsent.sent_count == len(lines)


@needs_exporter
def test_many_points_are_sent_in_several_requests(monkeypatch):
    from tracekit.report.export import otlp_push

    monkeypatch.setattr(otlp_push, "_REQUEST_POINTS", 7)
    with CollectorStandIn() as collector:
        otlp_push.UnsentSteps(RUN).send(otlp_push.Collector(f"{collector.url}/api/otlp/v1/metrics"))
    assert collector.points() == expected_points()
    assert len(collector.requests) >= len(expected_points()) // 7
    assert {path for path, _, _ in collector.requests} == {"/api/otlp/v1/metrics"}


@needs_exporter
def test_a_collector_that_refuses_is_named_without_its_password():
    with CollectorStandIn(status=400) as collector:
        done = push(collector.url.replace("://", "://user:secret@"))
    assert done.returncode == 2
    assert f"127.0.0.1:{collector.server.server_port}" in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--format", "otlp", "--push", "collector:4318"), "--push collector:4318"),
        (("--format", "otlp", "--push", "http://"), "--push http://"),
        (("--format", "prometheus", "--push", "http://127.0.0.1:4318"), "--push is for --format otlp"),
        (("--format", "otlp", "--push", "http://127.0.0.1:4318", "--out", "x"), "without --out"),
        (("--format", "prometheus", "--serve", "0.0.0.0"), "--serve 0.0.0.0"),
        (("--format", "prometheus", "--serve", "127.0.0.1:99999"), "--serve 127.0.0.1:99999"),
        (("--format", "prometheus", "--serve", "no.such.host.invalid:0"), "--serve no.such.host.invalid:0"),
    ],
)
def test_addresses_that_cannot_be_used_are_named(arguments, words):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra [otlp]")
    done = cli_runner.tracekit("export", RUN, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_board_for_grafana_shows_metrics_that_the_exporter_writes():
    board = json.loads((ROOT / "deploy" / "grafana_dashboard.json").read_text(encoding="utf-8"))
    logged = [value for name, value in vars(conventions).items() if name.endswith("_METRIC")]
    families = step_metrics.prometheus_latest("run", {0: dict.fromkeys(["step", *logged, *device_metrics.NAMES], 1.0)})
    variables = [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]] + variables
    used = {name for expression in expressions for name in re.findall(r"\btracekit_\w+", expression)}
    assert len(used) > 10
    assert used <= {family.name for family in families}
    assert {label for text in expressions for label in re.findall(r"(\w+)=~", text)} == {"run", "rank"}
