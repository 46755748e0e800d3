"""Ring attention: keys and values go round the ranks of the context axis while attention to those at hand runs.

Each rank begins with its own keys and values and sends them on to the next rank, while its queries attend to them.
After as many rounds as there are ranks, all queries have seen all keys (https://arxiv.org/abs/2310.01889). The parts
are merged by their log-sum-exp (online softmax). With the chunks of `context.TokenSplit`, a rank computes as much in
each round: one diagonal block first, then half of a block without a mask.

Letters in shapes, in addition to those of `instrumented_trainers.model`:
    G  query heads per key and value head, H / K      S  tokens of a block of keys
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from instrumented_trainers.regions import Axis

RING = "CP::ring"
"""Span around the rounds of one attention; `backward` is added where gradients go round."""
_BLOCK_TAG, _GRADIENT_TAG = 0, 1


def ring_attention(query: Tensor, key: Tensor, value: Tensor, axis: Axis) -> Tensor:
    """Return causal attention of this rank's queries (B, H, T, E) to the keys and values (B, K, T, E) of all ranks.

    Rank r of n has chunks r and 2 n − 1 − r of each sequence, as `context.TokenSplit` divides them.
    """
    return _Ring.apply(query, torch.stack((key, value)), axis)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, block: Tensor, axis: Axis) -> Tensor:
        with record_function(RING):
            output, weight = _forward(_group_heads(query, block.shape[2]), block, axis)
            output = output.to(query.dtype)
        ctx.axis = axis
        ctx.save_for_backward(query, block, output, weight)
        return output.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        query, block, output, weight = ctx.saved_tensors
        # Autocast, which casts products in forward, is off here, and may have left queries in higher precision.
        queries, gradients = (_group_heads(tensor.to(block.dtype), block.shape[2]) for tensor in (query, gradient))
        with record_function(f"{RING} backward"):
            of_query, of_block = _backward(queries, block, output, weight, gradients, ctx.axis)
        return of_query.flatten(1, 2).to(query.dtype), of_block.to(block.dtype), None


def _forward(query: Tensor, block: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, K, G, T, E) of grouped queries, and the log-sum-exp of their scores (B, K, G, T).

    Both are in 32 bits at least: parts of the rounds add up in them.
    """
    output = torch.zeros_like(query, dtype=_sum_dtype(query))
    total = output.new_full(query.shape[:-1], -math.inf)
    for number in range(axis.size):
        passing = _Passing(block, axis, _BLOCK_TAG) if number + 1 < axis.size else None
        queries, keys, masked = _visible_part(number, axis, query.shape[-2])
        part, weight = _attention(query[..., queries, :], block[:, :, :, keys], masked=masked)
        before = total[..., queries]
        after = torch.logaddexp(before, weight)
        merged = _scale(output[..., queries, :], before - after) + _scale(part, weight - after)
        output, total = _replace_part(output, merged, queries, -2), _replace_part(total, after, queries, -1)
        if passing is not None:
            block = passing.receive()
    return output, total


def _backward(
    query: Tensor, block: Tensor, output: Tensor, weight: Tensor, gradient: Tensor, axis: Axis
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and of this rank's keys and values.

    The gradients of a block follow it, a round later, and after the last round they go on to the rank that it is of.
    """
    mean = (gradient * output).sum(dim=-1, keepdim=True, dtype=weight.dtype)
    of_query = torch.zeros_like(query, dtype=weight.dtype)
    behind: _Passing | None = None
    for number in range(axis.size):
        passing = _Passing(block, axis, _BLOCK_TAG) if number + 1 < axis.size else None
        queries, keys, masked = _visible_part(number, axis, query.shape[-2])
        rows = (query[..., queries, :], gradient[..., queries, :], weight[..., queries, None], mean[..., queries, :])
        added, part = _attention_backward(*rows, block[:, :, :, keys], masked=masked)
        of_query = _replace_part(of_query, of_query[..., queries, :] + added, queries, -2)
        of_block = torch.zeros_like(block) if behind is None else behind.receive()
        of_block = _replace_part(of_block, of_block[:, :, :, keys] + part.to(block.dtype), keys, -2)
        behind = _Passing(of_block, axis, _GRADIENT_TAG)
        if passing is not None:
            block = passing.receive()
    assert behind is not None
    return of_query, behind.receive()


class _Passing:
    """A tensor on its way to the next rank of the ring, and one like it that comes from the rank before."""

    def __init__(self, values: Tensor, axis: Axis, tag: int) -> None:
        ranks = dist.get_process_group_ranks(axis.group)
        self._sent, self._arriving = (
            values.contiguous(),
            torch.empty_like(values, memory_format=torch.contiguous_format),
        )
        after, before = ranks[(axis.index + 1) % axis.size], ranks[axis.index - 1]
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, group=axis.group, tag=tag),
                dist.P2POp(dist.irecv, self._arriving, before, group=axis.group, tag=tag),
            ]
        )

    def receive(self) -> Tensor:
        """Wait for the block that the rank before sends."""
        for work in self._works:
            work.wait()
        return self._arriving


def _visible_part(number: int, axis: Axis, tokens: int) -> tuple[slice, slice, bool]:
    """Slices of this rank's queries and of a round's block that see each other, and whether with a mask.

    The block is that of rank r − number. Of an earlier rank's all queries see the first chunk; of a later rank's the
    second chunk of queries sees both.
    """
    full, half = slice(0, tokens), tokens // 2
    if number == 0:
        return full, full, True
    if number <= axis.index:
        return full, slice(0, half), False
    return slice(half, tokens), full, False


def _attention(query: Tensor, block: Tensor, *, masked: bool) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, K, G, T, E) of queries for a block (2, B, K, S, E), and the log-sum-exp of the scores."""
    key, value = block[:, :, :, None]
    scores = _scores(query, key, masked=masked)
    weight = scores.logsumexp(dim=-1)
    return (scores - weight[..., None]).exp().to(value.dtype) @ value, weight


def _attention_backward(
    query: Tensor, gradient: Tensor, weight: Tensor, mean: Tensor, block: Tensor, *, masked: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and of a block, from the log-sum-exp over all blocks and its outputs' mean."""
    key, value = block[:, :, :, None]
    shares = (_scores(query, key, masked=masked) - weight).exp()
    of_scores = (shares * (gradient @ value.mT - mean) / math.sqrt(query.shape[-1])).to(key.dtype)
    of_key, of_value = (of_scores.mT @ query).sum(dim=2), (shares.to(gradient.dtype).mT @ gradient).sum(dim=2)
    return of_scores @ key, torch.stack((of_key, of_value))


def _scores(query: Tensor, key: Tensor, *, masked: bool) -> Tensor:
    """Return the scores of queries and keys (B, K, G, T, S), in 32 bits at least.

    Masked are those of a query and the keys after it.
    """
    scores = (query @ key.mT).to(_sum_dtype(query)) / math.sqrt(query.shape[-1])
    if not masked:
        return scores
    # The chunks of a rank are in their order, so its own keys are seen as in a whole sequence.
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -math.inf)


def _sum_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _group_heads(heads: Tensor, keys: int) -> Tensor:
    """Return heads (B, H, T, E) as (B, K, G, T, E)."""
    return heads.unflatten(1, (keys, -1))


def _scale(values: Tensor, exponent: Tensor) -> Tensor:
    return values * exponent.exp()[..., None]


def _replace_part(tensor: Tensor, part: Tensor, where: slice, dim: int) -> Tensor:
    """Return a tensor with a part of it replaced, not in place: selective checkpointing may have stored the tensor."""
    if where.start == 0 and where.stop == tensor.shape[dim]:
        return part
    return torch.slice_scatter(tensor, part, dim % tensor.dim(), where.start, where.stop)
