"""Lightning's strategy for models that `fully_shard` was applied to: as its own, and it resumes from checkpoints.

Its own ModelParallelStrategy trains and saves such a model, but looks for DTensors when it loads. Needs
pytorch-lightning.
"""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed.checkpoint as dcp
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

from instrumented_trainers.parallelism.yafsdp.module import YaFSDPModule

_WHOLE = StateDictOptions(full_state_dict=True)
_METADATA_FILE = "meta.pt"  # of Lightning's, in a folder that torch.distributed.checkpoint wrote


class YaFSDPStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """Loads both kinds of checkpoint that it saves, a file and a folder, on any number of ranks."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load model and optimizers from a checkpoint and return what else is in it."""
        if not isinstance(self.model, YaFSDPModule):
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return loaded
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            return self._load_folder(path, weights_only)
        checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        set_model_state_dict(self.model, checkpoint.pop("state_dict"), options=_WHOLE)
        for optimizer, state in zip(self.optimizers, checkpoint.get("optimizer_states", []), strict=True):
            by_name = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, self.model)
            set_optimizer_state_dict(self.model, optimizer, by_name, options=_WHOLE)
        return checkpoint

    def _load_folder(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        model: pl.LightningModule = self.model
        state: dict[str, Any] = {"state_dict": get_model_state_dict(model)}
        for i, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{i}"] = get_optimizer_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["state_dict"])
        for i, optimizer in enumerate(self.optimizers):
            set_optimizer_state_dict(model, optimizer, state[f"optimizer_{i}"])
        metadata: dict[str, Any] = torch.load(path / _METADATA_FILE, weights_only=weights_only)
        return metadata
