"""Optimizer state before the first step, for checkpoints to load into."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def begin_missing_state(optimizer: Optimizer) -> None:
    """Make the state of parameters that were never stepped, by a step of size 0 on gradients of 0 for them alone."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [parameter for parameter in parameters if parameter.requires_grad and parameter not in optimizer.state]
    if not missing:
        return
    with _no_rate(optimizer), _no_gradients(parameters):
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for parameter in missing:
        step = optimizer.state.get(parameter, {}).get("step")
        if isinstance(step, Tensor):
            step.zero_()
        elif step is not None:
            optimizer.state[parameter]["step"] = 0


@contextmanager
def _no_gradients(parameters: list[nn.Parameter]) -> Iterator[None]:
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def _no_rate(optimizer: Optimizer) -> Iterator[None]:
    groups = [group for group in optimizer.param_groups if "lr" in group]
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
