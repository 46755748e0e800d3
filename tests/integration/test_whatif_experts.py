"""Experts with equally many tokens: what the replay saves, and what the simulator takes less without a hot expert."""

import json
from pathlib import Path

import pytest

import tracekit
from tests.support.cli_runner import tracekit as tracekit_command
from tracekit.ingest.loader import load
from tracekit.model.run import Run
from tracekit.replay.graph import savings
from tracekit.rules.rule import Severity

SAMPLES = Path(__file__).parents[2] / "sample_traces" / "parallelism"
CAUSE = "unbalanced-experts"
SIZES = ("--model", "8x7b", "--layers", "2", "--gpus", "8", "--seq", "1024", "--steps", "3")


def simulated(out: Path, *options: str) -> Run:
    done = tracekit_command("simulate", *SIZES, *options, "--out", out)
    assert done.returncode == 0, done.stderr
    return tracekit.load(out, cache=False)


@pytest.mark.accuracy  # measures truth; test_expert_pairs names such experts
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        (("--ep", "4", "--seed", "1"), 3),
        (("--ep", "2", "--seed", "2"), 2),
    ],
    ids=["one rank of four", "a little, half of the ranks"],
)
def test_balanced_experts_save_what_a_hot_expert_costs(tmp_path, options, factor):
    healthy = simulated(tmp_path / "healthy", *options)
    hot = simulated(tmp_path / "hot", *options, "--fault", f"hot-expert:1:{factor}")
    (fault,) = json.loads((tmp_path / "hot" / "truth.json").read_text(encoding="utf-8"))["faults"]
    # Tokens of the healthy run are not quite balanced either.
    saved_ns = savings.saving(hot, CAUSE).saved_ns - savings.saving(healthy, CAUSE).saved_ns
    assert saved_ns == pytest.approx(fault["cost_ns"], rel=0.1)
    report = tracekit.check(hot)
    (finding,) = (each for each in report.findings if each.code == "EP001")
    assert finding.ranks == tuple(fault["ranks"])
    assert finding.cost_ns == savings.saving(hot, CAUSE).saved_ns
    # That others wait for the rank is a consequence, but for waiting that balanced experts leave.
    waits = [wait for wait in report.findings if wait.code in ("RANK001", "RANK003", "RANK004")]
    assert all(wait.severity == Severity.INFO for wait in waits)
    assert all(wait.consequence_of == finding.id for wait in waits if wait.cost_ns < finding.cost_ns)
    assert "EP001" not in {each.code for each in tracekit.check(healthy).findings}


@pytest.mark.parametrize(
    ("sample", "reason"),
    [("parallelism/moe-ep2", "on the CPU"), ("demo-fsdp2", "on the CPU")],
)
def test_without_devices_there_is_no_answer(sample, reason):
    assert reason in savings.saving(load(SAMPLES.parent / sample), CAUSE).unavailable_reason


def test_without_experts_there_is_no_answer(tmp_path):
    done = tracekit_command("simulate", "--model", "125m", "--layers", "1", "--gpus", "2", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    run = tracekit.load(tmp_path / "run", cache=False)
    assert "no pairs of all-to-alls" in savings.saving(run, CAUSE).unavailable_reason
