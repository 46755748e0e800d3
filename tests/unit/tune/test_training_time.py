"""Training time per step: the mean of the logged steps on the slowest rank, saves included, without the first step."""

import json
from pathlib import Path

import pytest

import tracekit
from tests.support.cli_runner import ROOT
from tracekit.regression.thresholds import Thresholds
from tracekit.tune import training_time

FAULTS = ROOT / "sample_traces" / "faults"


def logged_mean_ns(run: Path) -> float:
    """Mean of the logged steps, by hand."""
    means = []
    for log in run.glob("rank*.metrics.jsonl"):
        times_ns = [json.loads(line)["step_time_ns"] for line in log.read_text().splitlines()]
        means.append(sum(times_ns[1:]) / len(times_ns[1:]))
    return max(means)


def test_slower_saves_make_training_time_longer() -> None:
    healthy, slow = (tracekit.load(FAULTS / name) for name in ("healthy-save", "slow-disk"))
    change = training_time.change([healthy], [slow], Thresholds())
    assert change is not None
    assert change.reference == pytest.approx(logged_mean_ns(FAULTS / "healthy-save"))
    assert change.candidate == pytest.approx(logged_mean_ns(FAULTS / "slow-disk"))
    assert change.is_worsening
