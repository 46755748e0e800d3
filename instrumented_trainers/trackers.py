"""Experiment trackers: TensorBoard's event files and Weights & Biases, written by the first rank."""

import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol

from instrumented_trainers.config import InvalidConfigError, TrainingConfig
from tracekit.capture.metrics import Pending

Scalar = float | Pending


class Tracker(Protocol):
    """Where the scalars of steps go."""

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the scalars of a step."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class Trackers:
    """The trackers that a configuration asks for. A step's scalars are written with the next step's, or at the end.

    Raises InvalidConfigError, on every rank, if a package is missing.
    """

    def __init__(self, config: TrainingConfig, rank: int, *, first_step: int) -> None:
        for package, is_enabled in (("tensorboard", config.tensorboard), ("wandb", config.wandb is not None)):
            if is_enabled and importlib.util.find_spec(package) is None:
                raise InvalidConfigError(
                    f"--{package}: needs the package `{package}`: pip install 'torch-tracekit[{package}]'"
                )
        self._trackers: list[Tracker] = []
        self._pending: tuple[int, Mapping[str, Scalar]] | None = None
        if rank == 0 and config.tensorboard:
            self._trackers.append(_TensorBoard(config, first_step))
        if rank == 0 and config.wandb is not None:
            self._trackers.append(_WeightsAndBiases(config))

    def add(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        """Add the scalars of a step. Numbers on the device are read when the next step is added."""
        self._write()
        self._pending = step, scalars

    def close(self) -> None:
        """Write what is left."""
        self._write()
        for tracker in self._trackers:
            tracker.close()

    def _write(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None or not self._trackers:
            return
        step, scalars = pending
        values = {name: value.value() if isinstance(value, Pending) else value for name, value in scalars.items()}
        for tracker in self._trackers:
            tracker.add(step, values)


class _TensorBoard:
    def __init__(self, config: TrainingConfig, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Of a resumed run, TensorBoard hides the steps that the earlier process did after the checkpoint.
        self._writer = SummaryWriter(str(config.out / "tensorboard"), purge_step=first_step or None)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, config: TrainingConfig) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=config.wandb_project,
            name=config.out.name,
            dir=str(config.out),
            mode=config.wandb,
            config={name: str(value) if value is not None else None for name, value in vars(config).items()},
            settings=wandb.Settings(console="off", silent=True),
        )

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()
