"""YaFSDP on CUDA: the same results as one process, no more memory than FSDP2, an allocator that stays out of it."""

import dataclasses
import functools
import gc
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from instrumented_trainers import parallelism
from instrumented_trainers.model_config import ModelConfig
from instrumented_trainers.parallelism import ShardOptions
from tests.integration import parity, training
from tests.integration.parity import Case
from tests.integration.test_yafsdp_parity import CASES
from tests.integration.training import Training
from tests.support import process_group

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
    """The caching allocator's work in some steps after warm-up, less what was allocated before the model was built."""

    peak_bytes: int
    """The most that tensors took."""
    reserved_bytes: int
    """The most that was taken from the device for them."""
    device_allocations: int


def memory(strategy: str, micro_batches: int) -> Memory:
    """Train in bf16 and return what the allocator did."""
    gc.collect()  # models of earlier cases are full of reference cycles
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    options = ShardOptions(torch.bfloat16, torch.float32)
    case = Training(
        strategy,
        "fused adamw",
        dtype=torch.float32,
        config=CONFIG,
        options=options,
        device="cuda",
        max_norm=1.0,
        micro_batches=micro_batches,
    )
    model, optimizer = training.build(case)
    torch.cuda.empty_cache()  # the whole model was there until it was sharded
    for number in range(WARM_UP_STEPS):
        training.step(case, model, optimizer, number)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for number in range(STEPS):
        training.step(case, model, optimizer, number)
    torch.cuda.synchronize()
    return Memory(
        torch.cuda.max_memory_allocated() - allocated,
        torch.cuda.max_memory_reserved() - reserved,
        torch.cuda.memory_stats()["num_device_alloc"] - before,
    )


# Runtime calls by which the host waits for the device, or for memory of it or of the host's that is pinned.
BLOCKING_CALLS = frozenset(
    ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaMalloc", "cudaHostAlloc", "cudaFree")
)


def blocking_calls(micro_batches: int) -> Counter[str]:
    """Blocking calls of the runtime in steady steps, from a profile."""
    case = Training("yafsdp", "fused adamw", dtype=torch.float32, config=CONFIG, device="cuda")
    model, optimizer = training.build(case)
    tokens = torch.randint(CONFIG.vocabulary, (2, 16), device="cuda")

    def step() -> None:
        for _ in range(micro_batches):
            model(tokens).float().square().mean().backward()
        parallelism.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP_STEPS):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        for _ in range(STEPS):
            with torch.profiler.record_function("steady step"):
                step()
    steps = [event.time_range for event in profile.events() if event.name == "steady step"]
    return Counter(
        event.name
        for event in profile.events()
        if event.name in BLOCKING_CALLS and any(step.start <= event.time_range.start <= step.end for step in steps)
    )


def differences(cases: dict[str, Case]) -> dict[str, parity.Difference | str]:
    """Compare all cases in this process group: its communicators, over sockets, take seconds. Text: what one raised."""
    found: dict[str, parity.Difference | str] = {}
    for name, case in cases.items():
        try:
            found[name] = parity.compare(dataclasses.replace(case, device="cuda"))
        except Exception:  # noqa: BLE001 whatever a case raises is its result
            found[name] = traceback.format_exc()
    return found


@functools.cache
def outcomes() -> dict[str, process_group.Outcome]:
    cases: dict[str, Callable[[], Any]] = {
        f"{name}, {count} micro-batches": functools.partial(memory, name, count)
        for name in ("yafsdp", "fsdp2")
        for count in (1, 2)
    }
    cases |= {f"blocking calls, {count}": functools.partial(blocking_calls, count) for count in (1, 2)}
    wrong = {"divisor off by a thousandth": Case(divisor_error=1.001)}
    cases["parity"] = functools.partial(differences, CASES | wrong)
    return process_group.run_cases(WORLD_SIZE, cases, cuda=True, timeout_s=560)


def of_case(name: str) -> list[parity.Difference]:
    """Return the differences of a case, by rank."""
    found = [by_name[name] for by_name in outcomes()["parity"].results()]
    errors = [each for each in found if isinstance(each, str)]
    assert not errors, "\n".join(errors)
    return [each for each in found if not isinstance(each, str)]


def pairs(micro_batches: int) -> list[tuple[Memory, Memory]]:
    """Return YaFSDP's memory and FSDP2's, by rank."""
    yafsdp, fsdp2 = (outcomes()[f"{name}, {micro_batches} micro-batches"].results() for name in ("yafsdp", "fsdp2"))
    return list(zip(yafsdp, fsdp2, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    for difference in of_case(name):
        assert difference.largest < TOLERANCE, difference


def test_a_divisor_off_by_a_thousandth_is_seen() -> None:
    for difference in of_case("divisor off by a thousandth"):
        assert difference.gradient > TOLERANCE


def test_takes_no_more_memory_from_the_device_than_fsdp2() -> None:
    # By the formula in docs/yafsdp.md the tensors of both come to the same here, within a hundredth. What the device
    # gives for them differs: FSDP2's come and go on several streams, and the allocator keeps a pool for each.
    for yafsdp, fsdp2 in pairs(micro_batches=1):
        assert yafsdp.reserved_bytes <= fsdp2.reserved_bytes, (yafsdp, fsdp2)


def test_needs_less_memory_than_fsdp2_where_gradients_add_up() -> None:
    # FSDP2 keeps the whole gradients of all layers from one micro-batch to the next, YaFSDP their shards.
    for yafsdp, fsdp2 in pairs(micro_batches=2):
        assert yafsdp.peak_bytes < fsdp2.peak_bytes, (yafsdp, fsdp2)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_asks_the_device_for_no_memory_after_warm_up(micro_batches: int) -> None:
    for yafsdp, _ in pairs(micro_batches):
        assert yafsdp.device_allocations == 0


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_steady_step_makes_the_host_wait_for_nothing(micro_batches: int) -> None:
    for calls in outcomes()[f"blocking calls, {micro_batches}"].results():
        assert not calls
