"""Save checkpoints: in the foreground, or on a background thread while training continues."""

import contextlib
import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from instrumented_trainers.checkpoints import resume, storage
from instrumented_trainers.checkpoints.resume import ResumePoint
from instrumented_trainers.checkpoints.seal import Seal
from instrumented_trainers.checkpoints.storage import Save, Writer
from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.faults import Fault
from instrumented_trainers.parallelism.yafsdp.flat_shard import FlatShard
from tracekit.capture import Recorder


class CheckpointSaver:
    """Saves the checkpoints of one run on this rank, and removes all but the newest."""

    def __init__(self, config: TrainingConfig, faults: tuple[Fault, ...], origin: ResumePoint | None) -> None:
        self._config = config
        self._faults = faults
        self._lineage = origin.lineage(config) if origin else ()
        self.blocking = not (config.background_save or any(fault.saves_in_background for fault in faults))
        # Its collectives must not come between those of training.
        self._group = dist.new_group(backend="gloo") if not self.blocking else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if not self.blocking else None
        self._pending: Future[None] | None = None

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        step: int,
        sequences: int,
        text: Mapping[str, Tensor],
        recorder: Recorder,
    ) -> Path:
        """Save after `step` optimizer steps that took `sequences` of the text; return where. Every rank calls it.

        `text` is this rank's position in streamed text, under names that no other rank has.
        In the background this returns as soon as the state is copied; it waits for a running earlier save.
        Raises FailedError if this save, or in the background the one before, has failed.
        """
        path = self._config.checkpoints / f"step-{step:06d}"
        writer = Writer(path)
        state = storage.state_to_save(model, optimizer) | ({"text": dict(text)} if text else {})
        for fault in self._faults:
            fault.prepare_writer(writer, dist.get_rank())
            state |= fault.add_state(dist.get_rank())
        work = Save(path, state, self._seal(step, sequences), writer, self._group, blocking=self.blocking)
        if self._thread is None:
            self._run(work, recorder)
        else:
            self.wait()
            staged = _stage_state(state)
            self._pending = self._thread.submit(self._run, dataclasses.replace(work, state=staged), recorder)
        return path

    def wait(self) -> None:
        """Wait for the save in the background, if there is one, and raise what it raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _run(self, work: Save, recorder: Recorder) -> None:
        with contextlib.ExitStack() as active_faults:
            for fault in self._faults:
                active_faults.enter_context(fault.during_save())
            work.run(recorder)
        if dist.get_rank() == 0:
            storage.prune(self._config.checkpoints, self._config.keep)

    def _seal(self, step: int, sequences: int) -> Seal:
        config = self._config
        arguments = resume.training_arguments(config)
        layout = dataclasses.asdict(config.layout)
        return Seal(step, sequences, config.strategy, config.world_size, arguments, self._lineage, layout=layout)


def _stage_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state in host memory. torch's stager would allocate the whole tensor for each shard of one."""
    leaves, structure = tree_flatten(state)
    without_shards = [None if isinstance(leaf, FlatShard) else leaf for leaf in leaves]
    copies = tree_leaves(BlockingAsyncStager().stage(tree_unflatten(without_shards, structure)))
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, FlatShard):
            copies[index] = FlatShard(leaf.local.to("cpu", copy=True), leaf.place)
    return tree_unflatten(copies, structure)
