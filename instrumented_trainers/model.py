"""A Llama-style decoder that knows nothing of parallelism.

Letters in shapes:
    B  sequences in a batch          H  query heads            F  width of the feed-forward layer
    T  tokens in a sequence          K  key and value heads    V  vocabulary
    D  width of the model            E  width of a head
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from instrumented_trainers.experts import MixtureOfExperts
from instrumented_trainers.initialization import WeightInitializer
from instrumented_trainers.model_config import ModelConfig
from instrumented_trainers.recomputation import selective_contexts


class SequencePositions(Protocol):
    """Knows where the tokens that a model is called with lie in their sequences."""

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the positions of that many tokens, in their order, shape (T)."""


class Llama(nn.Module):
    """Embedding, `layers`, norm, head. Called with tokens (B, T), it returns logits (B, T, V).

    Weights are drawn by a seed from torch's generator (seed that for the same weights on every rank). A model built on
    the meta device has none until it gets them, whole by `materialize` or in parts by its `initializer`.
    """

    token_split: SequencePositions | None = None
    """Which tokens the model sees of each sequence, if not all."""
    stream_parts: int = 1
    """Over how many ranks the tokens of the stream are divided that a part without embedding is called with."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding: nn.Embedding | None = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(
            Layer(config, recomputed=index < config.checkpointed_layers) for index in range(config.layers)
        )
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.head: nn.Linear | None = nn.Linear(config.width, config.vocabulary, bias=False)
        self._tie()
        if not next(self.parameters()).is_meta:
            self.apply(self.initializer(int(torch.randint(2**31, ()))))

    def part(self, layers: range, *, has_embedding: bool, has_head: bool) -> "Llama":
        """Return a part of the model, which shares its modules: some layers, under their numbers in the whole.

        Without the embedding it takes streams (B, T, D), without norm and head it returns them.
        """
        part = Llama.__new__(Llama)
        nn.Module.__init__(part)
        part.config, part.token_split = self.config, self.token_split
        part.embedding = self.embedding if has_embedding else None
        part.layers = NumberedLayers({number: self.layers[number] for number in layers})
        part.norm = self.norm if has_head else None
        part.head = self.head if has_head else None
        return part

    def initializer(self, seed: int) -> WeightInitializer:
        """Initializer that draws the weights, the same for the same seed."""
        return WeightInitializer(self, layers=self.config.layers, seed=seed)

    def materialize(self, device: torch.device, initializer: WeightInitializer) -> None:
        """Give a model on the meta device its weights, whole; `initializer` was made for it."""
        self.to_empty(device=device)
        self._tie()  # each place of a tied weight has got memory of its own
        self.apply(initializer)

    def _tie(self) -> None:
        if self.config.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        rotation = rotations(self._positions(tokens), self.config)
        stream = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.layers:
            stream = layer(stream, rotation)
        return stream if self.norm is None or self.head is None else self.head(self.norm(stream))

    def _positions(self, tokens: Tensor) -> Tensor:
        """Return the positions of the tokens (B, T), or of those of a stream, in their sequences, shape (T)."""
        count = tokens.shape[1] * (self.stream_parts if self.embedding is None else 1)
        if self.token_split is None:
            return torch.arange(count, device=tokens.device)
        return self.token_split.positions(count, tokens.device)


class NumberedLayers(nn.ModuleList):
    """Some of a model's layers, whose names are their numbers in the whole model."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)


class Layer(nn.Module):
    """Attention and feed-forward, each added to the stream (B, T, D) after a norm."""

    def __init__(self, config: ModelConfig, *, recomputed: bool) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.reentrant = config.reentrant
        self.selective = config.selective
        self.dropout = config.dropout
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.feed_forward = _feed_forward(config)

    def forward(self, stream: Tensor, rotation: Tensor) -> Tensor:
        if self.recomputed and self.training:
            if self.selective:
                return checkpoint(self._add, stream, rotation, use_reentrant=False, context_fn=selective_contexts)
            return checkpoint(self._add, stream, rotation, use_reentrant=self.reentrant)
        return self._add(stream, rotation)

    def _add(self, stream: Tensor, rotation: Tensor) -> Tensor:
        stream = stream + self._drop(self.attention(self.attention_norm(stream), rotation))
        return stream + self._drop(self.feed_forward(self.feed_forward_norm(stream)))

    def _drop(self, added: Tensor) -> Tensor:
        return functional.dropout(added, self.dropout, self.training) if self.dropout else added


class Attention(nn.Module):
    """Causal attention with rotary positions, each key and value head shared by H / K query heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        shared_width = config.key_value_heads * config.head_width
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, shared_width, bias=False)
        self.value = nn.Linear(config.width, shared_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, stream: Tensor, rotation: Tensor) -> Tensor:
        query = rotate(self._heads(self.query(stream)), rotation)
        key = rotate(self._heads(self.key(stream)), rotation)
        value = self._heads(self.value(stream))
        return self.output(self._attend(query, key, value).transpose(1, 2).flatten(2))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def _heads(self, projected: Tensor) -> Tensor:
        # (B, T, H * E) to (B, H, T, E)
        return projected.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


def _feed_forward(config: ModelConfig) -> nn.Module:
    if not config.experts:
        return FeedForward(config)
    return MixtureOfExperts(
        config.width,
        config.hidden_width,
        experts=config.experts,
        active=config.active_experts,
        balance=config.balance,
        capacity=config.capacity,
    )


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden_width, bias=False)
        self.up = nn.Linear(config.width, config.hidden_width, bias=False)
        self.down = nn.Linear(config.hidden_width, config.width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(stream)) * self.up(stream))


def rotations(positions: Tensor, config: ModelConfig) -> Tensor:
    """Return cosine and sine of the angles of positions (T), shape (2, T, E / 2), in fp64.

    Computed in each forward pass: a buffer would need care under every strategy and on the meta device.
    """
    exponents = torch.arange(0, config.head_width, 2, device=positions.device, dtype=torch.float64) / config.head_width
    angles = torch.outer(positions.double(), config.rotary_base**-exponents)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Return `heads` (B, H, T, E) with each pair (e, e + E / 2) turned by its position's angle."""
    cosine, sine = rotation.to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
