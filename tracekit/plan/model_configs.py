"""Sizes of a model from a Hugging Face `config.json`. The names are those of transformers' decoder configurations."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracekit.errors import InputError
from tracekit.plan.models import Experts, Model

_LARGEST_BYTES = 1 << 20
_LARGEST_SIZE = 1 << 40
_UNGATED = ("gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "gpt_bigcode")


def read(path: Path) -> Model:
    """Return the model that a file, or the `config.json` of a folder, describes.

    Raises InputError, naming the file and the key, if it cannot be read or describes no decoder.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise InputError(f"{file}: larger than 1 MiB, which no configuration is")
        config = json.loads(file.read_bytes())
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
