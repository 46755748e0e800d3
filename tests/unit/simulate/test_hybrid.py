"""Jobs with a layout: the traffic of each axis, who waits for whom, and what is written."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tracekit
from tests.support.wording import Wording
from tests.unit.simulate.jobs import pipelined, written
from tracekit.analysis.parallelism import pipeline_bubbles
from tracekit.conventions.strategies import ALL_REDUCE, RING_PASSES
from tracekit.errors import InputError
from tracekit.plan import hardware, models
from tracekit.rules.engine import check
from tracekit.rules.registry import RULES
from tracekit.rules.rule import Severity
from tracekit.simulate import engine, faults, hybrid_program, memory
from tracekit.simulate.hybrid_layers import Layers, Message, parts_of, transferred_elements
from tracekit.simulate.job import Impairments, Job, laid_out, move_layers
from tracekit.simulate.recording import Activity, Recording
from tracekit.sync import collective_matching

MB = 1e6


@pytest.fixture(scope="module")
def recording() -> Recording:
    return engine.simulate(pipelined(8, pp=2, tp=2, steps=1))


def _of_axis(recording: Recording, rank: int, axis: str) -> list[Activity]:
    activities = recording.ranks[rank].activities
    return [
        each for each in activities if each.group and (each.group.parent or each.group).description == f"mesh_{axis}"
    ]


@pytest.mark.parametrize("scatters", [False, True])
def test_the_traffic_of_a_micro_batch_is_that_of_the_formula(scatters: bool) -> None:
    # facts: b = 1, s = 2048, h = 25600, t = 8, 16 bits: 105 MB (13.1 scattered) and 734 MB per layer
    model = replace(models.find("llama2-7b", layers=2), width=25_600, heads=128, key_value_heads=128)
    layout = laid_out(gpus=16, model=model, pp=2, tp=8, sequence_parallel=scatters)
    job = Job("ddp", model, hardware.find("a100-80"), 16, 2048, hybrid=layout)
    layers = Layers(job, parts_of(job))
    messages = [each for each in (*layers.forward(), *layers.backward()) if isinstance(each, Message)]
    ring_elements = sum(RING_PASSES[each.op] * each.elements * 7 / 8 for each in messages)
    assert ring_elements == 8 * 2048 * 25_600 * 7 / 8
    assert 2 * ring_elements == pytest.approx(734 * MB, rel=1e-3)
    assert 2 * transferred_elements(job) == pytest.approx((13.1 if scatters else 105) * MB, rel=2e-3)
    assert scatters is not any(each.op == ALL_REDUCE for each in messages)


def test_a_receive_waits_for_its_peer_and_ends_with_the_send(recording: Recording) -> None:
    # stage 0   F0 send====          stage 1 posts its receive at once, and both kernels end together
    # stage 1   recv=======F0
    sends, receives = _of_axis(recording, 0, "pp"), _of_axis(recording, 4, "pp")
    assert len(sends) == len(receives) == 2 * 4
    assert sorted(each.end_ns for each in sends) == sorted(each.end_ns for each in receives)
    first = min(receives, key=lambda each: each.start_ns)
    sent = next(each for each in sends if each.end_ns == first.end_ns)
    assert first.start_ns < sent.start_ns < first.end_ns
    messages = {each.kernel.collective.op: each.kernel.collective for each in sends if each.kernel.collective}
    assert {op: of.peer for op, of in messages.items()} == {"send": 1, "recv": 1}


def test_each_axis_has_the_collectives_of_its_layers_and_stages(recording: Recording) -> None:
    # 2 layers a stage, 4 micro-batches: 2 all-reduces forward and backward in a layer; the embedding has 1, the head 2
    assert len(_of_axis(recording, 0, "tp")) == 4 * (2 * 4 + 1)
    assert len(_of_axis(recording, 7, "tp")) == 4 * (2 * 4 + 2)
    reduced = [each for each in _of_axis(recording, 0, "dp_replicate") if "AllReduce" in each.kernel.name]
    assert len(reduced) == 3
    assert all(each.group is not None and each.group.ranks == (0, 2) for each in reduced)


@pytest.mark.parametrize("fault", ["", "sharded-micro-batches"])
def test_sharded_weights_are_gathered_once_per_step_or_for_each_action(fault: str) -> None:
    job = pipelined(4, pp=2, steps=1, strategy="fsdp2", shards_data=True)
    recording = engine.simulate(faults.inject(job, [faults.parse(fault)] if fault else []))
    of_data = _of_axis(recording, 0, "dp_shard")
    ops = Counter(each.kernel.collective.op for each in of_data if each.kernel.collective)
    parts, micro_batches = 3, 4  # embedding and 2 layers
    assert ops["all_gather"] == (2 * parts * micro_batches if fault else parts)
    assert ops["reduce_scatter"] == (parts * micro_batches if fault else parts)
    gathered = max(each.end_ns for each in of_data if "AllGather" in each.kernel.name)
    first_backward = min(each.start_ns for each in recording.ranks[0].activities if "Backward" in each.kernel.name)
    assert (gathered > first_backward) == bool(fault)


@pytest.mark.parametrize(("pp", "schedule"), [(4, "1f1b"), pytest.param(2, "gpipe", marks=pytest.mark.accuracy)])
def test_the_price_of_sharded_micro_batches_is_what_a_simulation_without_them_saves(
    tmp_path: Path, pp: int, schedule: str
) -> None:
    job = pipelined(8, pp=pp, layers=4, micro_batches=8, schedule=schedule, strategy="fsdp2", shards_data=True)
    done = written(job, tmp_path, "sharded-micro-batches")
    found = check(tracekit.load(tmp_path), [rule() for rule in RULES if rule.code.startswith("PIPE")]).findings
    assert [each.code for each in found if each.severity is Severity.WARNING] == ["PIPE004"]
    assert found[0].cost_ns == pytest.approx(done.known_faults[0].cost_ns, rel=0.25)


@pytest.mark.accuracy  # the price of sharded micro-batches is tried every day
@pytest.mark.parametrize(
    ("schedule", "network_gb_per_s"),
    [
        ("gpipe", 5),
        ("gpipe", 20),
        ("zb-h1", 5),
    ],
)
def test_the_price_of_zero2_in_a_pipeline_is_what_zero1_saves(
    tmp_path: Path, schedule: str, network_gb_per_s: int
) -> None:
    """Reductions of all micro-batches queue for the network, and most of them end after the last backward."""
    step_ns = {}
    for strategy in ("zero1-scattered", "zero2"):
        job = pipelined(8, pp=2, micro_batches=8, schedule=schedule, strategy=strategy, shards_data=True)
        machine = replace(job.hardware, gpus_per_node=2, network_bytes_per_s=network_gb_per_s * 1e9)
        simulated = written(replace(job, hardware=machine), tmp_path / strategy)
        step_ns[strategy] = simulated.recording.total_ns / job.steps
    rules = [rule() for rule in RULES if rule.code == "PIPE004"]
    assert check(tracekit.load(tmp_path / "zero1-scattered"), rules).findings == ()
    (finding,) = check(tracekit.load(tmp_path / "zero2"), rules).findings
    assert finding.cost_ns == pytest.approx(step_ns["zero2"] - step_ns["zero1-scattered"], rel=0.05)


@pytest.mark.parametrize("gpus", [36, 40, 44])
def test_groups_of_more_ranks_than_are_listed_by_name_are_judged_in_a_pipeline(tmp_path: Path, gpus: int) -> None:
    """The text of such a group ends with a hash, which is beyond 63 bits for half of the groups."""
    job = replace(pipelined(gpus, pp=2, layers=2, micro_batches=2, steps=1), ranks_written=2)
    written(job, tmp_path)
    run = tracekit.load(str(tmp_path), cache=False)
    assert any("ranks from" in members for members in run.table(collective_matching.run_calls)["members"])
    report = check(run, [rule() for rule in RULES])
    assert report.run.table(collective_matching.run_calls)["op"].is_in(["send_recv", "send", "recv"]).any()


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    of = pipelined(4, pp=2, micro_batches=2, steps=1)
    of = replace(of, hardware=hardware.find("a100-80"))
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        written(replace(of, seed=seed), tmp_path / name)
    a, b, c = ((tmp_path / name / "rank00003.simulated.pt.trace.json.gz").read_bytes() for name in "abc")
    assert a == b != c


def test_a_written_run_states_its_mesh_stages_groups_and_bubbles(tmp_path: Path) -> None:
    of = pipelined(8, pp=2, tp=2, schedule="interleaved", stages=2, micro_batches=2, steps=1)
    simulated = written(of, tmp_path, "slow-stage:3:1.5")
    manifest, truth = (json.loads((tmp_path / name).read_text()) for name in ("run.json", "truth.json"))
    assert manifest["mesh"] == {"axes": ["pp", "dp_replicate", "tp"], "shape": [2, 2, 2]}
    assert manifest["pipeline"]["stage_ranks"] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert manifest["pipeline"]["stage_layers"] == [[0], [1], [2], [3]]
    assert manifest["groups"]["pp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    known = truth["faults"][0]
    assert (known["code"], known["ranks"], known["axis"], known["stages"]) == ("PIPE002", [4, 5, 6, 7], "pp", [1, 3])
    assert [each["rank"] for each in truth["bubbles"]] == [0, 4, 1, 5, 2, 6, 3, 7]
    trace = next(iter(tracekit.load(str(tmp_path), cache=False).traces()))
    assert trace.groups["description"].to_list() == ["default_pg", "mesh_pp", "mesh_dp_replicate", "mesh_tp"]
    ops = trace.collectives.filter(trace.collectives["op"].is_in(["send", "recv"]))
    assert set(ops["peer"]) == {4}
    assert set(ops["sent_bytes"]) == {2 * transferred_elements(of)}
    spans = set(trace.ops["name"].to_list())
    assert {"PP:0F0", "PP:2B1", "PP:0SEND_F1", "PP:2RECV_F0", "PP:2RECV_B0", "PP:2SEND_B1", "PP:0REDUCE_GRAD"} <= spans
    totals = [each.allocated_bytes for each in simulated.recording.ranks[0].allocations]
    assert totals[-1] == memory.static_bytes(of, 0)
    assert max(totals) <= memory.round_up(memory.peak_bytes(of, 0)) + (64 << 20)


def test_measured_bubbles_are_those_of_the_timeline(tmp_path: Path) -> None:
    of = pipelined(4, pp=2, tp=2, schedule="interleaved", stages=2, micro_batches=4, steps=1)
    written(replace(of, hardware=hardware.find("a100-80")), tmp_path, "slow-stage:1:1.3")
    table = tracekit.load(str(tmp_path), cache=False).table(pipeline_bubbles.pipeline_bubbles)
    measured = dict(table.select("rank", "bubble_ns").iter_rows())
    truth = json.loads((tmp_path / "truth.json").read_text())
    assert measured == {each["rank"]: each["bubble_ns"] for each in truth["bubbles"]}


def test_a_hot_expert_gets_more_tokens_and_its_ranks_work_longer() -> None:
    model = models.find("8x7b", layers=1)
    layout = laid_out(gpus=4, model=model, ep=4)
    healthy = Job("ddp", model, replace(hardware.find("h100-80"), jitter_ratio=0.0), 4, 512, steps=1, hybrid=layout)
    request = faults.parse("hot-expert:2:5")
    hot = faults.inject(healthy, [request])
    tokens = {rank: sum(_received(hot, rank)) for rank in range(4)}
    assert sum(tokens.values()) == sum(sum(rows) for rows in _sent(hot).values()) == 4 * 2 * 512
    assert tokens[1] > 2 * max(tokens[0], tokens[2], tokens[3])
    assert request.fault.ranks(hot) == (1,)

    def forward_ns(job: Job) -> int:
        start_ns, end_ns = next(iter(engine.simulate(job).ranks[1].actions.values()))
        return end_ns - start_ns

    assert forward_ns(hot) > 1.3 * forward_ns(healthy)


def _received(job: Job, rank: int) -> tuple[int, ...]:
    return next(_splits(job, rank))[1]


def _sent(job: Job) -> dict[int, tuple[int, ...]]:
    return {rank: next(_splits(job, rank))[0] for rank in job.simulated_ranks}


def _splits(job: Job, rank: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for each in hybrid_program.programs(job)[rank]:
        kernel = getattr(each, "kernel", None)
        if kernel is not None and kernel.collective is not None and kernel.collective.splits is not None:
            yield kernel.collective.splits


def test_a_layer_is_moved_from_the_stage_that_has_most(wording: Wording) -> None:
    layout = laid_out(gpus=4, model=models.find("llama2-7b", layers=10), pp=4)
    assert layout.stage_layers == (3, 3, 2, 2)
    assert move_layers(layout, stage=2, layers=1).stage_layers == (3, 2, 3, 2)
    with wording.raises(ValueError):
        move_layers(layout, stage=2, layers=9)


FAULTS: dict[str, dict[str, Any]] = {
    "slow-stage": {"pp": 2},
    "unbalanced-stages": {"pp": 2},
    "few-micro-batches:2": {"pp": 2},
    "sharded-micro-batches": {"pp": 2, "gpus": 4, "strategy": "fsdp2", "shards_data": True},
    "slow-pipeline-link:0:100": {"pp": 2},
    "slow-pipeline-links:100": {"pp": 2},
    "read-each-action": {"pp": 2},
    "slow-tensor-link": {"tp": 2},
    "tp-across-nodes": {"tp": 2},
    "late-replica": {"pp": 2, "gpus": 4},
    "late-node": {"tp": 2, "gpus": 16},
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_of_a_layout_costs_what_a_simulation_without_it_saves(text: str) -> None:
    changes: dict[str, Any] = {"gpus": 2, "steps": 1, **FAULTS[text]}
    healthy = pipelined(**changes)
    request = faults.parse(text)
    assert (request.fault.plain, request.fault.hybrid) == (False, True)
    faulty = faults.inject(healthy, [request])
    assert faults.without(healthy, [request], request) == healthy
    assert engine.simulate(faulty).total_ns > 1.02 * engine.simulate(healthy).total_ns
    assert set(request.fault.ranks(faulty)) <= set(range(healthy.gpus))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 6, "pp": 4}, "--pp 4 × --tp 1 does not divide --gpus 6"),
        ({"gpus": 4, "pp": 2, "ep": 4}, "--ep 4 does not divide the 2 ranks of data parallelism"),
        ({"gpus": 4, "ep": 2}, "--ep is 2; 7b has no experts"),
        ({"gpus": 4, "pp": 4, "layers": 3}, "4 stages need a layer each"),
        ({"gpus": 4, "pp": 2, "stages": 2}, "1f1b has 1 stage on each rank, not 2; --schedule interleaved has more"),
        ({"gpus": 4, "pp": 4, "schedule": "loop"}, "the schedule is 'loop'; known are gpipe"),
        ({"gpus": 4, "pp": 4, "stages": 1, "schedule": "zbv"}, "zbv has 2 stages on each rank, not 1"),
        (
            {"gpus": 4, "pp": 2, "stages": 2, "schedule": "dualpipev", "micro_batches": 3},
            "needs 4 micro-batches or more",
        ),
        ({"gpus": 2, "stages": 2, "schedule": "zbv"}, "zbv needs --pp 2 or more"),
        (
            {"gpus": 4, "pp": 2, "stages": 2, "schedule": "interleaved", "micro_batches": 3},
            "needs a multiple of 2 micro-batches; there are 3",
        ),
        ({"gpus": 4, "pp": 2, "strategy": "fsdp1"}, "use one of: ddp, zero1, zero1-scattered, zero2, fsdp2"),
        ({"gpus": 4, "pp": 2, "strategy": "fsdp2"}, "on the axis dp_shard"),
        ({"gpus": 4, "pp": 2, "strategy": "fsdp2", "schedule": "zb-h1", "shards_data": True}, "gradients are wrong"),
    ],
)
def test_an_impossible_layout_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pipelined(**changes)  # type: ignore[arg-type]


def test_faults_of_one_kind_of_job_are_refused_in_the_other(wording: Wording) -> None:
    with wording.raises(InputError):
        faults.inject(replace(pipelined(2, pp=2), hybrid=None), [faults.parse("slow-stage")])
    with wording.raises(InputError):
        faults.inject(pipelined(2, pp=2), [faults.parse("no-prefetch")])


def test_a_host_that_reads_each_result_is_found_as_the_host_half_of_the_bubble(
    tmp_path: Path, wording: Wording
) -> None:
    # stage 0   F0 .. F1 .. F2         .. the host reads the result and processes it
    job = pipelined(8, pp=4, layers=4, micro_batches=8)
    done = written(job, tmp_path, "read-each-action")
    run = tracekit.load(tmp_path)
    found = check(run, [rule() for rule in RULES if rule.code.startswith("PIPE")]).findings
    assert [each.code for each in found if each.severity is Severity.WARNING] == ["PIPE001"]
    assert found[0].cost_ns == pytest.approx(done.known_faults[0].cost_ns, rel=0.1)
    wording(found[0].fix)
    bubbles = run.table(pipeline_bubbles.pipeline_bubbles)
    assert bubbles["host_ns"].sum() > 5 * bubbles["communication_ns"].sum()


@pytest.mark.parametrize(
    "fault", ["slow-stage", "slow-pipeline-link", "read-each-action", "slow-tensor-link", "late-launch"]
)
def test_the_time_of_a_job_is_the_same_without_a_recording(fault: str) -> None:
    faulty = faults.inject(pipelined(8, pp=2, tp=2), [faults.parse(fault)])
    assert engine.total_ns(faulty) == engine.simulate(faulty).total_ns


def test_ranks_with_the_same_stages_share_a_program_unless_they_have_experts() -> None:
    job = pipelined(8, pp=2, tp=2)
    assert job.hybrid is not None
    written = hybrid_program.programs(job)
    assert len({id(each) for each in written.values()}) == job.hybrid.layout.pp < len(written)


def test_impairments_of_links_act_on_their_axis_only() -> None:
    of = pipelined(4, pp=2, tp=2, steps=1)
    healthy = engine.simulate(of)
    slow = engine.simulate(replace(of, impairments=Impairments(slow_axes={"tp": 3.0})))

    def transfer(recording: Recording, axis: str) -> int:
        return min(each.end_ns - each.start_ns for each in _of_axis(recording, 0, axis) if each.kernel.collective)

    assert transfer(slow, "tp") > 2 * transfer(healthy, "tp")
    assert transfer(slow, "pp") == pytest.approx(transfer(healthy, "pp"), rel=0.2)
