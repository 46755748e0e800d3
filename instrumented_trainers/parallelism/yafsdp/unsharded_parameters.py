"""Parameters that a model gets after it was sharded: no unit has them, so each rank would train its own."""

import functools

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from instrumented_trainers.parallelism.yafsdp.shard_tensor import Shard

_registration_count = 0
"""How many modules and parameters have been put into modules of this process since a model was sharded."""


class UnshardedParameters:
    """Looks for parameters that no unit has, whenever something has been put into a module.

    Not in each step: to go through all modules of a model takes longer than the rest of the checks.
    """

    def __init__(self, root: nn.Module) -> None:
        _count_registrations()
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
def _count_registrations() -> None:
    register_module_module_registration_hook(_count_registration)
    register_module_parameter_registration_hook(_count_registration)


def _count_registration(*_: object) -> None:
    global _registration_count
    _registration_count += 1
