"""A mixture of experts: each token goes through the K of N feed-forward experts that a router chooses.

Mixtral's (https://arxiv.org/abs/2401.04088), with the balancing loss of https://arxiv.org/abs/2101.03961, section 2.2.
It is dropless, or its experts have a capacity for each sequence (https://arxiv.org/abs/2006.16668, where a sequence is
called a group): what a token would get from an expert that is full is left out.

Letters in shapes, in addition to those of `instrumented_trainers.model`:
    S  tokens of all sequences, B * T      N  experts      K  experts per token
"""

import math
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

    dropped: Tensor | None = None
    """How many choices of experts training has dropped since `drop_ratio` was last called."""
    choices: int = 0
    """Of how many."""

    def __init__(
        self, width: int, hidden_width: int, *, experts: int, active: int, balance: float, capacity: float | None = None
    ) -> None:
        super().__init__()
        self.experts, self.active, self.balance, self.capacity = experts, active, balance, capacity
        self.router = nn.Linear(width, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, hidden_width, width))
        self.up = nn.Parameter(torch.empty(experts, hidden_width, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden_width))

    def forward(self, stream: Tensor) -> Tensor:
        tokens = stream.flatten(0, 1)
        chances = self.router(tokens).softmax(dim=-1, dtype=torch.promote_types(tokens.dtype, torch.float32))
        weights, choices = chances.topk(self.active)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        order = choices.flatten().argsort(stable=True)
        routed = torch.bincount(choices.flatten(), minlength=self.experts)
        order, counts = (order, routed) if self.capacity is None else self._within_capacity(choices, order, len(stream))
        outputs = self._expert_outputs(tokens[order // self.active], counts)
        outputs = outputs * weights.flatten()[order, None].to(outputs.dtype)
        mixed = torch.zeros_like(tokens).index_add(0, order // self.active, outputs.to(tokens.dtype))
        if self.balance and torch.is_grad_enabled():
            mixed = _AddLoss.apply(mixed, self.balance * balancing_loss(chances, routed / routed.sum()))
        return mixed.view_as(stream)

    def _within_capacity(self, choices: Tensor, order: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """The choices (S, K) that an expert has room for, in the given order, and their number for each expert.

        Of a sequence of T tokens each expert takes ``ceil(capacity * T * K / N)`` choices at most, whichever rank has
        the sequence.
        """
        assert self.capacity is not None
        of_sequence = choices.view(sequences, -1, self.active)
        room = math.ceil(self.capacity * of_sequence.shape[1] * self.active / self.experts)
        fits = (places(of_sequence, self.experts) < room).flatten()
        if self.training:
            dropped = (~fits).sum()
            self.dropped = dropped if self.dropped is None else self.dropped + dropped
            self.choices += fits.numel()
        fitting = order[fits[order]]
        return fitting, torch.bincount(choices.flatten()[fitting], minlength=self.experts)

    def _expert_outputs(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs of rows that are sorted by expert, (S * K, D)."""
        gates, ups, downs = self._weights()
        if rows.is_cuda and rows.dtype is torch.bfloat16 and _grouped_mm is not None:
            ends = counts.cumsum(0).to(torch.int32)  # stays on the device: the host need not wait for the counts
            gate, up = (_grouped_mm(rows, weights.mT, offs=ends) for weights in (gates, ups))
            return _grouped_mm(functional.silu(gate) * up, downs.mT, offs=ends)
        parts = [
            (functional.silu(part @ gate.mT) * (part @ up.mT)) @ down.mT
            for part, gate, up, down in zip(rows.split(counts.tolist()), gates, ups, downs, strict=True)
        ]
        return torch.cat(parts)

    def _weights(self) -> tuple[Tensor, ...]:
        """Return the experts' weights: `gate`, `up` and `down`."""
        return self.gate, self.up, self.down


def places(choices: Tensor, experts: int) -> Tensor:
    """Return the place of each choice in its expert's queue, from 0, for each of the sequences (B, T, K).

    First choices go before second ones, and earlier tokens before later ones.

    >>> places(torch.tensor([[[0, 1], [1, 0], [0, 1]]]), 2)[0].tolist()
    [[0, 1], [0, 2], [1, 2]]
    """
    by_priority = choices.transpose(1, 2).flatten(1)
    queues = functional.one_hot(by_priority, experts).cumsum(dim=1) - 1
    queued = queues.gather(2, by_priority[:, :, None])
    return queued.view(len(choices), choices.shape[2], choices.shape[1]).transpose(1, 2)


def drop_ratio(model: nn.Module) -> Tensor | None:
    """Return the share of choices that a model's experts have dropped since the last call; None without a capacity."""
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    counts = [layer.dropped for layer in layers if layer.dropped is not None]
    if not counts:
        return None
    ratio = torch.stack(counts).sum() / sum(layer.choices for layer in layers)
    for layer in layers:
        layer.dropped, layer.choices = None, 0
    return ratio


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
