"""YaFSDP on CUDA: the same results as one process, no more memory than FSDP2, an allocator that stays out of it."""

import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch

from instrumented_trainers.model import ModelConfig
from instrumented_trainers.strategies import ShardOptions
from tests import ranks
from tests.integration import parity, training
from tests.integration.parity import Case
from tests.integration.test_yafsdp_parity import CASES
from tests.integration.training import Training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
WORLD_SIZE = 2  # on one GPU, if there is but one

# Kernels of CUDA sum in another order when a batch has another size, so rounding is larger than on the CPU.
TOLERANCE = 1e-11

CONFIG = ModelConfig(width=1024, layers=8, heads=8, key_value_heads=8, hidden_width=2816, vocabulary=512)
WARM_UP_STEPS, STEPS = 3, 5


class Memory(NamedTuple):
    """What the caching allocator did in some steps after warm-up."""

    peak_bytes: int
    device_allocations: int


def memory(strategy: str) -> Memory:
    """Train in bf16 and return what the allocator did."""
    options = ShardOptions(torch.bfloat16, torch.float32)
    case = Training(strategy, dtype=torch.float32, config=CONFIG, options=options, device="cuda", max_norm=1.0)
    model, optimizer = training.build(case)
    for number in range(WARM_UP_STEPS):
        training.step(case, model, optimizer, number)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for number in range(STEPS):
        training.step(case, model, optimizer, number)
    torch.cuda.synchronize()
    return Memory(torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["num_device_alloc"] - before)


@functools.cache
def outcomes() -> dict[str, ranks.Outcome]:
    cases = {name: functools.partial(memory, name) for name in ("yafsdp", "fsdp2")}
    cases |= {
        name: functools.partial(parity.compare, dataclasses.replace(case, device="cuda"))
        for name, case in (CASES | {"divisor off by a thousandth": Case(divisor_error=1.001)}).items()
    }
    return ranks.run_cases(WORLD_SIZE, cases, cuda=True)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    for difference in outcomes()[name].results():
        assert difference.largest < TOLERANCE, difference


def test_a_divisor_off_by_a_thousandth_is_seen() -> None:
    for difference in outcomes()["divisor off by a thousandth"].results():
        assert difference.gradient > TOLERANCE


def test_needs_no_more_memory_than_fsdp2() -> None:
    for mine, theirs in zip(outcomes()["yafsdp"].results(), outcomes()["fsdp2"].results(), strict=True):
        assert mine.peak_bytes <= theirs.peak_bytes


def test_asks_the_device_for_no_memory_after_warm_up() -> None:
    for rank in outcomes()["yafsdp"].results():
        assert rank.device_allocations == 0
