"""Faults of a pipeline."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from instrumented_trainers.faults.fault import Fault
from instrumented_trainers.faults.step import compute


@dataclass(frozen=True)
class SlowStage(Fault):
    """One stage of a pipeline computes longer, forward and backward: more layers than the others, or a slower GPU.

    The other stages wait for it in every micro-batch. Found by PIPE002 (unbalanced stages).
    """

    name: ClassVar[str] = "slow-stage"
    usage: ClassVar[str] = "slow-stage=STAGE:FACTOR, such as slow-stage=1:1.5"
    seen_by: ClassVar[tuple[str, ...]] = ("PIPE002",)
    stage: int
    factor: float

    @classmethod
    def parse(cls, text: str) -> "SlowStage":
        stage, _, factor = text.partition(":")
        if not stage.isdecimal():
            raise ValueError(f"{stage!r} is not a stage")
        try:
            value = float(factor)
        except ValueError:
            value = 0.0
        if not 1 < value < float("inf"):
            raise ValueError(f"{factor!r} is not a factor above 1")
        return cls(int(stage), value)

    def stage_problem(self, stages: int) -> str | None:
        if stages == 1:
            return "there is no pipeline; add --pp 2 or more"
        return None if self.stage < stages else f"stage {self.stage} does not exist: there are {stages} stages"

    @contextlib.contextmanager
    def during_stage(self, stage: int, device: str) -> Iterator[None]:
        if stage != self.stage:
            yield
            return
        _wait_for_device(device)
        start_ns = time.perf_counter_ns()
        yield
        _wait_for_device(device)
        compute(round((self.factor - 1) * (time.perf_counter_ns() - start_ns)), device)


def _wait_for_device(device: str) -> None:
    """Have the host know how long the device computes, which must not be as long as the host launches."""
    if device == "cuda":
        torch.cuda.current_stream().synchronize()
