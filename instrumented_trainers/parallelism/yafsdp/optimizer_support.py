"""Optimizers that need whole tensors, and would silently compute something else from shards."""

import functools
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

# By class name, for most come from packages that need not be installed. torch.optim.Muon refuses one-dimensional
# parameters, and so shards, by itself.
NEED_WHOLE_TENSORS = frozenset(
    ("adafactor", "distributedshampoo", "galoreadamw", "kfac", "lamb", "lars", "lbfgs", "muon", "novograd", "psgd")
) | {"shampoo", "soap"}

_MARK = "_yafsdp_shard"  # on a shard, so that the hook knows it


def mark(shard: nn.Parameter) -> None:
    """Mark a shard: optimizers that need whole tensors refuse to step it."""
    _register_hook()
    setattr(shard, _MARK, True)


def is_shard(parameter: nn.Parameter) -> bool:
    """Return whether the parameter is a unit's shard."""
    return hasattr(parameter, _MARK)


@functools.cache
def _register_hook() -> None:
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 -- the signature of a hook
    kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__.lower() in NEED_WHOLE_TENSORS]
    if kinds and any(hasattr(parameter, _MARK) for group in optimizer.param_groups for parameter in group["params"]):
        raise NotImplementedError(
            f"YaFSDP: {kinds[0]} needs whole tensors, and a rank has one-dimensional shards of them; use an "
            "element-wise optimizer (AdamW, SGD and their kin), or another strategy"
        )
