"""Schedule the units of one model: what their hooks do, in which order, and which unit may use which buffer.

The rules
    Collectives are issued in program order, which is the same on every rank; no decision depends on whether a
    collective has finished, because that differs from rank to rank.
    Weights stay in a slot until another unit evicts them, so the last units of a forward pass are not gathered again
    for backward. A unit keeps its slot during its forward and backward; only a recomputation (activation checkpointing
    over several units) may evict it, and the unit's own recomputation then gathers its weights again.
    Weights in slots are discarded (reshard) when they may have changed: before the model's forward, after backward.
    A unit takes its gradient slot when its backward begins, and its gradients are reduced when the backward of its last
    use has ended, whether or not this rank has any: ranks may use different parameters of a unit, and all must reduce.
    The slot can always be reassigned: gradients written so far are reduced, later ones in a second reduction.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.profiler import record_function

from instrumented_trainers.parallelism.yafsdp.agreement import RankAgreement
from instrumented_trainers.parallelism.yafsdp.autograd_hooks import (
    copy_weights_in,
    hook_inputs,
    left_tensors,
    span,
)
from instrumented_trainers.parallelism.yafsdp.buffers import GradientSlot, Slots, WeightSlot, allocate, grow
from instrumented_trainers.parallelism.yafsdp.communication_lane import lane_for
from instrumented_trainers.parallelism.yafsdp.execution_order import ExecutionOrder
from instrumented_trainers.parallelism.yafsdp.flat_parameters import UnitParameter
from instrumented_trainers.parallelism.yafsdp.mixed_precision import tensors_in
from instrumented_trainers.parallelism.yafsdp.rank_programs import answer_others, compare_models
from instrumented_trainers.parallelism.yafsdp.refusals import (
    refuse_absent_weights,
    refuse_changed_weights,
    refuse_evicted,
    refuse_gradient_hooks,
    refuse_other_parameters,
    refuse_replaced_parameters,
    refuse_stored_weight,
    refuse_weights_changed_in_forward,
    unit_label,
)
from instrumented_trainers.parallelism.yafsdp.registrations import UnshardedParameters
from instrumented_trainers.parallelism.yafsdp.unit import Unit

_HOOKED = "_yafsdp_hooked"  # on a tensor that is no output: the computation at whose gradient it was hooked


class Engine:
    """Runs the units of one model. The root is the unit whose module holds all others."""

    def __init__(self, root: Unit, units: Sequence[Unit]) -> None:
        """Manage `units` (the root is one of them) and allocate their buffers.

        Units that run one after the other share slots, as many as the units' `buffers`. Those with `owns_slots` have
        slots of their own.
        """
        self.root, self.units = root, tuple(units)
        answer_others()
        description = [unit.description for unit in self.units]
        model_number = compare_models(description, root.ranks.shards)  # before any collective
        if root.ranks.replicas is not None:
            compare_models(description, root.ranks.replicas)
        members = {unit.ranks.members: unit.ranks for unit in self.units}
        lanes = {ranks: lane_for(root.device, group) for ranks, group in members.items()}
        self._lanes = {unit: lanes[unit.ranks.members] for unit in self.units}
        """Of each unit: experts may be sharded over other ranks than the rest."""
        self.order: ExecutionOrder[Unit] = ExecutionOrder()
        self.agreement = RankAgreement(self.units, self._lanes[root], model_number)
        filled = [unit for unit in self.units if unit.weight_bytes]
        self.shared_slots = allocate([unit for unit in filled if not unit.owns_slots], root.buffers)
        self.own_slots = {unit: allocate([unit], 1)[0] for unit in filled if unit.owns_slots}
        self._last_slot = 0  # index of the shared slots that the last unit used
        self._prefetch_depth = max(1, root.buffers - 1)
        self._callback_queued = False
        self._unsharded_parameters = UnshardedParameters(root.module)
        for unit in self.units:
            unit.engine = self

    @property
    def slots(self) -> tuple[Slots[Unit], ...]:
        """Return all slots: the shared ones first, then those of single units."""
        return (*self.shared_slots, *self.own_slots.values())

    # Hooks -----------------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Unshard the unit, prefetch the next units, and hook the inputs to detect the end of backward."""
        with span("pre_forward", unit):
            if _in_backward():
                self._recompute(unit)
            else:
                self._begin_forward(unit)
            self._wait_for_unshard(unit)
            args, kwargs = unit.policy.cast_inputs((args, kwargs))
            return hook_inputs(unit, (args, kwargs))

    def post_forward(self, unit: Unit, outputs: Any) -> Any:
        """Release the unit's slot and hook its outputs to detect the begin of backward."""
        with span("post_forward", unit):
            if not _in_backward():
                unit.in_forward = max(0, unit.in_forward - 1)
                if not unit.in_forward:
                    refuse_weights_changed_in_forward(unit)
                    unit.use_shards()
            outputs = unit.policy.cast_outputs(copy_weights_in(unit, outputs))
            if torch.is_grad_enabled():
                for tensor in tensors_in(outputs):
                    self._hook_backward(unit, tensor)
            for where, tensor in left_tensors(unit, outputs):
                refuse_stored_weight(unit, tensor, where)
                if torch.is_grad_enabled() and getattr(tensor, _HOOKED, None) is not tensor.grad_fn:
                    setattr(tensor, _HOOKED, tensor.grad_fn)
                    self._hook_backward(unit, tensor)
        if unit is self.root:
            self._wait_for_copies()  # the caller may change the shards
        return outputs

    def _hook_backward(self, unit: Unit, tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(functools.partial(self.pre_backward, unit, unit.weights_version))

    def pre_backward(self, unit: Unit, version: int, gradient: Tensor) -> Tensor:
        """Unshard the unit again, and prefetch the unit whose backward should be next.

        `version` is that of the weights in the forward pass.
        """
        refuse_changed_weights(unit, version)
        with span("pre_backward", unit):
            self._queue_callback()
            unit.in_backward = True
            self._unshard(unit)
            self._take_gradient_slot(unit)
            if unit is self.root or self.order.record_backward(unit):
                self._prefetch(self.order.next_backward(self._prefetch_depth), "backward")
            self._wait_for_unshard(unit)
        return gradient

    def on_gradient(self, unit: Unit, parameter: UnitParameter) -> None:
        """Move a finished gradient into the unit's gradient slot, waiting until the slot is free."""
        gradient = parameter.weight.grad  # type: ignore[union-attr]
        if gradient is not None and gradient.requires_grad:
            raise NotImplementedError(f"YaFSDP: {unit_label(unit)}: backward with create_graph=True is not supported")
        refuse_evicted(unit)
        refuse_absent_weights(unit)
        self._queue_callback()  # no output of a unit may have been part of this backward pass
        assert unit.slots is not None
        self._take_gradient_slot(unit)
        if unit.slots.gradients.reduction is not None:
            with span("grad_slot_wait", unit):
                self._finish_reduction(unit.slots.gradients)
        with span("post_backward_accumulate", unit):
            unit.accumulate_gradient(parameter)

    def end_backward(self, unit: Unit) -> None:
        """Note that autograd has gone back through one use of the unit: after the last one, its gradients are whole."""
        refuse_evicted(unit)
        refuse_absent_weights(unit)
        unit.uses_left -= 1
        self._post_backward(unit, is_last=unit.uses_left <= 0)

    def note(self, what: str) -> None:
        """Note what all ranks must do, such as an optimizer step."""
        self.agreement.note(what)

    def _post_backward(self, unit: Unit, *, is_last: bool = True) -> None:
        """Release the unit's weight slot and, after its last use, reduce-scatter its gradients."""
        if is_last and unit.slots is not None and unit.slots.gradients.owner is unit:
            self._reduce_scatter(unit)
        if unit.in_backward:
            with span("post_backward_reshard", unit):
                unit.in_backward = unit.evicted = False
                unit.use_shards()

    # Forward ---------------------------------------------------------------------------------------------------------

    def _begin_forward(self, unit: Unit) -> None:
        if unit is self.root:
            self._begin_root_forward()
        elif not self.root.in_forward:
            self._begin_forward_without_root(unit)
        else:
            refuse_other_parameters(unit)
        unit.in_forward += 1
        unit.uses_left += torch.is_grad_enabled()
        self._assign_slots(unit)
        self._unshard(unit)
        if not unit.encloses_units:
            self.order.record_forward(unit)
        # No compute before the first unit could hide the second's all-gather, so the root prefetches both.
        self._prefetch(self.order.next_forward(self._prefetch_depth + (1 if unit is self.root else 0)), "forward")

    def _begin_root_forward(self) -> None:
        if self._callback_queued:
            self._reset_failed_backward()
        for unit in self.units:
            if unit.in_forward:  # the last forward raised
                unit.in_forward = 0
                unit.use_shards()
        self._reshard_all()
        for unit in self.units:
            refuse_replaced_parameters(unit)
            refuse_gradient_hooks(unit)
        if torch.is_grad_enabled():
            self._unsharded_parameters.refuse_trained()
        self._last_slot = -1
        self.order.begin_forward()

    def _begin_forward_without_root(self, unit: Unit) -> None:
        if unit.outer_unit is not None:
            raise RuntimeError(
                f"YaFSDP: {unit_label(unit)} was called directly, but {unit_label(unit.outer_unit)} owns the "
                "parameters that it left out; call that module"
            )
        refuse_replaced_parameters(unit)
        if unit.slots is not None:
            self._reshard(unit.slots.weights)  # the optimizer may have stepped since they were gathered

    def _assign_slots(self, unit: Unit) -> None:
        """Assign slots to a unit that runs for the first time: the next after those of the previous unit."""
        if unit.slots is None and unit.weight_bytes:
            slots = self.own_slots.get(unit) or self.shared_slots[(self._last_slot + 1) % len(self.shared_slots)]
            unit.assign_slots(slots)
        if unit.slots in self.shared_slots:
            self._last_slot = self.shared_slots.index(unit.slots)

    # Weights ---------------------------------------------------------------------------------------------------------

    def _unshard(self, unit: Unit) -> None:
        if unit.slots is None or unit.has_weights:
            return
        slot = unit.slots.weights
        self._evict(slot, unit)
        self.agreement.note("weights", unit)
        with span("all_gather", unit):
            slot.owner = unit
            slot.gather = self._lanes[unit].all_gather(unit.copy_in_shards(self._lanes[unit]))
        unit.evicted = False

    def _wait_for_unshard(self, unit: Unit) -> None:
        if unit.slots is None:
            return
        slot = unit.slots.weights
        if slot.gather is not None:
            with span("all_gather_wait", unit):
                slot.gather.wait()
            slot.gather = None
        unit.use_weights()

    def _prefetch(self, units: Iterable[Unit], direction: str) -> None:
        """Prefetch the units whose slots are free; a slot with a wrong prediction is free."""
        expected: list[Unit] = []
        for unit in units:
            if unit.slots is None:
                continue
            owner = unit.slots.weights.owner
            if owner is not None and owner is not unit and (owner.in_use or owner in expected):
                return
            expected.append(unit)
            if owner is not unit:
                with record_function(f"YaFSDP::{direction}_prefetch for {unit.name}"):
                    self._unshard(unit)

    def _evict(self, slot: WeightSlot[Unit], requester: Unit) -> None:
        if slot.owner is None:
            return
        if slot.owner.in_forward:
            raise RuntimeError(
                f"YaFSDP: {unit_label(requester)} needs the buffer of {unit_label(slot.owner)}, whose forward is "
                "running and does not enclose it; shard one with reshard_after_forward=False, to give it its own buffer"
            )
        slot.owner.evicted = slot.owner.in_backward
        self._reshard(slot)

    def _reshard(self, slot: WeightSlot[Unit]) -> None:
        if slot.gather is not None:
            slot.gather.wait()
        if slot.owner is not None:
            slot.owner.use_shards()
            slot.owner.set_weights_present(present=False)
        slot.owner = slot.gather = None

    def _reshard_all(self) -> None:
        for slots in self.slots:
            self._reshard(slots.weights)

    # Backward --------------------------------------------------------------------------------------------------------

    def _recompute(self, unit: Unit) -> None:
        """Unshard a unit whose forward is recomputed for activation checkpointing."""
        self._queue_callback()
        if unit.outer_unit is not None and not unit.outer_unit.in_backward:
            unit.outer_unit.in_backward = True  # until the whole backward pass is over, as it is the root
            self._unshard(unit.outer_unit)
            self._wait_for_unshard(unit.outer_unit)
        unit.in_backward = True
        self._assign_slots(unit)
        self._unshard(unit)
        self._take_gradient_slot(unit)
        if self.order.is_next_backward(unit):
            self.order.record_backward(unit)
            self._prefetch(self.order.next_backward(self._prefetch_depth), "backward")

    def _take_gradient_slot(self, unit: Unit) -> None:
        """Reduce what another unit has in the slot; the unit's first gradient waits for that."""
        if unit.slots is None or not unit.is_trained:
            return
        slot = unit.slots.gradients
        if slot.owner is not unit:
            if slot.owner is not None:
                self._reduce_scatter(slot.owner)
            if slot.buffer.numel() < unit.gradient_bytes:
                self._finish_reduction(slot)
                grow(slot, unit.gradient_bytes)
            slot.owner = unit

    def _reduce_scatter(self, unit: Unit) -> None:
        assert unit.slots is not None
        slot = unit.slots.gradients
        self._finish_reduction(slot)  # another unit's, if this one has written no gradient
        if unit.requires_sync:
            self.agreement.note("gradients", unit)
            with span("post_backward_reduce", unit):
                slot.reduction = (unit, self._lanes[unit].reduce_scatter(unit.zero_missing_gradients()))
        else:
            with span("post_backward_accumulate", unit):
                unit.keep_unreduced()
        slot.owner = None
        slot.written.clear()

    def _finish_reduction(self, slot: GradientSlot[Unit]) -> None:
        if slot.reduction is not None:
            unit, token = slot.reduction
            token.wait()
            if unit.accumulate_reduced(self._lanes[unit]):
                self.agreement.note("gradients that were not cleared", unit)
            slot.reduction = None

    def _finish_reductions(self) -> None:
        for slots in self.slots:
            if slots.gradients.reduction is not None:
                with span("post_backward_rs_wait", slots.gradients.reduction[0]):
                    self._finish_reduction(slots.gradients)

    def _wait_for_copies(self) -> None:
        for lane in set(self._lanes.values()):
            lane.wait_for_copies()

    def _queue_callback(self) -> None:
        """Call `_finish_backward` at the end of the current outermost backward pass."""
        if not self._callback_queued:
            self._callback_queued = True
            Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        """Reduce the remaining units (those whose inputs need no gradient, such as the root) and publish gradients."""
        with record_function("YaFSDP::root_post_backward_callback"):
            for unit in reversed(self.units):
                if unit.requires_sync and unit.has_unreduced:  # and has not run in this pass
                    self._take_gradient_slot(unit)
                self._post_backward(unit)
                unit.uses_left = 0
            due = [unit for unit in self.units if self._has_new_gradients(unit)]
            self.agreement.publish(due)
            self._finish_reductions()
            self.agreement.compare_at_once()
            self._wait_for_copies()
            unused = self.agreement.unused_parameters(due)
            for unit in due:
                unit.publish_gradients(unused[unit])
            for unit in self.units:
                unit.show_unreduced()
            self._reshard_all()
            self.order.reset_backward()
            self._callback_queued = False
            for unit in due:
                unit.call_gradient_hooks()

    def _has_new_gradients(self, unit: Unit) -> bool:
        leaving = unit.slots.gradients.reduction if unit.slots is not None else None
        return unit.awaits_publication or (leaving is not None and leaving[0] is unit)

    def _reset_failed_backward(self) -> None:
        """Reset after a backward pass that raised: unpublished gradients are lost."""
        for slots in self.slots:
            if slots.gradients.reduction is not None:
                slots.gradients.reduction[1].wait()
            slots.gradients.owner = slots.gradients.reduction = None
            slots.gradients.written.clear()
        for unit in self.units:
            unit.in_backward = unit.evicted = False
            unit.uses_left = 0
            unit.discard_gradients()
        self.agreement.forget()
        self._callback_queued = False


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
