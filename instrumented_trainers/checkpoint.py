"""Distributed checkpoints of a run: saved with their stages recorded, found again, loaded."""

import shutil
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.optim import Optimizer

from instrumented_trainers.strategies import checkpoint_state, restore_state
from tracekit.capture import Recorder

_METADATA = ".metadata"  # what torch writes last: a checkpoint that has it is whole


def save(folder: Path, model: nn.Module, optimizer: Optimizer, *, step: int, recorder: Recorder) -> Path:
    """Save model and optimizer after `step` optimizer steps under `folder`; return where. Every rank calls it."""
    path = folder / f"step-{step:06d}"
    writer, planner = FileSystemWriter(path), DefaultSavePlanner()
    with recorder.checkpoint(writer, planner, checkpoint=path.name, step=step):
        state = {**checkpoint_state(model, optimizer), "step": step}
        dcp.save(state, storage_writer=writer, planner=planner)
    return path


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Give model and optimizer the state saved at `path`; return the optimizer steps done by then."""
    state: dict[str, Any] = {**checkpoint_state(model, optimizer), "step": 0}
    dcp.load(state, checkpoint_id=path)
    restore_state(model, optimizer, state)
    return int(state["step"])


def whole(folder: Path) -> list[Path]:
    """Return the whole checkpoints under `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if is_whole(path))


def is_whole(path: Path) -> bool:
    """Return whether there is a checkpoint at `path` whose save came to its end."""
    return (path / _METADATA).is_file()


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` whole checkpoints. One rank calls it."""
    for path in whole(folder)[:-keep]:
        shutil.rmtree(path)
