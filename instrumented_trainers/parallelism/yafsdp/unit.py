"""A unit: parameters that are sharded, all-gathered and reduce-scattered together. The engine schedules it."""

import copy
import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import OffloadPolicy

from instrumented_trainers.parallelism.yafsdp.buffers import Slots, regions
from instrumented_trainers.parallelism.yafsdp.communication_lane import Lane, Ranks
from instrumented_trainers.parallelism.yafsdp.dtensor_parameters import local_part
from instrumented_trainers.parallelism.yafsdp.flat_parameters import FlatParameters, ShardMemory, Sites, UnitParameter
from instrumented_trainers.parallelism.yafsdp.gather_hooks import has_gather_hooks
from instrumented_trainers.parallelism.yafsdp.hooked_parameters import HookedParameters
from instrumented_trainers.parallelism.yafsdp.mixed_precision import MixedPrecisionPolicy
from instrumented_trainers.parallelism.yafsdp.shard_tensor import plain_tensors


class UnitEngine(Protocol):
    """What runs a unit: it is called from the module's hooks and from autograd."""

    shared_slots: "tuple[Slots[Unit], ...]"
    own_slots: "Mapping[Unit, Slots[Unit]]"

    def pre_forward(self, unit: "Unit", args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the inputs of the unit's forward once its weights are there."""

    def post_forward(self, unit: "Unit", outputs: Any) -> Any:
        """Return the outputs of the unit's forward."""

    def on_gradient(self, unit: "Unit", parameter: UnitParameter) -> None:
        """Take over a gradient that autograd has finished."""

    def end_backward(self, unit: "Unit") -> None:
        """Note that autograd has gone back through one use of the unit."""

    def note(self, what: str) -> None:
        """Note what all ranks must do, such as an optimizer step."""


class Unit:
    """The parameters of one module that no unit inside it has.

    They are one flat tensor, or several where they differ in dtype or some are frozen: those that are trained come
    first. A flat tensor that is wholly frozen has no gradient and takes part in no reduction.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[nn.Parameter, Sites],
        *,
        ranks: Ranks,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        buffers: int,
        offload: OffloadPolicy = OffloadPolicy(),  # noqa: B008 -- it has no fields
    ) -> None:
        self.module, self.ranks, self.device, self.policy, self.buffers = module, ranks, device, policy, buffers
        self.name = ""
        self.rank = ranks.shards.rank()
        home = ShardMemory.of(offload, device)
        self.shard_device = home.device
        self.left_out = False
        """Whether the module has parameters that were left for a unit around it."""
        self.owns_slots = False
        self.keeps_whole_gradients = False
        """Whether backward passes without sync add up whole gradients instead of reducing them."""
        self.requires_sync = True
        self._begin(
            [_flat_class(group)(group, ranks, device, policy=policy, home=home) for group in _groups(parameters)]
        )

    def _begin(self, flats: Iterable[FlatParameters]) -> None:
        """Begin with flat tensors that no engine runs."""
        self.flats = tuple(flats)
        self.parameters = [parameter for flat in self.flats for parameter in flat.parameters]
        for parameter in self.parameters:
            parameter.shard.owner = weakref.ref(self)
        self._flat_of = {parameter: flat for flat in self.flats for parameter in flat.parameters}
        self._gradient_regions = regions([flat.gradient_bytes for flat in self.flats])
        self.outer_unit: Unit | None = None
        """The unit that has the parameters that were left out."""
        self.engine: UnitEngine | None = None
        self.slots: Slots[Unit] | None = None
        self.own_modules: tuple[nn.Module, ...] = (self.module,)
        """The module and those inside it that are in no other unit."""
        self.encloses_units = False
        """Whether other units run inside this one; such a unit has buffers of its own."""
        self.in_forward = 0
        self.uses_left = 0
        """How many uses in forward passes autograd has not gone back through yet."""
        self.in_backward = False
        self.evicted = False
        """Whether another unit evicted the weights during this unit's backward."""
        self.with_gradient: set[UnitParameter] = set()
        """The parameters that got a gradient on this rank in this backward pass."""
        self._reduced: tuple[FlatParameters, ...] = ()
        """The flat tensors of the last reduction."""
        self._unpublished: set[FlatParameters] = set()
        """The flat tensors whose gradient shards hold a gradient that the optimizer does not see yet."""
        self.is_unsharded = False
        """Whether whole weights are registered outside of forward, and stay."""

    def duplicate(self) -> Self:
        """Return a unit with copies of the shards, which no engine runs; its modules are this one's still."""
        other = copy.copy(self)
        other._begin([flat.duplicate() for flat in self.flats])
        return other

    # Shards ----------------------------------------------------------------------------------------------------------

    @property
    def is_meta(self) -> bool:
        """Return whether the shards are on the meta device still."""
        return any(flat.master.is_meta for flat in self.flats)

    def leave_meta(self) -> None:
        """Make the shards on the device, if they are on the meta device still, with zeros in them."""
        for flat in self.flats:
            flat.leave_meta()

    def adopt_moved_shards(self) -> None:
        """Take over values that were given to the optimizer's parameters as new memory, such as by share_memory."""
        for flat in self.flats:
            flat.adopt_moved_shards()

    def replaced_parameter(self) -> UnitParameter | None:
        """Return a parameter that is no longer the shard, or whose memory is not the shard's; None if all are."""
        return next((replaced for flat in self.flats if (replaced := flat.replaced_parameter()) is not None), None)

    def changed_weight(self) -> UnitParameter | None:
        """Parameter whose whole weight a forward pass has changed; None if there is none."""
        return next((changed for flat in self.flats if (changed := flat.changed_weight()) is not None), None)

    @property
    def description(self) -> str:
        """What must be the same on all ranks."""
        flats = "; ".join(flat.description for flat in self.flats)
        keeps = "keeps its weights" if self.owns_slots else f"shares {self.buffers} buffers"
        return f"unit {self.name or 'of the root'} {keeps}: {flats}"

    # Weights ---------------------------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """Size of the buffer for the unsharded weights."""
        return regions([flat.weight_bytes for flat in self.flats])[-1].stop if self.flats else 0

    @property
    def has_weights(self) -> bool:
        """Return whether the unit's weights are in its slot or on their way there."""
        return self.slots is not None and self.slots.weights.owner is self

    @property
    def weights_version(self) -> int:
        """Return a number that changes when the weights are changed in place, as by an optimizer."""
        return sum(flat.master._version for flat in self.flats)

    def is_weight(self, tensor: Tensor) -> bool:
        """Return whether the tensor lies in the buffer of the unit's unsharded weights."""
        tensor = local_part(tensor)
        if self.slots is None or tensor.device != self.device or tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() == self.slots.weights.buffer.untyped_storage().data_ptr()

    def set_weights_present(self, *, present: bool) -> None:
        """Let autograd raise where it would use weights that are not in the buffer or have changed since forward."""
        if self.slots is not None:
            for flat in self.flats:
                flat.set_weights_present(present=present)

    @property
    def is_trained(self) -> bool:
        """Return whether any parameter of the unit gets a gradient."""
        return any(flat.is_trained for flat in self.flats)

    @property
    def in_use(self) -> bool:
        """Return whether the unit's forward or backward is under way, so that its weights must stay."""
        return self.in_forward > 0 or self.in_backward

    @torch.inference_mode(mode=False)
    def assign_slots(self, slots: "Slots[Unit]") -> None:
        """Assign the unit's slots permanently: autograd keeps views of the weights, so their address must not change.

        From then on its engine is notified of each parameter's gradient.
        """
        self.slots = slots
        for flat, region in zip(self.flats, regions([flat.weight_bytes for flat in self.flats]), strict=True):
            flat.view_weights(slots.weights.buffer[region])
        for parameter in self.parameters:
            assert parameter.weight is not None
            # Weak references: Python's garbage collector does not see what these hooks hold, and a cycle through them
            # would keep the model for ever.
            notify = functools.partial(_notify_engine, weakref.ref(self), weakref.ref(parameter))
            parameter.weight.register_post_accumulate_grad_hook(notify)

    def copy_in_shards(self, lane: Lane) -> list[Tensor]:
        """Copy this rank's shards into the weight buffer, cast, and return the parts of the buffer to all-gather."""
        return [buffer for flat in self.flats for buffer in flat.copy_in_shard(lane)]

    def use_weights(self) -> None:
        """Register unsharded weights in the modules (FSDP's unshard)."""
        for flat in self.flats:
            flat.finish_gather()
        self.set_weights_present(present=True)
        with plain_tensors():
            for parameter in self.parameters:
                assert parameter.weight is not None
                if parameter.weight.requires_grad != parameter.shard.requires_grad:
                    parameter.weight.requires_grad_(parameter.shard.requires_grad)
                parameter.register(parameter.weight)

    def use_shards(self) -> None:
        """Register shards in the modules, for optimizers and state dicts (FSDP's reshard)."""
        for parameter in self.parameters:
            parameter.register(parameter.shard)

    # Gradients -------------------------------------------------------------------------------------------------------

    @property
    def gradient_bytes(self) -> int:
        """Size of the buffer for the unsharded gradients: up to the last flat tensor that is trained."""
        stops = (
            region.stop for flat, region in zip(self.flats, self._gradient_regions, strict=True) if flat.is_trained
        )
        return max(stops, default=0)

    @property
    def without_gradient(self) -> set[UnitParameter]:
        """Return the trainable parameters that got no gradient on this rank since the last publication."""
        with plain_tensors():
            return {parameter for parameter in self.parameters if parameter.shard.requires_grad} - self.with_gradient

    @property
    def awaits_publication(self) -> bool:
        """Return whether a gradient shard holds a gradient that the optimizer does not see yet."""
        return bool(self._unpublished)

    def _whole_gradients(self, flat: FlatParameters) -> Tensor:
        assert self.slots is not None
        region = self._gradient_regions[self.flats.index(flat)]
        return self.slots.gradients.buffer[region].view(flat.reduce_dtype)

    def accumulate_gradient(self, parameter: UnitParameter) -> None:
        """Move a parameter's gradient from autograd into the gradient buffer, cast to the reduce dtype."""
        assert self.slots is not None
        assert parameter.weight is not None
        gradient, parameter.weight.grad = parameter.weight.grad, None
        assert gradient is not None
        flat, written = self._flat_of[parameter], self.slots.gradients.written
        flat.write_gradient(self._whole_gradients(flat), parameter, gradient, is_first=parameter not in written)
        written.add(parameter)
        self.with_gradient.add(parameter)

    def zero_missing_gradients(self) -> list[Tensor]:
        """Zero missing gradients and return the parts of the gradient buffer to reduce-scatter."""
        assert self.slots is not None
        self._reduced = tuple(flat for flat in self.flats if flat.is_trained)
        buffers = [self._whole_gradients(flat) for flat in self._reduced]
        for flat, buffer in zip(self._reduced, buffers, strict=True):
            flat.zero_missing_gradients(buffer, self.slots.gradients.written)
            if self.requires_sync:
                flat.add_unreduced(buffer)
        return buffers

    @property
    def has_unreduced(self) -> bool:
        """Return whether gradients wait for a backward pass with sync: the same on all ranks."""
        return any(flat.has_unreduced for flat in self.flats)

    @property
    def awaits_reduction(self) -> bool:
        """Return whether any of them would be missing in an optimizer step."""
        return any(flat.awaits_reduction for flat in self.flats)

    def keep_unreduced(self) -> None:
        """Add the gradients in the buffer to those that wait for a backward pass with sync."""
        for buffer, flat in zip(self.zero_missing_gradients(), self._reduced, strict=True):
            flat.keep_unreduced(buffer)

    def show_unreduced(self) -> None:
        """Let parameters whose gradient waits have one, which a program may clear."""
        for flat in self.flats:
            if flat.has_unreduced:
                flat.show_unreduced(self.with_gradient)

    @torch.no_grad()
    def accumulate_reduced(self, lane: Lane) -> bool:
        """Add the means over ranks to the gradient shards, of what was reduce-scattered last.

        Return whether a program had left gradients there.
        """
        had_gradients = False
        for flat in self._reduced:
            is_first = flat not in self._unpublished
            self._unpublished.add(flat)
            is_zero = flat.accumulate_reduced(lane, self._whole_gradients(flat), is_first=is_first)
            had_gradients |= is_first and not is_zero
        return had_gradients

    @torch.no_grad()
    def publish_gradients(self, unused: Collection[UnitParameter]) -> None:
        """Show the gradient shards to the optimizer; `unused` parameters get none.

        Where shards lie in host memory, copies to there must have finished.
        """
        for flat in self._unpublished:
            flat.publish_gradients(unused)
        self._unpublished.clear()
        self.with_gradient.clear()

    def call_gradient_hooks(self) -> None:
        """Call the hooks of `register_post_accumulate_grad_hook` on shards that have a gradient."""
        with plain_tensors():
            calls = [
                (hook, parameter.shard)
                for parameter in self.parameters
                if (hooks := parameter.shard._post_accumulate_grad_hooks) and parameter.shard.grad is not None
                for hook in tuple(hooks.values())
            ]
        for hook, shard in calls:
            hook(shard)

    def discard_gradients(self) -> None:
        """Forget gradients that the optimizer does not see yet."""
        for parameter in self.parameters:
            if parameter.weight is not None:
                parameter.weight.grad = None
        for flat in self.flats:
            flat.discard_gradients()
        self._unpublished.clear()
        self.with_gradient.clear()


def _groups(parameters: Mapping[nn.Parameter, Sites]) -> Iterator[dict[nn.Parameter, Sites]]:
    """Yield the parameters that are alike in dtype and in whether they are trained, those that are trained first.

    A parameter with gather hooks is alone.
    """
    groups: dict[Any, dict[nn.Parameter, Sites]] = {}
    for parameter, sites in parameters.items():
        kind = (parameter.requires_grad, parameter.dtype, id(parameter) if has_gather_hooks(parameter) else None)
        groups.setdefault(kind, {})[parameter] = sites
    for kind in sorted(groups, key=lambda kind: not kind[0]):
        yield groups[kind]


def _flat_class(parameters: Collection[nn.Parameter]) -> type[FlatParameters]:
    return HookedParameters if any(map(has_gather_hooks, parameters)) else FlatParameters


def _notify_engine(reference: "weakref.ref[Unit]", to: "weakref.ref[UnitParameter]", _: Tensor) -> None:
    unit, parameter = reference(), to()
    if unit is not None and parameter is not None and unit.engine is not None:  # else the model has been deleted
        unit.engine.on_gradient(unit, parameter)
