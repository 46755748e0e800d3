"""A unit: parameters that are sharded, all-gathered and reduce-scattered together. The engine schedules it."""

import functools
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from instrumented_trainers.parallelism.yafsdp.buffers import Slots
from instrumented_trainers.parallelism.yafsdp.communication_lane import Lane, Ranks
from instrumented_trainers.parallelism.yafsdp.layout import Layout, Part
from instrumented_trainers.parallelism.yafsdp.mixed_precision import MixedPrecisionPolicy
from instrumented_trainers.parallelism.yafsdp.optimizer_support import mark


class UnitParameter:
    """One parameter of a unit: the shard that the optimizer sees and the weight that the module computes with."""

    def __init__(self, original: nn.Parameter, sites: list[tuple[nn.Module, str]], part: Part, shard: Tensor) -> None:
        self.shape = original.shape
        self.sites = sites
        """Every place in the modules where it stands: more than one if it is tied."""
        self.part = part
        self.shard = nn.Parameter(shard, requires_grad=original.requires_grad)
        self.shard.__dict__.update(original.__dict__)  # marks such as "no weight decay" that users put on parameters
        mark(self.shard)
        self.weight: nn.Parameter | None = None

    def replace_shard(self, values: Tensor) -> None:
        """Let optimizers see a new parameter with these values, of the shard's shape."""
        old = self.shard
        self.shard = nn.Parameter(values, requires_grad=old.requires_grad)
        self.shard.__dict__.update(old.__dict__)
        self.register(self.shard)

    @torch.no_grad()
    def copy_from_whole(self, whole: Tensor) -> None:
        """Give the shard its part of the whole parameter."""
        self.shard.copy_(whole.reshape(-1)[self.part.origin : self.part.origin + self.shard.numel()])

    def register(self, parameter: nn.Parameter) -> None:
        """Put `parameter` wherever the modules look for this one."""
        for module, name in self.sites:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = parameter  # many times a step, and without nn.Module's checks
            else:
                setattr(module, name, parameter)  # such as nn.LSTM, which keeps a list of its own


class UnitEngine(Protocol):
    """What runs a unit: it is called from the module's hooks and from autograd."""

    shared_slots: "tuple[Slots[Unit], ...]"
    own_slots: "Mapping[Unit, Slots[Unit]]"

    def pre_forward(self, unit: "Unit", args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the inputs of the unit's forward once its weights are there."""

    def post_forward(self, unit: "Unit", outputs: Any) -> Any:
        """Return the outputs of the unit's forward."""

    def on_gradient(self, unit: "Unit", index: int) -> None:
        """Take over a gradient that autograd has finished."""

    def end_backward(self, unit: "Unit") -> None:
        """Note that autograd has gone back through one use of the unit."""

    def note_step(self) -> None:
        """Note that an optimizer steps shards of the model."""


class Unit:
    """The parameters of one module that no unit inside it has, as one flat tensor cut into a shard per rank.

    `master` is this rank's shard, in the parameters' own dtype; the optimizer's parameters are views of it. `gradient`
    is its gradient: the mean over ranks, added up over micro-batches.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[nn.Parameter, list[tuple[nn.Module, str]]],
        *,
        ranks: Ranks,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        buffers: int,
        offload: OffloadPolicy = OffloadPolicy(),  # noqa: B008 -- it has no fields
    ) -> None:
        self.module, self.ranks, self.device, self.policy, self.buffers = module, ranks, device, policy, buffers
        self.is_offloaded = isinstance(offload, CPUOffloadPolicy)
        """Whether the shards of weights and gradients lie in host memory."""
        self.shard_device = torch.device("cpu") if self.is_offloaded else device
        self._pinned = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and device.type == "cuda"
        self.name = ""
        self.rank = ranks.shards.rank()
        self.layout = Layout.of([p.shape for p in parameters], ranks.shards.size())
        self.dtype = next((p.dtype for p in parameters), torch.get_default_dtype())
        self.weight_dtype = policy.param_dtype or self.dtype
        self.reduce_dtype = policy.reduce_dtype or self.weight_dtype
        # In fp16, whose largest value is 65504, a sum over ranks overflows long before their mean does.
        self._predivisor = 2 ** (ranks.count.bit_length() // 2) if self.reduce_dtype is torch.float16 else 1
        self.master = self._cut(list(parameters))
        self.gradient: Tensor | None = None
        self.incoming: Tensor | None = None
        """A gradient on its way to host memory, to be added to one that is there; allocated when first needed."""
        self._has_incoming = False
        self.parameters = [
            UnitParameter(original, sites, part, self.master[part.start : part.stop])
            for (original, sites), part in zip(parameters.items(), self._parts(), strict=True)
        ]
        self.left_out = False
        """Whether the module has parameters that were left for a unit around it."""
        self.outer_unit: Unit | None = None
        """The unit that has them."""
        self.engine: UnitEngine | None = None
        self.slots: Slots[Unit] | None = None
        self.own_modules: tuple[nn.Module, ...] = (module,)
        """The module and those inside it that are in no other unit."""
        self.encloses_units = False
        """Whether other units run inside this one; such a unit has buffers of its own."""
        self.owns_slots = False
        self.in_forward = 0
        self.uses_left = 0
        """How many uses in forward passes autograd has not gone back through yet."""
        self.in_backward = False
        self.evicted = False
        """Whether another unit evicted the weights during this unit's backward."""
        self.with_gradient: set[int] = set()
        """Indices of the parameters that got a gradient on this rank in this backward pass."""
        self.awaits_publication = False
        """Whether the gradient shard holds a gradient that the optimizer does not see yet."""
        self.use_shards()

    def _parts(self) -> Iterator[Part]:
        return (self.layout.part(index, self.rank) for index in range(len(self.layout.shapes)))

    def _cut(self, originals: list[nn.Parameter]) -> Tensor:
        """Return this rank's shard of the flat tensor, without ever making the whole one."""
        if any(original.is_meta for original in originals):
            return torch.empty(self.layout.shard_numel, dtype=self.dtype, device="meta")
        shard = self._zeros()
        for original, part in zip(originals, self._parts(), strict=True):
            piece = original.detach().reshape(-1)[part.origin : part.origin + part.stop - part.start]
            shard[part.start : part.stop] = piece
        return shard

    def _zeros(self) -> Tensor:
        size = self.layout.shard_numel
        return torch.zeros(size, dtype=self.dtype, device=self.shard_device, pin_memory=self._pinned)

    def leave_meta(self) -> None:
        """Make the shard on the device, if it is on the meta device still, with zeros in it."""
        if self.master.is_meta:
            self.master = self._zeros()
            for parameter in self.parameters:
                parameter.replace_shard(self.master[parameter.part.start : parameter.part.stop])

    @torch.no_grad()
    def adopt_moved_shards(self) -> None:
        """Take over values that were given to the optimizer's parameters as new memory, such as by share_memory."""
        for parameter in self.parameters:
            own = self.master[parameter.part.start : parameter.part.stop]
            if not _is_same_memory(parameter.shard, own):
                own.copy_(parameter.shard)
                parameter.shard.data = own

    def replaced_parameter(self) -> UnitParameter | None:
        """Return a parameter that is no longer the shard, or whose memory is not the shard's; None if all are."""
        for parameter in self.parameters:
            shard, own = parameter.shard, self.master[parameter.part.start : parameter.part.stop]
            is_there = all(module._parameters.get(name) is shard for module, name in parameter.sites)
            if not is_there or not _is_same_memory(shard, own):
                return parameter
        return None

    # Weights ---------------------------------------------------------------------------------------------------------

    @property
    def whole_weights(self) -> Tensor:
        """Return the part of the weight slot's buffer that this unit uses, flat."""
        assert self.slots is not None
        return self.slots.weights.buffer[: self.layout.numel]

    @property
    def has_weights(self) -> bool:
        """Return whether the unit's weights are in its slot or on their way there."""
        return self.slots is not None and self.slots.weights.owner is self

    @property
    def weights_version(self) -> int:
        """Return a number that changes when the weights are changed in place, as by an optimizer."""
        return self.master._version

    def is_weight(self, tensor: Tensor) -> bool:
        """Return whether the tensor lies in the buffer of the unit's unsharded weights."""
        if self.slots is None or tensor.device != self.device or tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() == self.slots.weights.buffer.untyped_storage().data_ptr()

    def set_weights_present(self, *, present: bool) -> None:
        """Let autograd raise where it would use weights that are not in the buffer or have changed since forward.

        It raises where a tensor's version is not that at which it was saved. So the version is an even number where
        the weights are in the buffer, an odd one where they are not, and another after each change of the shards.
        """
        if self.slots is not None and self.parameters:
            version = 2 * self.weights_version + (not present)
            weights = tuple(parameter.weight for parameter in self.parameters)
            torch._C._autograd._unsafe_set_version_counter(weights, (version,) * len(weights))

    @property
    def is_trained(self) -> bool:
        """Return whether any parameter of the unit gets a gradient."""
        return any(parameter.shard.requires_grad for parameter in self.parameters)

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
        for index, parameter in enumerate(self.parameters):
            weight = nn.Parameter(torch.empty(0, dtype=self.weight_dtype, device=self.device))
            # Not nn.Parameter(view): that shares the buffer's version counter, every gather bumps it, and backward
            # would take the weights for modified.
            weight.data = self.whole_weights[self.layout.span(index)].view(parameter.shape)
            # A weak reference: Python's garbage collector does not see what these hooks hold, and a cycle through them
            # would keep the model for ever.
            weight.register_post_accumulate_grad_hook(functools.partial(_notify_engine, weakref.ref(self), index))
            parameter.weight = weight

    @torch.no_grad()
    def copy_in_shard(self, lane: Lane) -> Tensor:
        """Copy this rank's shard into the weight buffer, cast, and return the buffer to all-gather."""
        whole = self.whole_weights
        lane.copy_in(whole, self.master)
        return whole

    def use_weights(self) -> None:
        """Register unsharded weights in the modules (FSDP's unshard)."""
        self.set_weights_present(present=True)
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
    def whole_gradients(self) -> Tensor:
        """Return the part of the gradient slot's buffer that this unit uses, flat."""
        assert self.slots is not None
        return self.slots.gradients.buffer[: self.layout.numel]

    @property
    def without_gradient(self) -> set[int]:
        """Return the indices of trainable parameters that got no gradient on this rank since the last publication."""
        trainable = {index for index, parameter in enumerate(self.parameters) if parameter.shard.requires_grad}
        return trainable - self.with_gradient

    @torch.no_grad()
    def accumulate_gradient(self, index: int) -> None:
        """Move a parameter's gradient from autograd into the gradient buffer, cast to the reduce dtype."""
        assert self.slots is not None
        parameter, slot = self.parameters[index], self.slots.gradients
        assert parameter.weight is not None
        gradient = parameter.weight.grad
        assert gradient is not None
        parameter.weight.grad = None
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()  # a sparse embedding's
        target = self.whole_gradients[self.layout.span(index)].view(parameter.shape)
        if index in slot.written:
            target.add_(gradient, alpha=1 / self._predivisor)
        elif self._predivisor == 1:
            target.copy_(gradient)
        else:
            torch.mul(gradient, 1 / self._predivisor, out=target)
        slot.written.add(index)
        self.with_gradient.add(index)

    @torch.no_grad()
    def zero_missing_gradients(self) -> Tensor:
        """Zero missing gradients and return the buffer to reduce-scatter."""
        assert self.slots is not None
        whole = self.whole_gradients
        for index in range(len(self.parameters)):
            if index not in self.slots.gradients.written:
                whole[self.layout.span(index)].zero_()
        whole[self.layout.used_numel :].zero_()
        return whole

    @torch.no_grad()
    def accumulate_reduced(self, lane: Lane) -> None:
        """Add the mean over ranks to the gradient shard, from the chunk in the buffer, a sum over ranks."""
        chunk, scale = lane.chunk(self.whole_gradients), self._predivisor / self.ranks.count
        is_first, is_zero = not self.awaits_publication, False
        if is_first:
            is_zero = self._adopt_gradients()
            self.awaits_publication = True
        assert self.gradient is not None
        if not self.is_offloaded:
            self.gradient.add_(chunk, alpha=scale)
            return
        mean = chunk.to(self.dtype, copy=True).mul_(scale)
        if is_zero:
            lane.copy_out(mean, self.gradient)
        else:
            self._copy_to_incoming(lane, mean)

    def _copy_to_incoming(self, lane: Lane, mean: Tensor) -> None:
        if self.incoming is None:
            self.incoming = self._zeros()
        if self._has_incoming:
            lane.wait_for_copies()
            self._add_incoming()
        lane.copy_out(mean, self.incoming)
        self._has_incoming = True

    def _add_incoming(self) -> None:
        if self._has_incoming:
            assert self.gradient is not None
            assert self.incoming is not None
            self.gradient.add_(self.incoming)
            self._has_incoming = False

    @torch.no_grad()
    def publish_gradients(self, unused: Collection[int]) -> None:
        """Show the gradient shard to the optimizer; `unused` parameters get none.

        A gradient that appeared on a shard meanwhile is autograd's, from a loss over the shards themselves such as a
        penalty on weights: it is added. Where shards lie in host memory, copies to there must have finished.
        """
        self._add_incoming()
        for index, (parameter, local) in enumerate(self._gradient_parts()):
            published = parameter.shard.grad
            if published is None:
                if parameter.shard.requires_grad and index not in unused:
                    parameter.shard.grad = local
            elif not _is_same_memory(published, local):
                local.add_(published)
                parameter.shard.grad = local
        self.awaits_publication = False
        self.with_gradient.clear()

    def call_gradient_hooks(self) -> None:
        """Call the hooks of `register_post_accumulate_grad_hook` on shards that have a gradient."""
        for parameter in self.parameters:
            hooks = parameter.shard._post_accumulate_grad_hooks
            for hook in tuple(hooks.values()) if hooks and parameter.shard.grad is not None else ():
                hook(parameter.shard)

    def discard_gradients(self) -> None:
        """Forget gradients that the optimizer does not see yet."""
        for parameter in self.parameters:
            if parameter.weight is not None:
                parameter.weight.grad = None
        self._has_incoming = False
        self.awaits_publication = False
        self.with_gradient.clear()

    def _adopt_gradients(self) -> bool:
        """Make the gradient shard equal to what the optimizer sees of it, zero where it sees none.

        Returns whether it is zero everywhere.
        """
        if self.gradient is None:
            self.gradient = self._zeros()
        if all(parameter.shard.grad is None for parameter in self.parameters):
            self.gradient.zero_()
            return True
        for parameter, local in self._gradient_parts():
            published = parameter.shard.grad
            if published is None:
                local.zero_()
            elif not _is_same_memory(published, local):
                local.copy_(published)
                parameter.shard.grad = local
        return False

    def _gradient_parts(self) -> Iterator[tuple[UnitParameter, Tensor]]:
        """Yield each parameter with its part of the gradient shard."""
        assert self.gradient is not None
        for parameter in self.parameters:
            yield parameter, self.gradient[parameter.part.start : parameter.part.stop]


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    # By storage, not by address: a part without elements has no address, and ranks must not differ in the answer.
    storages = one.untyped_storage().data_ptr(), other.untyped_storage().data_ptr()
    return storages[0] == storages[1] and one.storage_offset() == other.storage_offset() and one.dtype == other.dtype


def _notify_engine(reference: "weakref.ref[Unit]", index: int, _: Tensor) -> None:
    unit = reference()
    if unit is not None and unit.engine is not None:  # else the model has been deleted
        unit.engine.on_gradient(unit, index)
