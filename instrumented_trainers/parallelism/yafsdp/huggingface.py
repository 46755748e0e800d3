"""Hugging Face's Trainer for models that `fully_shard` was applied to: it saves and resumes whole checkpoints.

Its own Trainer trains such a model as it is (the model is taken for prepared by Accelerate), but saves on rank 0 alone,
which has a part of the weights only. Needs transformers.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from instrumented_trainers.parallelism.yafsdp.module import full_state_dict

_OPTIMIZER_FILE, _SCHEDULER_FILE = "optimizer.pt", "scheduler.pt"


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Saves weights as plain transformers reads them, and optimizer state under parameters' names.

    A checkpoint can be resumed on any number of ranks. Rank 0 holds all of it on its host while it is written.
    """

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model to `output_dir`. All ranks must call it."""
        state = full_state_dict(self.model)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        dist.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(self.model, _plain(self.optimizer), options=options)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / _OPTIMIZER_FILE)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / _OPTIMIZER_FILE).is_file():
            return
        state = torch.load(Path(checkpoint) / _OPTIMIZER_FILE, map_location="cpu", weights_only=True)
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, _plain(self.optimizer), state, options=options)
        schedule = torch.load(Path(checkpoint) / _SCHEDULER_FILE, weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that Accelerate wraps."""
    plain: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return plain
