"""Optimizers that step one parameter after the other."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class ParameterOptimizer(Optimizer):
    """Steps each parameter with a gradient by itself, as `_step` of a subclass does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; return the loss of `closure`, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    @abstractmethod
    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Step one parameter, which has a gradient, with the settings of its group."""
