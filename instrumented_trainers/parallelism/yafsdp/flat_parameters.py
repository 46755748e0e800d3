"""Parameters of a unit that are one flat tensor, cut into a shard per rank: of one dtype, all trained or all frozen."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from instrumented_trainers import regions
from instrumented_trainers.parallelism.yafsdp.communication_lane import Lane, Ranks
from instrumented_trainers.parallelism.yafsdp.dtensor_parameters import Division, local_part
from instrumented_trainers.parallelism.yafsdp.flat_shard import Place
from instrumented_trainers.parallelism.yafsdp.gather_hooks import OriginalClass, plain_values
from instrumented_trainers.parallelism.yafsdp.layout import Layout
from instrumented_trainers.parallelism.yafsdp.mixed_precision import MixedPrecisionPolicy
from instrumented_trainers.parallelism.yafsdp.shard_tensor import Shard, ShardParameter, plain_tensors

Sites: TypeAlias = list[tuple[nn.Module, str]]
"""Every place in the modules where a parameter stands: more than one if it is tied."""


class UnitParameter:
    """One parameter of a unit: the shard that the optimizer sees and the weight that the module computes with."""

    def __init__(self, original: nn.Parameter, sites: Sites, place: Place) -> None:
        self.division = Division.of(original)
        self.shape, self.sites, self.place = local_part(original).shape, sites, place
        self.part = place.layout.part(place.index, place.ranks.rank())
        """The part of its flat tensor's shard that belongs to it."""
        self.span = place.layout.span(place.index)
        self.shard = ShardParameter.of(torch.empty(0), place, requires_grad=original.requires_grad)
        self.shard.__dict__.update(original.__dict__)  # marks such as "no weight decay" that users put on parameters
        self.weight: nn.Parameter | None = None
        self.memory: Tensor | None = None
        """Where the weight lies, a view of the unit's buffer."""
        self.original_class: OriginalClass | None = None
        """The class that it has in the modules while it is whole, if that has gather hooks."""

    def replace_shard(self, values: Tensor) -> None:
        """Let optimizers see a new parameter with these values, of the shard's shape."""
        self.set_shard(values)
        self.register(self.shard)

    def set_shard(self, values: Tensor) -> None:
        """Make a new parameter with these values the shard, without registering it."""
        old = self.shard
        self.shard = ShardParameter.of(values, self.place, requires_grad=old.requires_grad)
        self.shard.__dict__.update(old.__dict__)

    @property
    def is_registered(self) -> bool:
        """Whether the modules have the shard wherever this parameter stands, or the weight while it is unsharded."""
        for module, name in self.sites:
            registered = module._parameters.get(name)
            if registered is None or (registered is not self.shard and registered is not self.weight):
                return False
        return True

    def show_weight(self, *, present: bool) -> None:
        """Let the weight have its memory, or none."""
        assert self.weight is not None
        assert self.memory is not None
        memory = self.memory if present else self.memory.new_empty(0)
        if isinstance(self.weight, DTensor):
            self.weight._local_tensor = memory
        else:
            self.weight.data = memory

    def module_parameter(self, part: Tensor, *, requires_grad: bool = True) -> nn.Parameter:
        """Parameter as modules compute with it, whose values on this rank are `part`."""
        if self.division is not None:
            part = self.division.dtensor(part)
        elif self.original_class is not None:
            part = self.original_class.wrap(part)
        return nn.Parameter(part, requires_grad=requires_grad)

    @torch.no_grad()
    def copy_from_whole(self, weight: Tensor) -> None:
        """Give the shard its part of the whole parameter, if that has changed."""
        local = self.shard.to_local()
        part = self.place.cut(plain_values(local_part(weight)), local.numel()).to(local.device)
        if not torch.equal(part, local):
            local.copy_(part)

    def register(self, parameter: nn.Parameter) -> None:
        """Put `parameter` wherever the modules look for this one."""
        for module, name in self.sites:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = parameter  # many times a step, and without nn.Module's checks
            else:
                setattr(module, name, parameter)  # such as nn.LSTM, which keeps a list of its own


@dataclass(frozen=True)
class ShardMemory:
    """Where shards of weights and gradients lie."""

    device: torch.device
    is_offloaded: bool = False
    """Whether that is host memory and the collectives are not there, or as if they were not."""
    is_pinned: bool = False

    @classmethod
    def of(cls, policy: OffloadPolicy, device: torch.device) -> Self:
        """Memory of shards by FSDP2's policy, with collectives on `device`."""
        if not isinstance(policy, CPUOffloadPolicy):
            return cls(device)
        return cls(torch.device("cpu"), is_offloaded=True, is_pinned=policy.pin_memory and device.type == "cuda")

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a shard."""
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self.is_pinned)


class FlatParameters:
    """Parameters of one dtype as one flat tensor, cut into a shard per rank.

    `master` is this rank's shard, in the parameters' own dtype; the optimizer's parameters are views of it. `gradient`
    is its gradient: the mean over ranks, added up over micro-batches; None while there is none.
    """

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, Sites],
        ranks: Ranks,
        device: torch.device,
        *,
        policy: MixedPrecisionPolicy,
        home: ShardMemory,
    ) -> None:
        self.ranks, self.device, self._home = ranks, device, home
        self.layout = self._layout([local_part(parameter).shape for parameter in parameters], ranks.shards.size())
        self.dtype = next(iter(parameters)).dtype
        self.weight_dtype = policy.param_dtype or self.dtype
        self.reduce_dtype = policy.reduce_dtype or self.weight_dtype
        self.divisor: float = ranks.count
        """By which the sum of gradients over ranks is divided."""
        # In fp16, whose largest value is 65504, a sum over ranks overflows long before their mean does.
        self._predivisor = 2 ** (ranks.count.bit_length() // 2) if self.reduce_dtype is torch.float16 else 1
        self.parameters = [
            UnitParameter(original, sites, self._place(index, sites, Division.of(original)))
            for index, (original, sites) in enumerate(parameters.items())
        ]
        self.master = self._cut(list(parameters))
        self._view_master()
        self._begin()

    @staticmethod
    def _layout(shapes: Sequence[torch.Size], world_size: int) -> Layout:
        return Layout.of(shapes, world_size)

    def _place(self, index: int, sites: Sites, division: Division | None) -> Place:
        part, ranks = self.layout.part(index, self.ranks.shards.rank()), self.ranks
        region = regions.region_of(*sites[0]) if division is None else division.region
        is_divided = division is not None
        return Place(self.layout, index, part.origin, ranks.shards, self.device, region, ranks.replicas, is_divided)

    def _begin(self) -> None:
        self.gradient: Tensor | None = None
        self._exact: Tensor | None = None
        """The gradient in the dtype of reductions, where that keeps more digits than the parameters'."""
        self.incoming: Tensor | None = None
        """A gradient on its way to host memory, to be added to one that is there; allocated when first needed."""
        self._has_incoming = False
        self._unreduced: Tensor | None = None
        """Whole gradients of this rank, of backward passes without sync."""
        self.has_unreduced = False
        self._shown_unreduced: set[UnitParameter] = set()
        """The parameters whose gradient stands for such ones: where a program has cleared it, they are dropped."""
        self._weights_hidden = False
        self.whole_weights: Tensor | None = None
        """The unsharded weights, flat: a part of the unit's weight slot."""

    @torch.no_grad()
    def duplicate(self) -> Self:
        """Return the same of a copy of the modules, without gradients; the modules do not know its shards yet."""
        other = copy.copy(self)
        other._begin()
        other.master = self.master if self.master.is_meta else self._zeros().copy_(self.master)
        other.parameters = [copy.copy(parameter) for parameter in self.parameters]
        for parameter in other.parameters:
            parameter.weight = parameter.memory = None
            parameter.set_shard(self.own_part(other.master, parameter))
        return other

    def _cut(self, originals: Sequence[nn.Parameter]) -> Tensor:
        """Return this rank's shard of the flat tensor, without ever making the whole one."""
        if any(original.is_meta for original in originals):
            return torch.empty(self.layout.shard_numel, dtype=self.dtype, device="meta")
        shard = self._zeros()
        for original, parameter in zip(originals, self.parameters, strict=True):
            part = parameter.part
            piece = local_part(original.detach()).reshape(-1)[part.origin : part.origin + part.stop - part.start]
            shard[part.start : part.stop] = piece
        return shard

    def _zeros(self) -> Tensor:
        return self._home.zeros(self.layout.shard_numel, self.dtype)

    def _view_master(self) -> None:
        for parameter in self.parameters:
            parameter.replace_shard(self.own_part(self.master, parameter))

    @staticmethod
    def own_part(shard: Tensor, parameter: UnitParameter) -> Tensor:
        """Part of a shard of the flat tensor, such as `master`, that belongs to a parameter."""
        return shard[parameter.part.start : parameter.part.stop]

    @property
    def shard_device(self) -> torch.device:
        """Device of the shards."""
        return self._home.device

    @property
    def is_trained(self) -> bool:
        """Return whether any of the parameters gets a gradient."""
        with plain_tensors():
            return any(parameter.shard.requires_grad for parameter in self.parameters)

    @property
    def weight_bytes(self) -> int:
        """Size of the unsharded weights."""
        return self.layout.numel * self.weight_dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Size of the unsharded gradients."""
        return self.layout.numel * self.reduce_dtype.itemsize

    @property
    def description(self) -> str:
        """What must be the same on all ranks."""
        trained = "trained" if self.is_trained else "frozen"
        shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in self.layout.shapes)
        return f"{trained} {self.dtype} as {self.weight_dtype}, summed in {self.reduce_dtype}: {shapes}"

    # Shards ----------------------------------------------------------------------------------------------------------

    def leave_meta(self) -> None:
        """Make the shard on the device, if it is on the meta device still, with zeros in it."""
        if self.master.is_meta:
            self.master = self._zeros()
            self._view_master()

    @torch.no_grad()
    def adopt_moved_shards(self) -> None:
        """Take over values that were given to the optimizer's parameters as new memory, such as by share_memory."""
        with plain_tensors():
            for parameter in self.parameters:
                part = self.own_part(self.master, parameter)
                if not is_same_memory(parameter.shard, part):
                    part.copy_(parameter.shard)
                    parameter.shard.data = part

    def replaced_parameter(self) -> UnitParameter | None:
        """Return a parameter that is no longer the shard, or whose memory is not the shard's; None if all are."""
        with plain_tensors():
            for parameter in self.parameters:
                shard = parameter.shard
                is_same = is_same_memory(shard, self.own_part(self.master, parameter))
                if not parameter.is_registered or not is_same:
                    return parameter
        return None

    def changed_weight(self) -> UnitParameter | None:
        """Parameter whose whole weight was written to, or given other memory, since it was registered; None if none."""
        version = self._version(present=True)
        for parameter in self.parameters:
            weight = parameter.weight
            assert weight is not None
            assert parameter.memory is not None
            if weight._version != version or local_part(weight).data_ptr() != parameter.memory.data_ptr():
                return parameter
        return None

    # Weights ---------------------------------------------------------------------------------------------------------

    def view_weights(self, memory: Tensor) -> None:
        """Let the weights lie in `memory`, bytes, for good: autograd keeps views of them."""
        self.whole_weights = memory.view(self.weight_dtype)
        for parameter in self.parameters:
            # Not nn.Parameter(view): that shares the buffer's version counter, every gather bumps it, and backward
            # would take the weights for modified.
            parameter.memory = self.whole_weights[parameter.span].view(parameter.shape)
            parameter.weight = parameter.module_parameter(parameter.memory.new_empty(0))
            parameter.show_weight(present=True)

    @torch.no_grad()
    def copy_in_shard(self, lane: Lane) -> list[Tensor]:
        """Copy this rank's shard to its place among the weights, cast, and return what is to be all-gathered."""
        assert self.whole_weights is not None
        lane.copy_in(self.whole_weights, self.master)
        return [self.whole_weights]

    def finish_gather(self) -> None:
        """Make the weights of what has been gathered, where they are not that."""

    def set_weights_present(self, *, present: bool) -> None:
        """Let autograd raise where it would use weights that are not in the buffer or have changed since forward.

        It raises where a tensor's version is not that at which it was saved. So the version is an even number where
        the weights are in the buffer, an odd one where they are not, and another after each change of the shards.
        """
        if self._weights_hidden or not (present or self.is_trained):
            # Autograd asks nobody before it uses a frozen weight that a function kept, other than by saving it.
            self._weights_hidden = not present
            for parameter in self.parameters:
                parameter.show_weight(present=present)
        self._set_version(present=present)

    def _set_version(self, *, present: bool) -> None:
        version = self._version(present=present)
        weights = tuple(parameter.weight for parameter in self.parameters)
        torch._C._autograd._unsafe_set_version_counter(weights, (version,) * len(weights))

    def _version(self, *, present: bool) -> int:
        return 2 * self.master._version + (0 if present else 1)

    # Gradients -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def write_gradient(self, buffer: Tensor, parameter: UnitParameter, gradient: Tensor, *, is_first: bool) -> None:
        """Write or add a parameter's gradient to the unsharded ones, cast to the reduce dtype."""
        if parameter.division is not None:
            gradient = parameter.division.part_of_gradient(gradient)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()  # a sparse embedding's
        target = buffer[parameter.span].view(parameter.shape)
        if not is_first:
            target.add_(gradient, alpha=1 / self._predivisor)
        elif self._predivisor == 1:
            target.copy_(gradient)
        else:
            torch.mul(gradient, 1 / self._predivisor, out=target)

    @torch.no_grad()
    def zero_missing_gradients(self, buffer: Tensor, written: Collection[UnitParameter]) -> None:
        """Zero what no gradient was written to."""
        for parameter in self.parameters:
            if parameter not in written:
                buffer[parameter.span].zero_()
        buffer[self.layout.used_numel :].zero_()

    @torch.no_grad()
    def keep_unreduced(self, buffer: Tensor) -> None:
        """Add the gradients in the buffer to those that wait for a backward pass with sync."""
        if self.has_unreduced:
            self._drop_cleared()
        if self._unreduced is None:
            self._unreduced = buffer.clone()
        elif self.has_unreduced:
            self._unreduced.add_(buffer)
        else:
            self._unreduced.copy_(buffer)
        self.has_unreduced = True

    @torch.no_grad()
    def add_unreduced(self, buffer: Tensor) -> None:
        """Add the gradients that wait to those in the buffer, which are to be reduced."""
        if self.has_unreduced:
            self._drop_cleared()
            assert self._unreduced is not None
            buffer.add_(self._unreduced)
            self.has_unreduced = False

    def _drop_cleared(self) -> None:
        assert self._unreduced is not None
        with plain_tensors():
            for parameter in self._shown_unreduced:
                if parameter.shard.grad is None:
                    self._unreduced[parameter.span].zero_()
        self._shown_unreduced.clear()

    @torch.no_grad()
    def show_unreduced(self, with_gradient: Collection[UnitParameter]) -> None:
        """Let parameters whose gradient waits have one, of what is reduced so far: a program may clear it."""
        self._adopt_gradients()
        with plain_tensors():
            for parameter, local in self._gradient_parts():
                if parameter in with_gradient:
                    self._shown_unreduced.add(parameter)
                    if parameter.shard.grad is None:
                        parameter.shard.grad = Shard.of(local, parameter.place)

    @property
    def awaits_reduction(self) -> bool:
        """Return whether gradients wait for a backward pass with sync that no program has cleared."""
        with plain_tensors():
            return self.has_unreduced and any(p.shard.grad is not None for p in self._shown_unreduced)

    @torch.no_grad()
    def accumulate_reduced(self, lane: Lane, buffer: Tensor, *, is_first: bool) -> bool:
        """Add the mean over ranks to the gradient shard; this rank's chunk of `buffer` is the sum.

        Before the first one of a backward pass the gradient shard is made what the optimizer sees of it. Return whether
        that was nothing.
        """
        is_zero = self._adopt_gradients() if is_first else False
        assert self.gradient is not None
        chunk, scale = lane.chunk(buffer), self._predivisor / self.divisor
        if not self._home.is_offloaded:
            self._sum(is_zero=is_zero, is_first=is_first).add_(chunk, alpha=scale)
            return is_zero
        mean = chunk.to(self.dtype, copy=True).mul_(scale)
        if is_zero:
            lane.copy_out(mean, self.gradient)
        else:
            self._copy_to_incoming(lane, mean)
        return is_zero

    def _sum(self, *, is_zero: bool, is_first: bool) -> Tensor:
        """Return what means are added to: the gradient shard, or where that keeps fewer digits, a sum that does not."""
        assert self.gradient is not None
        if torch.promote_types(self.dtype, self.reduce_dtype) == self.dtype:
            return self.gradient
        if self._exact is None:
            self._exact = self.gradient.to(self.reduce_dtype)
        elif is_zero:
            self._exact.zero_()
        elif is_first:  # what the program has done to the gradient since counts
            is_changed = self._exact.to(self.dtype) != self.gradient
            self._exact = torch.where(is_changed, self.gradient.to(self.reduce_dtype), self._exact)
        return self._exact

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

    def discard_gradients(self) -> None:
        """Forget a gradient that is on its way, and those that wait for a backward pass with sync."""
        self._has_incoming = self.has_unreduced = False
        self._shown_unreduced.clear()

    def _adopt_gradients(self) -> bool:
        """Make the gradient shard equal to what the optimizer sees of it, zero where it sees none.

        Returns whether it is zero everywhere.
        """
        if self.gradient is None:
            self.gradient = self._zeros()
        with plain_tensors():
            if all(parameter.shard.grad is None for parameter in self.parameters):
                self.gradient.zero_()
                return True
            for parameter, local in self._gradient_parts():
                published = parameter.shard.grad
                if published is None:
                    local.zero_()
                elif not is_same_memory(published, local):
                    local.copy_(published)
                    parameter.shard.grad = Shard.of(local, parameter.place)
        return False

    def publish_gradients(self, unused: Collection[UnitParameter]) -> None:
        """Show the gradient shard to the optimizer; `unused` parameters get none.

        A gradient that appeared on a shard meanwhile is autograd's, from a loss over the shards themselves such as a
        penalty on weights: it is added. Where shards lie in host memory, copies to there must have finished.
        """
        self._add_incoming()
        if self._exact is not None and self.gradient is not None:
            self.gradient.copy_(self._exact)
        with plain_tensors():
            for parameter, local in self._gradient_parts():
                published = parameter.shard.grad
                if published is None:
                    if parameter.shard.requires_grad and parameter not in unused:
                        parameter.shard.grad = Shard.of(local, parameter.place)
                elif not is_same_memory(published, local):
                    local.add_(published)
                    parameter.shard.grad = Shard.of(local, parameter.place)

    def _gradient_parts(self) -> Iterator[tuple[UnitParameter, Tensor]]:
        """Yield each parameter with its part of the gradient shard."""
        assert self.gradient is not None
        for parameter in self.parameters:
            yield parameter, self.own_part(self.gradient, parameter)


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors begin at the same place of the same storage."""
    # By storage, not by address: a part without elements has no address, and ranks must not differ in the answer.
    storages = a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr()
    return storages[0] == storages[1] and a.storage_offset() == b.storage_offset() and a.dtype == b.dtype
