"""Input formats: a plug-in of one file is found, loaded, listed and named in errors; so is every built-in reader."""

import json
import sys
from pathlib import Path

import pytest

import tracekit
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest import readers

ROOT = Path(__file__).parents[2]

PLUG_IN = """
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model import schema
from tracekit.model.trace import Trace
import polars as pl


class Stopwatch(Reader):
    name = "stopwatch log"
    suffixes = (".stopwatch",)
    contents = "steps of every rank, from laps"

    def sniff(self, head, name):
        return head.startswith(b"STOPWATCH")

    def traces(self, path, head, *, is_complete=True):
        ranks = [line.split()[0] for line in open(path).read().splitlines()[1:]]
        return [TraceInfo(int(rank), world_size=len(ranks), shares_file=True) for rank in ranks]

    def read(self, path, info, *, rank, window):
        laps = next(line.split()[1:] for line in open(path).read().splitlines()[1:] if line.split()[0] == str(rank))
        rows = [{"step": n, "start_ns": int(a), "end_ns": int(b)} for n, (a, b) in enumerate(zip(laps, laps[1:]))]
        return Trace(rank, window, path, steps=schema.STEPS.conform(pl.DataFrame(rows)))


STOPWATCH = Stopwatch()
"""


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """An installed package of one file, whose entry point is a reader."""
    site = tmp_path / "site"
    metadata = site / "stopwatch_reader-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "stopwatch_reader.py").write_text(PLUG_IN)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stopwatch-reader\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tracekit.readers]\nstopwatch = stopwatch_reader:STOPWATCH\n")
    monkeypatch.syspath_prepend(site)
    readers.available.cache_clear()
    yield
    sys.modules.pop("stopwatch_reader", None)
    readers.available.cache_clear()


def recording(folder: Path) -> Path:
    folder.mkdir()
    (folder / "laps.stopwatch").write_text("STOPWATCH\n0 10 20 40\n1 12 21 43\n")
    return folder


@pytest.mark.usefixtures("plug_in")
def test_a_plug_in_of_one_file_is_discovered_and_loaded(tmp_path):
    run = tracekit.load(recording(tmp_path / "run"), cache=False)
    assert run.ranks == (0, 1)
    assert run.data_quality.is_empty()
    assert run.trace(1).steps.select("start_ns", "end_ns").rows() == [(12, 21), (21, 43)]


@pytest.mark.usefixtures("plug_in")
def test_a_plug_in_shares_the_metrics_log_and_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACEKIT_CACHE_DIR", str(tmp_path / "cache"))
    folder = recording(tmp_path / "run")
    (folder / "rank00001.metrics.jsonl").write_text('{"step": 0, "loss": 2.5}\n')
    for _ in range(2):
        assert tracekit.load(folder).trace(1).metrics["value"].to_list() == [2.5]
    assert list((tmp_path / "cache" / "store").glob("*.trace"))


@pytest.mark.usefixtures("plug_in")
def test_a_plug_in_is_in_the_list_of_formats_and_in_error_messages(tmp_path):
    assert "| stopwatch log | `*.stopwatch` | steps of every rank, from laps |" in readers.as_markdown()
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match=r"\*\.stopwatch"):
        tracekit.load(empty)
    (tmp_path / "x.bin").write_bytes(b"\0\1\2\3")
    formats = r"unknown format; tracekit reads: stopwatch log, .*Perfetto trace, .*Kineto"
    with pytest.raises(BadTraceError, match=formats):
        tracekit.load(tmp_path / "x.bin")


def test_without_the_plug_in_its_files_are_of_no_known_format(tmp_path):
    with pytest.raises(BadTraceError, match=r"laps\.stopwatch: unknown format"):
        tracekit.load(recording(tmp_path / "run") / "laps.stopwatch")


FILES = {
    "run.json": (b"{}", "run manifest"),
    "manifest.json": (json.dumps({"schema": "tracekit.run/1"}).encode(), "run manifest"),
    "rank00000.checkpoint.jsonl": (b"{}", "checkpoint log"),
    "attempts.jsonl": (b"{}", "attempts log"),
    "rank00000.metrics.jsonl": (b"{}", "metrics log"),
    "snapshot.bin": (b"\x80\x04\x95", "CUDA memory snapshot (pickle)"),
    "trace.json": (b'{"traceEvents": []}', "PyTorch profiler trace (Kineto JSON)"),
    "no_suffix": (b'[{"ph": "X"}]', "PyTorch profiler trace (Kineto JSON)"),
}


@pytest.mark.parametrize("name", FILES)
def test_each_format_is_recognized(name):
    head, format_name = FILES[name]
    reader = readers.find(head, name)
    assert reader is not None
    assert reader.name == format_name


@pytest.mark.parametrize(
    "reader", [r for r in readers.READERS if not r.has_traces and not r.is_companion], ids=lambda r: r.name
)
def test_a_file_without_a_trace_is_named_with_what_to_do(tmp_path, reader):
    path = str(tmp_path / "file")
    with pytest.raises(BadTraceError) as caught:
        reader.traces(path, b"")
    assert str(caught.value) == f"{path}: this is a {reader.name}, not a trace; {reader.usage}"
    assert reader.usage


def test_the_formats_in_the_documentation_are_those_of_the_registry(request):
    path = ROOT / "docs" / "data_model.md"
    before, table, after = path.read_text(encoding="utf-8").partition("## Formats\n\n")
    rest = after[after.index("\n\n") :]
    page = f"{before}{table}{readers.as_markdown().rstrip()}{rest}"
    if request.config.getoption("--update-golden"):
        path.write_text(page, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == page


def test_every_reader_says_what_it_reads():
    for reader in readers.READERS:
        assert reader.suffixes, reader.name
        assert all(suffix == suffix.lower() for suffix in reader.suffixes)
        assert reader.contents, reader.name
    assert readers.as_markdown().count("\n") == len(readers.READERS) + 2
