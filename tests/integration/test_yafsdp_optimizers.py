"""Optimizers that need whole tensors step a sharded model as one process would; plain ones of them are refused."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from instrumented_trainers.parallelism.yafsdp import WholeTensorOptimizer
from instrumented_trainers.parallelism.yafsdp.optimizer_support import refuse_whole_tensor_optimizer
from tests.integration.yafsdp_attacks import Model, _largest, batch, shard_layers
from tests.support import process_group

WORLD_SIZES, STEPS, TOLERANCE = (2, 3), 5, 1e-10


class Lamb(Optimizer):
    """LAMB (arXiv 1904.00962, algorithm 2), without bias correction: Adam's step scaled by norms of whole tensors."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p] or self.state.setdefault(p, {})
                m = state.setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 1 - group["betas"][0])
                v = state.setdefault("v", torch.zeros_like(p)).lerp_(p.grad.square(), 1 - group["betas"][1])
                update = m / (v.sqrt() + 1e-6)
                p.sub_(update * (group["lr"] * p.norm() / update.norm().clamp(min=1e-6)))


class Shampoo(Optimizer):
    """Shampoo (arXiv 1802.09568, algorithm 1): matrices are preconditioned from both sides, others as by Adagrad."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self._direction(p, self.state[p]))

    def _direction(self, p: Tensor, state: dict[str, Tensor]) -> Tensor:
        if p.dim() != 2:
            squares = state.setdefault("squares", torch.full_like(p, 1e-3)).add_(p.grad.square())  # type: ignore[union-attr]
            return p.grad / squares.sqrt()  # type: ignore[operator]
        left = state.setdefault("left", 1e-3 * torch.eye(p.shape[0], dtype=p.dtype)).add_(p.grad @ p.grad.T)  # type: ignore[operator, union-attr]
        right = state.setdefault("right", 1e-3 * torch.eye(p.shape[1], dtype=p.dtype)).add_(p.grad.T @ p.grad)  # type: ignore[operator, union-attr]
        return _power(left, -0.25) @ p.grad @ _power(right, -0.25)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.pow(exponent)) @ vectors.T


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon": (torch.optim.Muon, {"lr": 0.02}),
    "LAMB": (Lamb, {"lr": 0.01}),
    "Shampoo": (Shampoo, {"lr": 0.02}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}

RESUMED = ("LAMB", "Shampoo", "Adafactor")  # those that step all parameters


def made(name: str, seed: int = 0) -> tuple[nn.Module, list[Any], nn.Module, list[Any]]:
    """Return a sharded model and one not, each with optimizers: Muon takes matrices, an AdamW the rest."""
    found: list[Any] = []
    for is_sharded in (True, False):
        torch.manual_seed(seed)
        model: Any = Model().double()
        is_matrix = {each: p.dim() == 2 or name != "Muon" for each, p in model.named_parameters()}
        model = shard_layers(model) if is_sharded else model
        kind, options = KINDS[name]
        taken = [p for each, p in model.named_parameters() if is_matrix[each]]
        rest = [p for each, p in model.named_parameters() if not is_matrix[each]]
        optimizers = [WholeTensorOptimizer(taken, kind, **options) if is_sharded else kind(taken, **options)]
        found += [model, optimizers + ([torch.optim.AdamW(rest, lr=0.01)] if rest else [])]
    return tuple(found)  # type: ignore[return-value]


def train(sharded: Any, optimizers: list[Any], reference: Any, others: list[Any], steps: range) -> float:
    for step in steps:
        sharded(batch(step, 0, dist.get_rank())).square().mean().backward()
        for rank in range(dist.get_world_size()):
            (reference(batch(step, 0, rank)).square().mean() / dist.get_world_size()).backward()
        for optimizer in (*optimizers, *others):
            optimizer.step()
            optimizer.zero_grad()
    return _largest(sharded, reference, gradients=False)


def parity(name: str) -> float:
    return train(*made(name), range(STEPS))


def owned_state(name: str) -> tuple[int, int]:
    """Return how many elements of state this rank keeps, and one process."""
    sharded, optimizers, reference, others = made(name)
    train(sharded, optimizers, reference, others, range(1))

    def numel(optimizer: Optimizer) -> int:
        return sum(v.numel() for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor))

    return numel(optimizers[0]._inner), numel(others[0])


def resume(name: str, path: str) -> float:
    """Save after two steps, load into an optimizer that has stepped otherwise, and train on beside one process."""
    sharded, optimizers, reference, others = made(name)
    train(sharded, optimizers, reference, others, range(2))
    dcp.save({"optimizer": get_optimizer_state_dict(sharded, optimizers[0])}, checkpoint_id=path)
    again, its, _, _ = made(name, seed=1)
    again(batch(7, 0, dist.get_rank())).mean().backward()
    its[0].step()
    its[0].zero_grad()
    again.load_state_dict(sharded.state_dict())
    state = get_optimizer_state_dict(again, its[0])
    dcp.load({"optimizer": state}, checkpoint_id=path)
    set_optimizer_state_dict(again, its[0], state)
    return train(again, its, reference, others, range(2, 4))


def full_state(name: str) -> float:
    """Return the largest difference of the whole state from one process's."""
    sharded, optimizers, reference, others = made(name)
    train(sharded, optimizers, reference, others, range(2))
    options = StateDictOptions(full_state_dict=True)
    found = get_optimizer_state_dict(sharded, optimizers[0], options=options)["state"]
    expected = get_optimizer_state_dict(reference, others[0])["state"]
    assert found.keys() == expected.keys()
    return max(
        float((torch.as_tensor(found[of][key]) - torch.as_tensor(value)).abs().max())
        for of, values in expected.items()
        for key, value in values.items()
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def cases(size: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(f"on{size}")
        return {
            f"{what} {name}": functools.partial(do, name)
            for name in KINDS
            for what, do in (("parity", parity), ("state", owned_state), ("full", full_state))
        } | {f"resume {name}": functools.partial(resume, name, str(folder / name)) for name in RESUMED}

    return process_group.run_worlds({size: cases(size) for size in WORLD_SIZES})


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_steps_as_one_process_does(outcomes: Any, world_size: int, name: str) -> None:
    assert max(outcomes[world_size][f"parity {name}"].results()) < TOLERANCE
    assert max(outcomes[world_size][f"full {name}"].results()) < TOLERANCE


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_loaded_optimizer_goes_on(outcomes: Any, world_size: int, name: str) -> None:
    assert max(outcomes[world_size][f"resume {name}"].results()) < TOLERANCE


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_state_is_divided_among_ranks(outcomes: Any, world_size: int, name: str) -> None:
    found = outcomes[world_size][f"state {name}"].results()
    assert sum(own for own, _ in found) == found[0][1]
    assert max(own for own, _ in found) < 0.7 * found[0][1]


class Renamed(Lamb):
    """LAMB under another name, which no list of names has."""


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, Lamb, Shampoo, Renamed])
def test_is_recognised_by_what_it_does(kind: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"{kind.__name__} needs whole tensors.*WholeTensorOptimizer"):
        refuse_whole_tensor_optimizer(kind([nn.Parameter(torch.ones(3, 3))]))


ELEMENT_WISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "ASGD", "RMSprop", "Rprop")


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_element_wise_optimizers_are_accepted(name: str) -> None:
    refuse_whole_tensor_optimizer(getattr(torch.optim, name)([nn.Parameter(torch.ones(4))]))
