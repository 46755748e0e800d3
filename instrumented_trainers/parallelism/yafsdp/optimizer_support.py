"""Optimizers that need whole tensors, and would silently compute something else from shards.

They are recognised by what they do: one steps a matrix, two others, as on two ranks, a half of it each. An element-wise
optimizer (SGD, Adam and their kin) makes the same of both.
"""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# For optimizers that cannot be made for a trial. By class name, for most come from packages that need not be installed.
NEED_WHOLE_TENSORS = frozenset(
    ("adafactor", "distributedshampoo", "galoreadamw", "kfac", "lamb", "lars", "lbfgs", "muon", "novograd", "psgd")
) | {"shampoo", "soap"}

_MARK = "_yafsdp_shard"  # on a shard
_STEPS, _ROWS, _COLUMNS = 3, 6, 4


class _Mark:
    """Says of a tensor that it is a shard, and whose. It is not saved with the tensor."""

    def __init__(self, owner: object | None) -> None:
        self.owner: Callable[[], Any] = weakref.ref(owner) if owner is not None else lambda: None

    def __reduce__(self) -> Any:
        return bool, (True,)

    def __deepcopy__(self, memo: Any) -> "_Mark":
        return self


def mark(shard: Tensor, owner: object | None = None) -> None:
    """Mark a tensor as a shard of the owner's, a unit's for parameters."""
    setattr(shard, _MARK, _Mark(owner))


def is_shard(tensor: Tensor) -> bool:
    """Return whether the tensor is marked as a shard."""
    return hasattr(tensor, _MARK)


def owner_of(shard: Tensor) -> Any:
    """Return whose shard a tensor is, None if it is not marked or its owner has been deleted."""
    owner_mark = getattr(shard, _MARK, None)
    return owner_mark.owner() if isinstance(owner_mark, _Mark) else None


def refuse_whole_tensor_optimizer(optimizer: Optimizer) -> None:
    """Raise NotImplementedError if the optimizer, which has shards to step, needs whole tensors."""
    kind = type(optimizer)
    if _needs_whole_tensors(kind, optimizer):
        raise NotImplementedError(
            f"YaFSDP: {kind.__name__} needs whole tensors, and a rank has one-dimensional shards of them; hand it to "
            "WholeTensorOptimizer, which gathers them, or use an element-wise optimizer (AdamW, SGD and their kin)"
        )


_tried: dict[tuple[type[Optimizer], Any], bool] = {}


def _needs_whole_tensors(kind: type[Optimizer], optimizer: Optimizer) -> bool:
    options = _options(kind, optimizer)
    key = kind, str(sorted(options.items(), key=str))
    if key not in _tried:
        _tried[key] = _differs_on_shards(kind, options)
    return _tried[key]


def _options(kind: type[Optimizer], optimizer: Optimizer) -> dict[str, Any]:
    """Return the options to make such an optimizer with, and a rate at which it moves."""
    accepted = inspect.signature(kind.__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    for name in ("capturable", "fused", "foreach"):  # how it computes, not what
        options.pop(name, None)
    return options | ({"lr": 0.1} if "lr" in options else {})


def _differs_on_shards(kind: type[Optimizer], options: dict[str, Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    matrix, *gradients = torch.randn(1 + _STEPS, _ROWS, _COLUMNS, generator=generator, dtype=torch.float64)
    try:
        expected = _train(kind, options, matrix, gradients)
    except Exception:  # noqa: BLE001 -- an optimizer of any make, made from its defaults alone
        return any(base.__name__.lower() in NEED_WHOLE_TENSORS for base in kind.__mro__)
    try:
        halves = [
            _train(kind, options, matrix.flatten()[half], [gradient.flatten()[half] for gradient in gradients])
            for half in (slice(0, matrix.numel() // 2), slice(matrix.numel() // 2, None))  # as two ranks have them
        ]
    except Exception:  # noqa: BLE001 -- such as torch.optim.Muon's, which takes matrices only
        return True
    return not torch.allclose(expected.flatten(), torch.cat(halves), rtol=1e-9, atol=1e-12)


def _train(kind: type[Optimizer], options: dict[str, Any], values: Tensor, gradients: list[Tensor]) -> Tensor:
    """Return the values after a step on each of the gradients."""
    parameter = nn.Parameter(values.clone())
    with torch.random.fork_rng(devices=[]):
        optimizer = kind([parameter], **options)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step(*((lambda: 0.0),) if _needs_closure(kind) else ())
    return parameter.detach()


def _needs_closure(kind: type[Optimizer]) -> bool:
    """Return whether a step cannot be made without a function that computes the loss, as of L-BFGS."""
    closure = inspect.signature(inspect.unwrap(kind.step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
