"""Simulated jobs in which the ranks of a node, or a part of it, are slow: in one process group and in a hybrid mesh."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

import tracekit
from benchmarks import injected_faults, perturbation_graph
from tests.support.cli_runner import tracekit as tracekit_command
from tests.unit.simulate.jobs import job, pipelined, written
from tracekit import conventions
from tracekit.analysis.parallelism import late_groups, pipeline_balance
from tracekit.plan import hardware, models
from tracekit.rules.pipeline import UnbalancedStages
from tracekit.rules.rule import Severity
from tracekit.rules.stragglers import LateGroup, Straggler, UnevenRanks
from tracekit.simulate import engine, kineto_writer
from tracekit.simulate.job import Impairments, Job, laid_out

pytestmark = pytest.mark.accuracy  # many runs with known faults: `make accuracy`

NANOGPT = Path(__file__).parents[3] / "shared" / "traces" / "nanogpt_h100_8ranks"
CASES = {
    "8 of 32": ("fsdp2", 32, range(24, 32), "RANK004", "All kernels of node 3 (ranks 24–31) take"),
    "8 of 32, hybrid": ("hsdp", 32, range(24, 32), "RANK004", "All kernels of node 3 (ranks 24–31) take"),
    "4 of 16": ("fsdp2", 16, range(8, 12), "RANK004", "All kernels of ranks 8–11 take"),
    "4 of 16, hybrid": ("hsdp", 16, range(8, 12), "RANK004", "All kernels of ranks 8–11 take"),
    "2 of 8": ("fsdp2", 8, range(2, 4), "RANK004", "All kernels of ranks 2–3 take"),
    "1 of 16": ("fsdp2", 16, range(5, 6), "RANK001", "All kernels of rank 5 take"),
    "1 of 16, hybrid": ("hsdp", 16, range(5, 6), "RANK001", "All kernels of rank 5 take"),
}


def findings(out: Path, strategy: str, gpus: int, slow: range) -> list[tracekit.Finding]:
    """Return the findings on late ranks of a simulated job whose `slow` ranks compute 1.3 times as long."""
    healthy = job(strategy, model="125m", layers=2, gpus=gpus, ranks_written=gpus)
    with_jitter = replace(healthy, hardware=replace(healthy.hardware, jitter_ratio=0.01))
    simulated = replace(with_jitter, impairments=Impairments(slow_ranks=dict.fromkeys(slow, (1.3, 0))))
    for rank, record in engine.simulate(simulated).ranks.items():
        kineto_writer.write(out / conventions.rank_file(rank, kineto_writer.TRACE_SUFFIX), simulated, record)
    rules = (Straggler(), LateGroup(), UnevenRanks())
    return list(tracekit.check(tracekit.load(str(out), cache=False), rules).findings)


@pytest.mark.parametrize(("strategy", "gpus", "slow", "code", "starts"), CASES.values(), ids=CASES)
def test_slow_ranks_are_one_finding(
    tmp_path: Path, strategy: str, gpus: int, slow: range, code: str, starts: str
) -> None:
    straggler, *consequences = findings(tmp_path, strategy, gpus, slow)
    assert (straggler.code, straggler.ranks) == (code, tuple(slow))
    assert straggler.severity.label == "warning"
    assert straggler.claim.startswith(starts)
    assert straggler.is_priced
    # Work that were alike on all ranks would end the same waiting.
    assert {finding.consequence_of for finding in consequences} <= {straggler.id}


@pytest.mark.parametrize(("fault", "found"), [("late-node", [tuple(range(8, 16))]), ("slow-rank:8:1.3", [])])
def test_a_late_node_with_several_ranks_of_each_process_group_is_one_finding(
    tmp_path: Path, fault: str, found: list[tuple[int, ...]]
) -> None:
    # Of each data-parallel group, ranks r, r + 4, r + 8 and r + 12, two ranks are on node 1; no tensor-parallel group
    # is on both nodes.
    written(pipelined(16, tp=4, layers=1, micro_batches=2, steps=3), tmp_path, fault)
    report = tracekit.check(tracekit.load(tmp_path, cache=False), (LateGroup(),))
    assert [each.ranks for each in report.findings] == found


@pytest.mark.parametrize("strategy", ["fsdp2", "hsdp"])
def test_healthy_nodes_are_no_late_group(tmp_path: Path, strategy: str) -> None:
    assert findings(tmp_path, strategy, 16, range(0)) == []


@pytest.mark.skipif(not NANOGPT.is_dir(), reason="the downloaded traces are not in ../shared")
def test_ranks_whose_reads_take_longer_in_one_process_group_of_all_are_no_late_group(tmp_path: Path) -> None:
    # All ranks read scalars. Ranks 0, 1 and 5 wait least in the collectives of all ranks, but seldom arrive there
    # together: only ranks that no collective joins may be late in parallel.
    job_of = perturbation_graph.load(NANOGPT.glob("*.json.gz"))
    injected_faults.item_calls(job_of, 0.12, random.Random("nanogpt_h100_8ranks reading scalars 0.12 310"))
    job_of.replay()
    for rank, document in zip(job_of.ranks, job_of.documents(), strict=True):
        perturbation_graph.write(document, tmp_path / f"rank{rank.number}.pt.trace.json.gz")
    assert late_groups.groups(tracekit.load(str(tmp_path), cache=False)).is_empty()


@pytest.mark.parametrize(
    ("slow", "starts"),
    [
        ((2, 3), "All kernels of node 1 (ranks 2–3) take"),
        ((6, 7), "All kernels of node 3 (ranks 6–7) take"),
        ((2, 3, 6, 7), "All kernels of replica 1 (ranks 2–3, 6–7) take"),
    ],
    ids=["first stage", "last stage", "all stages of a replica"],
)
def test_a_stage_that_waits_for_a_late_one_is_not_in_its_group(
    tmp_path: Path, slow: tuple[int, ...], starts: str
) -> None:
    healthy = pipelined(8, pp=2, tp=2, schedule="zb-h1", micro_batches=8, steps=3)
    machine = replace(healthy.hardware, gpus_per_node=2, jitter_ratio=0.01)
    late = replace(healthy, hardware=machine, impairments=Impairments(slow_ranks=dict.fromkeys(slow, (1.5, 0))))
    written(late, tmp_path / "run")
    found = tracekit.check(tracekit.load(tmp_path / "run", cache=False), (Straggler(), LateGroup())).findings
    assert [(each.code, each.ranks) for each in found] == [("RANK004", slow)]
    assert found[0].claim.startswith(starts)


@pytest.mark.parametrize(
    ("gpus", "tp", "schedule", "slow", "code"),
    [(16, 2, "zb-h1", (2, 3), "RANK004"), (16, 2, "1f1b", (2, 3), "RANK004"), (8, 1, "1f1b", (5,), "RANK001")],
    ids=["node, zb-h1", "node, 1f1b", "single rank of a middle stage"],
)
def test_collectives_of_stages_that_a_late_rank_delays_are_charged_to_it(
    tmp_path: Path, gpus: int, tp: int, schedule: str, slow: tuple[int, ...], code: str
) -> None:
    # Most waiting is for ranks of the three other stages of its replica, which get their inputs later.
    healthy = pipelined(gpus, pp=4, tp=tp, layers=4, schedule=schedule, micro_batches=12, steps=3)
    machine = replace(healthy.hardware, gpus_per_node=2, jitter_ratio=0.01)
    late = replace(healthy, hardware=machine, impairments=Impairments(slow_ranks=dict.fromkeys(slow, (2.0, 0))))
    written(late, tmp_path / "run")
    loaded = tracekit.load(tmp_path / "run", cache=False)
    found = tracekit.check(loaded, (Straggler(), LateGroup(), UnbalancedStages())).findings
    warnings = [each for each in found if each.severity is Severity.WARNING]
    assert [(each.code, each.ranks) for each in warnings] == [(code, slow)]
    lost_ns = engine.total_ns(late) - engine.total_ns(replace(late, impairments=Impairments()))
    assert warnings[0].cost_ns == pytest.approx(lost_ns / late.steps, rel=0.15)


def test_all_stages_of_a_late_replica_are_late_where_experts_make_the_others_wait_in_each_layer(tmp_path: Path) -> None:
    model = replace(models.find("mixtral-8x7b", layers=4), vocabulary=2048)
    layout = laid_out(gpus=8, model=model, pp=2, ep=4)
    machine = replace(hardware.find("h100-80"), gpus_per_node=2)
    late = Impairments(slow_ranks=dict.fromkeys((1, 5), (1.5, 0)))
    of = Job("ddp", model, machine, 8, 2048, micro_batches=6, steps=3, ranks_written=8, hybrid=layout, impairments=late)
    written(of, tmp_path / "run")
    assert late_groups.groups(tracekit.load(tmp_path / "run", cache=False))["rank"].to_list() == [1, 5]


def test_stages_take_their_time_without_late_replicas_and_without_gathering_weights(tmp_path: Path) -> None:
    # Only the first stage gathers weights within its first action: across nodes of one GPU, that takes longer.
    healthy = pipelined(8, pp=2, layers=2, micro_batches=6, steps=2, strategy="fsdp2", shards_data=True)
    times = {}
    for nodes, slow in ((8, (1, 5)), (1, ())):
        machine = replace(healthy.hardware, gpus_per_node=8 // nodes)
        faults = Impairments(slow_ranks=dict.fromkeys(slow, (1.3, 0)))
        written(replace(healthy, hardware=machine, impairments=faults), tmp_path / str(nodes))
        loaded = tracekit.load(tmp_path / str(nodes), cache=False)
        times[nodes] = loaded.table(pipeline_balance.stage_times)["stage_ns"].to_list()
    assert times[8] == pytest.approx(times[1], rel=0.005)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_all_stages_of_a_slow_rank_are_slow(tmp_path: Path, schedule: str) -> None:
    healthy = pipelined(4, pp=4, layers=16, schedule=schedule, stages=2, micro_batches=12, steps=2)
    done = written(healthy, tmp_path / "run", "slow-stage:1:1.4")
    (finding,) = UnbalancedStages().check(tracekit.load(tmp_path / "run", cache=False))
    stages = {"interleaved": "1, 5", "zbv": "1, 6"}[schedule]
    assert finding.message.startswith(f"Stages {stages} (rank 1) take up to 1.")
    assert finding.fix.startswith("Check the device and host of rank 1 ")
    assert finding.cost_ns == pytest.approx(done.known_faults[0].cost_ns, rel=0.1)


def test_ranks_that_are_late_for_their_tokens_are_overloaded_and_no_late_group(tmp_path: Path) -> None:
    sizes = ["--model", "8x7b", "--layers", "1", "--gpus", "8", "--ep", "4", "--seq", "1024", "--steps", "3"]
    done = tracekit_command("simulate", *sizes, "--fault", "hot-expert:1:4", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    findings_of_run = tracekit.check(tracekit.load(tmp_path / "run")).findings
    codes = {finding.code for finding in findings_of_run if not finding.consequence_of}
    assert "EP001" in codes
    assert not codes & {"RANK001", "RANK003", "RANK004"}
