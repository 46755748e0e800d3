"""Models in Hugging Face's format: our decoder is its `LlamaForCausalLM` under other names."""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from instrumented_trainers.config import InvalidConfigError
from instrumented_trainers.initialization import WeightInitializer
from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import ModelConfig

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"

_LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.down": "mlp.down_proj",
    }
)
_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
)
# What our decoder has no counterpart for, unless it is one of these values.
_REQUIRED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "model_type": ("llama",),
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "pretraining_tp": (1, None),
    }
)


def their_name(name: str) -> str:
    """Return Hugging Face's name of a parameter of ours. Raises InvalidConfigError if it has none.

    >>> their_name("layers.3.attention.query.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    module = name.removesuffix(".weight")
    if module in _OTHER_NAMES:
        return f"{_OTHER_NAMES[module]}.weight"
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    if match is None or match[2] not in _LAYER_NAMES:
        raise InvalidConfigError(f"{name}: Hugging Face's Llama has no such weight")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


@functools.cache
def read_sizes(folder: Path) -> ModelConfig:
    """Return the sizes of the model in a folder. Raises InvalidConfigError if it is none that our decoder can be."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfigError(f"--init-from {folder}: {CONFIG_FILE} cannot be read: {error}") from error
    for name, accepted in _REQUIRED.items():
        if config.get(name) not in accepted:
            raise InvalidConfigError(
                f"--init-from {folder}: {name} {config.get(name)!r}, only {accepted[0]!r} is known"
            )
    try:
        sizes = _sizes(config, folder)
    except (KeyError, ValueError) as error:
        raise InvalidConfigError(f"--init-from {folder}: {CONFIG_FILE} is not understood: {error}") from error
    if config.get("head_dim") not in (None, sizes.head_width):
        raise InvalidConfigError(f"--init-from {folder}: head_dim {config['head_dim']}, not {sizes.head_width}")
    return sizes


def _sizes(config: Mapping[str, Any], folder: Path) -> ModelConfig:
    heads = config["num_attention_heads"]
    return ModelConfig(
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        key_value_heads=config.get("num_key_value_heads") or heads,
        hidden_width=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        rotary_base=_rotary_base(config, folder),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        tied=config.get("tie_word_embeddings", False),
    )


def _rotary_base(config: Mapping[str, Any], folder: Path) -> float:
    # transformers 5 has `rope_parameters`, 4 `rope_theta` and, for positions that are scaled, `rope_scaling`.
    rotary = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind != "default":
        raise InvalidConfigError(f"--init-from {folder}: rotary positions of type {kind!r}; only 'default' is known")
    return float(rotary.get("rope_theta", config.get("rope_theta", 10_000.0)))


def config_of(sizes: ModelConfig, *, positions: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return Hugging Face's configuration of a model, for ``config.json``; `positions`: the longest sequence."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.width,
        "intermediate_size": sizes.hidden_width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_value_heads,
        "head_dim": sizes.head_width,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": sizes.norm_epsilon,
        "rope_theta": sizes.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes.rotary_base},
        "tie_word_embeddings": sizes.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


class PretrainedWeights(WeightInitializer):
    """Fills the weights of a model from the safetensors files in a folder, module by module.

    Raises InvalidConfigError if `safetensors` is missing, or a weight.
    """

    def __init__(self, model: Llama, folder: Path) -> None:
        super().__init__(model, layers=model.config.layers, seed=0)
        self._folder = folder
        self._files = _files_of_weights(folder)

    @torch.no_grad()
    def fill(self, module: nn.Module, own_name: str, target: Tensor) -> None:
        """Copy the module's weight of that name into `target`, a tensor of its shape."""
        name = their_name(self._names[id(module), own_name])
        if name not in self._files:
            raise InvalidConfigError(f"--init-from {self._folder}: there is no weight {name}")
        with _safetensors().safe_open(self._files[name], framework="pt") as file:
            weight = file.get_tensor(name)
        if weight.shape != target.shape:
            raise InvalidConfigError(
                f"--init-from {self._folder}: {name} is {tuple(weight.shape)}, not {tuple(target.shape)}"
            )
        target.copy_(weight)


def _files_of_weights(folder: Path) -> dict[str, Path]:
    """Return in which file each weight is."""
    index, single_file = folder / INDEX_FILE, folder / WEIGHTS_FILE
    if index.is_file():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in files.items()}
    if not single_file.is_file():
        raise InvalidConfigError(f"--init-from {folder}: neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    with _safetensors().safe_open(single_file, framework="pt") as file:
        return dict.fromkeys(file.keys(), single_file)


def save(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write configuration and weights, under our names, as Hugging Face's library reads them."""
    from_torch = _safetensors().torch
    folder.mkdir(parents=True, exist_ok=True)
    renamed = {their_name(name): weight.contiguous() for name, weight in weights.items()}
    from_torch.save_file(renamed, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise InvalidConfigError(
            "Hugging Face's weights need `safetensors`: pip install 'torch-tracekit[huggingface]'"
        ) from error
    return safetensors
