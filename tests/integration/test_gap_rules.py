"""The gap rules on recorded faults and their healthy twins, and on simulated runs."""

import json
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import cli_runner
from tracekit.analysis.communication import communication_gap_causes
from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.time import launched_work
from tracekit.rules.contention import PreparationGap
from tracekit.rules.host import BlockingSync, DataStall, LateLaunch
from tracekit.rules.rule import Severity
from tracekit.rules.stragglers import Straggler

SAMPLES = Path(__file__).parents[2] / "sample_traces"
RULES = (LateLaunch, BlockingSync, DataStall, Straggler, PreparationGap)


def codes(run):
    return {finding.code: finding for rule in RULES for finding in rule().check(run)}


@pytest.mark.parametrize(
    ("sample", "code"),
    [("late-launch", "HOST001"), ("host-sync", "HOST002"), ("dataloader", "HOST003"), ("slow-rank", "RANK001")],
)
def test_a_recorded_fault_is_found_and_nothing_else(sample, code):
    found = codes(tracekit.load(SAMPLES / "faults" / sample))
    assert set(found) == {code}


@pytest.mark.parametrize(
    "healthy",
    ["healthy-ddp", "healthy-fsdp2", "healthy-save", "healthy-background-save", "../demo-fsdp2", "../demo-yafsdp"],
)
def test_healthy_recordings_are_left_alone(healthy):
    assert codes(tracekit.load((SAMPLES / "faults" / healthy).resolve())) == {}


def test_the_delay_that_was_caused_is_the_delay_that_is_found():
    # Ten milliseconds of sleep before each of two layers, on a machine that may take longer to wake up.
    (found,) = LateLaunch().check(tracekit.load(SAMPLES / "faults" / "late-launch"))
    slept = found.evidence.filter(pl.col("step") == found.evidence["step"][0], pl.col("dur_ns") >= 10_000_000)
    assert slept.height >= 2
    assert found.cost_ns >= 20_000_000


def test_the_straggler_is_named():
    (found,) = Straggler().check(tracekit.load(SAMPLES / "faults" / "slow-rank"))
    assert found.ranks == (1,)


@pytest.mark.parametrize("name", ["demo-fsdp2", "demo-yafsdp"])
def test_causes_of_recorded_runs_sum_to_the_gaps(name):
    run = tracekit.load(SAMPLES / name)
    for trace in run.traces():
        for found, pieces in (
            (launched_work.communication_gaps(trace), communication_gap_causes.gap_causes(trace)),
            (launched_work.compute_gaps(trace), compute_gap_causes.compute_gap_causes(trace)),
        ):
            assert found.height
            assert pieces.group_by("gap", maintain_order=True).agg(pl.col("dur_ns").sum()).rows() == (
                found.select("gap", "dur_ns").rows()
            )
    across = compute_gap_causes.sums_across(run, ["cause"])
    assert across["dur_ns"].sum() == run.table(compute_gap_causes.compute_gap_causes)["dur_ns"].sum()
    assert across.filter(pl.col("cause") == communication_gap_causes.PEER).height


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        ("fsdp1", "late-launch"),
        pytest.param("yafsdp", "dataloader-stall", marks=pytest.mark.accuracy),
        ("fsdp2", "host-sync"),
        pytest.param("yafsdp", "slow-rank", marks=pytest.mark.accuracy),
        ("fsdp2", None),
    ],
)
def test_a_simulated_fault_is_found_and_nothing_else(strategy, fault, tmp_path):
    arguments = ["--strategy", strategy, "--model", "llama2-7b", "--layers", "4", "--gpus", "4", "--seq", "2048"]
    arguments += ["--hardware", "a100-80", "--seed", "11", *(("--fault", fault) if fault else ()), "--out", "run"]
    done = cli_runner.tracekit("simulate", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    truth = json.loads((tmp_path / "run" / "truth.json").read_text())
    requested = {each["code"] for each in truth["faults"] if each["fault"] == fault}
    warned = {code for code, found in codes(tracekit.load(tmp_path / "run")).items() if found.severity > Severity.INFO}
    assert warned == requested
