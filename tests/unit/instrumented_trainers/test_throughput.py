"""Model FLOP/s and MFU against torch's own count of operations."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import PRESETS
from instrumented_trainers.throughput import Throughput, flops_per_token, peak_flops


@pytest.mark.parametrize("name", ["micro", "tiny"])
def test_the_formula_is_what_torch_counts(name: str) -> None:
    sizes, tokens = PRESETS[name], 64
    model = Llama(sizes)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # the others are not counted on CPUs
        model(torch.zeros(2, tokens, dtype=torch.long)).sum().backward()
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    assert (flops_per_token(sizes, tokens) - 6 * norms) * 2 * tokens == counter.get_total_flops()


def test_the_line_has_mfu_where_the_peak_is_known() -> None:
    config = TrainingConfig("ddp", Path("x"), world_size=4, batch=4, tokens=64, peak_flops=1e12)
    throughput = Throughput.of(config)
    flops = throughput.flops_per_token * 1024
    scalars = throughput.scalars(10**9)
    assert scalars["mfu_ratio"] == pytest.approx(flops / 4 / 1e12)
    assert (scalars["tokens_per_second"], scalars["tokens_per_second_per_gpu"]) == (1024, 256)
    assert throughput.describe(10**9) == f"1,024 tokens/s   {flops / 1e9:.1f} GFLOP/s   MFU {flops / 4e12:.1%}"


def test_an_unknown_device_has_no_mfu() -> None:
    throughput = Throughput.of(TrainingConfig("ddp", Path("x")))
    assert "mfu_ratio" not in throughput.scalars(10**9)
    assert "MFU" not in throughput.describe(10**9)
    assert peak_flops("Some Future GPU", "bf16") is None
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA H200", "fp32") == 67e12
    assert peak_flops("NVIDIA H200", "fp64") == 67e12
