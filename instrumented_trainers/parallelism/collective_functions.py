"""Collectives that autograd can go back through, each with its own backward collective.

Letters in the names of Megatron-LM's paper (https://arxiv.org/abs/1909.08053): `copy_to_ranks` is f, `sum_over` g;
https://arxiv.org/abs/2205.05198 replaces them by `gather_along` and `scatter_along` over tokens (sequence parallelism).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from instrumented_trainers.regions import Axis

# torch 2.13 renamed both and warns at the old names, which are all that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to_ranks(values: Tensor, axis: Axis) -> Tensor:
    """Return values that every rank has; their gradients are summed over the axis."""
    return _Copied.apply(values, axis)


def sum_over(values: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the axis; its gradient, which every rank has, is that of each summand."""
    return _Summed.apply(values, axis)


def gather_along(values: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the ranks' values one after the other along `dim`; gradients are summed over the axis (reduce-scatter)."""
    return _Moved.apply(values, _gather, _scatter, axis, dim)


def gathered_alike(values: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the ranks' values one after the other, where all ranks go on to compute the same from them.

    So each of them has the whole gradient, and keeps its chunk.
    """
    return _Moved.apply(values, _gather, _chunk, axis, dim)


def scatter_along(values: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's chunk, along `dim`, of the sum over the axis; gradients are all-gathered."""
    return _Moved.apply(values, _scatter, _gather, axis, dim)


def own_chunk(values: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's chunk, along `dim`, of values that every rank has; gradients are all-gathered."""
    return _Moved.apply(values, _chunk, _gather, axis, dim)


def exchange_rows(rows: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int], *, span: str) -> Tensor:
    """Return the rows that the ranks sent to this one, by sender: an all-to-all; gradients go the way back.

    `rows` are sorted by receiver; `sent` and `received` count them per rank. Each way has a span, that of gradients
    with `backward` after its name.
    """
    return _Exchanged.apply(rows, axis, tuple(sent), tuple(received), span)


def scaled_gradient(values: Tensor, factor: float) -> Tensor:
    """Return the values as they are; their gradient is multiplied by the factor."""
    return _ScaledGradient.apply(values, factor)


def all_reduced(values: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the axis. Autograd does not see it."""
    # Not in place: the values may be stored for backward, by selective activation checkpointing for example.
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def _gather(values: Tensor, axis: Axis, dim: int) -> Tensor:
    wholes = values.new_empty((axis.size * values.shape[0], *values.shape[1:]))
    _all_gather(wholes, values.contiguous(), group=axis.group)
    return wholes if dim == 0 else torch.cat(wholes.chunk(axis.size), dim)


def _scatter(values: Tensor, axis: Axis, dim: int) -> Tensor:
    chunks = torch.cat(values.chunk(axis.size, dim)) if dim else values.contiguous()
    chunk = values.new_empty((chunks.shape[0] // axis.size, *chunks.shape[1:]))
    _reduce_scatter(chunk, chunks, group=axis.group)
    return chunk


def _chunk(values: Tensor, axis: Axis, dim: int) -> Tensor:
    return values.chunk(axis.size, dim)[axis.index].contiguous()


def _exchange(rows: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int], span: str) -> Tensor:
    with record_function(span):
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=axis.group)
    return arrived


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduced(gradient, ctx.axis), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, values: Tensor, axis: Axis) -> Tensor:
        return all_reduced(values, axis)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


_Move: TypeAlias = Callable[[Tensor, Axis, int], Tensor]


class _Moved(torch.autograd.Function):
    """Moves parts of a tensor between the ranks of an axis; gradients are moved back by another function."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, move: _Move, move_back: _Move, axis: Axis, dim: int) -> Tensor:
        ctx.move_back, ctx.axis, ctx.dim = move_back, axis, dim
        return move(values, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        return ctx.move_back(gradient, ctx.axis, ctx.dim), None, None, None, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, axis: Axis, sent: tuple[int, ...], received: tuple[int, ...], span: str
    ) -> Tensor:
        ctx.axis, ctx.sent, ctx.received, ctx.span = axis, sent, received, span
        return _exchange(rows, axis, sent, received, span)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        returned = _exchange(gradient, ctx.axis, ctx.received, ctx.sent, f"{ctx.span} backward")
        return returned, None, None, None, None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None
