"""Bytes moved by memory-bound operators compared with the tensors of the same calls, and on traces of others."""

import json
from pathlib import Path

import polars as pl
import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import tracekit
from tests.support.cli_runner import tracekit as command
from tests.support.selection import others_in_accuracy
from tracekit.analysis.compute import efficiency, flops
from tracekit.analysis.host import ops

OTHERS = Path(__file__).parents[3] / "shared" / "traces"
ATEN = torch.ops.aten


def size(*tensors):
    """Return the bytes in memory of tensors, an expanded dimension once."""
    return sum(
        each.element_size() * torch.Size([n for n, step in zip(each.shape, each.stride(), strict=True) if step]).numel()
        for each in tensors
    )


def calls():
    """Return the name of operators, the bytes of a call by its tensors, and the call."""
    x, y, row = torch.randn(32, 48), torch.randn(32, 48), torch.randn(1, 48)
    half, weight, places = torch.randn(32, 48).bfloat16(), torch.randn(100, 48), torch.randint(100, (2, 3))
    images, channels = torch.randn(2, 6, 16, 16), torch.ones(6)
    normed, mean, deviation = ATEN.native_layer_norm(x, [48], row[0], row[0], 1e-5)
    pooled, at = ATEN.max_pool2d_with_indices(images, [2, 2])
    looked_up = 2 * 6 * 48 * 4 + size(places)
    return [
        ("aten::add", size(x, row, x), lambda: ATEN.add(x, row)),
        ("aten::mul", size(x, row, x), lambda: ATEN.mul(x, row.expand(32, 48))),
        ("aten::sub_", size(x, y, x), lambda: ATEN.sub_(x, y)),
        ("aten::gt", size(x) + x.numel(), lambda: ATEN.gt(x, 0)),
        ("aten::where", size(x > 0, x, y, x), lambda: ATEN.where(x > 0, x, y)),
        ("aten::silu", 2 * size(half), lambda: ATEN.silu(half)),
        ("aten::addcmul", 3 * size(x) + size(row), lambda: ATEN.addcmul(x, y, row)),
        ("aten::threshold_backward", 3 * size(x), lambda: ATEN.threshold_backward(x, y, 0)),
        ("aten::copy_", size(half, x), lambda: half.float()),
        ("aten::amax", size(x) + 32 * 4, lambda: ATEN.amax(x, [1])),
        ("aten::sum", size(x) + 48 * 4, lambda: ATEN.sum(x, [0])),
        ("aten::argmax", size(x) + 32 * 8, lambda: ATEN.argmax(x, 1)),
        ("aten::_softmax", 2 * size(x), lambda: ATEN._softmax(x, 1, False)),
        ("aten::_log_softmax_backward_data", 3 * size(x), lambda: ATEN._log_softmax_backward_data(x, y, 1, x.dtype)),
        ("aten::native_layer_norm", size(x, row, row, normed, mean, deviation),
         lambda: ATEN.native_layer_norm(x, [48], row[0], row[0], 1e-5)),
        ("aten::native_layer_norm_backward", size(y, x, mean, deviation, row) + size(x, row, row),
         lambda: ATEN.native_layer_norm_backward(y, x, [48], mean, deviation, row[0], row[0], [True] * 3)),
        ("aten::native_batch_norm", 2 * size(images) + 8 * size(channels),
         lambda: functional.batch_norm(images, channels, channels, channels, channels, training=True)),
        ("aten::max_pool2d_with_indices", size(images, pooled, at),
         lambda: ATEN.max_pool2d_with_indices(images, [2, 2])),
        ("aten::embedding", looked_up, lambda: ATEN.embedding(weight, places)),
        ("aten::gather", 2 * 32 * 4 + 32 * 8, lambda: ATEN.gather(x, 1, torch.zeros(32, 1, dtype=torch.int64))),
        ("aten::native_dropout", 2 * size(x) + x.numel(), lambda: ATEN.native_dropout(x, 0.5, True)),
        ("aten::fill_", size(x), lambda: ATEN.fill_(x, 1.0)),
    ]  # fmt: skip


def recorded(step, folder):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler, record_function("ProfilerStep#1"):
        step()
    profiler.export_chrome_trace(str(folder / "rank00000.pt.trace.json.gz"))
    return tracekit.load(folder)


def test_bytes_of_operators_are_those_of_the_tensors_they_take_and_return(tmp_path):
    cases = calls()
    trace = recorded(lambda: [call() for _, _, call in cases], tmp_path).trace(0)
    each = flops.counted_calls(trace).join(trace.ops.select("id", "name", "start_ns"), on="id").sort("start_ns")
    of_name = dict(each.group_by("name", maintain_order=True).agg(pl.col("bytes").first()).iter_rows())
    assert {name: of_name.get(name) for name, _, _ in cases} == {name: expected for name, expected, _ in cases}


def test_hardware_utilization_counts_what_checkpointing_repeats(tmp_path):
    layer, inputs = torch.nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)

    def step():
        checkpoint(lambda x: layer(x).relu(), inputs, use_reentrant=False).sum().backward()

    trace = recorded(step, tmp_path).trace(0)
    found = efficiency.by_step(trace.replace(header={"deviceProperties": [{"name": "NVIDIA H100"}]}))
    mfu, hfu = found.select("mfu_ratio", "hfu_ratio").row(0)
    assert hfu / mfu == pytest.approx(4 / 3)  # forward once more beside forward and two products backward


def others(name):
    if not (OTHERS / name).is_dir():
        pytest.skip("the downloaded traces are not in ../shared")
    return tracekit.load(OTHERS / name)


COVERAGES = [
    ("tracelens_mi300_resnet_ddp", 0.99),
    ("megatron_tp8_a100_8ranks", 0.91),
    ("kineto_resnet_v100_memory", 0.99),
    ("tracelens_h100_memory_stacks", 0.99),
    ("merged_ddp_mi300_4ranks", 0.94),
    ("nanogpt_h100_8ranks", 0.65),
]


@pytest.mark.parametrize(("name", "coverage"), others_in_accuracy(COVERAGES, COVERAGES[:2]))
def test_work_is_known_for_most_compute_of_others_and_no_kernel_is_faster_than_memory(name, coverage):
    run = others(name)
    trace = run.trace(run.ranks[0])
    assert efficiency.by_step(trace)["work_coverage_ratio"].min() >= coverage
    calls_of_ops = efficiency.of_ops(trace).filter(pl.col("flops").is_null(), pl.col("bytes") > 100e6)
    ratio = calls_of_ops.filter(pl.col("rated_ns") > 0).select(pl.col("ideal_ns") / pl.col("rated_ns")).to_series()
    assert ratio.max() is None or ratio.max() < 1.02


def test_rates_of_memory_bound_operators_are_in_the_table_of_ops():
    rows = ops.ops(others("tracelens_mi300_resnet_ddp")).rows_by_key("name", named=True, unique=True)
    row = rows["aten::threshold_backward"]
    assert row["flops"] is None
    assert row["tflops_per_s"] is None
    assert row["tbytes_per_s"] == pytest.approx(4.53, abs=0.01)
    assert row["roofline_ratio"] == pytest.approx(row["tbytes_per_s"] / 5.325)


def test_what_a_user_states_of_devices_replaces_the_table_in_every_command(tmp_path):
    """Twice the bandwidth and the peak halve the shares of them."""
    others("tracelens_mi300_resnet_ddp")
    run = str(OTHERS / "tracelens_mi300_resnet_ddp")
    before = shares(run, tmp_path)
    stated = "peak_bf16_tflops = 2614.8\nmemory_gb_per_s = 10650\n"
    (tmp_path / "tracekit.toml").write_text(f'[devices."AMD Instinct MI300X"]\n{stated}')
    assert shares(run, tmp_path) == pytest.approx([each / 2 for each in before])


def shares(run, folder):
    """Return the MFU of the first step and the share of the roofline of an elementwise operator, from the commands."""
    step = json.loads(command("summary", run, "--by", "step", "--format", "json", cwd=folder).stdout)[0]
    rows = json.loads(command("kernels", run, "--of", "host", "--format", "json", cwd=folder).stdout)
    (row,) = (each for each in rows if each["name"] == "aten::threshold_backward")
    return [step["mfu_ratio"], row["roofline_ratio"]]
