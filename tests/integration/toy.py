"""A small transformer with every way of being awkward that a sharding engine must bear. Not a test itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

RANK_DEPENDENT_PATHS = ("spare on one rank",)
VOCABULARY, WIDTH, LAYERS, HEADS = 67, 24, 5, 2


class Block(nn.Module):
    """Attention and feed-forward; `spare` is used only on request."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.spare = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, stream: Tensor, *, use_spare: bool = False) -> Tensor:
        heads = self.mixed(self.attention_norm(stream)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        stream = stream + self.output(attention)
        stream = stream + self.feed_forward(self.norm(stream))
        return stream + self.spare(stream) if use_spare else stream


@dataclass
class Situation:
    """State other than the input on which a forward pass may depend; equal for the sharded model and the reference."""

    step: int = 0
    rank: int = 0


class Toy(nn.Module):
    """Called with tokens (B, T) it returns logits (B, T, V); `path` names how the stream goes through the layers."""

    def __init__(self, path: str = "plain", *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.path, self.situation = path, Situation()

    def forward(self, tokens: Tensor) -> Tensor:
        stream = PATHS[self.path](self, self.embedding(tokens))
        return self.head(self.norm(stream))


def _in_turn(layers: list[nn.Module], stream: Tensor) -> Tensor:
    for layer in layers:
        stream = layer(stream)
    return stream


def _plain(toy: Toy, stream: Tensor) -> Tensor:
    return _in_turn(list(toy.layers), stream)


def _long_skips(toy: Toy, stream: Tensor) -> Tensor:
    first = toy.layers[0](stream)
    second = toy.layers[1](first)
    third = toy.layers[2](second + first)
    fourth = toy.layers[3](third + first + stream)
    return toy.layers[4](fourth + second)


def _branches(toy: Toy, stream: Tensor) -> Tensor:
    return toy.layers[4](toy.layers[0](stream) + toy.layers[1](stream) + toy.layers[3](toy.layers[2](stream)))


def _reused(toy: Toy, stream: Tensor) -> Tensor:
    return _in_turn([toy.layers[i] for i in (0, 1, 1, 0, 2, 4, 2)], stream)


def _conditional(toy: Toy, stream: Tensor) -> Tensor:
    step = toy.situation.step
    return _in_turn([layer for i, layer in enumerate(toy.layers) if (step * step + i) % 3], stream)


def _shuffled(toy: Toy, stream: Tensor) -> Tensor:
    order = torch.randperm(LAYERS, generator=torch.Generator().manual_seed(toy.situation.step))
    return _in_turn([toy.layers[i] for i in order], stream)


def _spare_on_one_rank(toy: Toy, stream: Tensor) -> Tensor:
    for i, layer in enumerate(toy.layers):
        stream = layer(stream, use_spare=i > 0 and (toy.situation.step + i) % 4 == toy.situation.rank)
    return stream


def _detached(toy: Toy, stream: Tensor) -> Tensor:
    for i, layer in enumerate(toy.layers):
        stream = stream + layer(stream.detach() if i in (0, 2) else stream)
    return stream


def _embedding_only(toy: Toy, stream: Tensor) -> Tensor:
    """The layers run, and nothing of what they return is used."""
    _plain(toy, stream.detach())
    return stream


def _part_only(toy: Toy, stream: Tensor) -> Tensor:
    """All layers run, and backward goes through the first ones only."""
    stream = _in_turn(list(toy.layers[:2]), stream)
    _in_turn(list(toy.layers[2:]), stream)
    return stream


def _first_two_checkpointed(*, reentrant: bool) -> Callable[[Toy, Tensor], Tensor]:
    def path(toy: Toy, stream: Tensor) -> Tensor:
        for layer in toy.layers[:2]:
            stream = checkpoint(layer, stream, use_reentrant=reentrant)
        return _in_turn(list(toy.layers[2:]), stream)

    return path


def _checkpointed(layers_at_once: int, *, reentrant: bool) -> Callable[[Toy, Tensor], Tensor]:
    def path(toy: Toy, stream: Tensor) -> Tensor:
        for first in range(0, LAYERS, layers_at_once):
            group = list(toy.layers[first : first + layers_at_once])
            stream = checkpoint(_in_turn, group, stream, use_reentrant=reentrant)
        return stream

    return path


PATHS: Mapping[str, Callable[[Toy, Tensor], Tensor]] = MappingProxyType(
    {
        "plain": _plain,
        "long skips": _long_skips,
        "branches": _branches,
        "reused": _reused,
        "conditional": _conditional,
        "shuffled": _shuffled,
        "spare on one rank": _spare_on_one_rank,
        "detached": _detached,
        "layers without effect": _embedding_only,
        "backward of part only": _part_only,
        "non-reentrant checkpoint of the first two": _first_two_checkpointed(reentrant=False),
        "reentrant checkpoint of the first two": _first_two_checkpointed(reentrant=True),
    }
    | {
        f"{'reentrant' if reentrant else 'non-reentrant'} checkpoint of {count}": _checkpointed(
            count, reentrant=reentrant
        )
        for reentrant in (False, True)
        for count in (1, 2, 4)
    }
)
