"""Sizes of models, and those that have a name. Needs no torch, so that a command line is parsed at once."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model. `checkpointed_layers` is how many layers, counted from the first, recompute activations."""

    width: int
    layers: int
    heads: int
    key_value_heads: int
    hidden_width: int
    vocabulary: int
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    tied: bool = False
    """Whether head and embedding share one weight."""
    dropout: float = 0.0
    """Share of what attention and feed-forward add to the stream that is dropped in training."""
    checkpointed_layers: int = 0
    reentrant: bool = False
    """Which of torch's two ways of activation checkpointing the checkpointed layers use."""
    selective: bool = False
    """Whether these keep the outputs of matrix products and attention and recompute the rest only."""
    experts: int = 0
    """How many experts the feed-forward part of each layer has; 0: it is one for all tokens."""
    active_experts: int = 2
    """How many of them each token goes through."""
    balance: float = 0.0
    """The weight of the loss that balances the tokens over the experts, per forward pass."""
    capacity: float | None = None
    """How many times the mean number of a sequence's tokens an expert takes at most; None: all that choose it."""

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.key_value_heads or self.head_width % 2:
            raise ValueError(
                f"width {self.width}, heads {self.heads} and key_value_heads {self.key_value_heads} do not fit: "
                "heads must divide the width into an even number, key_value_heads must divide heads"
            )
        if self.experts and not 1 <= self.active_experts <= self.experts:
            raise ValueError(f"of {self.experts} experts {self.active_experts} cannot be active: name 1 to all of them")

    @property
    def head_width(self) -> int:
        """Return the width of one attention head."""
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """Return the number of parameters, each shared weight counted once."""
        outside = self.vocabulary * self.width * (1 if self.tied else 2) + self.width
        return self.layers * self.layer_parameters + outside

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of a layer."""
        return self._layer_parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that a token is multiplied by: of the experts, those that are active."""
        idle = self._layer_parameters(self.experts) - self._layer_parameters(min(self.active_experts, self.experts))
        return self.parameters - self.layers * idle

    def _layer_parameters(self, experts: int) -> int:
        attention = 2 * self.width * self.head_width * (self.heads + self.key_value_heads)
        router = self.experts * self.width
        return attention + router + max(1, experts) * 3 * self.width * self.hidden_width + 2 * self.width


# `micro` is for tests and small samples, `micro-deep` for those of pipelines. A unit (layer; embedding, norm and head
# together) of `tiny` holds at least 1 MiB in fp32, so that its buffers stand out of the allocator's events in a trace.
# The sizes from 1b up are those of Llama 2, Code Llama (34b) and Llama 3; 1.3b has GPT-3 XL's layers and width, 8x7b is
# Mixtral's.
PRESETS: Mapping[str, ModelConfig] = {
    "micro": ModelConfig(64, 2, 4, 2, 176, 512),
    "micro-deep": ModelConfig(64, 4, 4, 2, 176, 512),
    "tiny": ModelConfig(256, 4, 8, 2, 704, 512),
    "small": ModelConfig(512, 8, 8, 4, 1408, 512),
    "125m": ModelConfig(768, 12, 12, 12, 2048, 32_000),
    "1b": ModelConfig(2048, 16, 32, 8, 8192, 128_256, 500_000.0, tied=True),
    "1.3b": ModelConfig(2048, 24, 16, 16, 5504, 32_000),
    "3b": ModelConfig(3072, 28, 24, 8, 8192, 128_256, 500_000.0, tied=True),
    "7b": ModelConfig(4096, 32, 32, 32, 11_008, 32_000),
    "8b": ModelConfig(4096, 32, 32, 8, 14_336, 128_256, 500_000.0),
    "8x7b": ModelConfig(4096, 32, 32, 8, 14_336, 32_000, 1_000_000.0, experts=8),
    "13b": ModelConfig(5120, 40, 40, 40, 13_824, 32_000),
    "34b": ModelConfig(8192, 48, 64, 8, 22_016, 32_000, 1_000_000.0),
    "70b": ModelConfig(8192, 80, 64, 8, 28_672, 32_000),
    "70b-llama3": ModelConfig(8192, 80, 64, 8, 28_672, 128_256, 500_000.0),
}
