"""Learning-rate schedules: a step's share of the highest rate, by name.

All rise in a line for the warm-up. After it each is a function of the share of the remaining steps that is done, so
a resumed training has the rates of the uninterrupted one.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from instrumented_trainers.config import TrainingConfig


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Return the learning rate of a step, counted from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    height_ratio = _HEIGHTS[config.lr_schedule](step, config)
    floor_ratio = config.final_learning_rate_ratio
    return config.learning_rate * (floor_ratio + (1 - floor_ratio) * height_ratio)


def _constant(step: int, config: TrainingConfig) -> float:  # noqa: ARG001 every schedule takes the same
    return 1.0


def _cosine(step: int, config: TrainingConfig) -> float:
    return 0.5 * (1 + math.cos(math.pi * _done_ratio(step, config, begin=config.warmup_steps)))


def _linear(step: int, config: TrainingConfig) -> float:
    return 1 - _done_ratio(step, config, begin=config.warmup_steps)


def _wsd(step: int, config: TrainingConfig) -> float:
    """Warm-up, stable, decay (https://arxiv.org/abs/2404.06395): constant, then a line in the last steps."""
    decay_steps = max(1, config.steps // 5) if config.decay_steps is None else config.decay_steps
    return 1 - _done_ratio(step, config, begin=max(config.warmup_steps, config.steps - 1 - decay_steps))


def _done_ratio(step: int, config: TrainingConfig, *, begin: int) -> float:
    """Share of the way from step `begin` to the last step at which a step is, from 0 to 1."""
    return min(1.0, max(0, step - begin) / max(1, config.steps - 1 - begin))


_HEIGHTS: Mapping[str, Callable[[int, TrainingConfig], float]] = MappingProxyType(
    {"constant": _constant, "cosine": _cosine, "linear": _linear, "wsd": _wsd}
)
