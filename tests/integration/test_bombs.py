"""Small files that unpack to much: refused before the memory is used; spaces before a trace cost what they weigh."""

import gzip
import json
import tracemalloc
import zipfile
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.fuzz import bounds
from tests.support import kineto_files
from tracekit.errors import BadTraceError, ConfigError
from tracekit.ingest import archives, budget
from tracekit.ingest.budget import OverBudgetError
from tracekit.ingest.readers import memory_snapshots
from tracekit.ingest.readers.kineto import scan
from tracekit.ingest.readers.perfetto import packets

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
    with pytest.raises(BadTraceError, match="far more memory"):
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
