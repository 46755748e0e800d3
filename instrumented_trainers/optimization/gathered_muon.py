"""Muon for parameters that are DTensors, as FSDP2's are."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from instrumented_trainers.optimization.parameter_optimizer import ParameterOptimizer


class GatheredMuon(ParameterOptimizer):
    """Steps sharded matrices by `torch.optim.Muon`, with one all-gather for each.

    The momentum is sharded as the weights are, so a checkpoint has it as any other optimizer's. Of each matrix in turn
    the update is gathered, and orthogonalized on every rank. (torch's own Muon takes DTensors too, but communicates in
    each of its 15 matrix products per matrix.) Every rank must step it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        adjust_lr_fn: str | None = None,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "adjust_lr_fn": adjust_lr_fn}
        )

    def _step(self, parameter: DTensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = _muon_update(gradient.lerp(momentum, group["momentum"]).full_tensor(), group)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None))


def _muon_update(update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Matrix that torch's Muon adds for an update, its own momentum and decay left out."""
    matrix = nn.Parameter(torch.zeros_like(update))
    matrix.grad = update
    torch.optim.Muon(
        [matrix], lr=group["lr"], weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=group["adjust_lr_fn"]
    ).step()
    return matrix.detach()
