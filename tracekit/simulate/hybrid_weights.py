"""Sharded weights of a hybrid job's stages: gathered once per step, or before each action that uses them."""

from collections.abc import Callable
from typing import TypeAlias

from tracekit.simulate import hybrid_reduction, program
from tracekit.simulate.job import Job
from tracekit.simulate.program import GATHER_STREAM, MAIN_STREAM, Kernel

ROOT, HEAD = "root", "head"
"""The parts of the first and of the last stage that are no layers."""
Part: TypeAlias = int | str


class GatheredWeights:
    """Gathers a rank's weights where its job shards them (fully_shard); else it does nothing."""

    def __init__(self, job: Job, host: program.Host, issue: Callable[[Kernel], None]) -> None:
        self._job, self._host, self._issue = job, host, issue
        self._gathered: dict[tuple[int, Part], int] = {}

    @property
    def are_kept(self) -> bool:
        """Return whether weights are gathered once per step: reshard_after_forward=False."""
        return self._job.gathers_weights and not self._job.impairments.gathers_every_micro_batch

    def gather(self, position: str, stage: int, part: Part) -> None:
        """Gather a part's weights once the main stream has done what it was given so far."""
        layer = part if isinstance(part, int) else None
        self._host.begin(f"{position} gather {stage} {part}")
        with self._host.span(f"FSDP::all_gather ({part if layer is None else f'layers.{layer}'})"):
            if not self.are_kept:
                size_bytes = hybrid_reduction.gathered_bytes(self._job, layer)
                self._host.add(program.Allocate(_buffer(stage, part), size_bytes))
            self._host.follow(GATHER_STREAM, MAIN_STREAM)
            for kernel in hybrid_reduction.gathers(self._job, layer):
                self._issue(kernel)
        self._gathered[stage, part] = self._host.record(GATHER_STREAM)

    def enter(self, position: str, stage: int, part: Part, following: Part | None) -> None:
        """Let the main stream wait for a part's weights; if none are kept, gather those of the following part too."""
        if not self._job.gathers_weights:
            return
        if not self.are_kept and (stage, part) not in self._gathered:
            self.gather(position, stage, part)
        if (event := self._gathered.pop((stage, part), None)) is not None:
            self._host.wait(MAIN_STREAM, event)
        if not self.are_kept and following is not None:
            self.gather(position, stage, following)

    def leave(self, stage: int, part: Part) -> None:
        """Free a part's weights, unless they are kept."""
        if self._job.gathers_weights and not self.are_kept:
            self._host.add(program.Free(_buffer(stage, part)))


def _buffer(stage: int, part: Part) -> str:
    return f"weights {stage} {part}"
