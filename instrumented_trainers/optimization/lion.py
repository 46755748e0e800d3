"""Lion (https://arxiv.org/abs/2302.06675, algorithm 2), which torch does not have."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from instrumented_trainers.optimization.parameter_optimizer import ParameterOptimizer


class Lion(ParameterOptimizer):
    """Steps each weight by the sign of its momentum. Element-wise, so it steps shards as it steps whole tensors.

    Its state is one number per weight. The rate should be 3 to 10 times smaller than AdamW's, the weight decay as much
    larger (section 5 of the paper).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum, gradient = state["momentum"], parameter.grad
        update = momentum.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)
