"""Optimizers that need whole tensors, and would silently compute something else from shards."""

from torch import nn
from torch.optim import Optimizer

# By class name, for most come from packages that need not be installed. torch.optim.Muon refuses one-dimensional
# parameters, and so shards, by itself.
NEED_WHOLE_TENSORS = frozenset(
    ("adafactor", "distributedshampoo", "galoreadamw", "kfac", "lamb", "lars", "lbfgs", "muon", "novograd", "psgd")
) | {"shampoo", "soap"}

_MARK = "_yafsdp_shard"  # on a shard


def mark(shard: nn.Parameter) -> None:
    """Mark a parameter as a shard."""
    setattr(shard, _MARK, True)


def is_shard(parameter: nn.Parameter) -> bool:
    """Return whether the parameter is a unit's shard."""
    return hasattr(parameter, _MARK)


def refuse_whole_tensor_optimizer(optimizer: Optimizer) -> None:
    """Raise NotImplementedError if the optimizer, which has shards to step, needs whole tensors."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__.lower() in NEED_WHOLE_TENSORS]
    if kinds:
        raise NotImplementedError(
            f"YaFSDP: {kinds[0]} needs whole tensors, and a rank has one-dimensional shards of them; use an "
            "element-wise optimizer (AdamW, SGD and their kin), or another strategy"
        )
