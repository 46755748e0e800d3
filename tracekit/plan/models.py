"""Sizes of models, to plan for and to simulate: by name, or from a Hugging Face `config.json`.

Names are the trainers' presets, and others' own names for them; keys of the file those of transformers' decoders.

Sources: GPT-3: arXiv 2005.14165, table 2.1, and a step of 768 sequences: 2402.15627, table 2. Llama 2: 2307.09288.
Llama 3: 2407.21783, table 3. Mixtral: 2401.04088, table 1. DeepSeek-V3: 2412.19437, section 4.2.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tracekit.conventions import regular_files
from tracekit.errors import InputError

_LARGEST_BYTES = 1 << 20
_LARGEST_SIZE = 1 << 40
_UNGATED = ("gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "gpt_bigcode")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of a layer's feed-forward part."""

    count: int
    active: int
    """How many of them a token goes through."""
    width: int
    """The hidden width of one."""
    shared: int = 0
    """How many more of that width all tokens go through."""
    dense_layers: int = 0
    """How many of the model's layers have none."""


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder; a layer is what the strategies shard and gather as one unit."""

    name: str
    width: int
    layers: int
    heads: int
    key_value_heads: int
    hidden_width: int
    vocabulary: int
    gated: bool = True
    """Whether the feed-forward part has a gate (SwiGLU)."""
    tied: bool = False
    """Whether head and embedding share one weight."""
    experts: Experts | None = None
    attention_weights: int | None = None
    """Weights of a layer's attention; None: as many as its heads need without compression."""
    sequence: int = 4096
    """Tokens per sequence in its training, the default of plans."""
    batch_tokens: int = 1 << 22
    """Tokens per step in its training, the default of plans."""

    @property
    def is_plain(self) -> bool:
        """Return whether it is a Llama-style decoder without experts, as the simulator runs."""
        return self.experts is None and self.has_simulated_layers

    @property
    def has_simulated_layers(self) -> bool:
        """Return whether its attention and feed-forward parts are those of a Llama-style decoder, or experts of it."""
        return self.gated and self.attention_weights is None

    @property
    def attention_parameters(self) -> tuple[int, int]:
        """Return the weights of the input projection (queries, keys, values) and of the output projection."""
        grouped = self.width * self.width * self.key_value_heads // self.heads
        return self.width * self.width + 2 * grouped, self.width * self.width

    @property
    def feed_forward_parameters(self) -> tuple[int, int]:
        """Return the weights of the projections up (gate and up, as one), and of the one down, in a dense layer."""
        return (2 if self.gated else 1) * self.width * self.hidden_width, self.width * self.hidden_width

    @property
    def layer_parameters(self) -> int:
        """Return the weights of a dense layer's matrices; its two norms are left out, they are too small to matter."""
        return self._attention + sum(self.feed_forward_parameters)

    @property
    def expert_layers(self) -> int:
        """Return the number of layers with experts."""
        return 0 if self.experts is None else self.layers - self.experts.dense_layers

    @property
    def expert_parameters(self) -> int:
        """Return the weights of one expert."""
        return 0 if self.experts is None else 3 * self.width * self.experts.width

    @property
    def largest_layer_parameters(self) -> int:
        """Return the weights of the largest layer."""
        return max(self.layer_parameters, self._expert_layer(self.experts.count) if self.experts else 0)

    @property
    def _attention(self) -> int:
        return sum(self.attention_parameters) if self.attention_weights is None else self.attention_weights

    def _expert_layer(self, experts: int) -> int:
        assert self.experts is not None
        router = self.width * self.experts.count
        return self._attention + router + (experts + self.experts.shared) * self.expert_parameters

    @property
    def outer_parameters(self) -> int:
        """Return the weights of the embedding, or of the head, which is as large."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Return the weights of all layers, embedding and head."""
        return self._all_layers(self.experts.count if self.experts else 0) + self._outer

    @property
    def active_parameters(self) -> int:
        """Return the weights that a token is multiplied by: of the experts the active ones, and not the embedding."""
        return self._all_layers(self.experts.active if self.experts else 0) + self.outer_parameters

    @property
    def _outer(self) -> int:
        return (1 if self.tied else 2) * self.outer_parameters

    def _all_layers(self, experts: int) -> int:
        dense = (self.layers - self.expert_layers) * self.layer_parameters
        return dense + (self.expert_layers * self._expert_layer(experts) if self.experts else 0)


_SIZES = (
    Model("tiny", 256, 4, 8, 2, 704, 512),
    Model("small", 512, 8, 8, 4, 1408, 512),
    Model("125m", 768, 12, 12, 12, 2048, 32_000),
    Model("1b", 2048, 16, 32, 8, 8192, 128_256, tied=True, sequence=8192),
    Model("1.3b", 2048, 24, 16, 16, 5504, 32_000),
    Model("3b", 3072, 28, 24, 8, 8192, 128_256, tied=True, sequence=8192),
    Model("7b", 4096, 32, 32, 32, 11_008, 32_000),
    Model("8b", 4096, 32, 32, 8, 14_336, 128_256, sequence=8192, batch_tokens=1 << 24),
    Model("8x7b", 4096, 32, 32, 8, 14_336, 32_000, experts=Experts(8, 2, 14_336), sequence=8192),
    Model("13b", 5120, 40, 40, 40, 13_824, 32_000),
    Model("34b", 8192, 48, 64, 8, 22_016, 32_000),
    Model("70b", 8192, 80, 64, 8, 28_672, 32_000),
    Model("70b-llama3", 8192, 80, 64, 8, 28_672, 128_256, sequence=8192, batch_tokens=1 << 24),
    Model("gpt3-175b", 12_288, 96, 96, 96, 49_152, 51_200, gated=False, tied=True, sequence=2048, batch_tokens=3 << 19),
    Model("405b", 16_384, 126, 128, 8, 53_248, 128_256, sequence=8192, batch_tokens=1 << 24),
    Model(
        *("deepseek-v3", 7168, 61, 128, 128, 18_432, 129_280),
        experts=Experts(256, 8, 2048, shared=1, dense_layers=3),
        # Queries through 1,536 numbers, keys and values through 512, 128 + 64 and 128 numbers a head.
        attention_weights=7168 * (1536 + 512 + 64) + 128 * (1536 * (128 + 64) + 512 * (128 + 128) + 128 * 7168),
        batch_tokens=15_360 * 4096,
    ),
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
    "gpt3": "gpt3-175b",
    "mixtral-8x7b": "8x7b",
}
MODELS: Mapping[str, Model] = {model.name: model for model in _SIZES}
NAMES = (*MODELS, *_ALIASES)


def find(name: str, *, layers: int | None = None) -> Model:
    """Return the model of this name, with so many of its layers. Raises InputError where there is none."""
    model = MODELS.get(_ALIASES.get(name, name))
    if model is None:
        choices = f"known: {', '.join(NAMES)}; or give a Hugging Face config.json"
        raise InputError(f"{name!r} is not a known model; {choices}")
    if layers is not None and not 1 <= layers <= model.layers:
        raise InputError(f"--layers is {layers}; {name} has {model.layers}")
    return model if layers is None else replace(model, layers=layers)


def read(path: Path) -> Model:
    """Return the model that a file, or the `config.json` of a folder, describes.

    Raises InputError, naming the file and the key, if it cannot be read or describes no decoder.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise InputError(f"{file}: larger than 1 MiB, which no configuration is")
        config = json.loads(regular_files.read_bytes(file))
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: no JSON: a Hugging Face config.json is wanted") from error
    if not isinstance(config, dict):
        raise InputError(f"{file}: no JSON object: a Hugging Face config.json is wanted")
    inner = config.get("text_config")  # of a model that also reads images
    return _model(inner if isinstance(inner, dict) else config, file)


def _model(config: Mapping[str, Any], file: Path) -> Model:
    width = _size(config, file, "hidden_size", "n_embd", "d_model")
    heads = _size(config, file, "num_attention_heads", "n_head")
    shared = _size(config, file, "num_key_value_heads", default=heads)
    if not width or not heads or not shared or width % heads or heads % shared:
        raise InputError(
            f"{file}: {heads} heads do not divide {width}, or {shared} key and value heads (num_key_value_heads) do "
            "not divide num_attention_heads"
        )
    return Model(
        str(config.get("model_type") or file.parent.name or file.stem),
        width,
        _size(config, file, "num_hidden_layers", "n_layer"),
        heads,
        shared,
        _size(config, file, "intermediate_size", "n_inner", "ffn_dim", default=4 * width),
        _size(config, file, "vocab_size"),
        gated=config.get("model_type") not in _UNGATED,
        tied=config.get("tie_word_embeddings") is True,
        experts=_experts(config, file),
        attention_weights=_attention(config, file, width, heads, shared),
        sequence=min(_size(config, file, "max_position_embeddings", "n_positions", default=4096), 8192),
    )


def _experts(config: Mapping[str, Any], file: Path) -> Experts | None:
    count = _size(config, file, "num_local_experts", "n_routed_experts", "num_experts", default=0)
    if not count:
        return None
    active = _size(config, file, "num_experts_per_tok", "num_experts_per_token", default=2)
    if active > count:
        raise InputError(f"{file}: {active} of {count} experts cannot be active")
    layers = _size(config, file, "num_hidden_layers", "n_layer")
    return Experts(
        count,
        active,
        _size(config, file, "moe_intermediate_size", "intermediate_size"),
        shared=_size(config, file, "n_shared_experts", default=0),
        dense_layers=min(_size(config, file, "first_k_dense_replace", default=0), layers),
    )


def _attention(config: Mapping[str, Any], file: Path, width: int, heads: int, shared: int) -> int | None:
    """Return the weights of a layer's attention if they do not follow from width and heads alone."""
    latent = _size(config, file, "kv_lora_rank", default=0)
    if latent:  # multi-head latent attention, arXiv 2405.04434
        plain = _size(config, file, "qk_nope_head_dim")
        rotary, values = _size(config, file, "qk_rope_head_dim"), _size(config, file, "v_head_dim")
        queries = _size(config, file, "q_lora_rank", default=0)
        query = width * queries + queries * heads * (plain + rotary) if queries else width * heads * (plain + rotary)
        return query + width * (latent + rotary) + latent * heads * (plain + values) + heads * values * width
    head = _size(config, file, "head_dim", default=width // heads)
    return None if head * heads == width else 2 * width * head * (heads + shared)


def _size(config: Mapping[str, Any], file: Path, *names: str, default: int | None = None) -> int:
    """Return the first of the sizes that is there and not null."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < _LARGEST_SIZE:
            raise InputError(f"{file}: {name} is {str(value)[:40]!r}, not a size")
        return value
    if default is None:
        raise InputError(f"{file}: no {names[0]}: a Hugging Face config.json of a decoder is wanted")
    return default
