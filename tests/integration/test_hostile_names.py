"""What commands print of a run with hostile names: to terminals, CI's log, spreadsheets, browsers and parsers."""

import csv
import gzip
import io
import json
import random
import re
import string
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

import tracekit as tracekit_library
from tests.support import loaded_runs
from tests.support.cli_runner import ROOT, tracekit

runs_loaded_once = loaded_runs.runs_loaded_once
pytestmark = pytest.mark.usefixtures("runs_loaded_once")
HOSTILE = (
    "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "::error file=x::obey", "::set-output name=a::b", "##[error]obey",
    "##vso[task.setvariable]x", '=HYPERLINK("http://x","y")', "+cmd|' /C calc'!A0", "@SUM(1)", "-2+3|x",
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", '"}],"x":[{"', "a\nb", "a\r\n::error::c", "a\x00b",
    "\ud800", "\u202eabc", "\u2028x", "```\n# h1", "[x](javascript:alert(1))", "| a | b |", ";y 5\n;z 6",
    "x" * 5000 + "\x9b31m",
)  # fmt: skip
BEGINS_WITH_HOSTILE = ("kernel", "python_function", "gpu_memcpy")
"""Of these, nothing is known by how the name begins."""
READABLE = tuple(text for text in HOSTILE if text.isprintable())
LETTERS = bytes(ord(string.ascii_letters[value % len(string.ascii_letters)]) for value in range(256))
LONG = random.Random(47).randbytes(1 << 20).translate(LETTERS).decode()
"""Ends the name of one operator of each rank."""
NAMED_ARGUMENTS = ("Collective name", "Process Group Description", "kernel_file", "kernel_backend")
COMMANDS = {
    "check": ("text", "json", "markdown", "html", "github", "sarif", "junit", "codequality"),
    "summary": ("text", "json", "markdown", "html"),
    "kernels": ("text", "json", "markdown", "html", "csv"),
    "kernels --of host --by stack": ("text",),
    "whatif": ("text", "json", "markdown", "html"),
    "tune": ("text", "json", "markdown", "html"),
    "whatif --critical-path": ("text", "json", "html"),
    "memory": ("text", "json", "html"),
    "query": ("table", "json", "csv"),
}
CASES = [(command, form) for command, forms in COMMANDS.items() for form in forms]
UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
CI_COMMAND = re.compile(r"^\s*::[a-z]|##(vso)?\[", re.MULTILINE)
# Attributes and elements that a browser would run or load.
RUNS = ("onerror", "onload", "onclick", "srcdoc")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "::error::<b>\x1b[31m=1+1\u202e"
    folder.mkdir()
    written = {}
    for file in (ROOT / "sample_traces" / "ci" / "red").iterdir():
        if file.name.endswith(".json.gz"):
            trace = json.loads(gzip.decompress(file.read_bytes()))
            for event in trace["traceEvents"]:
                _spoil(event, written)
            next(event for event in trace["traceEvents"] if event.get("cat") == "cpu_op")["name"] += LONG
            (folder / file.name).write_bytes(gzip.compress(json.dumps(trace).encode()))
        elif file.name.endswith(".metrics.jsonl"):
            rows = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
            lines = [json.dumps(row | dict.fromkeys(HOSTILE, 1.5)) for row in rows]
            (folder / file.name).write_text("\n".join([*lines, ""]), encoding="utf-8")
    manifest = json.loads((ROOT / "sample_traces" / "ci" / "red" / "run.json").read_text(encoding="utf-8"))
    manifest |= {"host": HOSTILE[0], "device_name": HOSTILE[10], "command": list(HOSTILE)}
    (folder / "run.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def _spoil(event: dict, written: dict[tuple[str, str], str]) -> None:
    """Add hostile text to all names of an event, the same to the same name."""
    args = event.get("args", {})
    if event.get("ph") == "M":
        if "name" in args:
            args["name"] = f"{args['name']} {HOSTILE[len(written) % len(HOSTILE)]}"
        return
    key = (event.get("cat", ""), event["name"])
    if key not in written:
        text = HOSTILE[len(written) % len(HOSTILE)]
        names = (text, event["name"]) if key[0] in BEGINS_WITH_HOSTILE else (event["name"], text)
        written[key] = " ".join(names)
    event["name"] = written[key]
    args.update({name: f"{args[name]} {HOSTILE[1]}" for name in NAMED_ARGUMENTS if name in args})


@pytest.mark.parametrize(("command", "form"), CASES)
def test_no_name_is_obeyed_split_or_lost(command: str, form: str, run: Path) -> None:
    name, *options = command.split()
    if name == "check":
        options += ["--fail-on", "never", "-v"]
    if name == "query":
        options = ["select distinct name from ops order by name"]
    if "stack" not in options:
        options += ["--format", form]
    done = tracekit(name, run, *options, GITHUB_ACTIONS="true", COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert not UNSEEN.search(done.stdout)
    if form != "github":  # its lines are the commands of tracekit
        assert not CI_COMMAND.search(done.stdout)
    READERS.get(form, lambda text: None)(done.stdout)


@pytest.mark.parametrize("form", ["prometheus", "openmetrics", "otlp"])
def test_metrics_are_read_back_as_many_as_they_are(form: str, run: Path, tmp_path: Path) -> None:
    done = tracekit("export", run, "--format", form, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out").read_text(encoding="utf-8")
    assert not UNSEEN.search(text)
    if form == "otlp":
        service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
        json_format = pytest.importorskip("google.protobuf.json_format")
        for line in text.splitlines():
            (of_rank,) = json_format.Parse(line, service.ExportMetricsServiceRequest()).resource_metrics
            metrics = {metric.name for metric in of_rank.scope_metrics[0].metrics}
            assert {f"tracekit.{name}" for name in READABLE} <= metrics
    else:
        parse = parser if form == "prometheus" else openmetrics_parser
        assert len(list(parse.text_string_to_metric_families(text))) >= len(HOSTILE)


def test_tensorboard_reads_each_metric_back(run: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    done = tracekit("export", run, "--format", "tensorboard", "--out", tmp_path / "boards")
    assert done.returncode == 0, done.stderr
    boards = sorted((tmp_path / "boards").iterdir())
    assert [board.name for board in boards] == ["rank00000", "rank00001"]
    for board in boards:
        events = accumulator.EventAccumulator(str(board))
        events.Reload()
        names = set(events.Tags()["scalars"])
        assert set(READABLE) <= names
        assert not [name for name in names if UNSEEN.search(name)]


def test_a_perfetto_export_has_each_name_whole(run: Path, tmp_path: Path) -> None:
    schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    done = tracekit("export", run, "--out", tmp_path / "out.pftrace")
    assert done.returncode == 0, done.stderr
    trace = schema.Trace.FromString((tmp_path / "out.pftrace").read_bytes())
    names = {entry.name for packet in trace.packet for entry in packet.interned_data.event_names}
    for text in (*READABLE, LONG):
        assert any(text in name for name in names), text[:50]


def test_folded_stacks_are_a_line_each_and_split_at_their_own_frames_only(run: Path, tmp_path: Path) -> None:
    for suffix in ("folded", "speedscope.json"):
        done = tracekit("kernels", run, "--of", "host", "--by", "stack", "--out", tmp_path / f"out.{suffix}")
        assert done.returncode == 0, done.stderr
    profile = json.loads((tmp_path / "out.speedscope.json").read_text(encoding="utf-8"))
    frames = [frame["name"] for frame in profile["shared"]["frames"]]
    text = (tmp_path / "out.folded").read_text(encoding="utf-8")
    assert not UNSEEN.search(text)
    lines = text.splitlines()
    assert len(lines) == len(profile["profiles"][0]["samples"])
    assert all(line.rpartition(" ")[2].isdecimal() for line in lines)
    depths = sorted(line.rpartition(" ")[0].count(";") + 1 for line in lines)
    assert depths == sorted(map(len, profile["profiles"][0]["samples"]))
    assert any(LONG in name for name in frames)


@pytest.fixture(scope="module")
def answers(run: Path) -> dict[str, object]:
    loaded = tracekit_library.load(run, cache=False)
    report = loaded.check()
    return {
        "run": loaded,
        "report": report,
        "finding": report.findings[0],
        "tables": loaded.tables,
        "what if": loaded.what_if(),
        "timeline": loaded.timeline(),
    }


@pytest.mark.parametrize("name", ["run", "report", "finding", "tables", "what if", "timeline"])
def test_a_notebook_shows_names_as_text(name: str, answers: dict[str, object]) -> None:
    html = answers[name]._repr_html_()
    assert not UNSEEN.search(html)
    frames = [attributes for tag, attributes in _Tags.of(html) if tag == "iframe"]
    assert [frame["sandbox"] for frame in frames] == ["allow-scripts"] * (name == "timeline")
    for page in [frame["srcdoc"] for frame in frames] or [html]:
        _read_html(page)


def test_each_name_is_in_the_rows_of_a_query(run: Path) -> None:
    names = json.loads(tracekit("query", run, "select distinct name from ops", "--format", "json").stdout)
    texts = [row["name"] for row in names]
    # Lone surrogates are no text: they are read as '�'.
    for text in (*READABLE, LONG):
        assert any(text in name for name in texts), text[:50]


def _read_csv(text: str) -> None:
    csv.field_size_limit(1 << 24)  # names of a MiB
    rows = list(csv.reader(io.StringIO(text)))
    assert len({len(row) for row in rows}) == 1
    assert not [cell for row in rows for cell in row if re.match(r"[=@\t\r]|[+-](?!\d)", cell)]


def _read_github(text: str) -> None:
    for line in text.splitlines():
        assert re.match(r"::(error|warning|notice|group|endgroup)\b", line) or not line.startswith("::"), line


def _read_html(text: str) -> None:
    tags = list(_Tags.of(text))
    assert not [tag for tag, attributes in tags if any(name in RUNS for name in attributes)]
    assert "<script>alert" not in text
    assert not [tag for tag, attributes in tags if tag == "img" and attributes.get("src") == "x"]


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    @classmethod
    def of(cls, text: str) -> Iterator[tuple[str, dict[str, str | None]]]:
        parser = cls()
        parser.feed(text)
        yield from parser.tags


READERS = {
    "json": json.loads,
    "sarif": json.loads,
    "codequality": json.loads,
    "junit": ET.fromstring,
    "csv": _read_csv,
    "github": _read_github,
    "html": _read_html,
}
