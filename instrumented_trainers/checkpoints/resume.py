"""Resume from a checkpoint: choose it, verify it, and check that it belongs to this training."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from instrumented_trainers.checkpoints import seal
from instrumented_trainers.checkpoints.seal import Seal
from instrumented_trainers.config import NEWEST, OVERRIDABLE, InvalidConfigError, TrainingConfig

# What the result of a training depends on. Strategy, ranks and recording are not among them: they change only the order
# of sums.
_TRAINING_ARGUMENTS = (
    *OVERRIDABLE,
    "model",
    "init_from",
    "data",
    "text_field",
    "stream",
    "tokenizer",
    "train_tokenizer",
    "separator",
    "eval_split",
    "tokens",
    "precision",
    "seed",
    "optimizer",
)


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a training resumes from."""

    path: Path
    seal: Seal

    def lineage(self, config: TrainingConfig) -> tuple[Mapping[str, Any], ...]:
        """Return the checkpoints that the training descends from, oldest first, this one last."""
        last = {
            "checkpoint": str(self.path),
            "step": self.seal.step,
            "strategy": self.seal.strategy,
            "world_size": self.seal.world_size,
            "overrides": list(config.override),
        }
        return (*self.seal.lineage, last)


def resume_point(config: TrainingConfig) -> ResumePoint | None:
    """Return the verified checkpoint to resume from; None for a new training. Every rank calls it.

    A damaged one that was requested by name raises InvalidConfigError; without a name the previous one is used, and
    rank 0 reports that on stderr. Raises InvalidConfigError too if there is none, or it belongs to another training.
    """
    if config.resume is None:
        return None
    candidates, is_named = _candidates(config)
    for path in reversed(candidates):
        sealed, damage = _verify(path)
        if sealed is not None:
            _refuse_another_training(config, sealed)
            return ResumePoint(path, sealed)
        if is_named:
            raise InvalidConfigError(
                f"--resume {config.resume}: damaged: {damage}; name another, or restore it from a copy"
            )
        if dist.get_rank() == 0:
            sys.stderr.write(f"instrumented_trainers: {path} is damaged: {damage}; trying the previous one\n")
    words = "every checkpoint is damaged" if candidates else "no complete checkpoint"
    where = config.checkpoints if config.resume == NEWEST else Path(config.resume)
    raise InvalidConfigError(f"--resume: {words} in {where}; name one, or leave --resume out")


def training_arguments(config: TrainingConfig) -> dict[str, Any]:
    """Return the arguments that the result of the training depends on, as JSON represents them."""
    values = {name: getattr(config, name) for name in _TRAINING_ARGUMENTS}
    return json.loads(json.dumps(values, default=str))


def _candidates(config: TrainingConfig) -> tuple[list[Path], bool]:
    """Return the checkpoints to choose from, oldest first, and whether one was named."""
    if config.resume == NEWEST:
        return seal.complete(config.checkpoints), False
    requested = Path(str(config.resume))
    for path in (requested, config.checkpoints / requested):
        if seal.is_sealed(path):
            return [path], True
    run = dataclasses.replace(config, out=requested)
    if run.checkpoints.is_dir():
        return seal.complete(run.checkpoints), False
    raise InvalidConfigError(f"--resume {requested}: no complete checkpoint")


def _verify(path: Path) -> tuple[Seal | None, str | None]:
    """Return the seal if every file matches it, else what is wrong. The ranks share the reading."""
    damage = None
    read_seal: Seal | None = None
    try:
        read_seal = seal.read(path)
        rank_files = sorted(read_seal.files.items())[dist.get_rank() :: dist.get_world_size()]
        damage = next(filter(None, (seal.damage(path, name, expected) for name, expected in rank_files)), None)
    except seal.InvalidSealError as error:
        damage = str(error)
    complaints: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(complaints, damage)
    damage = next(filter(None, complaints), None)
    return (None, damage) if damage else (read_seal, None)


def _refuse_another_training(config: TrainingConfig, read_seal: Seal) -> None:
    overridden = {text.partition("=")[0] for text in config.override}
    for name, value in training_arguments(config).items():
        if name in overridden or read_seal.arguments.get(name, value) == value:
            continue
        words = f"--resume: the checkpoint belongs to a training with {name} {read_seal.arguments[name]}, not {value}"
        way_out = f", or add --override {name}={value}" if name in OVERRIDABLE else ""
        raise InvalidConfigError(f"{words}: repeat its original options{way_out}")
