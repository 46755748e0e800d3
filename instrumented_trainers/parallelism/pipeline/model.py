"""A rank's stages of a pipeline as one model that a training loop steps, clips, evaluates and saves."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from instrumented_trainers.parallelism.options import device_of
from instrumented_trainers.parallelism.pipeline.hooks import StageHooks
from instrumented_trainers.parallelism.pipeline.plan import PipelinePlan
from instrumented_trainers.parallelism.pipeline.replicated import ReplicatedPart

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class StageShapes:
    """What stages pass to each other on a rank: tokens (B, T) go in, streams (B, T, D) between, logits come out."""

    tokens: tuple[int, ...]
    stream: tuple[int, ...]
    logits: tuple[int, ...]
    dtype: torch.dtype

    def inputs(self, *, is_first: bool) -> Tensor:
        """Return a tensor without memory of the kind that a stage takes."""
        if is_first:
            return torch.empty(self.tokens, dtype=torch.int64, device="meta")
        return torch.empty(self.stream, dtype=self.dtype, device="meta", requires_grad=True)

    def outputs(self, *, is_last: bool) -> Tensor:
        """Return a tensor without memory of the kind that a stage returns."""
        shape = self.logits if is_last else self.stream
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)


class PipelineModel(nn.Module):
    """The `parts` of a model that are this rank's stages, by stage number, and their schedule.

    `mesh` is that of the axis pp. `loss` of logits and targets is that of a micro-batch, its share in the step's.
    `accumulate` is the context of a part's backward, `around` that of each action of a stage.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        parts: Mapping[int, nn.Module],
        mesh: DeviceMesh,
        shapes: StageShapes,
        *,
        loss: Loss,
        accumulate: Callable[[nn.Module, bool], AbstractContextManager[None]],
        around: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        from torch.distributed.pipelining.stage import PipelineStage

        from instrumented_trainers.parallelism.pipeline.schedules import make_schedule

        self.plan, self.parts = plan, nn.ModuleList(parts.values())
        self.process_group = mesh.get_group()
        self._parts = dict(parts)
        last = plan.stages - 1
        self._has_first, self._has_last = 0 in parts, last in parts
        self._last_rank = int(mesh.mesh[next(p for p in range(plan.ranks) if last in plan.stages_on(p))])
        stages = [
            PipelineStage(
                _Called(part),
                number,
                plan.stages,
                device_of(mesh),
                input_args=shapes.inputs(is_first=number == 0),
                output_args=shapes.outputs(is_last=number == last),
                group=self.process_group,
            )
            for number, part in parts.items()
        ]
        hooks = StageHooks(
            accumulate=lambda number, is_last: accumulate(self._parts[number], is_last),
            synchronize=self._synchronize,
            finish=self._finish,
            around=around,
        )
        self._schedule: Any = make_schedule(plan.schedule, stages, plan.micro_batches, loss_fn=loss, hooks=hooks)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward of all micro-batches, (M * B, T) each; return the sum of their losses.

        Every rank of the pipeline calls it with the same batch, and gets the loss.
        """
        losses: list[Tensor] = []
        inputs = (tokens,) if self._has_first else ()
        self._schedule.step(*inputs, target=targets if self._has_last else None, losses=losses, return_outputs=False)
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=tokens.device)
        return self._of_last_stage(loss.double())

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits of all micro-batches' tokens on the rank of the last stage, None on the others."""
        inputs = (tokens,) if self._has_first else ()
        logits: Tensor | None = self._schedule.eval(*inputs, return_outputs=True)
        return logits

    def _of_last_stage(self, value: Tensor) -> Tensor:
        dist.broadcast(value, src=self._last_rank, group=self.process_group)
        return value

    def _synchronize(self, number: int) -> None:
        part = self._parts[number]
        if isinstance(part, ReplicatedPart):
            part.synchronize()

    def _finish(self, number: int) -> None:
        part = self._parts[number]
        if isinstance(part, ReplicatedPart):
            part.finish()


class _Called(nn.Module):
    """A part as the schedule calls it. PipelineStage would switch FSDP's settings itself, as other schedules need."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *inputs: Tensor) -> Any:
        return self.part(*inputs)
