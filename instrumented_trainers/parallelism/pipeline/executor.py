"""Runs a rank's list of pipeline actions, each in a span ``PP:<stage><action><micro-batch>``, as torch names them.

torch's own runtime waits for what a stage receives inside the span of its forward or backward, where waiting looks like
computing. Here the wait has a span of its own, that of the receive.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import (
    _Action,
    _batch_p2p,
    _ComputationType,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)
from torch.distributed.pipelining.stage import PipelineStage
from torch.profiler import record_function

from instrumented_trainers.parallelism.pipeline.hooks import StageHooks

_FORWARD, _INPUT, _WEIGHT, _FULL = (
    _ComputationType.FORWARD,
    _ComputationType.BACKWARD_INPUT,
    _ComputationType.BACKWARD_WEIGHT,
    _ComputationType.FULL_BACKWARD,
)
_SEND_F, _RECV_F = _ComputationType.SEND_F, _ComputationType.RECV_F
_SEND_B, _RECV_B = _ComputationType.SEND_B, _ComputationType.RECV_B
_OF_FORWARD = (_FORWARD, _SEND_F, _RECV_F)
_Works = list[dist.Work]


class Executor(_PipelineScheduleRuntime):
    """A schedule that runs its actions one after the other. `hooks` are what it asks the rank's strategy for."""

    def __init__(self, stages: list[PipelineStage], micro_batches: int, *, hooks: StageHooks, **options: Any) -> None:
        self._hooks = hooks
        super().__init__(stages, micro_batches, **options)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        inputs, _ = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        prepare = self._initialize_stages  # torch 2.11 and earlier need neither the target nor the loss
        prepare(*(inputs[0], {}, None, loss_kwargs)[: len(inspect.signature(prepare).parameters)])
        step = _Step(self, inputs, target_mbs, keeps_outputs=return_outputs)
        for action in self.pipeline_order_with_comms[self.rank]:
            for sub_action in action.sub_actions or (action,):
                if self._has_backward or sub_action.computation_type in _OF_FORWARD:
                    step.run(sub_action)
        step.finish()
        self._update_losses(self._stages, losses if self._has_backward else None)


class _Step:
    """One run through the list."""

    def __init__(
        self, schedule: Executor, inputs: list[Any], targets: list[Any] | None, *, keeps_outputs: bool
    ) -> None:
        self._schedule, self._hooks = schedule, schedule._hooks
        self._stages = {stage.stage_index: stage for stage in schedule._stages}
        self._inputs, self._targets, self._keeps_outputs = inputs, targets, keeps_outputs
        self._receives: dict[tuple[int, _ComputationType, int], _Works] = {}
        self._sends: list[_Works] = []
        self._backwards_left = dict.fromkeys(self._stages, schedule._n_microbatches)

    def run(self, action: _Action) -> None:
        """Run an action of this rank's list."""
        stage, kind, number = self._stages[action.stage_index], action.computation_type, action.microbatch_index or 0
        if kind in (_RECV_F, _RECV_B):
            operations = stage.get_fwd_recv_ops if kind is _RECV_F else stage.get_bwd_recv_ops
            self._receives[action.stage_index, kind, number] = _batch_p2p(operations(number))
        elif kind in (_SEND_F, _SEND_B):
            operations = stage.get_fwd_send_ops if kind is _SEND_F else stage.get_bwd_send_ops
            with record_function(f"PP:{action}"):
                self._sends.append(_batch_p2p(operations(number)))
        elif kind in (_FORWARD, _FULL, _INPUT, _WEIGHT):
            self._wait(stage.stage_index, _RECV_F if kind is _FORWARD else _RECV_B, number)
            with self._span(action):
                self._compute(stage, kind, number)
        elif kind is _ComputationType.REDUCE_GRAD:
            with record_function(f"PP:{action}"):
                self._hooks.synchronize(stage.stage_index)

    def finish(self) -> None:
        """Wait until everything has been sent, and all gradients are reduced."""
        for works in self._sends:
            _wait_batch_p2p(works)
        if self._schedule._has_backward:
            for number in self._stages:
                self._hooks.finish(number)

    def _wait(self, stage: int, kind: _ComputationType, number: int) -> None:
        """Wait for what the next action takes in, if another rank sends it."""
        if works := self._receives.pop((stage, kind, number), None):
            with record_function(f"PP:{_Action(stage, kind, number)}"):
                _wait_batch_p2p(works)

    @contextlib.contextmanager
    def _span(self, action: _Action) -> Iterator[None]:
        with record_function(f"PP:{action}"), self._hooks.around(action.stage_index):
            yield

    def _compute(self, stage: PipelineStage, kind: _ComputationType, number: int) -> None:
        if kind is _FORWARD:
            self._forward(stage, number)
            return
        ends = kind is not _INPUT
        self._backwards_left[stage.stage_index] -= ends
        is_last = ends and not self._backwards_left[stage.stage_index]
        with self._hooks.accumulate(stage.stage_index, is_last):
            if kind is _WEIGHT:
                stage.backward_weight_one_chunk(number, last_backward=is_last)
                return
            loss = self._schedule._maybe_get_loss(stage, number)
            stage.backward_one_chunk(number, loss=loss, full_backward=kind is _FULL, last_backward=is_last)
        if (before := self._stages.get(stage.stage_index - 1)) is not None:
            before.set_local_bwd_input(stage.get_local_bwd_output(number), number)

    def _forward(self, stage: PipelineStage, number: int) -> None:
        output = stage.forward_one_chunk(number, self._inputs[number], {}, save_forward_output=self._keeps_outputs)
        if self._schedule._has_backward:
            self._schedule._maybe_compute_loss(stage, output, self._targets, number)
        if (after := self._stages.get(stage.stage_index + 1)) is not None:
            after.set_local_fwd_input(output, number)
