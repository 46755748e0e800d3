"""The sizes of the model that a configuration trains."""

import dataclasses

from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.config.settings import SELECTIVE
from instrumented_trainers.model import PRESETS, ModelConfig
from instrumented_trainers.text import tokenizer

_VOCABULARY_MULTIPLE = 64


def model_config(config: TrainingConfig) -> ModelConfig:
    """Return the sizes of the model: the preset's, with a vocabulary that holds the tokenizer's tokens.

    Raises InvalidConfigError if the tokenizer's file cannot be read.
    """
    preset = PRESETS[config.model]
    experts = preset.experts if config.experts is None else config.experts
    return dataclasses.replace(
        preset,
        experts=experts,
        active_experts=config.active_experts,
        balance=config.balance_loss / config.micro_batches if experts else 0.0,
        vocabulary=max(preset.vocabulary, _vocabulary(config)),
        dropout=config.dropout,
        checkpointed_layers=config.checkpoint_layers,
        reentrant=config.reentrant,
        selective=config.recompute == SELECTIVE,
    )


def _vocabulary(config: TrainingConfig) -> int:
    """Return the size that the tokens need, rounded up to a multiple that matrix multiplications are fast with."""
    tokens = config.train_tokenizer or tokenizer.TOKENS
    if config.tokenizer is not None:
        tokens = tokenizer.vocabulary(config.tokenizer)
    return -(-tokens // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
