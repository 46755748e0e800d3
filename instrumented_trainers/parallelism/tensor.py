"""Tensor parallelism: each layer's matrices are divided over ranks, heads and hidden units with them.

Megatron-LM's plan (https://arxiv.org/abs/1909.08053): query, key, value, gate and up by columns, output and down by
rows, embedding and head by vocabulary. With sequence parallelism (https://arxiv.org/abs/2205.05198) the stream between
the matrices, and so norms and dropout, is divided over tokens: an all-gather and a reduce-scatter take the place of
each all-reduce.

Parameters become plain tensors, this rank's regions of them, so that every data-parallel strategy takes them as they
are. The modules stay, and so do their names.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from instrumented_trainers import regions
from instrumented_trainers.experts import MixtureOfExperts
from instrumented_trainers.model import Attention, FeedForward
from instrumented_trainers.parallelism.collective_functions import (
    copy_to_ranks,
    gather_along,
    gathered_alike,
    own_chunk,
    scatter_along,
    sum_over,
)
from instrumented_trainers.regions import Axis

_TOKENS, _VOCABULARY = 1, 2  # dims of the stream (B, T, D) and of logits (B, T, V)
_COLUMNS, _ROWS = 0, 1  # dims of a linear layer's weight (out, in) that are divided


def parallelize(model: nn.Module, axis: Axis, *, sequence_parallel: bool, gather_logits: bool = True) -> nn.Module:
    """Divide a Llama, or a pipeline stage of one, over the ranks of the axis, in place; return it.

    Call it before activation checkpointing's and the data-parallel strategy's wrappers. Without `gather_logits` the
    model returns this rank's part of the vocabulary, for `vocabulary_loss`. Raises ValueError where sizes do not fit.
    """
    stream = _TokenStream(axis) if sequence_parallel else _WholeStream(axis)
    model.stream_parts = axis.size if sequence_parallel else 1  # type: ignore[assignment]
    tied = _weight(model, "head") is not None and _weight(model, "head") is _weight(model, "embedding")
    if (embedding := getattr(model, "embedding", None)) is not None:
        _divide_embedding(embedding, axis, stream)
    for layer in _layers(model):
        _divide_layer(layer, axis, stream)
    if (norm := getattr(model, "norm", None)) is not None:
        stream.prepare_norm(norm)
    if (head := getattr(model, "head", None)) is not None:
        _divide_head(head, axis, stream, gather_logits=gather_logits)
        if tied:
            head.weight = embedding.weight
    return model


class _WholeStream:
    """The stream between the matrices, which every rank has whole."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def enter(self, stream: Tensor) -> Tensor:
        """Input of matrices that are divided by columns."""
        return copy_to_ranks(stream, self.axis)

    def leave(self, partial: Tensor) -> Tensor:
        """Return the stream that partial sums, of matrices divided by rows, make together."""
        return sum_over(partial, self.axis)

    def enter_alike(self, stream: Tensor) -> Tensor:
        """Return all tokens, for a module that computes the same on every rank."""
        return stream

    def leave_alike(self, output: Tensor) -> Tensor:
        """Stream made of the output of a module that computes the same on every rank."""
        return output

    def prepare_norm(self, norm: nn.Module) -> None:
        """Let a norm, which every rank has whole, work on this stream."""


class _TokenStream(_WholeStream):
    """The stream divided over tokens: sequence parallelism."""

    def enter(self, stream: Tensor) -> Tensor:
        return gather_along(stream, self.axis, _TOKENS)

    def leave(self, partial: Tensor) -> Tensor:
        return scatter_along(partial, self.axis, _TOKENS)

    def enter_alike(self, stream: Tensor) -> Tensor:
        return gathered_alike(stream, self.axis, _TOKENS)

    def leave_alike(self, output: Tensor) -> Tensor:
        return own_chunk(output, self.axis, _TOKENS)

    def prepare_norm(self, norm: nn.Module) -> None:
        # Each rank sees a part of the tokens, so it has a part of the weight's gradient.
        regions.specialize(norm, TokenShardedNorm, axis=self.axis)


class TokenShardedNorm(nn.RMSNorm):
    """A norm of this rank's tokens, whose weight's gradient is summed over the ranks that have the others."""

    axis: Axis

    def forward(self, stream: Tensor) -> Tensor:
        return functional.rms_norm(stream, self.normalized_shape, copy_to_ranks(self.weight, self.axis), self.eps)


class VocabularyShardedEmbedding(nn.Embedding):
    """An embedding of which this rank has the rows of a part of the vocabulary."""

    stream: _WholeStream

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.stream.axis.index * self.weight.shape[0]
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.stream.leave(rows.masked_fill(elsewhere[..., None], 0))


class TensorParallelExperts(MixtureOfExperts):
    """A mixture of experts of which this rank has a part of every expert's hidden units. The router is replicated."""

    stream: _WholeStream

    def forward(self, stream: Tensor) -> Tensor:
        return self.stream.leave_alike(super().forward(self.stream.enter_alike(stream)))

    def _expert_outputs(self, rows: Tensor, counts: Tensor) -> Tensor:
        axis = self.stream.axis
        return sum_over(super()._expert_outputs(copy_to_ranks(rows, axis), counts), axis)


def _divide_embedding(embedding: nn.Embedding, axis: Axis, stream: _WholeStream) -> None:
    regions.cut(embedding, "weight", axis, _COLUMNS)
    regions.specialize(embedding, VocabularyShardedEmbedding, stream=stream)


def _divide_layer(layer: Any, axis: Axis, stream: _WholeStream) -> None:
    stream.prepare_norm(layer.attention_norm)
    stream.prepare_norm(layer.feed_forward_norm)
    _divide_attention(layer.attention, axis, stream)
    if isinstance(layer.feed_forward, MixtureOfExperts):
        _divide_experts(layer.feed_forward, axis, stream)
    else:
        _divide_feed_forward(layer.feed_forward, axis, stream)


def _divide_attention(attention: Attention, axis: Axis, stream: _WholeStream) -> None:
    for part in (attention.query, attention.key, attention.value):
        regions.cut(part, "weight", axis, _COLUMNS)
    regions.cut(attention.output, "weight", axis, _ROWS)
    _surround(attention, stream.enter, stream.leave)


def _divide_feed_forward(feed_forward: FeedForward, axis: Axis, stream: _WholeStream) -> None:
    regions.cut(feed_forward.gate, "weight", axis, _COLUMNS)
    regions.cut(feed_forward.up, "weight", axis, _COLUMNS)
    regions.cut(feed_forward.down, "weight", axis, _ROWS)
    _surround(feed_forward, stream.enter, stream.leave)


def _divide_experts(experts: MixtureOfExperts, axis: Axis, stream: _WholeStream) -> None:
    for name in ("gate", "up"):
        regions.cut(experts, name, axis, 1 + _COLUMNS)
    regions.cut(experts, "down", axis, 1 + _ROWS)
    regions.specialize(experts, TensorParallelExperts, stream=stream)


def _divide_head(head: nn.Linear, axis: Axis, stream: _WholeStream, *, gather_logits: bool) -> None:
    regions.cut(head, "weight", axis, _COLUMNS)

    def leave(logits: Tensor) -> Tensor:
        return gathered_alike(logits, axis, _VOCABULARY) if gather_logits else logits

    _surround(head, stream.enter, leave)


def _surround(module: nn.Module, enter: Callable[[Tensor], Tensor], leave: Callable[[Tensor], Tensor]) -> None:
    """Let a module be called with `enter` of the stream and return `leave` of what it returns."""

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return enter(inputs[0]), *inputs[1:]

    def after(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return leave(output)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _layers(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model.layers, nn.ModuleList)
    return list(model.layers)


def _weight(model: nn.Module, name: str) -> torch.nn.Parameter | None:
    return getattr(getattr(model, name, None), "weight", None)
