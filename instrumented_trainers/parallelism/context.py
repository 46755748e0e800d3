"""Context parallelism: each rank has some tokens of every sequence, and attention sees the keys and values of all.

It gathers them, as Llama 3 was trained (https://arxiv.org/abs/2407.21783, section 3.3.2), or they go round a ring of
the ranks. Each sequence is cut into twice as many chunks as there are ranks, of which rank r has chunks r and
2n − 1 − r. Together these see as many keys on every rank, so causal attention is balanced.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from instrumented_trainers import regions
from instrumented_trainers.model import Attention
from instrumented_trainers.parallelism.collective_functions import gather_along
from instrumented_trainers.parallelism.ring_attention import ring_attention
from instrumented_trainers.regions import Axis

GATHER, RING = "gather", "ring"
_TOKENS = 2  # dim of queries, keys and values (B, H, T, E)


class TokenSplit:
    """Which tokens of a sequence each rank of the axis has."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def own(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of sequences (B, T), shape (B, T / ranks)."""
        return tokens.index_select(1, self.positions(tokens.shape[1] // self.axis.size, tokens.device))

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's `tokens` tokens, in their order on it."""
        return self._positions_of(self.axis.index, tokens, device)

    def order(self, tokens: int, device: torch.device) -> Tensor:
        """Return the indices that put the ranks' tokens, rank after rank and `tokens` of each, into their order."""
        ranks = [self._positions_of(rank, tokens, device) for rank in range(self.axis.size)]
        return torch.cat(ranks).argsort()

    def _positions_of(self, rank: int, tokens: int, device: torch.device) -> Tensor:
        length, last = tokens // 2, 2 * self.axis.size - 1
        within = torch.arange(length, device=device)
        return torch.cat((within + rank * length, within + (last - rank) * length))


class ContextParallelAttention(Attention):
    """Attention of this rank's queries to the keys and values of all ranks."""

    split: TokenSplit

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens = query.shape[_TOKENS]
        both = gather_along(torch.stack((key, value)), self.split.axis, 1 + _TOKENS)
        key, value = both.index_select(1 + _TOKENS, self.split.order(tokens, query.device))
        positions = self.split.positions(tokens, query.device)
        halves = zip(query.chunk(2, _TOKENS), positions.chunk(2), self._ends(tokens), strict=True)
        return torch.cat([_attention(part, key, value, places, end) for part, places, end in halves], _TOKENS)

    def _ends(self, tokens: int) -> tuple[int, int]:
        """Number of keys, from the first, that the queries of each of the two chunks see at most."""
        length, rank, ranks = tokens // 2, self.split.axis.index, self.split.axis.size
        return (rank + 1) * length, (2 * ranks - rank) * length


class RingAttention(ContextParallelAttention):
    """Attention of this rank's queries to the keys and values of all ranks, which go round a ring."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ring_attention(query, key, value, self.split.axis)


ATTENTION: Mapping[str, type[ContextParallelAttention]] = {GATHER: ContextParallelAttention, RING: RingAttention}
"""The ways to see the keys and values of all ranks, by name."""


def parallelize(model: nn.Module, axis: Axis, method: str = GATHER) -> nn.Module:
    """Let a Llama, or a pipeline stage of one, work on this rank's tokens of each sequence; return it.

    It is called with `TokenSplit(axis).own` of the tokens, and its logits are those of these. `method` is one of
    ATTENTION.
    """
    split = TokenSplit(axis)
    model.token_split = split  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, Attention):
            regions.specialize(module, ATTENTION[method], split=split)
    return model


def _attention(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, end: int) -> Tensor:
    seen = torch.arange(end, device=query.device) <= positions[:, None]
    return functional.scaled_dot_product_attention(
        query, key[:, :, :end], value[:, :, :end], attn_mask=seen, enable_gqa=True
    )
