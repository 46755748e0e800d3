"""Logs of NCCL Inspector: what is read, and which ranks and links `check` names by them.

The files have the published source's fields (tests/support/inspector_logs.py): the plugin itself needs NCCL and GPUs.
"""

import gzip
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekit
from tests.support import cli_runner, inspector_logs
from tests.support.inspector_logs import BEGAN_US, Call
from tracekit.analysis.communication import collective_instances
from tracekit.errors import BadTraceError
from tracekit.ingest.readers import nccl_inspector
from tracekit.ingest.readers.nccl_inspector import NCCLInspectorLogs
from tracekit.ingest.readers.reader import TraceInfo
from tracekit.model import schema
from tracekit.regression.metric_sources import breakdown_samples
from tracekit.rules import engine

README_EXAMPLE = {
    "header": {"id": "0xe62dedaa97644a", "rank": 4, "n_ranks": 8, "nnodes": 1},
    "metadata": {
        "inspector_output_format_version": "v4.0",
        "git_rev": "9019a1912-dirty",
        "rec_mechanism": "nccl_profiler_interface",
        "dump_timestamp_us": 1752867229276385,
        "hostname": "hostname",
        "pid": 438776,
    },
    "coll_perf": {
        "coll": "ReduceScatter",
        "coll_sn": 1231,
        "coll_msg_size_bytes": 2147483648,
        "coll_exec_time_us": 41057,
        "coll_timing_source": "kernel_gpu",
        "coll_algobw_gbs": 418.439467,
        "coll_busbw_gbs": 366.134533,
    },
}
"""The numbers of NVIDIA's README: they show that a size is that of one rank's part."""


def load(path):
    return tracekit.load(path, cache=False)


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path):
    (info,) = NCCLInspectorLogs().traces(str(path), path.read_bytes()[: 256 << 10])
    return NCCLInspectorLogs().read(str(path), info, rank=info.rank or 0, window=0)


def findings(run, code):
    return [finding for finding in engine.check(run).findings if finding.code == code]


def test_the_numbers_of_nvidias_example_are_those_of_its_bandwidths(tmp_path):
    trace = read(write(tmp_path / "node-pid438776.log", README_EXAMPLE))
    (call,) = trace.collectives.to_dicts()
    (activity,) = trace.activities.to_dicts()
    whole_bytes = max(call["sent_bytes"], call["received_bytes"])
    assert (call["op"], call["group"], call["group_size"], call["seq"]) == (
        "reduce_scatter",
        "0xe62dedaa97644a",
        8,
        1231,
    )
    assert whole_bytes / activity["dur_ns"] == pytest.approx(README_EXAMPLE["coll_perf"]["coll_algobw_gbs"], rel=1e-6)
    bus_gbs = whole_bytes * (8 - 1) / 8 / activity["dur_ns"]
    assert bus_gbs == pytest.approx(README_EXAMPLE["coll_perf"]["coll_busbw_gbs"], rel=1e-6)


@pytest.mark.parametrize("verbose", [True, False])
def test_each_call_is_read(tmp_path, verbose):
    calls = inspector_logs.job(2, 5, late_rank=1)
    run = load(inspector_logs.write(tmp_path, calls, verbose=verbose))
    assert run.ranks == (0, 1)
    for rank, trace in enumerate(run.traces()):
        assert trace.activities["dur_ns"].to_list() == [call.dur_us * 1000 for call in calls[rank]]
        assert trace.collectives["seq"].to_list() == [call.sequence for call in calls[rank]]
        assert trace.collectives["sent_bytes"].to_list() == [64 << 20] * 5
        if verbose:
            starts_ns = [(BEGAN_US + call.start_us) * 1000 for call in calls[rank]]
            assert trace.activities["start_ns"].to_list() == starts_ns
        assert (schema.WRITE_TIMES in trace.data_quality["kind"]) == (not verbose)


@pytest.mark.parametrize("verbose", [True, False])
def test_waits_are_those_of_the_job(tmp_path, verbose):
    # Of logs without times, by durations alone: all ranks leave together.
    run = load(inspector_logs.write(tmp_path, inspector_logs.job(3, 20, late_rank=2, late_us=4000), verbose=verbose))
    waits = run.table(collective_instances.waits)
    assert waits.height == 60
    late = waits.filter(rank=2)["wait_ns"]
    assert late.max() == 0
    others_ns = waits.filter(waits["rank"] != 2)["wait_ns"]
    assert 3_950_000 < others_ns.min() <= others_ns.max() < 4_050_000


@pytest.mark.parametrize("verbose", [True, False])
def test_a_late_rank_is_named_with_what_the_others_lose(tmp_path, verbose):
    # Dumps every 0.1 s: the times of the log are five steps apart from those of the job.
    calls = inspector_logs.job(4, 60, late_rank=2)
    run = load(inspector_logs.write(tmp_path, calls, verbose=verbose, interval_us=100_000))
    (finding,) = findings(run, "RANK001")
    assert finding.ranks == (2,)
    assert finding.cost_ns == pytest.approx(60 * 4_000_000, rel=0.02)
    assert "not recorded" in finding.message


@pytest.mark.parametrize("verbose", [True, False])
def test_a_healthy_job_has_no_warning(tmp_path, verbose):
    report = engine.check(load(inspector_logs.write(tmp_path, inspector_logs.job(4, 60), verbose=verbose)))
    assert {finding.severity.label for finding in report.findings} == {"info"}
    assert {finding.code for finding in report.findings} == {"DATA001"}


@pytest.mark.parametrize(("verbose", "slow_from"), [(True, 30), (False, 0)])
def test_a_slow_group_is_named_against_its_peers(tmp_path, verbose, slow_from):
    jobs = inspector_logs.job_of_groups(60, slow_group=1, slow_from=slow_from)
    (finding,) = findings(load(inspector_logs.write(tmp_path, jobs, verbose=verbose)), "RANK002")
    assert finding.ranks == (4, 5, 6, 7)
    assert finding.cost_ns == pytest.approx((60 - slow_from) * 4_000_000, rel=0.02)


def test_groups_of_equal_speed_are_no_slow_link(tmp_path):
    assert not findings(load(inspector_logs.write(tmp_path, inspector_logs.job_of_groups(60))), "RANK002")


def test_compute_and_the_host_are_not_judged(tmp_path):
    report = engine.check(load(inspector_logs.write(tmp_path, inspector_logs.job(2, 20))))
    judged = set(report.rules) - set(report.blind_spots)
    assert {"COMM001", "HOST001", "COMP001", "MEM001", "STREAM001"} <= set(report.blind_spots)
    assert {"RANK001", "RANK002", "STEP004"} <= judged
    assert report.cannot_judge is None


def test_the_rank_is_that_of_the_largest_communicator(tmp_path):
    shard = inspector_logs.record(Call(0, 10, 0, communicator="0xa", group_rank=1, group_size=2), 5, 8)
    world = inspector_logs.record(Call(20, 10, 0), 5, 8)
    path = write(tmp_path / "node-pid7.log", *[shard] * 2000, world)
    assert path.stat().st_size > 512 << 10
    (info,) = NCCLInspectorLogs().traces(str(path), path.read_bytes()[: 256 << 10])
    assert (info.rank, info.world_size) == (5, 8)


def test_a_send_has_its_peer_in_the_group_of_all_only(tmp_path):
    record = inspector_logs.record(Call(0, 10, 3), 0, 4)
    perf = {key.replace("coll", "p2p"): value for key, value in record["coll_perf"].items()}
    message = {**record, "p2p_perf": {**perf, "p2p": "Send", "p2p_peer": 2}}
    del message["coll_perf"]
    small = json.loads(json.dumps(message))
    small["header"] |= {"id": "0xb", "n_ranks": 2}
    trace = read(write(tmp_path / "node-pid7.log", message, small))
    assert trace.collectives["op"].to_list() == ["send", "send"]
    assert trace.collectives["peer"].to_list() == [2, None]


def test_lost_records_and_damaged_lines_are_counted(tmp_path):
    record = inspector_logs.record(Call(0, 10, 0), 0, 2)
    losses = {key: record[key] for key in ("header", "metadata")}
    losses["dump_stats"] = {"coll_records": 1, "coll_dropped_since_last_dump": 3, "p2p_dropped_since_last_dump": 0}
    path = write(tmp_path / "node-pid7.log", record, losses)
    with path.open("a") as file:
        file.write('{"header": {"id"\n')
    issues = {row["kind"]: row for row in read(path).data_quality.to_dicts()}
    assert issues["dropped_events"]["affected_ratio"] == 0.75
    assert "1 line " in issues["bad_log"]["message"]


def test_packed_and_cut_logs_are_read(tmp_path):
    folder = inspector_logs.write(tmp_path / "plain", inspector_logs.job(1, 50))
    content = (folder / "node0-pid1000.log").read_bytes()
    packed = tmp_path / "node0-pid1000.log.gz"
    packed.write_bytes(gzip.compress(content))
    assert load(tmp_path / "node0-pid1000.log.gz").trace(0, 0).collectives.height == 50
    packed.write_bytes(gzip.compress(content)[:-200])
    cut = load(packed).trace(0, 0)
    assert 0 < cut.collectives.height < 50
    assert "truncated" in cut.data_quality["kind"]


def test_a_log_without_collectives_is_refused(tmp_path):
    record = inspector_logs.record(Call(0, 10, 0), 0, 2)
    del record["coll_perf"]
    with pytest.raises(BadTraceError, match="no collective"):
        read(write(tmp_path / "node-pid7.log", record))


@pytest.mark.parametrize("stated", [1e308, None, [], {}])
def test_a_communicator_that_is_no_name_has_no_collective(tmp_path, stated):
    record = json.loads(json.dumps(README_EXAMPLE))
    record["header"]["id"] = stated
    with pytest.raises(BadTraceError, match="no collective"):
        read(write(tmp_path / "node-pid7.log", record))


def test_other_logs_in_a_folder_are_not_looked_at(tmp_path):
    inspector_logs.write(tmp_path, inspector_logs.job(2, 5))
    (tmp_path / "stdout.log").write_text("step 1\n")
    (tmp_path / "rank0.jsonl").write_text('{"loss": 1}\n')
    run = load(tmp_path)
    assert run.ranks == (0, 1)
    assert "not_a_trace" not in run.data_quality["kind"]


def test_commands_read_such_a_run(tmp_path):
    folder = inspector_logs.write(tmp_path / "run", inspector_logs.job(2, 20, late_rank=1), verbose=False)
    history = tmp_path / "history.duckdb"
    summary = cli_runner.tracekit("summary", folder)
    assert (summary.returncode, "compute was not recorded" in summary.stderr) == (0, True)
    checked = cli_runner.tracekit("check", folder, "--format", "json", "--history", history)
    assert checked.returncode == 0
    assert [f["ranks"] for f in json.loads(checked.stdout)["findings"] if f["code"] == "RANK001"] == [[1]]
    shown = cli_runner.tracekit("history", "show", "--db", history, "--format", "json")
    assert shown.returncode == 0
    # How long a log is says nothing about the job's speed.
    samples = load(folder).table(breakdown_samples)
    assert samples.is_empty()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 3), st.integers(0, 900)), min_size=1, max_size=40))
def test_calls_of_a_communicator_never_overlap_nor_end_after_they_were_written(drawn):
    """Against the definition: each call ends by its dump, and before the next call of its communicator starts."""
    written_us, calls = 10**6, []
    for sequence, (dur_us, communicator, pause_us) in enumerate(drawn):
        written_us += pause_us
        calls.append(
            nccl_inspector._Call("AllReduce", str(communicator), None, 2, sequence, 8, None, dur_us, written_us, True)
        )
    ends_us = [call.end_us for call in [replace(call) for call in calls]]
    nccl_inspector._separate_ends(calls)
    for communicator in {call.communicator for call in calls}:
        group = [call for call in calls if call.communicator == communicator]
        for call, following in pairwise(group):
            assert call.end_us <= following.end_us - following.dur_us
    assert all(call.end_us <= end_us for call, end_us in zip(calls, ends_us, strict=True))


def test_a_log_states_the_process_and_start(tmp_path):
    path = write(tmp_path / "node-pid7.log", README_EXAMPLE)
    (info,) = NCCLInspectorLogs().traces(str(path), path.read_bytes())
    assert info == TraceInfo(rank=4, world_size=8, process_id=438776, start_ns=1752867229276385000)
