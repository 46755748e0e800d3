"""`tracekit plan layout`: published trainings, memory by hand, and what cannot be."""

import json
import math
from pathlib import Path

import pytest

from tests.support.cli_runner import tracekit
from tests.support.wording import Wording
from tracekit.errors import ConfigError, InputError
from tracekit.plan import hardware, layouts, memory, models
from tracekit.plan.checkpoint import Layout
from tracekit.plan.layouts import Job, Mesh
from tracekit.plan.memory import NONE, SELECTIVE, Workload

# MFU as published. GPT-3: Megatron-LM in arXiv 2402.15627, tables 1 and 2. Llama 3: 2407.21783, table 4.
PUBLISHED = {
    "GPT-3 175B on 1,024 A100": ("gpt3-175b", "a100-80", 1024, (8, 16, 8), 0.447),
    "Llama 3 405B on 8,192 H100": ("405b", "h100-80", 8192, (16, 64, 8), 0.43),
    "Llama 3 405B on 16,384 H100": ("405b", "h100-80", 16_384, (16, 128, 8), 0.41),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_are_among_the_best_five_with_the_published_mfu(name: str) -> None:
    model, device, gpus, (pp, dp, tp), mfu = PUBLISHED[name]
    done = tracekit("plan", "layout", "--model", model, "--gpus", gpus, "--device", device, "--format", "json")
    best = json.loads(done.stdout)["layouts"][:5]
    (found,) = [each for each in best if (each["pp"], each["dp"], each["tp"]) == (pp, dp, tp)]
    assert found["zero"] == 1
    assert found["mfu_ratio"] == pytest.approx(mfu, rel=0.15)


def test_a_mesh_has_all_gpus_and_a_step_all_sequences() -> None:
    job = Job.of(models.find("405b"), hardware.find("h100-80"), gpus=2048)
    for each in layouts.plan(job):
        assert each.pp * each.dp * each.tp * each.cp == job.gpus
        assert each.micro_batch * each.micro_batches * each.dp == job.batch
        assert each.memory_bytes <= layouts.MEMORY_RATIO * job.hardware.memory_bytes
        assert each.tp <= job.gpus_per_node
        assert each.tokens_per_second * each.step_seconds == pytest.approx(job.batch * job.sequence)


def test_the_best_comes_first_and_every_mesh_once() -> None:
    plans = layouts.plan(Job.of(models.find("70b"), hardware.find("h100-80"), gpus=512))
    rates = [round(each.mfu_ratio, 4) for each in plans]
    assert rates == sorted(rates, reverse=True)
    meshes = [(each.pp, each.dp, each.tp, each.cp, each.ep, each.zero) for each in plans]
    assert len(set(meshes)) == len(meshes)


def test_the_time_of_a_step_by_hand() -> None:
    # One GPU, one micro-batch: compute alone. 6 flops per weight and half of 12 s h per layer and token for attention,
    # at the rate of matrix products; three passes of the other operators at memory bandwidth.
    model, device = models.find("1b"), hardware.find("h100-80")
    job = Job.of(model, device, gpus=1, sequence=2048, batch=1)
    (plan,) = [each for each in layouts.plan(job) if (each.zero, each.recompute) == (1, NONE)]
    flops = 2048 * (6 * model.active_parameters + 6 * model.layers * 2048 * model.width)
    others = 3 * 2048 * model.layers * device.elementwise_bytes * model.width / device.memory_bytes_per_s
    assert plan.step_seconds == pytest.approx(flops / device.flops_per_s + others)
    assert plan.limited_by == "compute"
    assert (plan.bubble_ratio, plan.tp_bytes, plan.pp_bytes, plan.dp_bytes) == (0, 0, 0, 0)


def test_the_operations_of_an_iteration_are_those_of_the_paper() -> None:
    # arXiv 2104.04473, section 5.1: 96 B s l h² (1 + s/6h + V/16lh), with layers, but not the head, recomputed
    gpt, sequences, tokens = models.find("gpt3-175b"), 1536, 2048
    layers, h = gpt.layers, gpt.width
    inner = 1 + tokens / (6 * h) + gpt.vocabulary / (16 * layers * h)
    published = 96 * sequences * tokens * layers * h**2 * inner
    head = 6.0 * gpt.vocabulary * h
    of_layers = layouts.flops_per_token(gpt, tokens) - 6.0 * gpt.outer_parameters
    assert sequences * tokens * (4 / 3 * of_layers + head) == pytest.approx(published, rel=2e-3)


def test_traffic_by_hand() -> None:
    job = Job.of(models.find("gpt3-175b"), hardware.find("a100-80"), gpus=64, sequence=2048, batch=8)
    work, mesh = Workload(2048, 1, 8, NONE, sequence_parallel=True), Mesh(pp=8, dp=1, tp=8)
    hidden = 2 * 2048 * 12_288
    assert layouts._tp_bytes(job, mesh, work) == 8 * hidden * 7 / 8
    assert layouts._pp_bytes(job, mesh, work) == 2 * hidden / 8
    assert layouts._dp_bytes(job, Mesh(pp=8, dp=2, tp=4), work) == pytest.approx(6 * job.model.parameters / 32 / 2)
    assert layouts._dp_bytes(job, Mesh(pp=1, dp=8, tp=8, zero=3), work) == pytest.approx(
        8 * 8 * job.model.parameters / 8 * 7 / 8
    )


def test_memory_is_that_of_plan_memory() -> None:
    model = models.find("70b")
    job = Job.of(model, hardware.find("a100-80"), gpus=64, sequence=4096, batch=64)
    work = Workload(4096, 1, 16, SELECTIVE, sequence_parallel=True)
    whole = memory.plan(model.parameters, Layout(8, 2, 4, 1), model=model, work=work)
    assert layouts.memory_bytes(job, Mesh(pp=2, dp=4, tp=8), work) == pytest.approx(whole.total_bytes)


def test_more_bandwidth_less_bubble_and_less_recomputation_are_faster() -> None:
    job = Job.of(models.find("70b"), hardware.find("a100-80"), gpus=64, batch=16)

    def seconds(mesh: Mesh, recompute: str = NONE) -> float:
        work = Workload(job.sequence, 1, job.batch // mesh.dp, recompute, sequence_parallel=True)
        return math.fsum(layouts._step_parts(job, mesh, work).values())

    assert seconds(Mesh(pp=8, dp=1, tp=8, chunks=5)) < seconds(Mesh(pp=8, dp=1, tp=8))
    assert seconds(Mesh(8, 1, 8)) < seconds(Mesh(8, 1, 8), SELECTIVE) < seconds(Mesh(8, 1, 8), "full")


def test_what_cannot_fit_is_an_error_in_one_line(wording: Wording) -> None:
    done = tracekit("plan", "layout", "--model", "405b", "--gpus", 8)
    assert done.returncode == 2
    wording(done.stderr)
    assert done.stderr.count("\n") == 1


def test_the_table_names_what_limits_a_layout() -> None:
    done = tracekit("plan", "layout", "--model", "405b", "--gpus", 16_384, "--device", "h100-80", "--count", 3)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "405b: 405.8 B parameters on 16,384 h100-80 GPUs, 2,048 sequences of 8,192 tokens a step"
    )
    assert lines[2].split()[:3] == ["pp", "v", "dp"]
    assert len(lines) == 6
    assert "pipeline bubble" in done.stdout


# Models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("gpt3", 174.6, 174.6), ("llama3-405b", 405.8, 403.7), ("mixtral-8x7b", 46.7, 12.7), ("deepseek-v3", 671.0, 36.6)],
)
def test_models_have_as_many_parameters_as_published(name: str, billions: float, active: float) -> None:
    model = models.find(name)
    assert model.parameters / 1e9 == pytest.approx(billions, abs=0.06)
    assert model.active_parameters / 1e9 == pytest.approx(active, abs=0.06)


CONFIGS = {
    "405b": {
        "model_type": "llama",
        "hidden_size": 16_384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 53_248,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
    },
    "8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 32_000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32_768,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18_432,
        "vocab_size": 129_280,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_hugging_face_gives_the_same_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    ours = models.find(name)
    for read in (models.read(tmp_path), models.read(tmp_path / "config.json")):
        assert (read.parameters, read.active_parameters) == (ours.parameters, ours.active_parameters)
    done = tracekit("plan", "memory", "--model", tmp_path, "--dp", 64, "--zero", 3, "--format", "json")
    assert json.loads(done.stdout)["total_bytes"] == pytest.approx(16 * ours.parameters / 64)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "no JSON object"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("{}", "no hidden_size"),
        ('{"hidden_size": "4096"}', "hidden_size is '4096', not a size"),
        ('{"hidden_size": -1}', "hidden_size is '-1', not a size"),
        ('{"hidden_size": 1e400}', "hidden_size is 'inf', not a size"),
        ('{"hidden_size": 10, "num_attention_heads": 3}', "3 heads do not divide 10"),
        ('{"hidden_size": 10, "num_attention_heads": 0}', "num_attention_heads"),
    ],
)
def test_other_files_are_refused_by_what_is_wrong(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json") as raised:
        models.read(tmp_path)
    assert words in str(raised.value)


def test_a_missing_file_and_an_impossible_job_are_refused(tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        models.read(tmp_path / "none.json")
    with wording.raises(ConfigError):
        Job.of(models.find("1b"), hardware.find("a100-80"), gpus=0)


def test_models_with_experts_cannot_be_simulated(tmp_path: Path, wording: Wording) -> None:
    done = tracekit("simulate", "--model", "8x7b", "--gpus", 8, "--out", tmp_path / "run")
    assert done.returncode == 2
    wording(done.stderr)
