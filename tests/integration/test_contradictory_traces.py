"""Well-formed traces whose content cannot be true: a finding says so, so that no verdict is taken for certain."""

import json

import pytest

from tests.support import cli_runner, kineto_files
from tests.support.selection import others_in_accuracy

RANKS, STEPS = 2, 60


def issues(folder, traces):
    for rank, trace in enumerate(traces):
        kineto_files.write(folder / f"rank{rank:05d}.pt.trace.json", trace)
    done = cli_runner.tracekit("check", folder, "--format", "json", "--no-cache", "--fail-on", "never")
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)["findings"]
    return {found["subject"]: found for found in findings if found["code"] == "DATA001"}


def drawn(*, later_us=7.0):
    """Return two ranks that work in the same way, but not at the same moments."""
    traces = [kineto_files.trace(rank, RANKS, steps=STEPS) for rank in range(RANKS)]
    for trace in traces:
        collectives = [event for event in trace["traceEvents"] if event["name"].startswith("nccl")]
        for number, event in enumerate(collectives):
            event["args"] |= {
                "Process Group Name": "0",
                "Process Group Ranks": "[0, 1]",
                "Group size": 2,
                "Seq": number,
            }
    for number, event in enumerate(traces[1]["traceEvents"]):
        if event["cat"] == "kernel" and event["name"] == "gemm":
            event["ts"] += later_us + number % 3
    return traces


def scaled(trace, factor):
    for event in trace["traceEvents"]:
        event["ts"] *= factor
        event["dur"] *= factor


def test_ranks_that_work_in_the_same_way_are_no_copies(tmp_path):
    assert not issues(tmp_path, drawn()).keys() & {"copied_rank", "clock_rate", "device_clock"}


def test_the_trace_of_one_rank_under_the_name_of_another_is_a_copy(tmp_path):
    first, _ = drawn()
    copied = {**first, "distributedInfo": {**first["distributedInfo"], "rank": 1}}
    found = issues(tmp_path, [first, copied])["copied_rank"]
    assert found["severity"] == "error"
    assert found["message"].startswith("Ranks 0–1 have the same activities at the same times")


@pytest.mark.parametrize("factor", others_in_accuracy([1000, 1 / 1000, 20], [1000]))
def test_a_rank_with_times_in_another_unit_is_reported(tmp_path, factor):
    traces = drawn()
    scaled(traces[1], factor)
    found = issues(tmp_path, traces)["clock_rate"]
    assert found["severity"] == "error"
    assert "on rank" in found["message"]


@pytest.mark.parametrize(("earlier_us", "is_reported"), [(10, False), (500, True)])
def test_work_that_begins_before_its_launch_is_reported(tmp_path, earlier_us, is_reported):
    traces = drawn()
    for trace in traces:
        for event in trace["traceEvents"]:
            if event["cat"] == "kernel":
                event["ts"] -= 20 + earlier_us  # launches begin 20 µs before
    found = issues(tmp_path, traces)
    assert ("device_clock" in found) == is_reported
    if is_reported:
        assert found["device_clock"]["severity"] == "error"  # all of the work is affected
