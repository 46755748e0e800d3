"""What is put into modules after a model was sharded: parameters that no unit has, and the model itself into DDP."""

import functools

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from instrumented_trainers.parallelism.yafsdp.module import units_in
from instrumented_trainers.parallelism.yafsdp.shard_tensor import Shard

_registration_count = 0
"""How many modules and parameters have been put into modules of this process since a model was sharded."""


class UnshardedParameters:
    """Looks for parameters that no unit has, whenever something has been put into a module.

    Not in each step: to go through all modules of a model takes longer than the rest of the checks.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._checked_count = -1

    def refuse_trained(self) -> None:
        """Raise RuntimeError if such a parameter is to be trained."""
        if self._checked_count == _registration_count:
            return
        has_frozen = False
        for name, parameter in self._root.named_parameters():
            if isinstance(parameter, Shard):
                continue
            if parameter.requires_grad:
                raise RuntimeError(
                    f"YaFSDP: parameter {name!r} was put into the model after fully_shard, so no unit has it, and each "
                    "rank would train its own; put it there before, or apply fully_shard to the new module first"
                )
            has_frozen = True
        if not has_frozen:  # else it may be unfrozen, of which nobody tells
            self._checked_count = _registration_count


@functools.cache
def watch_registrations() -> None:
    """Look at what is put into modules of this process from now on."""
    register_module_module_registration_hook(_watch_module)
    register_module_parameter_registration_hook(_count_registration)


def _count_registration(*_: object) -> None:
    global _registration_count
    _registration_count += 1


def _watch_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    _count_registration(parent, name)
    if isinstance(parent, DistributedDataParallel) and child is not None and any(True for _ in units_in(child)):
        raise RuntimeError(
            "YaFSDP: DistributedDataParallel would write rank 0's shards to all ranks, and average gradients that are "
            "means over ranks already; train the sharded model itself (for replicas: a mesh of two dims)"
        )
