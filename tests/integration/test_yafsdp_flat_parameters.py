"""Frozen weights beside trained ones, and weights of several dtypes, in one unit: what is sent, stored and computed."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fully_shard_2
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from instrumented_trainers.memory.measured import MemoryMeter
from instrumented_trainers.parallelism.yafsdp import fully_shard
from tests.support import process_group
from tests.support.selection import others_in_accuracy

WORLD_SIZES = (2, 3)
WIDTH, RANK, LAYERS = 96, 2, 3
MATRIX, ADAPTER = WIDTH * WIDTH, 2 * RANK * WIDTH
PADDING = 8 * 3 * 3  # elements that alignment may add to a flat tensor of up to three parameters on three ranks
SEND = {"all_gather": "c10d::_allgather_base_", "reduce_scatter": "c10d::_reduce_scatter_base_"}


class Adapted(nn.Module):
    """A frozen matrix with a trained low-rank correction (LoRA)."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.matrix = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.matrix(x.to(self.matrix.weight.dtype)).to(x.dtype) + self.up(self.down(x)))


class NormInFp32(nn.Module):
    """A matrix in bf16, and a norm in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.layer_norm(x.float(), (WIDTH,), self.norm.weight, self.norm.bias)
        return x + torch.tanh(self.linear(y.bfloat16()))


def stack(layer: Callable[[], nn.Module], shard: Callable[[nn.Module], Any] = lambda module: module) -> Any:
    """Return layers with the same weights on every rank, each sharded, and all of them together."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer() for _ in range(LAYERS)))
    for each in model:
        shard(each)
    return shard(model)


def data(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sent_numel() -> dict[str, int]:
    """Return by collective how many elements of whole tensors the ranks exchange in the second step."""
    model = stack(Adapted, fully_shard)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recording:
            model(data(dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = dict.fromkeys(SEND, 0)
    for event in recording.events():
        for name, operator in SEND.items():
            if event.name == operator:
                found[name] += max(shape[0] for shape in event.input_shapes if len(shape) == 1)
    return found


def memory() -> tuple[int, int, int]:
    """Return the bytes that the memory report finds of gradients, of optimizer state and of buffers."""
    model = stack(Adapted, fully_shard)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    meter = MemoryMeter(model, optimizer, "cpu")
    for _ in range(2):
        with meter.step():
            model(data(dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    footprint = meter.measurement().footprint
    return footprint.gradients_bytes, footprint.optimizer_bytes, footprint.buffers_bytes  # type: ignore[return-value]


def trained(layer: Callable[[], nn.Module], shard: Any, ranks: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Train three steps on the data of `ranks` and return all weights, whole."""
    model = stack(layer, shard) if shard is not None else stack(layer)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5, momentum=0.9)
    for _ in range(3):
        for rank in ranks:
            (model(data(rank, dtype)).float().square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict().items()
    return {name: value.full_tensor() if shard is not None else value for name, value in state}


def difference(layer: Callable[[], nn.Module], other: Any, dtype: torch.dtype) -> float:
    """Return the largest difference of a weight from those of `other`: FSDP2, or None for one process."""
    found = trained(layer, fully_shard, [dist.get_rank()], dtype)
    ranks = [dist.get_rank()] if other is not None else range(dist.get_world_size())
    expected = trained(layer, other, ranks, dtype)
    assert all(found[name].dtype == value.dtype for name, value in expected.items())
    return max(float((found[name].double() - value.double()).abs().max()) for name, value in expected.items())


HALF = functools.partial(Adapted, torch.bfloat16)
CASES: dict[str, Callable[[], Any]] = {
    "adapters": functools.partial(difference, Adapted, None, torch.float32),
    "adapters of weights in bf16": functools.partial(difference, HALF, None, torch.float32),
    "adapters of weights in bf16, FSDP2": functools.partial(difference, HALF, fully_shard_2, torch.float32),
    "norms in fp32": functools.partial(difference, NormInFp32, None, torch.bfloat16),
    "sent": sent_numel,
    "memory": memory,
}
# A bf16 weight of up to 0.2 is rounded by 2 ** -9 of that in each of three steps, and rounding moves what follows. One
# process divides the loss by the number of ranks, which three rounds in bf16.
TOLERANCES = {"adapters": 1e-6, "adapters of weights in bf16": 1e-3, "adapters of weights in bf16, FSDP2": 1e-6} | {
    "norms in fp32": 4e-3
}


@functools.cache
def outcomes(world_size: int) -> dict[str, process_group.Outcome]:
    return process_group.run_cases(world_size, CASES)


@pytest.mark.parametrize("name", TOLERANCES)
@pytest.mark.parametrize("world_size", others_in_accuracy(WORLD_SIZES, {3}))
def test_trains_as_others_do(world_size: int, name: str) -> None:
    assert max(outcomes(world_size)[name].results()) < TOLERANCES[name]


@pytest.mark.parametrize("world_size", others_in_accuracy(WORLD_SIZES, {3}))
def test_only_adapters_are_reduced(world_size: int) -> None:
    for found in outcomes(world_size)["sent"].results():
        assert LAYERS * ADAPTER <= found["reduce_scatter"] <= LAYERS * (ADAPTER + PADDING)
        # In forward, and again in backward but for the two layers whose weights are in the buffers still.
        assert LAYERS * (MATRIX + ADAPTER) <= found["all_gather"] <= 2 * LAYERS * (MATRIX + ADAPTER + 2 * PADDING)


@pytest.mark.parametrize("world_size", others_in_accuracy(WORLD_SIZES, {3}))
def test_the_memory_report_shows_gradients_of_adapters_only(world_size: int) -> None:
    adapters = 4 * LAYERS * (ADAPTER + PADDING)
    for gradients, optimizer, buffers in outcomes(world_size)["memory"].results():
        assert gradients <= adapters / world_size + 4 * PADDING * LAYERS
        assert optimizer <= 2 * adapters / world_size + 8 * PADDING * LAYERS
        assert buffers <= 2 * 4 * (MATRIX + 2 * ADAPTER + 4 * PADDING)  # two of weights, two of gradients of adapters
