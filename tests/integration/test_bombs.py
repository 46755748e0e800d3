"""Small files that unpack to much: refused before the memory is used; spaces before a trace cost what they weigh."""

import gzip
import io
import json
import pickle
import signal
import tracemalloc
import zipfile
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.fuzz import bounds
from tests.support import kineto_files
from tracekit.errors import BadTraceError, ConfigError
from tracekit.ingest import archives, budget, pickle_child, pickles, untrusted_json
from tracekit.ingest.budget import OverBudgetError
from tracekit.ingest.checkpoint_files import formats
from tracekit.ingest.readers import logs, memory_snapshots
from tracekit.ingest.readers.kineto import scan
from tracekit.ingest.readers.perfetto import packets
from tracekit.ingest.readers.reader import TraceInfo

COUNT = 3_000_000
EMPTY_PACKETS = b"\x0a\x00" * COUNT
MIB = 1 << 20


@pytest.mark.parametrize(
    "content", [gzip.compress(EMPTY_PACKETS), bounds.packed_packets(COUNT)], ids=["gzip", "in a packet"]
)
def test_a_trace_of_empty_packets_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / ("rank0.pftrace.gz" if content[:2] == b"\x1f\x8b" else "rank0.pftrace")
    path.write_bytes(content)
    with pytest.raises(BadTraceError, match="far more events"):
        packets.read(str(path))


def test_a_trace_of_packets_that_unpack_to_too_many_bytes_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(budget, "LEAST_BYTES", MIB)
    path = tmp_path / "rank0.pftrace.gz"
    path.write_bytes(gzip.compress((b"\x0a\x7f" + bytes(127)) * 20_000))
    with pytest.raises(OverBudgetError, match="far more bytes"):
        packets.read(str(path))


def test_a_member_by_bzip2_is_unpacked_in_parts(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(budget, "LEAST_BYTES", 2 * MIB)
    path = tmp_path / "run.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("rank0.json", b" " * (200 * MIB))
    tracemalloc.start()
    try:
        with pytest.raises(BadTraceError, match="unpacks to far more bytes"):
            archives.unpack(path, lambda name: name.endswith(".json"))
        assert tracemalloc.get_traced_memory()[1] < 20 * MIB
    finally:
        tracemalloc.stop()


def test_members_by_bzip2_are_read_and_others_named(tmp_path: Path):
    kineto_files.write(tmp_path / "rank0.json", kineto_files.trace(0, steps=3))
    with zipfile.ZipFile(tmp_path / "run.zip", "w", zipfile.ZIP_BZIP2) as archive:
        archive.write(tmp_path / "rank0.json", "rank0.json")
        archive.writestr("rank1.json", b"{}", zipfile.ZIP_LZMA)
    unpacked = archives.unpack(tmp_path / "run.zip", lambda name: name.endswith(".json"))
    assert [path.name for path in unpacked.folder.iterdir()] == ["rank0.json"]
    assert (unpacked.folder / "rank0.json").read_bytes() == (tmp_path / "rank0.json").read_bytes()
    (problem,) = unpacked.problems
    assert "rank1.json" in problem


@pytest.mark.parametrize(
    "spaces", [b" " * (5 * MIB), b"\n\t" * MIB, b"[" + b" " * (5 * MIB)], ids=["spaces", "lines", "in"]
)
def test_spaces_before_the_events_change_nothing(tmp_path: Path, spaces: bytes):
    event = b'{"ph":"X","cat":"cpu_op","name":"aten::mm","ts":1,"dur":2,"pid":1,"tid":1}'
    trace = spaces + event + b"]" if spaces[:1] == b"[" else spaces + b'{"traceEvents":[' + event + b"]}"
    path = tmp_path / "rank0.json"
    path.write_bytes(trace)
    assert tracekit.load(path, cache=False).trace(0).ops["name"].to_list() == ["aten::mm"]


def test_events_without_fields_are_counted(tmp_path: Path):
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents":[' + b"{}," * 3_000_000 + b"{}]}"))
    with pytest.raises(OverBudgetError, match="far more events"):
        tracekit.load(path, cache=False).trace(0)


def test_a_trace_takes_no_more_time_than_its_budget(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(budget, "LEAST_S", -1e9)
    path = kineto_files.write(tmp_path / "rank0.json", kineto_files.trace(0, steps=3))
    with pytest.raises(OverBudgetError, match="to read"):
        tracekit.load(path, cache=False).trace(0)


def test_the_user_can_allow_more(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(budget, "LEAST_BYTES", MIB)
    path = tmp_path / "rank0.json.gz"
    trace = json.dumps(kineto_files.trace(0, steps=3)).encode()
    path.write_bytes(gzip.compress(b" " * (2 * MIB) + trace))
    with pytest.raises(OverBudgetError, match=f"{budget.VARIABLE}=2,"):
        tracekit.load(path, cache=False).trace(0)
    monkeypatch.setenv(budget.VARIABLE, "4")
    assert tracekit.load(path, cache=False).trace(0).ops.height
    monkeypatch.setenv(budget.VARIABLE, "much")
    with pytest.raises(ConfigError, match="name a factor"):
        tracekit.load(path, cache=False).trace(0)


def test_a_snapshot_that_shares_its_containers_is_refused_at_once(tmp_path: Path):
    path = tmp_path / "a.pickle"
    path.write_bytes(bounds.shared_snapshot(9, 10, "segment_pool_id"))
    with pytest.raises(BadTraceError, match="when it is written out"):
        memory_snapshots.read(path)


def test_archives_in_an_archive_and_long_names_are_said(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        for name in ("rank0.json", "more.tar.gz", "a" * 300 + ".json", "../rank2.json"):
            archive.writestr(name, "{}")
    problems = archives.unpack(tmp_path / "run.zip", lambda name: name.endswith(".json")).problems
    assert [next(word for word in WORDS if word in problem) for problem in problems] == list(WORDS)


WORDS = ("archive itself", "too long", "leads out")


@pytest.mark.parametrize("place", ['"dur"', '"name"', '"kernel"', '"args"'])
def test_a_stray_byte_in_a_key_or_value_is_said(tmp_path: Path, place: str):
    trace = json.dumps(kineto_files.trace(0, steps=3)).encode()
    stray = place[:2].encode() + b"\xff" + place[2:].encode()
    (tmp_path / "rank0.json").write_bytes(trace.replace(place.encode(), stray, 1))
    issues = tracekit.load(tmp_path, cache=False).trace(0).data_quality
    assert issues.filter(pl.col("message").str.contains("UTF-8")).height, issues["message"].to_list()


def test_levels_within_a_damaged_event_are_skipped_by_few_parses(tmp_path: Path, monkeypatch):
    event = '{"ph":"X","cat":"cpu_op","name":"aten::mm","ts":1,"dur":2,"pid":1,"tid":1}'
    deep = '{"ph":?,' + '{"args":[' * 20_000
    path = tmp_path / "rank0.json"
    path.write_text(f'{{"traceEvents":[{event},{deep},{event}]}}')
    parses = []
    parse = scan._parse
    monkeypatch.setattr(scan, "_parse", lambda *place: parses.append(place[1]) or parse(*place))
    trace = tracekit.load(path, cache=False).trace(0)
    assert trace.ops["name"].to_list() == ["aten::mm"] * 2
    assert len(parses) < 2_000


@pytest.mark.parametrize("kind", [pickle_child.PLAIN, pickle_child.SNAPSHOT])
def test_a_pickle_that_builds_too_much_states_its_bound_and_the_user_can_allow_more(kind: str, monkeypatch):
    content = pickle.dumps({"segments": [], "device_traces": [[]]})[:-1] + b"(" + b"}" * 1_200_000 + b"1."
    monkeypatch.setattr(budget, "_PICKLES", budget._PICKLES._replace(memory_bytes=64 << 20, memory_ratio=1))
    with pytest.raises(pickles.OverBudgetError, match=rf"\d+ MiB of memory.* {budget.VARIABLE}=2$"):
        pickles.read(kind, io.BytesIO(content))
    with pickles.ManyPickles() as many, pytest.raises(pickles.OverBudgetError, match=f"{budget.VARIABLE}=2$"):
        many.read(kind, content)
    monkeypatch.setenv(budget.VARIABLE, "4")
    assert json.loads(pickles.read(kind, io.BytesIO(content))[0])["segments"] == []


def test_a_pickle_that_takes_too_long_states_how_to_allow_more():
    failure = pickles._failure(-signal.SIGXCPU, "")
    assert isinstance(failure, pickles.OverBudgetError)
    assert f"{budget.VARIABLE}=2" in str(failure)


def test_metadata_over_its_budget_is_unreadable_not_damaged(tmp_path: Path):
    (tmp_path / ".metadata").write_bytes(bounds.shared_metadata())
    (problem,) = formats.check_distributed(tmp_path).problems
    assert (problem.file, problem.is_readable) == (".metadata", False)
    assert f"{budget.VARIABLE}=2" in problem.what


@pytest.mark.parametrize("text", ["[" + '{"":0},' * 999 + "{}]", "[" + "1," * 1999 + "1]"], ids=["objects", "numbers"])
def test_a_document_has_a_bound_of_values_that_the_user_can_raise(text: str, monkeypatch):
    monkeypatch.setattr(budget, "LEAST_VALUES", 1000)
    monkeypatch.setattr(untrusted_json, "_SMALL", 0)
    for document in (text, text.encode()):
        with pytest.raises(ValueError, match=f"values; .* {budget.VARIABLE}=2$"):
            untrusted_json.parse(document)
    monkeypatch.setenv(budget.VARIABLE, "2")
    assert untrusted_json.parse(text) == json.loads(text)


def test_a_log_with_too_many_lines_is_over_its_budget(tmp_path: Path, monkeypatch):
    path = tmp_path / "rank00000.metrics.jsonl"
    path.write_text("{}\n" * 1000 + '{"step": 3, "loss": 2}\n')
    metrics = logs.MetricsLogs()
    with monkeypatch.context() as changed:
        changed.setattr(budget, "LEAST_VALUES", 1000)
        with pytest.raises(OverBudgetError, match=str(path)):
            metrics.read(str(path), TraceInfo(), rank=0, window=0)
    assert metrics.read(str(path), TraceInfo(), rank=0, window=0).metrics.rows() == [(3, "loss", 2.0)]


def test_the_user_can_allow_more_levels(monkeypatch):
    text = "[" * 250 + "]" * 250
    with pytest.raises(ValueError, match=f"100 levels deep; .* {budget.VARIABLE}=2$"):
        untrusted_json.parse(text)
    monkeypatch.setenv(budget.VARIABLE, "3")
    assert untrusted_json.to_text(untrusted_json.parse(text)) == text
    monkeypatch.setenv(budget.VARIABLE, "100")
    with pytest.raises(ValueError, match="400 levels"):
        untrusted_json.parse("[" * 401 + "]" * 401)
