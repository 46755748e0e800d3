"""Whole weights between steps, copies of a sharded model, and averages of its weights, which are copies, too."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from instrumented_trainers.parallelism.yafsdp import register_forward_method
from tests.integration.yafsdp_attacks import Model, OtherMethod, _largest, _outcome, batch, shard_layers
from tests.support import process_group

WORLD_SIZE, TOLERANCE = 3, 1e-12  # division by 2 is exact, so a wrong order of dividing and summing could hide
WHOLE = StateDictOptions(full_state_dict=True)


def models(seed: int = 0) -> tuple[Any, Any]:
    """Return a sharded model and the same of one process."""
    found = []
    for shard in (shard_layers, lambda model: model):
        torch.manual_seed(seed)
        found.append(shard(Model().double()))
    return found[0], found[1]


def train(sharded: Any, reference: Any, steps: range, after: Callable[[], None] = lambda: None) -> float:
    """Train both and return the largest difference of their weights; call `after` after each step."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (sharded, reference)]
    for step in steps:
        sharded(batch(step, 0, dist.get_rank())).square().mean().backward()
        for rank in range(dist.get_world_size()):
            (reference(batch(step, 0, rank)).square().mean() / dist.get_world_size()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        after()
    return _largest(sharded, reference, gradients=False)


def apart(found: Any, expected: Any) -> float:
    """Return the largest difference of two state dicts of whole tensors, which must have the same keys."""
    assert list(found) == list(expected)
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


# Whole weights -------------------------------------------------------------------------------------------------------


def read() -> float:
    sharded, reference = models()
    train(sharded, reference, range(2))
    with sharded.unshard():
        difference = apart(sharded.state_dict(), reference.state_dict())
    return max(difference, train(sharded, reference, range(2, 3)))


def write() -> float:
    """Write some weights in place and load others, then train on."""
    sharded, reference = models()
    train(sharded, reference, range(1))
    other = Model().double()
    nn.init.constant_(other.head.weight, 0.3)
    for model in (sharded, reference):
        whole = model.unshard() if model is sharded else None
        nn.init.ones_(model.layers[1].linear.weight)
        model.layers[2].scale.data = torch.full_like(model.layers[2].scale, 0.7)
        model.head.load_state_dict(other.head.state_dict())
        if whole is not None:
            model.reshard()
            model.reshard()  # once more does nothing
    return train(sharded, reference, range(1, 3))


def discard() -> float:
    sharded, reference = models()
    with sharded.layers[0].unshard(writeback=False):
        sharded.layers[0].linear.weight.data.zero_()
    return train(sharded, reference, range(2))


def run_on_whole_weights() -> float:
    """Run as often as each rank wants, without communication."""
    sharded, reference = models()
    x = batch(0, 0, dist.get_rank())
    with torch.no_grad(), sharded.unshard():
        for _ in range(1 + dist.get_rank()):
            difference = float((sharded(x) - reference(x)).abs().max())
    return max(difference, train(sharded, reference, range(2)))


def train_unsharded() -> str:
    sharded, _ = models()
    with sharded.unshard():
        return str(_outcome(lambda: sharded(batch(0, 0, 0)).sum().item()))


def unshard_in_forward() -> str:
    sharded, _ = models()
    sharded.layers[0].linear.register_forward_pre_hook(lambda *_: sharded.unshard())
    return str(_outcome(lambda: sharded(batch(0, 0, 0)).sum().item()))


def copy_unsharded() -> str:
    sharded, _ = models()
    with sharded.unshard():
        return str(_outcome(lambda: copy.deepcopy(sharded)))


# Copies --------------------------------------------------------------------------------------------------------------


def train_a_copy() -> float:
    """Train a copy and then what it was copied from: neither changes the other."""
    sharded, reference = models()
    train(sharded, reference, range(1))
    copied, other = copy.deepcopy(sharded), copy.deepcopy(reference)
    differences = [train(copied, other, range(1, 3)), _largest(sharded, reference, gradients=False)]
    return max(*differences, train(sharded, reference, range(1, 4)), _largest(copied, other, gradients=False))


def copy_with_tied_and_frozen_weights() -> float:
    found = []
    for shard in (shard_layers, lambda model: model):
        torch.manual_seed(0)
        model: Any = Model().double()
        model.head.weight = model.inlet.weight
        model.layers[1].linear.requires_grad_(False)
        found.append(copy.deepcopy(shard(model)))
    assert found[0].head.weight is found[0].inlet.weight
    return train(found[0], found[1], range(2))


def copy_a_registered_method() -> float:
    torch.manual_seed(0)
    sharded = shard_layers(Model(OtherMethod).double())
    register_forward_method(sharded.layers[0], "encode")  # type: ignore[index, arg-type]
    copied = copy.deepcopy(sharded)
    x = batch(0, 0, 0)
    copied(x)
    expected = copied.layers[0].encode(x)  # type: ignore[index, union-attr]
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    return float((copied.layers[0].encode(x) - expected).abs().max())  # type: ignore[index, union-attr]


# Averages ------------------------------------------------------------------------------------------------------------


def averages(sharded: Any, reference: Any) -> list[Any]:
    return [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for model in (sharded, reference)]


def train_averaged(sharded: Any, reference: Any, averaged: list[Any], steps: range) -> float:
    def update() -> None:
        for average, model in zip(averaged, (sharded, reference), strict=True):
            average.update_parameters(model)

    return max(train(sharded, reference, steps, update), _largest(averaged[0], averaged[1], gradients=False))


def average() -> float:
    """Average as torch does, and evaluate the averages."""
    sharded, reference = models()
    averaged = averages(sharded, reference)
    difference = train_averaged(sharded, reference, averaged, range(4))
    x = batch(9, 0, dist.get_rank())
    with torch.no_grad():
        outputs = [model(x) for model in averaged]
    return max(
        difference,
        float((outputs[0] - outputs[1]).abs().max()),
        apart(get_model_state_dict(averaged[0], options=WHOLE), averaged[1].state_dict()),
    )


def resume(path: str) -> float:
    """Save model and averages after two steps, load both into others, and train on."""
    sharded, reference = models()
    averaged = averages(sharded, reference)
    train_averaged(sharded, reference, averaged, range(2))
    dcp.save({"model": sharded.state_dict(), "average": averaged[0].state_dict()}, checkpoint_id=path)
    again, _ = models(seed=1)
    average_again = averages(again, reference)[0]
    state = {"model": again.state_dict(), "average": average_again.state_dict()}
    dcp.load(state, checkpoint_id=path)
    again.load_state_dict(state["model"])
    average_again.load_state_dict(state["average"])
    return train_averaged(again, reference, [average_again, averaged[1]], range(2, 4))


EXACT: dict[str, Callable[[], float]] = {
    "whole weights read": read,
    "whole weights written": write,
    "whole weights discarded": discard,
    "run on whole weights": run_on_whole_weights,
    "a copy trained": train_a_copy,
    "tied and frozen weights copied": copy_with_tied_and_frozen_weights,
    "a registered method copied": copy_a_registered_method,
    "averaged": average,
}
REFUSED: dict[str, tuple[Callable[[], str], str]] = {
    "trained unsharded": (train_unsharded, "gradients of its whole weights would be lost"),
    "unsharded in forward": (unshard_in_forward, "cannot be unsharded while it runs"),
    "copied unsharded": (copy_unsharded, "cannot be copied while it is unsharded"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, process_group.Outcome]:
    refused = {name: case for name, (case, _) in REFUSED.items()}
    resumed = {"averages resumed": functools.partial(resume, str(tmp_path_factory.mktemp("saved")))}
    return process_group.run_cases(WORLD_SIZE, {**EXACT, **refused, **resumed})


@pytest.mark.parametrize("name", [*EXACT, "averages resumed"])
def test_is_what_one_process_has(outcomes: Any, name: str) -> None:
    assert max(outcomes[name].results()) < TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(outcomes: Any, name: str) -> None:
    for words in outcomes[name].results():
        assert REFUSED[name][1] in words
