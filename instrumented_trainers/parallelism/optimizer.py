"""The optimizer of a sharded model."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from instrumented_trainers.parallelism.zero1 import Zero1DataParallel


def make_optimizer(model: nn.Module, kind: type[Optimizer], **options: Any) -> Optimizer:
    """Return an optimizer of that kind over the model's parameters, made with `options`; call it after sharding.

    Under zero1 a rank holds the state of its part of the parameters only.
    """
    if isinstance(model, Zero1DataParallel):
        return model.make_optimizer(kind, **options)
    return kind(model.parameters(), **options)  # type: ignore[call-arg]
