"""Optimizers that need whole tensors, after their papers. Not a test."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lamb(Optimizer):
    """LAMB (arXiv 1904.00962, algorithm 2), without bias correction: Adam's step scaled by norms of whole tensors."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p] or self.state.setdefault(p, {})
                m = state.setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 1 - group["betas"][0])
                v = state.setdefault("v", torch.zeros_like(p)).lerp_(p.grad.square(), 1 - group["betas"][1])
                update = m / (v.sqrt() + 1e-6)
                p.sub_(update * (group["lr"] * p.norm() / update.norm().clamp(min=1e-6)))


class Shampoo(Optimizer):
    """Shampoo (arXiv 1802.09568, algorithm 1): matrices are preconditioned from both sides, others as by Adagrad."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self._direction(p, self.state[p]))

    def _direction(self, p: Tensor, state: dict[str, Tensor]) -> Tensor:
        if p.dim() != 2:
            squares = state.setdefault("squares", torch.full_like(p, 1e-3)).add_(p.grad.square())  # type: ignore[union-attr]
            return p.grad / squares.sqrt()  # type: ignore[operator]
        left = state.setdefault("left", 1e-3 * torch.eye(p.shape[0], dtype=p.dtype)).add_(p.grad @ p.grad.T)  # type: ignore[operator, union-attr]
        right = state.setdefault("right", 1e-3 * torch.eye(p.shape[1], dtype=p.dtype)).add_(p.grad.T @ p.grad)  # type: ignore[operator, union-attr]
        return _power(left, -0.25) @ p.grad @ _power(right, -0.25)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.pow(exponent)) @ vectors.T


class Soap(Optimizer):
    """SOAP (arXiv 2409.11321, algorithm 3): Adam in the eigenbasis of Shampoo's matrices; others by Adam."""

    def __init__(
        self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.95), frequency: int = 2
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "frequency": frequency})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state[p]:
                        self.state[p].update(self._begun(p))
                    p.sub_(self._direction(p.grad, self.state[p], group), alpha=group["lr"])

    def _begun(self, p: Tensor) -> dict[str, Any]:
        sides = [torch.eye(size, dtype=p.dtype, device=p.device) for size in p.shape] if p.dim() == 2 else []
        moments = {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
        return {**moments, "covariances": [1e-3 * side for side in sides], "bases": sides}

    def _direction(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        state["m"].lerp_(gradient, 1 - beta1)
        state["v"].lerp_(_rotated(gradient, state["bases"]).square(), 1 - beta2)
        moment = _rotated(state["m"], state["bases"])
        direction = _rotated(moment / (state["v"].sqrt() + 1e-6), [base.T for base in state["bases"]])
        products = (gradient @ gradient.T, gradient.T @ gradient) if gradient.dim() == 2 else ()
        for covariance, product in zip(state["covariances"], products, strict=True):
            covariance.lerp_(product, 1 - beta2)
        if state["step"] % group["frequency"] == 0:  # one step of power iteration
            for covariance, base in zip(state["covariances"], state["bases"], strict=True):
                base.copy_(torch.linalg.qr(covariance @ base).Q)
        state["step"] += 1
        return direction


def _rotated(matrix: Tensor, bases: list[Tensor]) -> Tensor:
    return bases[0].T @ matrix @ bases[1] if bases else matrix
