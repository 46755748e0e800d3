"""Several optimizers, each for a part of a model's parameters, stepped as one."""

from typing import Any

from torch.optim import Optimizer


class CombinedOptimizer:
    """Steps all its `parts`. Their parameter groups are listed one part after the other."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of all parts: the dictionaries themselves, so that a rate set here is theirs."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        """Step all parameters that have a gradient."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Remove the gradients of all parameters."""
        for part in self.parts:
            part.zero_grad()


def parts_of(optimizer: Optimizer | CombinedOptimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that a combined one consists of; of another, itself."""
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
