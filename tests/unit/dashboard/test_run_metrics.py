"""The metrics that charts of many runs draw are those of compare and summary."""

import math
import random
from pathlib import Path

import numpy as np
import pytest

from dashboard.run_store import run_metrics
from tracekit.analysis.compute import efficiency
from tracekit.ingest.loader import load
from tracekit.model.run import Run
from tracekit.regression.comparison import RunSamples
from tracekit.regression.samples import job_samples

SAMPLES = Path(__file__).parents[3] / "sample_traces"


@pytest.mark.parametrize("name", ["demo-fsdp2", "gpu/compiled"])
def test_metrics_of_steps_are_those_that_runs_are_compared_by(name):
    run = load(SAMPLES / name)
    found = run_metrics.measure(run)
    compared = job_samples(RunSamples.of(run, "a").samples)
    for metric in ("step_time_ns", "exposed_communication_ratio", "peak_allocated_bytes"):
        assert found.values.get(metric, ()) == tuple(compared.get(metric, ()))
    assert len(found.values["step_time_ns"]) >= 2
    assert found.settings["world_size"] == str(run.manifest.get("world_size", found.settings["world_size"]))


def test_mfu_of_a_step_is_the_mean_over_ranks():
    run = load(SAMPLES / "gpu/cuda-graphs")
    steps = run.table(efficiency.by_step).drop_nulls(["step", "mfu_ratio"])
    expected = [
        float(np.mean(steps.filter(window=window, step=step)["mfu_ratio"].to_list()))
        for window, step in sorted(set(steps.select("window", "step").iter_rows()))
    ]
    assert run_metrics.measure(run).values.get("mfu_ratio", ()) == pytest.approx(tuple(expected))


def test_lists_and_nested_fields_of_a_manifest_are_settings():
    run = load(SAMPLES / "demo-fsdp2")
    manifest = {"mesh": {"axes": ["dp_shard", "tp"]}, "model": {"name": "tiny"}, "none": None, "x" * 500: "y" * 500}
    found = run_metrics.measure(Run("x", run.sources, manifest=manifest)).settings
    assert found["mesh.axes"] == "dp_shard, tp"
    assert found["model.name"] == "tiny"
    assert "none" not in found
    assert all(len(text) <= run_metrics.MAX_VALUE for item in found.items() for text in item)


def test_the_explained_share_is_that_of_an_analysis_of_variance():
    scipy_stats = pytest.importorskip("scipy.stats")
    random.seed(1)
    times = [random.uniform(1, 2) * (3 if number % 3 else 1) for number in range(30)]
    groups = [str(number % 3) for number in range(30)]
    logs = np.log(times)
    parts = [logs[[g == group for g in groups]] for group in "012"]
    statistic = scipy_stats.f_oneway(*parts).statistic
    n, k = 30, 3
    r_squared = (statistic * (k - 1) / (n - k)) / (1 + statistic * (k - 1) / (n - k))
    adjusted = 1 - (1 - r_squared) * (n - 1) / (n - k)
    assert run_metrics.explained_ratio(groups, times) == pytest.approx(adjusted)


@pytest.mark.parametrize(
    ("groups", "times"),
    [([], []), (["a"], [1.0]), (["a", "a"], [1.0, 2.0]), (["a", "b"], [1.0, 2.0]), (["a", "b", "b"], [1.0] * 3)],
)
def test_without_enough_runs_nothing_is_explained(groups, times):
    ratio = run_metrics.explained_ratio(groups, times)
    assert ratio == 0.0
    assert math.isfinite(ratio)
