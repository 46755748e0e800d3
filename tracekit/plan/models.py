"""Sizes of models by name, to plan for and to simulate: the trainers' presets, and Llama's own names for them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tracekit.errors import InputError


@dataclass(frozen=True)
class Model:
    """Sizes of a Llama-style decoder; a layer is what the strategies shard and gather as one unit."""

    name: str
    width: int
    layers: int
    heads: int
    key_value_heads: int
    hidden_width: int
    vocabulary: int

    @property
    def attention_parameters(self) -> tuple[int, int]:
        """Return the weights of the input projection (queries, keys, values) and of the output projection."""
        grouped = self.width * self.width * self.key_value_heads // self.heads
        return self.width * self.width + 2 * grouped, self.width * self.width

    @property
    def feed_forward_parameters(self) -> tuple[int, int]:
        """Return the weights of the two projections up (gate and up, as one), and of the one down."""
        return 2 * self.width * self.hidden_width, self.width * self.hidden_width

    @property
    def layer_parameters(self) -> int:
        """Return the weights of one layer's matrices; its two norms are left out, they are too small to matter."""
        return sum(self.attention_parameters) + sum(self.feed_forward_parameters)

    @property
    def outer_parameters(self) -> int:
        """Return the weights of the embedding, or of the head, which is as large."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Return the weights of all layers, embedding and head."""
        return self.layers * self.layer_parameters + 2 * self.outer_parameters


_SIZES = (
    Model("tiny", 256, 4, 8, 2, 704, 512),
    Model("small", 512, 8, 8, 4, 1408, 512),
    Model("125m", 768, 12, 12, 12, 2048, 32_000),
    Model("1b", 2048, 16, 32, 8, 8192, 128_256),
    Model("3b", 3072, 28, 24, 8, 8192, 128_256),
    Model("7b", 4096, 32, 32, 32, 11_008, 32_000),
    Model("8b", 4096, 32, 32, 8, 14_336, 128_256),
    Model("13b", 5120, 40, 40, 40, 13_824, 32_000),
    Model("34b", 8192, 48, 64, 8, 22_016, 32_000),
    Model("70b", 8192, 80, 64, 8, 28_672, 32_000),
    Model("70b-llama3", 8192, 80, 64, 8, 28_672, 128_256),
    Model("405b", 16_384, 126, 128, 8, 53_248, 128_256),
)
_ALIASES = {
    "llama3-1b": "1b",
    "llama3-3b": "3b",
    "llama2-7b": "7b",
    "llama3-8b": "8b",
    "llama2-13b": "13b",
    "llama2-34b": "34b",
    "llama2-70b": "70b",
    "llama3-70b": "70b-llama3",
    "llama3-405b": "405b",
}
MODELS: Mapping[str, Model] = {model.name: model for model in _SIZES}
NAMES = (*MODELS, *_ALIASES)


def find(name: str, *, layers: int | None = None) -> Model:
    """Return the model of this name, with so many of its layers. Raises InputError where there is none."""
    model = MODELS.get(_ALIASES.get(name, name))
    if model is None:
        raise InputError(f"{name!r} is not a known model; known: {', '.join(NAMES)}")
    if layers is not None and not 1 <= layers <= model.layers:
        raise InputError(f"--layers is {layers}; {name} has {model.layers}")
    return model if layers is None else replace(model, layers=layers)
