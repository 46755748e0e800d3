"""YaFSDP over what torch's tensor and expert parallelism have divided: the results of one process, in fp64."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from instrumented_trainers.parallelism.collective_functions import exchange_rows
from instrumented_trainers.parallelism.yafsdp import WholeTensorOptimizer, fully_shard
from instrumented_trainers.regions import Axis
from tests.integration.parity import relative
from tests.support import process_group
from tests.support.selection import others_in_accuracy

WORLD_SIZE, TOLERANCE, STEPS = 4, 1e-12, 3
WIDTH, HIDDEN, HEADS, VOCABULARY, LAYERS, TOKENS = 8, 16, 2, 12, 3, 6


class Attention(nn.Module):
    """As in torchtitan's Llama: the number of heads is what the divided matrices give."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Of the same structure and names as torchtitan's."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def divide_tensors(model: Llama, mesh: DeviceMesh) -> None:
    """Divide as torchtitan's apply_tp does, with sequence parallelism between the matrices."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def batch(step: int, data_rank: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(10 * step + data_rank))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], data_ranks: list[int], *, penalty: bool
) -> list[Tensor]:
    """Train on the batches of these data-parallel ranks, and return losses and norms."""
    optimizer, numbers = make(model.parameters()), []
    for step in range(STEPS):
        loss = torch.stack([loss_of(model, batch(step, rank)) for rank in data_ranks]).mean()
        numbers.append(loss.detach())
        if penalty:
            loss = loss + 0.1 * sum(p.norm() + p.mean() for p in model.parameters())  # type: ignore[assignment]
        loss.backward()
        numbers.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return numbers


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


def tensor_parallel(optimizer: str = "sgd", *, penalty: bool = False, replicas: bool = False, **options: Any) -> float:
    """Two ranks divide matrices, two data; or, with replicas, two replicas of one shard."""
    shape, names = ((2, 1, 2), ("replicate", "data", "model")) if replicas else ((2, 2), ("data", "model"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Llama().double())
    sharded, reference = models
    divide_tensors(sharded, mesh["model"])
    data = mesh["replicate", "data"] if replicas else mesh["data"]
    for layer in sharded.layers.values():
        fully_shard(layer, data, **options)
    fully_shard(sharded, data, **options)
    assert [p.shape for p in sharded.parameters()] == [p.shape for p in reference.parameters()]
    own = train(sharded, OPTIMIZERS[optimizer], [mesh.get_coordinate()[0]], penalty=penalty)  # type: ignore[index]
    expected = train(reference, OPTIMIZERS[optimizer], [0, 1], penalty=penalty)
    return max(_of_numbers(own, expected), _of_weights(sharded, reference))


def _of_numbers(own: list[Tensor], expected: list[Tensor]) -> float:
    largest = 0.0
    for number, other in zip(own, expected, strict=True):
        mean = number.detach().clone()
        dist.all_reduce(mean)  # a loss is that of a rank's batch
        largest = max(largest, relative(mean / dist.get_world_size(), other.detach()))
    return largest


def _of_weights(sharded: Any, reference: nn.Module) -> float:
    """Difference of whole weights: each rank's, and those that a checkpoint gathers; and of what `unshard` shows."""
    largest = 0.0
    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    with sharded.unshard():
        whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in sharded.named_parameters()}
    expected = dict(reference.named_parameters())
    for name, parameter in sharded.named_parameters():
        tensors = [parameter.full_tensor().detach(), whole[name].detach(), *([state[name]] if name in state else [])]
        largest = max(largest, *(relative(tensor, expected[name].detach()) for tensor in tensors))
        assert relative(parameter.detach().norm(), expected[name].detach().norm()) < TOLERANCE
    return largest


# Experts --------------------------------------------------------------------------------------------------------------

EXPERTS = 4


class Experts(nn.Module):
    """Each token goes to one expert. Called with (N, D) and the number of each token's expert."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN)
        self.axis: Axis | None = None

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        rows, counts = x[order], torch.bincount(chosen, minlength=EXPERTS)
        outputs = self._of_own(rows, counts) if self.axis is None else self._exchanged(rows, counts, self.axis)
        return outputs[order.argsort()]

    def _exchanged(self, rows: Tensor, counts: Tensor, axis: Axis) -> Tensor:
        sent = counts.view(axis.size, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=axis.group)
        sizes = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived = exchange_rows(rows, axis, *sizes, span="dispatch")
        experts = torch.arange(received.shape[1]).repeat(axis.size).repeat_interleave(received.flatten())
        order = experts.argsort(stable=True)
        outputs = self._of_own(arrived[order], received.sum(0))[order.argsort()]
        return exchange_rows(outputs, axis, *sizes[::-1], span="combine")

    def _of_own(self, rows: Tensor, counts: Tensor) -> Tensor:
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        parts = rows.split(counts.tolist())
        return torch.cat([torch.tanh(part @ a) @ b for part, a, b in zip(parts, w1, w2, strict=True)])


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = nn.ModuleList(Experts() for _ in range(2))
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for experts in self.experts:
            x = x + experts(x.flatten(0, 1), tokens.flatten() % EXPERTS).view_as(x)
        return self.output(x)  # type: ignore[no-any-return]


def expert_parallel(optimizer: str = "sgd", *, penalty: bool = False) -> float:
    """Four data-parallel ranks; two divide the experts, which two replicate, and these are sharded over two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same experts", "experts"))
    world = init_device_mesh("cpu", (WORLD_SIZE,))
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Sparse().double())
    sharded, reference = models
    for experts in sharded.experts:
        experts.axis = Axis("experts", mesh.get_group("experts"))
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh["experts"], [Shard(0)])))
        fully_shard(experts, mesh["same experts"])
        experts.set_gradient_divide_factor(WORLD_SIZE)
    fully_shard(sharded, world)
    own = train(sharded, OPTIMIZERS[optimizer], [dist.get_rank()], penalty=penalty)
    expected = train(reference, OPTIMIZERS[optimizer], list(range(WORLD_SIZE)), penalty=penalty)
    return max(_of_numbers(own, expected), _of_weights(sharded, reference))


# Refused --------------------------------------------------------------------------------------------------------------


def over_the_data_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = Llama()
    divide_tensors(model, mesh["model"])
    fully_shard(model)


def muon_of_parts() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = Llama()
    divide_tensors(model, mesh["model"])
    fully_shard(model, mesh["data"])
    WholeTensorOptimizer([model.output.weight], torch.optim.Muon, lr=0.1)


def unequal_parts() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    layer = nn.Linear(3, 3)
    parallelize_module(layer, mesh["model"], ColwiseParallel())
    fully_shard(layer, mesh["data"])


REFUSED = {
    "over the data ranks": (over_the_data_ranks, r"YaFSDP: .*fully_shard\(module, mesh"),
    "muon of parts": (muon_of_parts, "WholeTensorOptimizer"),
    "unequal parts": (unequal_parts, "unequal parts"),
}
EXACT: dict[str, Callable[[], float]] = {
    "tensor parallel": tensor_parallel,
    "tensor parallel, adamw": functools.partial(tensor_parallel, "adamw"),
    "tensor parallel, a penalty": functools.partial(tensor_parallel, penalty=True),
    "tensor parallel, three buffers": functools.partial(tensor_parallel, buffers=3, reshard_after_forward=False),
    "tensor parallel, replicas": functools.partial(tensor_parallel, replicas=True),
    "expert parallel": expert_parallel,
    "expert parallel, adamw": functools.partial(expert_parallel, "adamw"),
}


# Each division with SGD, which shows a wrong scale; test_yafsdp_parity.py has AdamW and three buffers.
EVERYDAY = {"tensor parallel", "tensor parallel, a penalty", "tensor parallel, replicas", "expert parallel"}


def all_outcomes(*, everyday: bool) -> dict[str, float | str]:
    """Outcomes, all in one process group: DTensor's caches keep meshes, whose groups end with it."""
    outcomes: dict[str, float | str] = {
        name: difference() for name, difference in EXACT.items() if everyday == (name in EVERYDAY)
    }
    for name, (do, _) in REFUSED.items() if everyday else ():
        with pytest.raises(NotImplementedError) as error:
            do()
        outcomes[name] = str(error.value)
    return outcomes


@functools.cache
def outcomes(*, everyday: bool) -> list[dict[str, float | str]]:
    return process_group.run(WORLD_SIZE, functools.partial(all_outcomes, everyday=everyday))


@pytest.mark.parametrize("name", others_in_accuracy(EXACT, EVERYDAY))
def test_trains_as_one_process_does(name: str) -> None:
    for by_name in outcomes(everyday=name in EVERYDAY):
        assert float(by_name[name]) < TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name: str) -> None:
    for by_name in outcomes(everyday=True):
        assert re.search(REFUSED[name][1], str(by_name[name]))
