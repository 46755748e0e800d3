"""Distributed checkpoints of a run: saved with their stages recorded, sealed, found again, loaded."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter
from torch.optim import Optimizer

from instrumented_trainers.checkpoints import seal
from instrumented_trainers.checkpoints.seal import Seal
from instrumented_trainers.config import TrainingFailedError
from instrumented_trainers.parallelism import checkpoint_state, restore_state
from tracekit.capture import Recorder, record_load

_METADATA = ".metadata"


class Writer(FileSystemWriter):
    """torch's writer, but a full disk raises an OSError that names the file."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except (RuntimeError, OSError) as error:
            # torch's serialization continues after a failed write, and then raises for a wrong position.
            os_error = _os_error_before(error)
            if os_error is None:
                raise
            raise OSError(os_error.errno, os_error.strerror, os_error.filename or self._last_file()) from error

    def _last_file(self) -> str | None:
        """Return the file that this rank wrote to last."""
        rank_files = Path(self.path).glob(f"__{dist.get_rank()}_*")
        return max(((file.stat().st_mtime_ns, file.name) for file in rank_files), default=(0, None))[1]


@dataclasses.dataclass(frozen=True)
class Save:
    """One save: what goes into it, where, and how. `group`: the ranks' process group; None: that of training."""

    path: Path
    state: Mapping[str, Any]
    seal: Seal
    writer: Writer
    group: dist.ProcessGroup | None = None
    blocking: bool = True

    def run(self, recorder: Recorder) -> None:
        """Save, record where the time goes, and seal. Every rank calls it. Raises FailedError if any rank cannot."""
        rank = dist.get_rank()
        if rank == 0 and self.path.is_dir():
            shutil.rmtree(self.path)
        planner = DefaultSavePlanner()
        recorded = recorder.checkpoint(
            self.writer, planner, checkpoint=self.path.name, step=self.seal.step, blocking=self.blocking
        )
        try:
            with recorded:
                dcp.save(dict(self.state), storage_writer=self.writer, planner=planner, process_group=self.group)
                problem = self._seal(rank)
        except CheckpointException as failure:
            problem = _first_failure(failure)
        if problem is not None:
            if rank == 0:
                shutil.rmtree(self.path, ignore_errors=True)
            raise TrainingFailedError(f"{self.path.name} could not be saved: {problem}; {_recovery_hint(self.path)}")

    def _seal(self, rank: int) -> str | None:
        """Exchange the files' checksums and seal the checkpoint; return what went wrong, the same on every rank."""
        described: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(described, self._describe_own(rank), group=self.group)
        problems = [problem for problem in described if isinstance(problem, str)]
        if problems:
            return problems[0]
        outcome: list[str | None] = [None]
        if rank == 0:
            files = {name: description for part in described for name, description in part.items()}
            try:
                seal.write(self.path, dataclasses.replace(self.seal, files=files))
            except OSError as error:
                outcome = [f"rank 0: {seal.SEAL_FILE}: {error.strerror}"]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        return outcome[0]

    def _describe_own(self, rank: int) -> dict[str, Any] | str:
        try:
            names = sorted(path.name for path in self.path.glob(f"__{rank}_*"))
            # torch syncs its metadata before it is flushed.
            return {
                **{name: seal.describe(self.path, name) for name in names},
                **({_METADATA: seal.describe(self.path, _METADATA, sync=True)} if rank == 0 else {}),
            }
        except OSError as error:
            return f"rank {rank}: {_describe_error(error)}"


def state_to_save(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return all that an exact resume needs: weights, optimizer, and this rank's random state."""
    return {**checkpoint_state(model, optimizer), "random": random_state()}


def load(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    has_random_state: bool,
    text: Mapping[str, Tensor] | None = None,
    run: Path,
    step: int,
) -> None:
    """Give model and optimizer the state saved at `path`, and the random generators if that has this rank's.

    The tensors of `text` are filled with what was saved under their names. The checkpoint log in the folder `run` gets
    the stages of the load, of the checkpoint of `step`.
    """
    with record_load(run, path, checkpoint=path.name, step=step):
        state: dict[str, Any] = {**checkpoint_state(model, optimizer), **({"text": dict(text)} if text else {})}
        if has_random_state:
            state["random"] = random_state()
        dcp.load(state, checkpoint_id=path)
        restore_state(model, optimizer, state)
    for name, value in state.get("random", {}).items():
        _set_random_state(name, value)


def random_state() -> dict[str, Tensor]:
    """Return the state of this rank's random generators, under names that no other rank has."""
    rank = dist.get_rank()
    states = {f"{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states[f"{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` sealed checkpoints. One rank calls it."""
    for path in seal.complete(folder)[:-keep]:
        shutil.rmtree(path)


def _set_random_state(name: str, value: Tensor) -> None:
    if name.endswith(".cuda"):
        torch.cuda.set_rng_state(value)
    else:
        torch.set_rng_state(value)


def _os_error_before(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _first_failure(failure: CheckpointException) -> str:
    """Describe which rank failed first and why; errors other than I/O errors are raised again."""
    rank, (error, _) = min(failure.failures.items())
    if isinstance(error, OSError):
        return f"rank {rank}: {_describe_error(error)}"
    raise failure


def _describe_error(error: OSError) -> str:
    return f"{Path(error.filename).name}: {error.strerror}" if error.filename else str(error.strerror)


def _recovery_hint(path: Path) -> str:
    earlier = [other.name for other in seal.complete(path.parent) if other != path]
    if not earlier:
        return "there is no earlier checkpoint: free the disk or fix its permissions, and start again"
    return f"{earlier[-1]} is the last complete one: free the disk or fix its permissions, and continue with --resume"
