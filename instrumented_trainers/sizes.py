"""The sizes of the model that a configuration trains."""

import dataclasses
from pathlib import Path

from instrumented_trainers import huggingface
from instrumented_trainers.config import InvalidConfigError, TrainingConfig
from instrumented_trainers.config.settings import SELECTIVE
from instrumented_trainers.model_config import PRESETS, ModelConfig
from instrumented_trainers.text import tokenizer

_VOCABULARY_MULTIPLE = 64


def model_config(config: TrainingConfig) -> ModelConfig:
    """Return the sizes of the model: the preset's, with a vocabulary that holds the tokenizer's tokens.

    Those of a model in Hugging Face's format are as they are. Raises InvalidConfigError if its files or the
    tokenizer's cannot be used.
    """
    if config.init_from is not None:
        sizes = _pretrained_sizes(config, config.init_from)
    else:
        preset = PRESETS[config.model]
        sizes = dataclasses.replace(preset, vocabulary=max(preset.vocabulary, _round_up(_tokens(config))))
    experts = sizes.experts if config.experts is None else config.experts
    return dataclasses.replace(
        sizes,
        experts=experts,
        active_experts=config.active_experts,
        balance=config.balance_loss / config.micro_batches if experts else 0.0,
        capacity=config.capacity if experts else None,
        dropout=config.dropout,
        checkpointed_layers=config.checkpoint_layers,
        reentrant=config.reentrant,
        selective=config.recompute == SELECTIVE,
    )


def _pretrained_sizes(config: TrainingConfig, folder: Path) -> ModelConfig:
    sizes, tokens = huggingface.read_sizes(folder), _tokens(config)
    if sizes.vocabulary < tokens:
        raise InvalidConfigError(
            f"--init-from {folder}: the model knows {sizes.vocabulary:,} tokens, and the text's have numbers below "
            f"{tokens:,}; give its own --tokenizer FILE"
        )
    return sizes


def _tokens(config: TrainingConfig) -> int:
    """Number of different tokens of the text."""
    path = tokenizer.source(config)
    return tokenizer.vocabulary(path) if path is not None else config.train_tokenizer or tokenizer.TOKENS


def _round_up(tokens: int) -> int:
    """Return a size that the tokens need, at which matrix multiplications are fast."""
    return -(-tokens // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
