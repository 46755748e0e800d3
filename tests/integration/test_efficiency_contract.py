"""The JSON that programs read: rows of `summary --by step`, `ops`, `critical-path` and `compare --by operator`."""

import json
from pathlib import Path

import pytest

from tests.support.cli_runner import tracekit as command

SAMPLES = Path(__file__).parents[2] / "sample_traces"
RUN, OTHER = SAMPLES / "demo-fsdp2", SAMPLES / "demo-yafsdp"


def read(*arguments: object):
    done = command(*arguments, "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_steps_have_operations_their_coverage_and_utilization() -> None:
    rows = read("summary", RUN, "--by", "step")
    assert rows
    for row in rows:
        assert row.keys() >= {"rank", "step", "duration_ns", "flops", "flops_coverage_ratio", "mfu_ratio"}
        assert row["flops"] is None or row["flops"] > 0
        assert 0 <= row["flops_coverage_ratio"] <= 1
        assert row["mfu_ratio"] is None  # a CPU has no peak


def test_operators_have_work_rates_and_their_share_of_the_roofline() -> None:
    rows = read("kernels", RUN, "--of", "host")
    assert all(
        row.keys() >= {"name", "count", "flops", "bytes", "tflops_per_s", "tbytes_per_s", "roofline_ratio"}
        for row in rows
    )


def test_parts_of_the_critical_path_tile_the_step() -> None:
    found = read("whatif", RUN, "--critical-path")
    assert found.keys() >= {"run", "step", "rank", "start_ns", "step_ns", "parts"}
    reached_ns = found["start_ns"]
    for part in found["parts"]:
        assert part.keys() >= {"rank", "kind", "name", "start_ns", "dur_ns"}
        assert part["start_ns"] == reached_ns
        reached_ns += part["dur_ns"]
    assert reached_ns == found["start_ns"] + found["step_ns"]


def test_changes_of_operators_have_contributions_and_verdicts() -> None:
    found = read("compare", RUN, OTHER, "--by", "operator")
    assert all(row.keys() >= {"name", "change_ns", "contribution_ratio", "verdict"} for row in found["rows"])
    assert sum(row["change_ns"] for row in found["rows"]) == pytest.approx(found["change_ns"], rel=1e-3)
