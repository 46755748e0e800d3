"""What if: recorded and simulated runs replayed, their steps without a cause, and what the command says of them."""

import dataclasses
import json
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import cli_runner, shared_findings
from tests.support.selection import others_in_accuracy
from tracekit.analysis.time import breakdown
from tracekit.errors import InputError
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.plan import hardware, models
from tracekit.replay.graph import savings, strategies, trace_graph
from tracekit.replay.graph.nodes import HOST
from tracekit.replay.graph.strategies import NodeSpec
from tracekit.rules.engine import check
from tracekit.simulate import faults, run
from tracekit.simulate.job import Job
from tracekit.sync import alignment

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces"
SHARED = ROOT.parent / "shared" / "traces"
REPRODUCED = 0.05
EVERYDAY = {"torchrec_v100_4ranks"}


def off(of):
    replayed = savings.replayed_steps(of)
    return float((replayed["replayed_ns"] / replayed["duration_ns"] - 1).abs().max())


@pytest.mark.parametrize(
    "name",
    others_in_accuracy(
        [
            "demo-fsdp2",
            "demo-yafsdp",
            "faults/healthy-fsdp2",
            "faults/no-prefetch",
            "faults/dataloader",
            "parallelism/pipeline-1f1b",  # a send lasts until its host waits for it
            "parallelism/pipeline-interleaved",
            "parallelism/pipeline-slow-stage",
            "parallelism/moe-ep2",  # groups of experts without names
            "gpu/compiled",
            "gpu/cuda-graphs",  # kernels of a graph follow each other in less than 1 µs
        ],
        ["faults/healthy-fsdp2", "parallelism/pipeline-1f1b", "parallelism/moe-ep2", "gpu/compiled", "gpu/cuda-graphs"],
    ),
)
def test_recorded_runs_are_reproduced_with_nothing_changed(name):
    assert off(tracekit.load(SAMPLES / name)) < REPRODUCED


@pytest.mark.skipif(not SHARED.exists(), reason="the downloaded traces are not in ../shared")
@pytest.mark.parametrize(
    "name", others_in_accuracy(["megatron_tp8_a100_8ranks", "torchrec_v100_4ranks", "nanogpt_h100_8ranks"], EVERYDAY)
)
def test_public_runs_without_recorded_waits_are_reproduced(name):
    assert off(tracekit.load(SHARED / name)) < REPRODUCED


@pytest.mark.parametrize(
    "name", ["parallelism/pipeline-1f1b", "parallelism/moe-ep2", "gpu/compiled", "faults/dataloader"]
)
def test_without_host_time_or_communication_a_step_still_computes(name):
    assert_still_computes(tracekit.load(SAMPLES / name))


@pytest.mark.skipif(not SHARED.exists(), reason="the downloaded traces are not in ../shared")
@pytest.mark.parametrize(
    "name",
    others_in_accuracy(["tracelens_h100_memory_stacks", "torchrec_v100_4ranks", "kineto_resnet_v100_memory"], EVERYDAY),
)
def test_public_runs_without_host_time_or_communication_still_compute(name):
    # In the first, 128 ms of loading before the first kernel and most of 512 ms of idle time are data loading.
    assert_still_computes(tracekit.load(SHARED / name))


def assert_still_computes(of):
    computed = of.table(breakdown.by_step).group_by("rank").agg(pl.col("compute_ns").mean())["compute_ns"].max()
    for cause in ("data-loading", "late-launch", "blocking-sync", "straggler", "communication"):
        found = savings.saving(of, cause)
        assert found.unavailable_reason or found.step_ns - found.saved_ns > 0.97 * computed, cause


@pytest.mark.skipif(not SHARED.exists(), reason="the downloaded traces are not in ../shared")
@pytest.mark.parametrize("name", others_in_accuracy(["torchrec_v100_4ranks", "nanogpt_h100_8ranks"], EVERYDAY))
def test_findings_are_priced_where_work_was_queued_before_the_window(name):
    # Up to 24% of the device's work has no recorded launch, all of it before the first that has one.
    (late,) = [finding for finding in shared_findings.findings(SHARED / name) if finding.code == "HOST001"]
    assert late.is_priced


@pytest.mark.skipif(not SHARED.exists(), reason="the downloaded traces are not in ../shared")
def test_a_blocking_call_waits_for_the_work_of_its_own_op():
    # aten::copy_ launches a pageable copy and waits for its stream: 33 ms, returning 37 µs after the copy has ended.
    trace = tracekit.load(SHARED / "torchrec_v100_4ranks").trace(0)
    calls = trace_graph.nodes(trace).filter(pl.col("what") == HOST, pl.col("step") == 5)
    long = calls.filter(pl.col("end_ns") - pl.col("start_ns") > 30_000_000)
    assert trace.ops["name"].gather(long["ref"].to_list()).to_list() == ["cudaStreamSynchronize"]
    assert long["own_ns"].item() < 100_000


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Return what simulates a run of a strategy with a fault, and its truth: each once."""
    made = {}

    def make(strategy, *names):
        requested = tuple(name for name in names if name)
        if (strategy, requested) not in made:
            job = Job(strategy, models.find("llama2-7b", layers=3), hardware.find("a100-80"), 16, 2048, steps=3, seed=4)
            job = dataclasses.replace(job, ranks_written=2, micro_batches=1)
            out = tmp_path_factory.mktemp("runs") / "-".join((strategy, *requested))
            run.simulate(job, [faults.parse(each) for each in requested], out, arguments={}, force=True)
            made[strategy, requested] = out
        return made[strategy, requested]

    return make


def without_waits(loaded):
    def bare(source):
        def read():
            trace = source.read()
            tables = {**trace.tables, "syncs": schema.SYNCS.empty()}
            return Trace(trace.rank, trace.window, trace.path, header=trace.header, **tables)

        return dataclasses.replace(source, read=read)

    return Run(loaded.path, [bare(each) for each in loaded.sources], manifest=loaded.manifest, align=alignment.offsets)


CAUSES = [
    ("fsdp1", "late-launch", "late-launch"),
    ("fsdp1", "", "give-way"),
    ("fsdp2", "host-sync", "blocking-sync"),
    ("fsdp2", "no-prefetch", "late-gathers"),
    ("yafsdp", "slow-rank", "straggler"),
    ("yafsdp", "small-collectives:8", "small-collectives"),
]


@pytest.mark.parametrize(("strategy", "fault", "cause"), others_in_accuracy(CAUSES, [CAUSES[1], CAUSES[2], CAUSES[4]]))
def test_what_a_cause_costs_is_what_the_simulator_saves_without_it(strategy, fault, cause, simulated):
    folder = simulated(strategy, fault)
    name = fault.split(":")[0] or "give-way"
    (true_ns,) = [each["cost_ns"] for each in truth(folder) if each["fault"] == name]
    loaded = tracekit.load(folder, cache=False)
    assert off(loaded) < 0.01
    assert savings.saving(loaded, cause).saved_ns == pytest.approx(true_ns, rel=0.1)


PAIRS = [
    ("fsdp2", ("dataloader-stall", "no-prefetch"), ("data-loading", "late-gathers")),
    ("fsdp2", ("sm-contention", "slow-rank"), ("straggler", "slowed-compute")),
    ("yafsdp", ("slow-rank", "small-collectives:8"), ("straggler", "small-collectives")),
]


@pytest.mark.parametrize(("strategy", "both", "causes"), others_in_accuracy(PAIRS, PAIRS[:1]))
def test_what_two_causes_cost_together_is_what_a_run_without_both_takes_less(strategy, both, causes, simulated):
    faulty, healthy = (tracekit.load(simulated(strategy, *each), cache=False) for each in (both, ()))
    found = savings.combined_saving(faulty, causes)
    healthy_ns = savings.saving(healthy, "communication").step_ns
    assert found.saved_ns == pytest.approx(found.step_ns - healthy_ns, rel=0.05)
    alone_ns = sum(savings.saving(faulty, each).saved_ns for each in causes)
    assert abs(found.saved_ns - alone_ns) > 0.05 * found.saved_ns


def truth(folder):
    return json.loads((folder / "truth.json").read_text())["faults"]


def test_waits_missing_from_a_trace_are_inferred(simulated):
    folder = simulated("fsdp2", "host-sync")
    bare = without_waits(tracekit.load(folder, cache=False))
    (true_ns,) = [each["cost_ns"] for each in truth(folder) if each["fault"] == "host-sync"]
    assert off(bare) < 0.01
    assert savings.saving(bare, "blocking-sync").saved_ns == pytest.approx(true_ns, rel=0.1)
    inferred, known = (savings.saving(each, "blocking-sync") for each in (bare, tracekit.load(folder, cache=False)))
    assert inferred.confidence < known.confidence


def test_findings_cost_what_the_replay_says(simulated):
    folder = simulated("fsdp2", "host-sync")
    (finding,) = [each for each in check(tracekit.load(folder, cache=False)).findings if each.code == "HOST002"]
    (true_ns,) = [each["cost_ns"] for each in truth(folder) if each["fault"] == "host-sync"]
    assert finding.cost_ns == pytest.approx(true_ns, rel=0.1)


def test_another_strategy_is_predicted_with_its_assumptions(simulated):
    fsdp1, yafsdp = (tracekit.load(simulated(each, ""), cache=False) for each in ("fsdp1", "yafsdp"))
    prediction = strategies.predict_strategy(fsdp1, "yafsdp")
    assert prediction.predicted_ns == pytest.approx(savings.saving(yafsdp, "data-loading").step_ns, rel=0.06)
    assert any("two buffers" in each for each in prediction.assumptions)


def test_sharding_inside_nodes_is_predicted_from_a_recording_across_them(simulated):
    fsdp2, hsdp = (tracekit.load(simulated(each, ""), cache=False) for each in ("fsdp2", "hsdp"))
    machine = hardware.find("a100-80")
    prediction = strategies.predict_strategy(fsdp2, "hsdp", NodeSpec(machine.gpus_per_node, machine.node_bytes_per_s))
    assert prediction.predicted_ns == pytest.approx(savings.saving(hsdp, "data-loading").step_ns, rel=0.03)
    slower = strategies.predict_strategy(fsdp2, "hsdp", NodeSpec(machine.gpus_per_node, machine.node_bytes_per_s / 8))
    assert slower.predicted_ns > 1.1 * prediction.predicted_ns
    assert any("sharded over 8 ranks only" in each for each in prediction.assumptions)
    with pytest.raises(InputError, match="the 16 ranks of the sharding group do not fill nodes of 5 GPUs"):
        strategies.predict_strategy(fsdp2, "hsdp", NodeSpec(5, 1e9))
    with pytest.raises(InputError, match="sharded over 16 ranks, which fit in one node of 16 GPUs already"):
        strategies.predict_strategy(fsdp2, "hsdp", NodeSpec(16, 1e9))


def test_another_network_is_predicted_from_what_links_carried(simulated):
    base, slow = (tracekit.load(simulated("fsdp2", each), cache=False) for each in ("", "slow-network:2"))
    step_ns = {run: savings.saving(run, "data-loading").step_ns for run in (base, slow)}
    prediction = strategies.predict_network(base, 0.5)
    assert prediction.predicted_ns == pytest.approx(step_ns[slow], rel=0.01)
    assert prediction.predicted_ns > 1.2 * prediction.step_ns
    assert strategies.predict_network(slow, 2).predicted_ns == pytest.approx(step_ns[base], rel=0.01)
    assert "unchanged latency" in prediction.assumptions[1]
    for wrong in (0, -1, float("nan"), 1000):
        with pytest.raises(InputError, match="--network-times is"):
            strategies.predict_network(base, wrong)


def test_the_command_prints_text_and_json(simulated):
    folder = str(simulated("fsdp2", "host-sync"))
    text = cli_runner.tracekit("whatif", folder, "--gpu-hour-price", "2", cwd=ROOT)
    assert text.returncode == 0, text.stderr
    first, *rest = text.stdout.splitlines()
    assert "replayed without changes" in first
    causes = rest[next(number for number, row in enumerate(rest) if row.startswith("without ")) + 1 :]
    assert causes[0].startswith(("blocking-sync ", "communication "))
    assert "at 2 an hour" in text.stdout
    result = cli_runner.tracekit("whatif", folder, "--without", "blocking-sync", "--format", "json", cwd=ROOT)
    (only,) = json.loads(result.stdout)["without"]
    assert only["cause"] == "blocking-sync"
    assert only["saved_ratio"] > 0.05
    both = cli_runner.tracekit(
        "whatif", folder, "--without", "communication", "--without", "blocking-sync", "--together", cwd=ROOT
    )
    assert "\nblocking-sync and communication " in both.stdout
    one = cli_runner.tracekit("whatif", folder, "--without", "communication", "--together", cwd=ROOT)
    assert (one.returncode, "two or more causes" in one.stderr) == (2, True)
    wrong = cli_runner.tracekit("whatif", folder, "--without", "blocking-sink", cwd=ROOT)
    assert wrong.returncode == 2
    assert "did you mean blocking-sync?" in wrong.stderr
    other = cli_runner.tracekit("whatif", folder, "--strategy", "hsdp", cwd=ROOT)
    assert other.returncode == 2
    assert "--node-bandwidth" in other.stderr
    known = cli_runner.tracekit("whatif", folder, "--strategy", "hsdp", "--node-bandwidth", "230e9", cwd=ROOT)
    assert known.returncode == 0, known.stderr
    assert "8 GPUs per node, with a ring bandwidth of 230 GB/s" in known.stdout
