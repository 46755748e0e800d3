"""Optimizers that need whole tensors step a sharded model as one process would; plain ones of them are refused."""

import functools
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from instrumented_trainers.parallelism.yafsdp import WholeTensorOptimizer
from instrumented_trainers.parallelism.yafsdp.optimizer_support import refuse_whole_tensor_optimizer
from tests.integration.matrix_optimizers import Lamb, Shampoo, Soap
from tests.integration.yafsdp_attacks import Model, _largest, batch, shard_layers
from tests.support import process_group
from tests.support.selection import OutcomesOnDemand, others_in_accuracy

WORLD_SIZE, STEPS, TOLERANCE, FP32_TOLERANCE = 3, 5, 1e-10, 1e-3


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon": (torch.optim.Muon, {"lr": 0.02}),
    "LAMB": (Lamb, {"lr": 0.01}),
    "Shampoo": (Shampoo, {"lr": 0.02}),
    "SOAP": (Soap, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}

RESUMED = ("LAMB", "Shampoo", "SOAP", "Adafactor")  # those that step all parameters
EVERYDAY = {*KINDS} - {"Shampoo"}  # SOAP has Shampoo's matrices and a state of Adam's besides


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


def parity(name: str) -> tuple[float, tuple[int, int], float]:
    """Largest difference of weights after all steps, elements of state of this rank and of one process, and the
    largest difference of the whole state."""
    sharded, optimizers, reference, others = made(name)
    difference = train(sharded, optimizers, reference, others, range(STEPS))
    counts = _state_numel(optimizers[0]._inner), _state_numel(others[0])
    return difference, counts, _full_state_difference(sharded, optimizers[0], reference, others[0])


def _state_numel(optimizer: Optimizer) -> int:
    return sum(v.numel() for state in optimizer.state.values() for v in tree_leaves(state) if isinstance(v, Tensor))


def _full_state_difference(sharded: Any, optimizer: Any, reference: Any, other: Any) -> float:
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(sharded, optimizer, options=options)["state"]
    expected = get_optimizer_state_dict(reference, other)["state"]
    assert state.keys() == expected.keys()
    pairs = zip(tree_leaves([state[name] for name in expected]), tree_leaves(list(expected.values())), strict=True)
    return max(float((torch.as_tensor(value) - torch.as_tensor(whole)).abs().max()) for value, whole in pairs)


def parity_of_heavyball() -> float:
    """As `parity`, with SOAP of the package heavyball, which computes in fp32.

    Adam divides what lies in directions of little gradient by little more than `eps`: with a small one, rounding of
    gradients moves weights by some percent on one process, too.
    """
    import heavyball

    heavyball.utils.compile_mode = None
    models = []
    for shard in (shard_layers, lambda model: model):
        torch.manual_seed(0)
        models.append(shard(Model()))
    kinds = [functools.partial(WholeTensorOptimizer, kind=heavyball.SOAP), heavyball.SOAP]
    optimizers = [kind(model.parameters(), lr=0.01, eps=0.1) for kind, model in zip(kinds, models, strict=True)]
    sharded, reference = models
    for step in range(STEPS):
        sharded(batch(step, 0, dist.get_rank()).float()).square().mean().backward()
        for rank in range(dist.get_world_size()):
            (reference(batch(step, 0, rank).float()).square().mean() / dist.get_world_size()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return _largest(sharded, reference, gradients=False)


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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("saved")
    cases: dict[str, Any] = {f"parity {name}": functools.partial(parity, name) for name in KINDS}
    cases |= {f"resume {name}": functools.partial(resume, name, str(folder / name)) for name in RESUMED}
    return OutcomesOnDemand(WORLD_SIZE, cases, {case for case in cases if case.rpartition(" ")[2] in EVERYDAY})


@pytest.mark.parametrize("name", others_in_accuracy(KINDS, EVERYDAY))
def test_steps_as_one_process_does(outcomes: Any, name: str) -> None:
    for difference, _, state_difference in outcomes[f"parity {name}"].results():
        assert difference < TOLERANCE
        assert state_difference < TOLERANCE


@pytest.mark.skipif(importlib.util.find_spec("heavyball") is None, reason="heavyball is not installed")
def test_soap_of_heavyball_steps_as_on_one_process() -> None:
    found = process_group.run(WORLD_SIZE, parity_of_heavyball)
    assert max(found) < FP32_TOLERANCE


@pytest.mark.parametrize("name", others_in_accuracy(RESUMED, EVERYDAY & {*RESUMED}))
def test_a_loaded_optimizer_goes_on(outcomes: Any, name: str) -> None:
    assert max(outcomes[f"resume {name}"].results()) < TOLERANCE


@pytest.mark.parametrize("name", others_in_accuracy(KINDS, EVERYDAY))
def test_state_is_divided_among_ranks(outcomes: Any, name: str) -> None:
    counts = [rank_counts for _, rank_counts, _ in outcomes[f"parity {name}"].results()]
    whole = counts[0][1]
    assert sum(count for count, _ in counts) == whole
    assert max(count for count, _ in counts) < 0.7 * whole


class Renamed(Lamb):
    """LAMB under another name, which no list of names has."""


WHOLE_TENSOR = (torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, Lamb, Shampoo, Soap, Renamed)


@pytest.mark.parametrize("kind", WHOLE_TENSOR)
def test_is_recognised_by_what_it_does(kind: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"{kind.__name__} needs whole tensors.*WholeTensorOptimizer"):
        refuse_whole_tensor_optimizer(kind([nn.Parameter(torch.ones(3, 3))]))


ELEMENT_WISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "ASGD", "RMSprop", "Rprop")


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_element_wise_optimizers_are_accepted(name: str) -> None:
    refuse_whole_tensor_optimizer(getattr(torch.optim, name)([nn.Parameter(torch.ones(4))]))
