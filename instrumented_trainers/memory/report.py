"""The memory report of a run: predicted and measured, rank by rank."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from instrumented_trainers.config import MEMORY_STEP, TrainingConfig
from instrumented_trainers.memory.footprint import KINDS, Footprint
from instrumented_trainers.memory.measured import MeasuredMemory, MemoryMeter
from instrumented_trainers.memory.predicted import predict_footprint
from instrumented_trainers.parallelism import ShardOptions


@dataclass(frozen=True)
class MemoryReport:
    """What a step took, by rank."""

    step: int
    predicted: tuple[Footprint, ...]
    measured: tuple[MeasuredMemory, ...]

    def as_manifest(self) -> Mapping[str, Any]:
        """Entry ``memory`` of ``run.json``, in bytes."""
        return {"step": self.step, "ranks": [self._rank(rank) for rank in range(len(self.measured))]}

    def as_text(self) -> list[str]:
        """Return a table of the rank whose peak is the highest, in MiB."""
        rank = max(range(len(self.measured)), key=lambda rank: self.measured[rank].peak_bytes)
        formula, measured = self.predicted[rank], self.measured[rank]
        lines = [f"memory of rank {rank} in step {self.step}, MiB   predicted   measured"]
        for kind in KINDS:
            by_formula, counted = (footprint.as_row()[f"{kind}_bytes"] for footprint in (formula, measured.footprint))
            lines.append(_line(kind, by_formula, counted))
        lines.append(_line("sum", formula.known_bytes, measured.footprint.known_bytes))
        if formula.offloaded_bytes:
            counted = measured.footprint.offloaded_bytes
            lines.append(_line("in host memory, not in the sum", formula.offloaded_bytes, counted))
        lines.append(_line("peak", None, measured.peak_bytes))
        if measured.reserved_bytes is not None:
            lines.append(_line("reserved by the allocator", None, measured.reserved_bytes))
        return lines

    def _rank(self, rank: int) -> Mapping[str, Any]:
        measured = self.measured[rank]
        peaks = {"peak_bytes": measured.peak_bytes, "reserved_bytes": measured.reserved_bytes}
        return {"predicted": self.predicted[rank].as_row(), "measured": {**measured.footprint.as_row(), **peaks}}


class MemoryWatch:
    """Measures one step of the training if a memory report is requested."""

    def __init__(
        self, config: TrainingConfig, options: ShardOptions, model: nn.Module, optimizer: Optimizer, *, first_step: int
    ) -> None:
        self._config, self._options = config, options
        self._model, self._optimizer = model, optimizer
        # By then optimizer state and persistent buffers are allocated.
        self._step = first_step + MEMORY_STEP if config.memory_report else None
        self.report: MemoryReport | None = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Run a step inside. Every rank calls it for every step."""
        if step != self._step:
            yield
            return
        meter = MemoryMeter(self._model, self._optimizer, self._config.device, is_offloaded=self._options.offload)
        with meter.step():
            yield
        formula = predict_footprint(self._config, self._options, dist.get_rank())
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (formula, meter.measurement()))
        self.report = MemoryReport(step, tuple(pair[0] for pair in of_ranks), tuple(pair[1] for pair in of_ranks))

    def summary(self) -> list[str]:
        """Return the lines to print at the end of the training."""
        if self.report is not None:
            return self.report.as_text()
        return (
            [] if self._step is None else [f"no memory report: the training ended before the end of step {self._step}"]
        )


def _line(name: str, by_formula: int | None, counted: int | None) -> str:
    return f"  {name:<30}{_mib(by_formula):>11}{_mib(counted):>11}"


def _mib(size_bytes: int | None) -> str:
    return "—" if size_bytes is None else f"{size_bytes / 2**20:,.2f}"
