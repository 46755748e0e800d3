"""I/O logs that DFTracer wrote around the instrumented trainer: calls, steps, files, and what rules say of them."""

import gzip
import json
import re
import shutil
from collections import Counter

import numpy as np
import polars as pl
import pytest

import tracekit
from tests.support import cli_runner
from tests.support.cli_runner import ROOT
from tracekit.analysis.host import host_stalls, launch_delay
from tracekit.ingest.readers.dftracer import DFTracerLogs
from tracekit.ingest.readers.reader import TraceInfo
from tracekit.rules import engine
from tracekit.rules.checkpoint import BlockingCheckpoint
from tracekit.rules.host import DataStall
from tracekit.rules.save_stalls import SerializedSave

RECORDED = ROOT / "tests" / "recordings" / "dftracer"
DATALOADER = ROOT / "sample_traces" / "faults" / "dataloader"
LOGS = sorted(RECORDED.glob("*.pfw.gz"))


def load(path):
    return tracekit.load(path, cache=False)


def plain(path):
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def plain_calls(path):
    return [
        e
        for e in plain(path)
        if e["ph"] == 1 and e["cat"] in ("POSIX", "STDIO") and e["name"] not in ("waitpid", "fork")
    ]


def read(path, **info):
    return DFTracerLogs().read(str(path), TraceInfo(**info), rank=0, window=0)


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def event(name="read", start_us=10, dur_us=5, **args):
    return {"name": name, "cat": "POSIX", "pid": 7, "tid": 8, "ts": start_us, "dur": dur_us, "ph": 1, "args": args}


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name[3:7])
def test_every_call_is_read(path):
    calls, found = plain_calls(path), read(path).io_calls
    files = {e["args"]["value"]: e["args"]["name"] for e in plain(path) if e["name"] == "FH"}
    assert Counter(found["name"]) == Counter(e["name"] for e in calls)
    assert Counter(found["file"]) == Counter(files.get(e["args"].get("fhash")) for e in calls)
    assert found["dur_ns"].sum() == sum(e["dur"] for e in calls) * 1000
    for kind in ("read", "write"):
        moved = sum(e["args"]["ret"] for e in calls if e["name"] == kind)
        assert found.filter(kind=kind)["bytes"].sum() == moved


def test_a_rank_has_the_calls_of_its_own_process():
    run = load(RECORDED)
    for rank in run.ranks:
        trace = run.trace(rank)
        assert trace.io_calls["process"].cast(pl.String).unique().to_list() == [trace.lanes["pid"][0]]
        assert trace.io_calls.filter(pl.col("file").str.contains(f"__{rank}_0.distcp")).height > 100
        assert trace.io_calls["file"].str.contains(f"__{1 - rank}_0.distcp").any() is False


def test_calls_belong_to_the_step_in_which_they_begin():
    run = load(RECORDED)
    found = run.table(host_stalls.io_calls_of_run)
    assert found.height == sum(run.trace(rank).io_calls.height for rank in run.ranks)
    spans = {rank: run.trace(rank).steps.select("step", "host_start_ns", "host_end_ns").rows() for rank in run.ranks}
    for row in found.iter_rows(named=True):
        inside = [step for step, start, end in spans[row["rank"]] if start <= row["start_ns"] < end]
        assert row["step"] == (inside[0] if inside else None)
    assert found["step"].null_count() < found.height


def test_sums_by_file_are_those_of_a_mask():
    run = load(RECORDED)
    found, sums = run.table(host_stalls.io_calls_of_run), host_stalls.io_by_file(run)
    assert sums["calls"].sum() == found.height
    for row in sums.head(12).iter_rows(named=True):
        own = found.filter(
            pl.col("rank") == row["rank"], pl.col("kind") == row["kind"], pl.col("file").eq_missing(row["file"])
        )
        first = own["start_ns"].min()
        mask = np.zeros(int(((own["start_ns"] + own["dur_ns"]).max() - first) // 1000), bool)
        for start, dur in own.select("start_ns", "dur_ns").rows():
            mask[(start - first) // 1000 : (start - first + dur) // 1000] = True
        assert row["busy_ns"] == mask.sum() * 1000
        assert row["longest_ns"] == own["dur_ns"].max()
        assert row["bytes"] == (own["bytes"].sum() if own["bytes"].null_count() < own.height else None)
        if row["bytes"]:
            assert row["moved_bytes_per_s"] == pytest.approx(row["bytes"] / (row["busy_ns"] / 1e9))


def test_a_save_that_blocks_says_which_call_took_the_time():
    run = load(RECORDED)
    finding = next(iter(SerializedSave(min_blocked_ms=1).check(run)))
    assert (
        "most of that in 1 fsync call of /data/run/checkpoints/step-000002/__1_0.distcp (24.4 ms)." in finding.message
    )
    files = {e["args"]["value"]: e["args"]["name"] for log in LOGS for e in plain(log) if e["name"] == "FH"}
    syncs = [
        e["dur"]
        for log in LOGS
        for e in plain(log)
        if e["name"] == "fsync" and "step-000002/__1_0" in files[e["args"]["fhash"]]
    ]
    assert [round(us, -2) for us in syncs] == [24_400]


def test_a_blocking_checkpoint_says_what_file_systems_have_to_do_with_it(tmp_path):
    (finding,) = BlockingCheckpoint().check(load(RECORDED))
    assert re.search(
        r" File system calls take [\d.]+ ms of the save, most of that in \d+ \w+ calls? of /data/run/", finding.message
    )
    for path in RECORDED.glob("rank*"):
        shutil.copy(path, tmp_path)
    (without,) = BlockingCheckpoint().check(load(tmp_path))
    assert without.message == finding.message.partition(" File system")[0]


def log_of_worker(folder, process, parent, calls):
    start = {"name": "start", "cat": "dftracer", "pid": process, "tid": process, "ts": 1, "dur": 0, "ph": 1}
    named = {"name": "FH", "cat": "dftracer", "pid": process, "ph": 4, "args": {"name": "/data/shard-3", "value": "ab"}}
    write(folder / "io-app.pfw", start | {"args": {"ppid": parent}}, named, *calls)


def test_a_data_stall_names_the_reads_of_a_worker(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(DATALOADER, folder)
    waits = load(DATALOADER).table(launch_delay.data_waits).sort("dur_ns", descending=True)
    process = int(load(DATALOADER).trace(0).lanes["pid"][0])
    calls = [
        event("pread64", start // 1000, 40_000, fhash="ab", ret=1 << 20) | {"pid": 5, "tid": 5}
        for start in waits["start_ns"].head(8).to_list()
    ]
    (before,) = engine.check(load(folder), rules=[DataStall()]).findings
    assert "File system" not in before.message
    log_of_worker(folder, 5, process, calls)
    (finding,) = engine.check(load(folder), rules=[DataStall()]).findings
    assert before.message.startswith(finding.message.partition(" File system")[0])
    assert "File system calls take " in finding.message
    assert "pread64 call" in finding.message
    assert "of /data/shard-3 (" in finding.message
    assert "MiB at 26.2 MB/s)." in finding.message


def test_the_older_format_is_read_too(tmp_path):
    path = tmp_path / "old.pfw"
    lines = [
        "[",
        '{"id":1,"name":"FH","cat":"dftracer","pid":7,"tid":7,"ph":"M","args":{"name":"/data/a","value":12}}',
        '{"id":2,"name":"read","cat":"POSIX","pid":7,"tid":8,"ts":1700000000000000,"dur":250,"ph":"X",'
        '"args":{"hhash":3,"fhash":12,"ret":4096}},',
        '{"id":3,"name":"fwrite","cat":"STDIO","pid":7,"tid":8,"ts":1700000000000400,"dur":1,"ph":"X","args":{"fname":"/b"}}',
        '{"id":4,"name":"train","cat":"COMPUTE","pid":7,"tid":8,"ts":1700000000000400,"dur":1,"ph":"X","args":{}}',
        "]",
    ]
    path.write_text("\n".join(lines))
    assert read(path).io_calls.rows() == [
        ("read", "read", "/data/a", 1_700_000_000_000_000_000, 250_000, 4096, 7, 8),
        ("fwrite", "write", "/b", 1_700_000_000_000_400_000, 1_000, None, 7, 8),
    ]
    assert read(path).data_quality.is_empty()


def test_units_of_time_are_those_that_the_log_states(tmp_path):
    unit = {"name": "CM", "cat": "dftracer", "pid": 7, "ph": 4, "args": {"name": "time_metric", "value": "NS"}}
    assert read(write(tmp_path / "a.pfw", unit, event())).io_calls["start_ns"].to_list() == [10]


@pytest.mark.parametrize(
    ("lines", "count", "said"),
    [
        (['{"name": "read", "cat": "POSIX", "ph"', "\x00\x01", "nonsense"], 1, "3 lines are no events"),
        ([json.dumps(event(start_us=value)) for value in (-1, 1.5, 1 << 62, "9", None, True)], 1, "6 calls have no"),
        ([json.dumps(event(dur_us=1 << 60))], 1, "1 calls have no usable time"),
        ([json.dumps(event() | {"pid": 9})], 1, "1 calls are of other processes"),
        ([json.dumps(event(ret=-1)), json.dumps(event(ret="x")), json.dumps(event(fhash=[1]))], 4, None),
        (['{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"], 1, "1 lines are no events"),
    ],
)
def test_malformed_lines_are_left_out(tmp_path, lines, count, said):
    path = write(tmp_path / "a.pfw", event())
    path.write_text(path.read_text() + "\n".join(lines))
    trace = read(path, process_id=7)
    assert trace.io_calls.height == count
    assert trace.data_quality.height == (said is not None)
    assert said is None or said in trace.data_quality["message"][0]


def test_a_damaged_log_never_loses_the_trace(tmp_path):
    shutil.copytree(RECORDED, tmp_path / "run")
    path = tmp_path / "run" / LOGS[0].name
    path.write_bytes(path.read_bytes()[:4000])
    expected, run = load(RECORDED), load(tmp_path / "run")
    assert (
        0 < sum(run.trace(rank).io_calls.height for rank in (0, 1)) < expected.table(host_stalls.io_calls_of_run).height
    )
    assert all(run.trace(rank).ops.equals(expected.trace(rank).ops) for rank in (0, 1))


def test_logs_of_other_processes_and_empty_ones_are_only_noted(tmp_path):
    shutil.copytree(RECORDED, tmp_path / "run")
    (tmp_path / "run" / "io-fork.pfw.gz").write_bytes(b"")
    issues = load(tmp_path / "run").data_quality
    assert sorted(issues["kind"]) == ["not_a_trace", "unmatched_companion"]
    assert "DFTracer log of process" in issues.filter(kind="unmatched_companion")["message"][0]


def test_a_log_alone_is_named(tmp_path):
    shutil.copy(LOGS[0], tmp_path)
    for path in (tmp_path, tmp_path / LOGS[0].name):
        ended = cli_runner.tracekit("check", path)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr.count("\n") == 1
        assert "this is a DFTracer log, not a profiler trace; it has file system calls, no operators" in ended.stderr


def test_the_summary_by_file():
    ended = cli_runner.tracekit("summary", RECORDED, "--by", "file", "--format", "json")
    assert ended.returncode == 0
    rows = json.loads(ended.stdout)
    assert len(rows["rows"] if isinstance(rows, dict) else rows) == host_stalls.io_by_file(load(RECORDED)).height


def test_a_run_without_an_io_log_says_what_is_missing() -> None:
    done = cli_runner.tracekit("summary", ROOT / "sample_traces" / "demo-fsdp2", "--by", "file")
    assert done.stdout == "The traces contain no file system calls: the run has no I/O log of DFTracer (.pfw).\n"
