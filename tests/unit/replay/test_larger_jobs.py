"""More GPUs: predictions from recordings of few simulated ranks, compared with simulations of the larger job."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tracekit
from benchmarks import larger_jobs as benchmark
from tests.support.cli_runner import tracekit as command
from tests.unit.simulate.jobs import job, pipelined, written
from tracekit.analysis.communication import latency
from tracekit.errors import InputError
from tracekit.model.run import Run
from tracekit.replay.graph import larger_jobs, savings
from tracekit.replay.graph.larger_jobs import Network
from tracekit.simulate import engine
from tracekit.simulate.job import Job

STEPS = 2


def recorded(simulated_job: Job, out: Path) -> Run:
    written(simulated_job, out)
    return tracekit.load(str(out), cache=False)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory) -> tuple[Job, Run]:
    simulated_job = job("fsdp2", layers=2, gpus=16, ranks_written=16, steps=STEPS)
    simulated_job = replace(simulated_job, hardware=replace(simulated_job.hardware, jitter_ratio=0.02))
    return simulated_job, recorded(simulated_job, tmp_path_factory.mktemp("two_nodes"))


@pytest.mark.parametrize("gpus", [8, 64])
def test_the_step_of_another_size_is_that_of_its_simulation(two_nodes, gpus: int) -> None:
    simulated_job, run = two_nodes
    network = Network(bytes_per_s=simulated_job.hardware.node_bytes_per_s)
    prediction = larger_jobs.predict(run, gpus, network)
    if gpus == 8:  # the links across nodes stay: this is not the simulation of one node
        assert prediction.predicted_ns < prediction.step_ns
        return
    true_ns = engine.simulate(replace(simulated_job, gpus=gpus, ranks_written=gpus)).total_ns / STEPS
    assert prediction.predicted_ns == pytest.approx(true_ns, rel=0.05)
    low_ns, high_ns = prediction.range_ns
    assert low_ns < true_ns < high_ns
    assert prediction.throughput_ratio == pytest.approx(gpus / 16 * prediction.step_ns / prediction.predicted_ns)


def test_the_recorded_size_is_the_unchanged_replay(two_nodes) -> None:
    _, run = two_nodes
    replay = savings.replayed_steps(run)
    steps = replay.select("window", "step").n_unique()
    prediction = larger_jobs.predict(run, 16)
    assert prediction.predicted_ns == pytest.approx(savings.total_ns(replay, "replayed_ns") / steps, rel=1e-3)


def test_a_job_that_leaves_its_node_needs_the_bandwidth_between_nodes(tmp_path: Path) -> None:
    simulated_job = job("ddp", layers=2, gpus=8, ranks_written=8, steps=STEPS)
    run = recorded(simulated_job, tmp_path)
    with pytest.raises(InputError, match="--network-bandwidth"):
        larger_jobs.predict(run, 32)
    machine = simulated_job.hardware
    network = Network(8, machine.network_bytes_per_s, 1e9 * machine.network_hop_s)
    prediction = larger_jobs.predict(run, 32, network)
    true_ns = engine.simulate(replace(simulated_job, gpus=32, ranks_written=32)).total_ns / STEPS
    assert prediction.predicted_ns == pytest.approx(true_ns, rel=0.05)
    trees = larger_jobs.predict(run, 32, replace(network, has_trees=True))
    assert trees.predicted_ns < prediction.predicted_ns  # less latency


@pytest.mark.accuracy  # replicas of a pipeline grow in the next test
def test_shards_within_nodes_stay_and_only_replicas_grow(tmp_path: Path) -> None:
    simulated_job = job("hsdp", layers=2, gpus=16, ranks_written=16, steps=STEPS)
    prediction = larger_jobs.predict(recorded(simulated_job, tmp_path), 64)
    true_ns = engine.simulate(replace(simulated_job, gpus=64, ranks_written=64)).total_ns / STEPS
    assert prediction.predicted_ns == pytest.approx(true_ns, rel=0.05)


def test_pipelines_grow_by_replicas_of_the_model(tmp_path: Path) -> None:
    run = recorded(pipelined(4, pp=2, steps=1), tmp_path)
    with pytest.raises(InputError, match="multiple of 2"):
        larger_jobs.predict(run, 5)
    wide = pipelined(8, pp=2, steps=1)
    prediction = larger_jobs.predict(run, 8)
    assert prediction.predicted_ns == pytest.approx(engine.simulate(wide).total_ns, rel=0.05)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2},  # rings of every second rank share a node's network
        {"pp": 2},  # stages move to other nodes
        {"strategy": "zero1"},  # more ranks broadcast smaller parts, which they step
    ],
    ids=str,
)
def test_groups_that_leave_their_node_get_their_share_of_the_network(sizes: dict, tmp_path: Path) -> None:
    simulated_job = pipelined(8, steps=1, **sizes)
    # A network so slow that what crosses it decides.
    machine = replace(
        simulated_job.hardware, network_bytes_per_s=simulated_job.hardware.node_bytes_per_s / 8, network_hop_s=20e-6
    )
    simulated_job = replace(simulated_job, hardware=machine)
    network = Network(8, machine.network_bytes_per_s, 1e9 * machine.network_hop_s)
    run = recorded(simulated_job, tmp_path)
    prediction = larger_jobs.predict(run, 32, network)
    wide = replace(pipelined(32, steps=1, **sizes), hardware=machine)
    assert prediction.predicted_ns == pytest.approx(engine.simulate(wide).total_ns, rel=0.05)
    assert prediction.predicted_ns > 1.2 * prediction.step_ns
    with pytest.raises(InputError, match="--network-bandwidth"):
        larger_jobs.predict(run, 32, Network(8))


def test_a_latency_that_large_messages_hide_is_not_fitted(tmp_path: Path) -> None:
    simulated_job = job("fsdp2", layers=2, gpus=16, ranks_written=16, steps=STEPS)
    simulated_job = replace(simulated_job, hardware=replace(simulated_job.hardware, jitter_ratio=0.05))
    (row,) = recorded(simulated_job, tmp_path).table(latency.by_group).iter_rows(named=True)
    assert row["is_fitted"]
    assert row["hop_sensitivity"] > 3
    groups = larger_jobs._sized_groups(recorded(simulated_job, tmp_path / "again"), 16, 16)
    assert [(group.hop_ns, group.bytes_per_ns) for group in groups] == [(None, None)]


def test_without_data_parallelism_nothing_shows_its_cost(tmp_path: Path) -> None:
    run = recorded(pipelined(2, tp=2, steps=1), tmp_path)
    with pytest.raises(InputError, match="no collective of data parallelism"):
        larger_jobs.predict(run, 8)


def test_the_latest_of_more_ranks_is_later() -> None:
    draws = np.random.default_rng(0)
    late_ns = np.sort(draws.exponential(1e6, 4000))
    for ranks in (2, 8, 64):
        largest = draws.choice(late_ns, (20_000, ranks)).max(axis=1).mean()
        assert larger_jobs._mean_of_latest(late_ns, ranks) == pytest.approx(largest, rel=0.02)


def test_the_command_states_step_range_and_throughput(tmp_path: Path) -> None:
    run = recorded(pipelined(4, pp=2, steps=1), tmp_path)
    shown = command("whatif", run.path, "--gpus", "8", "--format", "json", "--no-cache")
    (prediction,) = json.loads(shown.stdout)["predictions"]
    direct = larger_jobs.predict(run, 8, Network())
    assert prediction["predicted_ns"] == direct.predicted_ns
    assert prediction["range_ns"] == list(direct.range_ns)
    assert prediction["throughput_ratio"] == pytest.approx(direct.throughput_ratio)
    refused = command("whatif", run.path, "--trees")
    assert refused.returncode == 2


@pytest.mark.accuracy  # measures truth
def test_a_drawn_job_is_predicted_closely() -> None:
    result = benchmark.outcome(benchmark.draw(9, times=4))
    assert abs(result.error_ratio) <= benchmark.CLOSE
    assert result.is_within
