"""Logs of torchtitan's structured logger, recorded with its own writer (tests/recordings/torchtitan_logs)."""

import gzip
import json
import shutil
import statistics
from collections import defaultdict

import polars as pl
import pytest

import tracekit
from tests.support import cli_runner, kineto_files
from tests.support.cli_runner import ROOT
from tracekit.errors import BadTraceError
from tracekit.ingest.readers.torchtitan import TorchtitanLogs
from tracekit.rules import engine

RECORDED = ROOT / "tests" / "recordings" / "torchtitan_logs"
LOGS = sorted(RECORDED.glob("*.jsonl.gz"))


def load(path):
    return tracekit.load(path, cache=False)


def records(path):
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def times_us(path, name):
    """Start and end of the spans of a name by step, as plain Python reads them."""
    spans = defaultdict(list)
    for record in records(path):
        if record["log_type_name"] in (f"{name}_start", f"{name}_end"):
            spans[record["step"]].append(record["time_us"])
    return spans


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def record(name, time_us, *, step=1, **fields):
    plain = {"rank": 0, "pid": 7, "tid": 7, "log_type": "event", "logger_name": "torchtitan.structured_logger"}
    return {**plain, "step": step, "time_us": time_us, "log_type_name": name, **fields}


@pytest.mark.parametrize("path", LOGS, ids=["rank 0", "rank 1"])
def test_each_step_and_span_is_read(path):
    run = load(path)
    (trace,) = run.traces()
    steps = times_us(path, "step")
    assert trace.rank == int(path.name.split("global_rank_")[1][0])
    assert trace.steps["step"].to_list() == list(steps)
    assert trace.steps["start_ns"].to_list() == [start * 1000 for start, _ in steps.values()]
    work = times_us(path, "fwd_bwd")
    read = trace.activities.filter(name="torchtitan::fwd_bwd")
    assert read["start_ns"].to_list() == [start * 1000 for start, _ in work.values()]
    assert read["dur_ns"].to_list() == [(end - start) * 1000 for start, end in work.values()]
    assert trace.data_quality.filter(kind="bad_log").is_empty()


@pytest.mark.parametrize("path", LOGS, ids=["rank 0", "rank 1"])
def test_metrics_are_those_of_the_spans(path):
    (trace,) = load(path).traces()
    values = {(row["step"], row["name"]): row["value"] for row in trace.metrics.to_dicts()}
    for step, (start, end) in times_us(path, "step").items():
        assert values[step, "step_time_ns"] == (end - start) * 1000
    for step, (start, end) in times_us(path, "fetching_batch").items():
        assert values[step, "data_wait_ns"] == (end - start) * 1000
    tokens = {step for step, name in values if name == "tokens_per_second"}
    assert tokens == {10, 20}
    assert values[10, "tokens_per_second"] == pytest.approx(8192e9 / values[10, "step_time_ns"])


def test_the_wait_for_data_and_the_evaluation_are_named():
    report = engine.check(load(RECORDED))
    by_code = {finding.code: finding for finding in report.findings}
    waits_us = [end - start for start, end in times_us(LOGS[0], "fetching_batch").values()]
    assert by_code["HOST003"].cost_ns == pytest.approx(1000 * statistics.median(waits_us), rel=0.1)
    evaluations = [f for f in report.findings if f.code == "STEP001" and "evaluation" in f.message]
    assert [12 in finding.steps for finding in evaluations] == [True]
    assert {"RANK001", "COMM001", "COMP001", "HOST001", "MEM001"} <= set(report.blind_spots)
    assert report.cannot_judge is None


def test_a_log_next_to_traces_of_a_profiler_is_left_out(tmp_path):
    kineto_files.write(tmp_path / "rank0.pt.trace.json", kineto_files.trace(0, steps=1))
    shutil.copy(LOGS[0], tmp_path)
    run = load(tmp_path)
    assert [source.path.endswith(".json") for source in run.sources] == [True]
    assert run.data_quality["kind"].to_list().count("unused_log") == 1


def test_spans_without_an_end_and_bad_lines_are_counted(tmp_path):
    path = write(
        tmp_path / "training.global_rank_0.a.jsonl",
        record("step_start", 1000),
        record("fwd_bwd_start", 1100),
        record("fwd_bwd_end", 1500),
        record("optim_start", 1600),
        record("step_end", 2000),
        record("eval_end", 2100),
        {"rank": 0},
    )
    (trace,) = load(path).traces()
    assert trace.activities.filter(name="torchtitan::fwd_bwd")["dur_ns"].to_list() == [400_000]
    messages = trace.data_quality.filter(kind="bad_log")["message"]
    assert ["2 spans" in text or "1 line" in text for text in messages] == [True, True]


def test_a_log_without_a_step_is_refused(tmp_path):
    path = write(tmp_path / "controller.global_rank_0.a.jsonl", record("generate_start", 5), record("generate_end", 9))
    with pytest.raises(BadTraceError, match="no complete step"):
        load(path)


def test_nested_and_interleaved_spans_belong_to_their_threads(tmp_path):
    # time    0 1 2 3 4 5 6 7 8 9
    # thread 7  s f . . f . . . s      thread 8: f from 2 to 7
    path = write(
        tmp_path / "training.global_rank_0.a.jsonl",
        record("step_start", 1000),
        record("fwd_bwd_start", 1001),
        record("fwd_bwd_start", 1002, tid=8),
        record("fwd_bwd_end", 1004),
        record("fwd_bwd_end", 1007, tid=8),
        record("step_end", 1009),
    )
    (trace,) = load(path).traces()
    work = trace.activities.filter(pl.col("name") == "torchtitan::fwd_bwd").sort("start_ns")
    assert work["dur_ns"].to_list() == [3000, 5000]
    assert work["lane"].n_unique() == 2


def test_sniffing_needs_the_logger(tmp_path):
    reader = TorchtitanLogs()
    assert reader.sniff(gzip.decompress(LOGS[0].read_bytes())[:4096], "x")
    assert not reader.sniff(b'{"loss": 1, "log_type_name": "x"}', "x")
    assert reader.has_name("training.global_rank_0.20261130-1.jsonl")
    assert not reader.has_name("rank00000.metrics.jsonl")


def test_summary_says_what_compute_is():
    done = cli_runner.tracekit("summary", RECORDED)
    assert done.returncode == 0
    assert "spans of the host" in done.stderr
