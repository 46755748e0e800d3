"""Weights for a model that was sharded on the meta device, of which no rank ever has the whole."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from instrumented_trainers.parallelism import fsdp2, yafsdp
from instrumented_trainers.parallelism.options import ShardOptions
from instrumented_trainers.parallelism.yafsdp import YaFSDPModule

SHARDS_ON_META = frozenset(("fsdp2", "yafsdp"))
"""Strategies that can shard a model on the meta device. DDP and ZeRO-1 store it whole; FSDP1 would untie weights."""


def materialize(
    model: nn.Module, reset: Callable[[nn.Module], None], device: torch.device, options: ShardOptions
) -> None:
    """Draw the weights, one module at a time; each rank keeps its shards. Make the optimizer after that.

    `reset` is called with each module that has parameters of its own, while these are whole; it must fill them, with
    the same values on every rank. Raises NotImplementedError for a model that was sharded in another way.
    """
    if isinstance(model, YaFSDPModule):
        yafsdp.materialize(model, reset)
    elif isinstance(model, FSDPModule):
        fsdp2.materialize(model, reset, device, offload=options.offload)
    else:
        raise NotImplementedError(f"{type(model).__name__} was not sharded on the meta device by fsdp2 or yafsdp")
