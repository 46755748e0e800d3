"""Trainings with the trainers' own loop, many in one set of rank processes. Not a test."""

import contextlib
import functools
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from instrumented_trainers import loop
from instrumented_trainers.config import InvalidConfigError, TrainingConfig, TrainingFailedError
from instrumented_trainers.loop import StopRequest
from instrumented_trainers.parallelism import make_mesh
from tracekit import conventions


def micro(strategy: str, out: Path, **settings: Any) -> TrainingConfig:
    """Return a training of some small steps on two ranks, steps 2 and 3 of it profiled."""
    small = {"model": "micro", "batch": 2, "tokens": 32, "steps": 6, "learning_rate": 3e-3}
    window = {"profile_wait": 1, "profile_warmup": 1, "profile_active": 2}
    return TrainingConfig(strategy, out, **{**small, **window, **settings})


def case(config: TrainingConfig) -> Callable[[], tuple[list[float], str]]:
    """Return a case for `tests.support.process_group` that trains and returns the rank's losses and its stderr."""
    return functools.partial(train, config)


def train(config: TrainingConfig) -> tuple[list[float], str]:
    """Train on this rank; a training that is refused or fails has no losses, and its words are the second value."""
    said = io.StringIO()
    mesh = make_mesh(config.layout, "cpu", data_axes=config.data_axes)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            loop.train(config, mesh, ["train"], StopRequest())
    except (InvalidConfigError, TrainingFailedError) as error:
        return [], f"{type(error).__name__}: {error}"
    return [row["loss"] for row in rows(config.out, dist.get_rank(), conventions.METRICS_SUFFIX)], said.getvalue()


def rows(run: Path, rank: int, suffix: str) -> list[dict[str, Any]]:
    """Return the lines of one of a rank's logs."""
    return [json.loads(line) for line in (run / conventions.rank_file(rank, suffix)).read_text().splitlines()]


def manifest(run: Path) -> Mapping[str, Any]:
    """Return the run's manifest."""
    words: Mapping[str, Any] = json.loads((run / conventions.MANIFEST_FILE).read_text())
    return words
