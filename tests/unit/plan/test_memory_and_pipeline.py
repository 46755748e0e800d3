"""Memory per rank and pipeline bubbles against the published numbers."""

import json

import pytest

from tests.support.cli_runner import tracekit
from tracekit.conventions import strategies
from tracekit.errors import ConfigError
from tracekit.plan import memory, models, pipeline
from tracekit.plan.checkpoint import Layout


@pytest.mark.parametrize(("zero", "size_gb"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_memory_of_the_paper(zero: int, size_gb: float) -> None:
    done = tracekit("plan", "memory", "--params", 7.5e9, "--dp", 64, "--zero", zero, "--format", "json")
    assert json.loads(done.stdout)["total_bytes"] == pytest.approx(size_gb * 1e9, rel=0.003)


def test_activations_of_llama_2_70b() -> None:
    llama = models.find("llama2-70b")
    assert memory.llama_factor(llama, work=memory.Workload(4096)) == 40.5
    assert memory.llama_factor(llama, tp=8, work=memory.Workload(4096, sequence_parallel=True)) == 40.5 / 8
    assert memory.llama_factor(llama, tp=8, work=memory.Workload(4096)) == 8 + 32.5 / 8
    done = tracekit("plan", "memory", "--model", "llama2-70b", "--sequence", 4096, "--zero", 3, "--format", "json")
    assert json.loads(done.stdout)["activation_bytes"] == pytest.approx(108.7e9, rel=1e-3)
    done = tracekit(
        *("plan", "memory", "--model", "llama2-70b", "--sequence", 4096, "--dp", 64, "--yafsdp"),
        *("--recomputation", "full", "--format", "json"),
    )
    plan = json.loads(done.stdout)
    assert plan["activation_bytes"] == pytest.approx(5.37e9, rel=1e-3)
    state = plan["weight_bytes"] + plan["gradient_bytes"] + plan["optimizer_bytes"]
    assert state == pytest.approx(18 * llama.parameters / 64)
    assert plan["buffer_bytes"] == 12 * llama.layer_parameters
    assert plan["total_bytes"] == pytest.approx(state + plan["buffer_bytes"] + plan["activation_bytes"])


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_of_a_gpt_layer_are_those_of_the_paper_without_scores_and_dropout(tp: int) -> None:
    # arXiv 2205.05198, table 2: sbh(10 + 24/t + 5as/(ht)); with sequence parallelism sbh/t·(34 + 5as/h); full 2sbh.
    # Flash attention keeps none of the 5as/h; the masks of two dropouts, which are 1 each, are not counted.
    gpt, masks = models.find("gpt3-175b"), 2
    assert memory.llama_factor(gpt, tp=tp, work=memory.Workload(2048)) + masks == 10 + 24 / tp
    scattered = memory.Workload(2048, sequence_parallel=True)
    assert memory.llama_factor(gpt, tp=tp, work=scattered) + masks / tp == 34 / tp
    assert memory.llama_factor(gpt, tp=tp, work=memory.Workload(2048, recomputation=memory.FULL)) == 2


@pytest.mark.parametrize(("name", "tp", "pp"), [("1b", 1, 8), ("8b", 8, 16), ("70b", 8, 128)])
def test_yafsdp_buffers_are_no_larger_than_a_pipeline_stage(name: str, tp: int, pp: int) -> None:
    model = models.find(name)
    assert max(model.layer_parameters, model.outer_parameters) > model.parameters / pp
    plan = memory.plan(model.parameters, Layout(tp, pp, 4), model=model, with_yafsdp=True)
    assert plan.buffer_bytes == pytest.approx(12 * model.parameters / (tp * pp))
    shallow = memory.plan(model.parameters, Layout(tp, 2, 4), model=model, with_yafsdp=True)
    assert shallow.buffer_bytes == 12 * max(model.layer_parameters, model.outer_parameters) / tp


@pytest.mark.parametrize("pp", [1, 8])
def test_a_layer_larger_than_the_model_is_an_error(pp: int) -> None:
    with pytest.raises(ConfigError, match="largest layer"):
        memory.plan(1e9, Layout(pp=pp), with_yafsdp=True, largest_layer=2e9)


def test_activations_of_the_first_stage_grow_with_micro_batches_in_flight() -> None:
    llama, work = models.find("8b"), memory.Workload(2048, micro_batches=8)
    whole = memory.activations_of(llama, memory.Workload(2048), Layout())
    assert memory.activations_of(llama, work, Layout(pp=4)) == whole
    assert memory.activations_of(llama, memory.Workload(2048), Layout(pp=4)) == whole / 4


@pytest.mark.parametrize(("zero", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_of_data_parallelism(zero: int, times: int) -> None:
    plan = memory.plan(7.5e9, Layout(dp=64, zero=zero))
    assert plan.traffic_bytes_per_step == times * 7.5e9 * strategies.GATHERED_BYTES
    assert memory.plan(7.5e9, Layout(zero=zero)).traffic_bytes_per_step == 0


@pytest.mark.parametrize(("zero", "times"), [(0, 2), (1, 2), (2, 9), (3, 24)])
def test_what_is_sharded_is_sent_for_every_micro_batch_of_a_pipeline(zero: int, times: int) -> None:
    plan = memory.plan(6e9, Layout(pp=4, dp=64, zero=zero), micro_batches=8)
    assert plan.traffic_bytes_per_step == times * 1.5e9 * strategies.GATHERED_BYTES


@pytest.mark.parametrize(("zero", "device", "host"), [(1, 4 * 7.5e9, 14 * 7.5e9 / 64), (3, 0, 16 * 7.5e9 / 64)])
def test_offloading_moves_the_optimizer_and_what_it_steps_to_the_host(zero: int, device: float, host: float) -> None:
    plan, offloaded = (memory.plan(7.5e9, Layout(dp=64, zero=zero), offload=offload) for offload in (False, True))
    assert offloaded.total_bytes == pytest.approx(device)
    assert offloaded.offloaded_bytes == pytest.approx(host)
    assert plan.offloaded_bytes == 0


def test_offloading_what_every_rank_has_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--zero 1"):
        memory.plan(7.5e9, Layout(dp=64), offload=True)


def test_traffic_of_pipelines_and_tensor_parallelism() -> None:
    command = ("plan", "pipeline", "--stages", 4, "--micro-batches", 8, "--width", 25_600, "--layers", 128)
    command += ("--sequence", 2048, "--tp", 8, "--format", "json")
    plan = json.loads(tracekit(*command).stdout)
    scattered = json.loads(tracekit(*command, "--scatter-gather").stdout)
    assert plan["stage_bytes_per_micro_batch"] == pytest.approx(105e6, rel=2e-3)
    assert scattered["stage_bytes_per_micro_batch"] == pytest.approx(13.1e6, rel=2e-3)
    assert plan["tensor_parallel_bytes_per_micro_batch"] == pytest.approx(734e6, rel=1e-3)
    assert plan["tensor_parallel_bytes_per_step"] == pytest.approx(734e6 * 32 * 8, rel=1e-3)


def test_schedules_with_smaller_bubbles_need_more_activations() -> None:
    plan = {name: pipeline.plan(4, 8, schedule=name) for name in pipeline.SCHEDULES}
    assert [plan[name].bubble_to_ideal_ratio for name in ("1f1b", "zb-h1", "zb-h2")] == [0.375, 0.125, 0]
    assert plan["zb-h2"].activation_ratio == 2
    assert pipeline.plan(4, 8, chunks=2, schedule="interleaved").activation_ratio == 1.375
    with pytest.raises(ConfigError, match="one chunk"):
        pipeline.plan(4, 8, chunks=2, schedule="zb-h1")


def test_bubble_of_four_stages() -> None:
    done = tracekit("plan", "pipeline", "--stages", 4, "--micro-batches", 8, "--format", "json")
    plan = json.loads(done.stdout)
    assert plan["bubble_to_ideal_ratio"] == 0.375
    assert plan["bubble_ratio"] == pytest.approx(0.273, abs=5e-4)


def test_interleaving_halves_the_bubble() -> None:
    assert pipeline.bubble_to_ideal_ratio(64, 512) == pytest.approx(0.123, abs=5e-4)
    assert pipeline.bubble_to_ideal_ratio(64, 512, chunks=2) == pytest.approx(0.0615, abs=5e-5)


def test_zero_stages_is_an_error() -> None:
    assert tracekit("plan", "pipeline", "--stages", 0, "--micro-batches", 8).returncode == 2
