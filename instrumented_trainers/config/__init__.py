"""The settings of a training run, and the command line that sets them."""

from instrumented_trainers.config.command_line import parse
from instrumented_trainers.config.settings import (
    CP_METHODS,
    LR_SCHEDULES,
    MEMORY_STEP,
    NEWEST,
    OPTIMIZERS,
    OVERRIDABLE,
    PRECISIONS,
    SCHEDULES,
    InvalidConfigError,
    TrainingConfig,
    TrainingFailedError,
)

__all__ = [
    "CP_METHODS",
    "LR_SCHEDULES",
    "MEMORY_STEP",
    "NEWEST",
    "OPTIMIZERS",
    "OVERRIDABLE",
    "PRECISIONS",
    "SCHEDULES",
    "InvalidConfigError",
    "TrainingConfig",
    "TrainingFailedError",
    "parse",
]
