"""The training that a user's function returns: model, loss, batches, and how to shard and optimize."""

import importlib
import importlib.util
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

SEED = 0
_PLAIN_VALUES = (int, float, bool, str, type(None))
_RATE, _MOMENTUM = 0.01, 0.9  # SGD shows gradients of another scale, which Adam hides


class UnusableTrainingError(Exception):
    """What the user's function returns cannot be verified. The message states what, and what to return instead."""


@dataclass(frozen=True)
class UserTraining:
    """Model, loss and batches, as a user's function returns them."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    """Mean loss of a batch, which the gradients are of; called with the model, or what a strategy makes of it."""
    batches: Sequence[Any]
    """One whole batch for each step, whose tensors have the samples along their first dim."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    """Called with the sharded model, whose parameters are others than before."""
    units: Sequence[str] | None = None
    """Names of the modules that fsdp2 and yafsdp shard one by one; None: the elements of lists of modules."""
    shard: Callable[[nn.Module, str], nn.Module] | None = None
    """The user's own code to shard, called with the model and the name of the strategy."""


def load(target: str, *, steps: int) -> UserTraining:
    """Training of `module:function` or `script.py:function`, of at most so many steps.

    Raises UnusableTrainingError where there is no such function, or where it returns something else.
    """
    function = _function(target)
    random.seed(SEED)
    torch.manual_seed(SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(SEED)
    return _training(target, function(), steps)


def part_of(batch: Any, rank: int, ranks: int) -> Any:
    """The samples of one rank. Raises UnusableTrainingError for a tensor whose first dim cannot be divided."""

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if value.shape[0] % ranks:
            shape = tuple(value.shape)
            raise UnusableTrainingError(
                f"a batch has a tensor of the shape {shape}, whose first dim {ranks} ranks cannot share; return "
                "batches whose tensors have a multiple of so many samples along the first dim"
            )
        return value.chunk(ranks)[rank]

    return tree_map(part, batch)


def in_fp64(batch: Any) -> Any:
    """The batch with its floating-point tensors in fp64."""
    return tree_map(lambda value: value.double() if _is_floating(value) else value, batch)


def switch_dropout_off(model: nn.Module) -> bool:
    """Switch dropout off, as ranks draw other masks than one process; return whether a module had some."""
    had_dropout = False
    for module in model.modules():
        attribute = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
        probability = getattr(module, attribute, None)
        if isinstance(probability, float) and probability > 0:
            setattr(module, attribute, 0.0)
            had_dropout = True
    return had_dropout


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _function(target: str) -> Callable[[], Any]:
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        raise UnusableTrainingError(
            f"{target}: expected module:function or script.py:function, such as train.py:training"
        )
    module = _script(Path(place)) if place.endswith(".py") else _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        raise UnusableTrainingError(f"{place} has no function {name!r}; it has {', '.join(functions[:8]) or 'none'}")
    return function


def _script(path: Path) -> Any:
    if not path.is_file():
        raise UnusableTrainingError(f"{path}: no such file; name a script, or a module without .py")
    sys.path.insert(0, str(path.resolve().parent))  # as Python does for a script, so that it can import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise UnusableTrainingError(
            f"there is no module {name!r}, seen from {Path.cwd()}; name a script as FILE.py:function"
        )
    return importlib.import_module(name)


def _training(target: str, returned: Any, steps: int) -> UserTraining:
    if isinstance(returned, tuple) and len(returned) == 3:
        returned = dict(zip(("model", "loss", "batches"), returned, strict=True))
    if not isinstance(returned, Mapping) or not {"model", "loss", "batches"} <= returned.keys():
        raise UnusableTrainingError(
            f"{target} returned {type(returned).__name__}; return a dict with model, loss and batches, or a tuple"
        )
    names = [field.name for field in fields(UserTraining)]
    if unknown := [str(key) for key in returned if key not in names]:
        raise UnusableTrainingError(f"{target} returned {unknown[0]!r}, which is none of {', '.join(names)}")
    model = returned["model"]
    if not isinstance(model, nn.Module) or not any(parameter.requires_grad for parameter in model.parameters()):
        raise UnusableTrainingError(
            f"{target} returned {type(model).__name__} as model; return an nn.Module that trains"
        )
    if device := next((p.device for p in model.parameters() if p.device.type != "cpu"), None):
        raise UnusableTrainingError(
            f"{target} returned a model on {device}; return it on the CPU, small enough for that"
        )
    batches = list(itertools.islice(_batch_iterable(target, returned["batches"]), steps))
    if not batches:
        raise UnusableTrainingError(f"{target} returned no batches; return one for each step")
    for value in tree_leaves(batches):
        if not isinstance(value, (Tensor, *_PLAIN_VALUES)):
            raise UnusableTrainingError(
                f"{target} returned a batch with a {type(value).__name__}; return tensors, in dicts, lists or tuples"
            )
    optimizer = returned.get("optimizer") or _default_optimizer
    return UserTraining(model, returned["loss"], batches, optimizer, returned.get("units"), returned.get("shard"))


def _batch_iterable(target: str, batches: Any) -> Iterable[Any]:
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise UnusableTrainingError(f"{target} returned {type(batches).__name__} as batches; return a list of batches")
    return batches


def _default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_RATE, momentum=_MOMENTUM)
