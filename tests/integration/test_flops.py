"""FLOPs from a recorded trace, beside torch's own counter of the same training step, and on traces of others."""

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

import tracekit
from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import ModelConfig
from tests.support.cli_runner import tracekit as command
from tests.support.selection import others_in_accuracy
from tracekit.analysis.compute import efficiency, flops
from tracekit.analysis.time import breakdown
from tracekit.model.trace import Trace

OTHERS = Path(__file__).parents[3] / "shared" / "traces"

Step = Callable[[], Tensor]


def resnet50() -> Step:
    import transformers

    model = transformers.ResNetForImageClassification(transformers.ResNetConfig())
    images = torch.randn(2, 3, 64, 64)
    return lambda: model(images).logits.sum()


def gpt2() -> Step:
    import transformers

    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, attn_implementation="eager")
    model, tokens = transformers.GPT2LMHeadModel(config), torch.randint(100, (2, 32))
    return lambda: model(tokens).logits.sum()


def vit() -> Step:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=64, attn_implementation="eager"
    )
    model, images = transformers.ViTForImageClassification(config), torch.randn(2, 3, 64, 64)
    return lambda: model(images).logits.sum()


def llama() -> Step:
    model, tokens = Llama(ModelConfig(64, 2, 4, 2, 176, 512)), torch.randint(512, (2, 32))
    return lambda: model(tokens).sum()


def mixture_of_experts() -> Step:
    model, tokens = Llama(ModelConfig(64, 2, 4, 2, 176, 512, experts=4)), torch.randint(512, (2, 32))
    return lambda: model(tokens).sum()


class RecommendationModel(nn.Module):
    """DLRM: embeddings of categories and a perceptron of numbers, their dot products, another perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(100, 16, mode="sum") for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16))
        self.top = nn.Sequential(nn.Linear(26, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        features = torch.stack([dense, *(table(bag) for table, bag in zip(self.tables, categories, strict=True))], 1)
        products = torch.bmm(features, features.mT)
        row, column = torch.tril_indices(5, 5, -1)
        return self.top(torch.cat((dense, products[:, row, column]), 1))


def recommendation() -> Step:
    model, numbers, categories = RecommendationModel(), torch.randn(8, 13), torch.randint(100, (4, 8, 3))
    return lambda: model(numbers, categories).sum()


def convolutions() -> Step:
    """Return strided, dilated, transposed and one-dimensional convolutions, one without a gradient of its input."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, (3, 5), stride=(2, 1), padding=2, dilation=(1, 2)),
        nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1),
        nn.Flatten(2),
        nn.Conv1d(4, 6, 4, padding="same"),
    )
    images = torch.randn(2, 3, 16, 16)
    return lambda: model(images).sum()


def recorded(step: Step, folder: Path) -> Trace:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler, record_function("ProfilerStep#1"):
        step().backward()
    profiler.export_chrome_trace(str(folder / "rank00000.pt.trace.json.gz"))
    return tracekit.load(folder).trace(0)


MODELS = (resnet50, gpt2, vit, llama, mixture_of_experts, recommendation, convolutions)


@pytest.mark.parametrize(
    "model",
    others_in_accuracy(
        MODELS, [model for model in MODELS if model is not resnet50]
    ),  # `convolutions` has its operators
    ids=lambda model: model.__name__,
)
def test_flops_of_a_training_step_are_those_of_torchs_counter(model, tmp_path):
    torch.manual_seed(0)
    step = model()
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's fused attention is not in torch's counter
        with FlopCounterMode(display=False) as counter:
            step().backward()
        trace = recorded(step, tmp_path)
    assert flops.flops(trace)["flops"].sum() == pytest.approx(counter.get_total_flops(), rel=1e-12)
    assert flops.coverage(trace).select(pl.col("known_ns") / pl.col("compute_ns")).item() > 0.99


def test_attention_of_fused_kernels_has_the_operations_of_its_products(tmp_path):
    query, key, value = (torch.randn(2, heads, 32, 16, requires_grad=True) for heads in (4, 2, 2))

    def step():
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum()

    product = 2 * 2 * 4 * 32 * 32 * 16
    by_op = dict(flops.flops(recorded(step, tmp_path)).group_by("name").agg(pl.col("flops").sum()).iter_rows())
    assert by_op == {
        "aten::_scaled_dot_product_flash_attention_for_cpu": 2 * product,
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 5 * product,
    }


def test_a_depthwise_convolution_costs_backward_what_its_groups_multiply(tmp_path):
    """torch's counter multiplies the weight's gradient by the number of groups."""
    convolution, images = nn.Conv2d(8, 8, 3, groups=8), torch.randn(2, 8, 10, 10, requires_grad=True)
    forward = 2 * 2 * 8 * 8 * 8 * 3 * 3
    found = flops.flops(recorded(lambda: convolution(images).sum(), tmp_path))
    assert found["flops"].sum() == 3 * forward


def test_operations_are_unknown_where_an_operator_has_no_formula(tmp_path):
    cell, inputs = nn.LSTM(16, 16), torch.randn(8, 4, 16)
    trace = recorded(lambda: cell(inputs)[0].sum(), tmp_path)
    assert flops.coverage(trace).select(pl.col("known_ns") / pl.col("compute_ns")).item() < 0.9
    assert efficiency.by_step(trace)["mfu_ratio"].to_list() == [None]
    missing = efficiency.unknown_work(trace).filter(pl.col("flops_unknown_ns") > 0)
    assert any("rnn" in name or "lstm" in name for name in missing["name"])
    assert set(missing["reason"]) == {efficiency.NO_FORMULA}


def others(name):
    if not (OTHERS / name).is_dir():
        pytest.skip("the downloaded traces are not in ../shared")
    return tracekit.load(OTHERS / name).trace(0)


def test_a_step_of_resnet50_is_785_gflop_although_its_trace_has_no_strides():
    steps = efficiency.by_step(others("kineto_resnet_v100_memory"))
    assert steps["flops"].to_list() == pytest.approx([785.12e9] * steps.height, rel=1e-3)
    assert steps["flops_coverage_ratio"].min() > 0.999


KNOWN = [
    ("tracelens_mi300_resnet_ddp", 1.0, None),
    ("torchrec_v100_4ranks", 0.391, ("aten::mm", efficiency.NO_SHAPES)),
    ("nanogpt_h100_8ranks", 0.88, ("flash_attn_3::bwd", efficiency.INSUFFICIENT)),
    ("tracelens_h100_memory_stacks", 1.0, None),
    ("megatron_tp8_a100_8ranks", 1.0, None),
    ("hta_dlrm_a100", 0.415, ("CompiledFunctionBackward", efficiency.NO_FORMULA)),
]


@pytest.mark.parametrize(("name", "ratio", "missing"), others_in_accuracy(KNOWN, KNOWN[:3]))
def test_operations_are_known_for_compute_of_others_or_what_is_missing_is_named(name, ratio, missing):
    trace = others(name)
    known, whole = flops.coverage(trace).select("known_ns", "compute_ns").sum().row(0)
    assert known / whole == pytest.approx(ratio, abs=0.005)
    unknown = efficiency.unknown_work(trace)
    assert unknown["flops_unknown_ns"].sum() == whole - known
    assert unknown["compute_ratio"].sum() >= 1 - known / whole - 1e-9
    named = unknown.filter(pl.col("flops_unknown_ns") > 0).select("name", "reason").rows()
    assert next(iter(named), None) == missing


def test_the_summary_says_which_operations_are_missing():
    others("hta_dlrm_a100")
    shown = command("summary", OTHERS / "hta_dlrm_a100", "--by", "step")
    assert shown.returncode == 0, shown.stderr
    assert "operations are known for 41.5% of the compute time" in shown.stderr
    assert "CompiledFunctionBackward 54.0% (no formula)" in shown.stderr
    listed = command("summary", OTHERS / "hta_dlrm_a100", "--by", "unknown-work", "--format", "json")
    (first, *_) = json.loads(listed.stdout)
    assert (first["name"], first["reason"]) == ("CompiledFunctionBackward", "no formula")
    assert first["compute_ratio"] == pytest.approx(0.540, abs=0.0005)
    queried = command("query", OTHERS / "hta_dlrm_a100", "SELECT max(total_ns) AS most FROM unknown_work")
    assert str(first["total_ns"]) in queried.stdout
    full = command("summary", OTHERS / "kineto_resnet_v100_memory", "--by", "step")
    assert "operations are known" not in full.stderr


def test_utilization_of_a_tensor_parallel_rank_is_that_of_a_reckoning_by_hand():
    """All products of the rank by their shapes over its device window, at the A100's 312 TFLOP/s of bf16."""
    trace = others("megatron_tp8_a100_8ranks")
    products = trace.ops.filter(pl.col("name").is_in(["aten::mm", "aten::bmm", "aten::baddbmm"]))
    total = 0.0
    for name, shapes in products.select("name", pl.col("shapes").str.json_decode(pl.List(pl.List(pl.Int64)))).rows():
        left, right = shapes[1:3] if name == "aten::baddbmm" else shapes[:2]
        total += 2 * right[-1] * torch.Size(left).numel()
    window_ns = trace.steps["end_ns"][0] - trace.steps["start_ns"][0]
    found = efficiency.by_step(trace).row(0, named=True)
    assert found["flops"] == total
    assert found["mfu_ratio"] == pytest.approx(total / (window_ns / 1e9) / 312e12, rel=1e-9)


@pytest.mark.accuracy
def test_utilization_of_a_data_parallel_rank_is_that_of_the_products_in_its_file():
    """nanoGPT on H100, from the raw JSON, at 989 TFLOP/s of bf16 and 1,979 of fp8, without its flash_attn_3.

    The sequences of that have no lengths in the trace. In its window each query sees a known number of keys at most.
    """
    trace = others("nanogpt_h100_8ranks")
    (file,) = (OTHERS / "nanogpt_h100_8ranks").glob("rank0-*.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    marks = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"}
    begin, end = marks["ProfilerStep#11"]
    needed_s, bound_s = 0.0, 0.0
    for event in (e for e in events if e.get("cat") == "cpu_op" and begin <= e["ts"] < end):
        dims, types = event["args"].get("Input Dims"), event["args"].get("Input type")
        if event["name"] in ("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::baddbmm"):
            at = int(event["name"] == "aten::baddbmm")
            needed_s += 2 * math.prod(dims[at]) * dims[at + 1][-1] / (1979e12 if "Float8" in types[at] else 989e12)
        if event["name"] in ("flash_attn_3::fwd", "flash_attn_3::bwd"):
            is_backward = event["name"].endswith("bwd")
            tokens, heads, width = dims[is_backward]
            keys = int(event["args"]["Concrete Inputs"][17 if is_backward else 25]) + 1
            bound_s += 2 * tokens * heads * keys * 2 * width * (2.5 if is_backward else 1) / 989e12
    found = efficiency.by_step(trace).filter(step=11).row(0, named=True)
    (window_ns,) = breakdown.by_step(trace).filter(step=11)["duration_ns"]
    assert found["mfu_ratio"] == pytest.approx(needed_s / (window_ns / 1e9), rel=1e-3)
    assert 0.2 < found["mfu_ratio"] < 0.21
    assert bound_s / (window_ns / 1e9) < 0.009
