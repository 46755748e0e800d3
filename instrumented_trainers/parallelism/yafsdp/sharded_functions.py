"""The two functions of torch that are replaced, as torch has no hook there. Both do as before for everything else.

`torch.autograd._engine_run_backward` runs each backward pass: it explains errors on absent weights by the unit's name,
and refuses gradients of shards, which are no part of any graph. `state_dict._gather_state_dict` makes state whole for
`get_model_state_dict`, and knows DTensors only. Tried with torch 2.13.
"""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict
from torch.utils._pytree import tree_map_only

from instrumented_trainers.parallelism.yafsdp.flat_shard import FlatShard
from instrumented_trainers.parallelism.yafsdp.refusals import name_missing_weight
from instrumented_trainers.parallelism.yafsdp.shard_tensor import ShardParameter
from instrumented_trainers.parallelism.yafsdp.unit import Unit

_units: WeakSet[Unit] = WeakSet()


def replace_functions(unit: Unit) -> None:
    """Let torch's functions know the unit. Raises RuntimeError with a torch that lacks one of them."""
    _units.add(unit)
    _replace_once()


@functools.cache
def _replace_once() -> None:
    for module, name, replaced in (
        (torch.autograd, "_engine_run_backward", _naming_units),
        (state_dict, "_gather_state_dict", _gathering_shards),
    ):
        if not callable(function := getattr(module, name, None)):
            raise RuntimeError(
                f"YaFSDP: torch {torch.__version__} has no {module.__name__}.{name}, which YaFSDP needs; it was tried "
                "with torch 2.13"
            )
        setattr(module, name, replaced(function))


def _naming_units(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Runner of backward passes that explains errors of autograd on versions of weights."""

    @functools.wraps(run_backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 4 and any(isinstance(leaf, ShardParameter) for leaf in args[4]):
            raise NotImplementedError(
                "YaFSDP: backward(inputs=…) and autograd.grad give no gradients of sharded parameters, as modules "
                "compute with whole weights; call loss.backward(), then read .grad"
            )
        try:
            return run_backward(*args, **kwargs)
        except RuntimeError as error:
            if (words := name_missing_weight(str(error), _units)) is not None:
                raise RuntimeError(words) from error
            raise

    return run


def _gathering_shards(gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gather)
    def gather_state_dict(
        state: dict[str, Any], *, cpu_offload: bool = False, ranks_only: tuple[int, ...] = (), **options: Any
    ) -> Any:
        is_returned = not ranks_only or dist.get_rank() in ranks_only

        def gather_whole(shard: FlatShard) -> Tensor | None:
            tensor = shard.full_tensor()  # on every rank, one after the other
            tensor = tensor.cpu() if cpu_offload and is_returned else tensor
            return tensor if is_returned else None

        state = tree_map_only(FlatShard, gather_whole, state)
        return gather(state, cpu_offload=cpu_offload, ranks_only=ranks_only, **options)

    return gather_state_dict
