"""A mixture of experts: each token goes through the K of N feed-forward experts that a router chooses (dropless).

Mixtral's (https://arxiv.org/abs/2401.04088), with the balancing loss of https://arxiv.org/abs/2101.03961, section 2.2.

Letters in shapes, in addition to those of `instrumented_trainers.model`:
    S  tokens of all sequences, B * T      N  experts      K  experts per token
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# torch 2.11 has it under the older name; on CUDA it takes bf16 only, on the CPU it is a loop as ours.
_grouped_mm = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class MixtureOfExperts(nn.Module):
    """SwiGLU by experts: ``sum over K of weight * down(silu(gate(x)) * up(x))``, the weights of a token adding up to 1.

    `gate`, `up` (N, F, D) and `down` (N, D, F) hold all experts, so that all of them have a gradient on every rank,
    whichever tokens it has.
    """

    def __init__(self, width: int, hidden_width: int, *, experts: int, active: int, balance: float) -> None:
        super().__init__()
        self.experts, self.active, self.balance = experts, active, balance
        self.router = nn.Linear(width, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, hidden_width, width))
        self.up = nn.Parameter(torch.empty(experts, hidden_width, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden_width))

    def forward(self, stream: Tensor) -> Tensor:
        tokens = stream.flatten(0, 1)
        chances = self.router(tokens).softmax(dim=-1, dtype=torch.promote_types(tokens.dtype, torch.float32))
        weights, chosen = chances.topk(self.active)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.experts)
        outputs = self._computed(tokens[order // self.active], counts)
        outputs = outputs * weights.flatten()[order, None].to(outputs.dtype)
        mixed = torch.zeros_like(tokens).index_add(0, order // self.active, outputs)
        if self.balance and torch.is_grad_enabled():
            mixed = _AddLoss.apply(mixed, self.balance * balancing_loss(chances, counts / counts.sum()))
        return mixed.view_as(stream)

    def _computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs of rows that are sorted by expert, (S * K, D)."""
        gates, ups, downs = self._weights()
        if rows.is_cuda and rows.dtype is torch.bfloat16 and _grouped_mm is not None:
            ends = counts.cumsum(0).to(torch.int32)  # stays on the device: the host need not wait for the counts
            gate, up = (_grouped_mm(rows, each.mT, offs=ends) for each in (gates, ups))
            return _grouped_mm(functional.silu(gate) * up, downs.mT, offs=ends)
        parts = [
            (functional.silu(part @ gate.mT) * (part @ up.mT)) @ down.mT
            for part, gate, up, down in zip(rows.split(counts.tolist()), gates, ups, downs, strict=True)
        ]
        return torch.cat(parts)

    def _weights(self) -> tuple[Tensor, ...]:
        """Return the experts' weights: `gate`, `up` and `down`."""
        return self.gate, self.up, self.down


def balancing_loss(chances: Tensor, shares: Tensor) -> Tensor:
    """Return N times the sum over experts of the share of tokens times the mean chance; 1 where both are uniform.

    `chances` (S, N) are the router's, `shares` (N) those of tokens that go to an expert.
    """
    return chances.shape[-1] * (shares.to(chances.dtype) * chances.mean(dim=0)).sum()


class _AddLoss(torch.autograd.Function):
    """Returns a tensor as it is; in backward a loss gets the gradient 1, as if it had been added to the training's.

    So it need not be carried through layers, whose strategies and checkpoints expect one output.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)
