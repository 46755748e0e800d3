"""A parameter with gather hooks as a flat tensor of its own: the hooks say what is sent and what the weight is."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from instrumented_trainers.parallelism.yafsdp.buffers import regions
from instrumented_trainers.parallelism.yafsdp.communication_lane import Lane, Ranks
from instrumented_trainers.parallelism.yafsdp.flat_parameters import FlatParameters, ShardMemory, Sites, UnitParameter
from instrumented_trainers.parallelism.yafsdp.gather_hooks import OriginalClass, plain_values
from instrumented_trainers.parallelism.yafsdp.layout import Layout
from instrumented_trainers.parallelism.yafsdp.mixed_precision import MixedPrecisionPolicy


class HookedParameters(FlatParameters):
    """One parameter with gather hooks: a shard has rows of it. What the hooks send lies in the unit's buffer.

    The optimizer sees a plain shard. Where the whole weight has memory of its own, that is there while the unit runs.
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
        ((original, sites),) = parameters.items()
        original_class = OriginalClass.of(original)
        assert original_class is not None
        self._class = original_class
        self._mesh = DeviceMesh.from_group(ranks.shards, device.type)
        self._policy, self._module = policy, sites[0][0]
        self._sizes: list[tuple[torch.Size, torch.dtype]] | None = None
        plain = nn.Parameter(plain_values(original).detach(), requires_grad=original.requires_grad)
        plain.__dict__.update(original.__dict__)
        super().__init__({plain: sites}, ranks, device, policy=policy, home=home)
        self.parameters[0].original_class = original_class

    def _begin(self) -> None:
        super()._begin()
        self._outputs: list[Tensor] = []
        """What has been gathered of each input of the hooks, parts of the unit's weight slot."""
        self._metadata: Any = None
        self._is_gathered = False
        """Whether something has been gathered that the weight has not been made of."""
        self._own_memory: list[Tensor] = []
        """Tensors of the whole weight that do not lie in the slot."""

    @staticmethod
    def _layout(shapes: Sequence[torch.Size], world_size: int) -> Layout:
        (shape,) = shapes
        return Layout((shape,), (0,), shape.numel(), world_size)  # without padding: a shard is rows

    @property
    def weight_bytes(self) -> int:
        return self._regions[-1].stop

    @property
    def description(self) -> str:
        return f"{super().description}, gathered by {self._class.kind.__name__}"

    def _rows(self) -> Any:
        """This rank's rows, of the parameter's own class."""
        (shape,) = self.layout.shapes
        return self._class.wrap(self.master.view(-1, *shape[1:]))

    @torch.no_grad()
    def _inputs(self) -> list[Tensor]:
        """What this rank sends. The hook may call collectives: all ranks call it at the same place."""
        (shape,) = self.layout.shapes
        hook = self._rows().fsdp_pre_all_gather
        stride = torch.empty(shape, device="meta").stride()
        arguments = (self._mesh, shape, stride, self._module, self._policy)
        takes_mesh_alone = len(inspect.signature(hook).parameters) == 1  # FSDP2's older protocol
        inputs, self._metadata = hook(*arguments[:1] if takes_mesh_alone else arguments)
        sizes = [(values.shape, values.dtype) for values in inputs]
        if self._sizes is None:
            self._sizes = sizes
        if sizes != self._sizes:
            raise NotImplementedError(
                f"YaFSDP: fsdp_pre_all_gather of {self._class.kind.__name__} sends {sizes}, but {self._sizes} before: "
                "buffers do not change"
            )
        return [values.reshape(-1) for values in inputs]

    @property
    def _regions(self) -> list[slice]:
        if self._sizes is None:
            self._inputs()
        assert self._sizes is not None
        return regions([size.numel() * dtype.itemsize * self.layout.world_size for size, dtype in self._sizes])

    def _whole(self, weight: Tensor | None) -> Any:
        """Whole weight and its inner tensors, of what was gathered; None where it is written to `weight`."""
        assert self._sizes is not None
        outputs = [values.view(-1, *size[1:]) for values, (size, _) in zip(self._outputs, self._sizes, strict=True)]
        options = {} if weight is None else {"out": weight}
        return self._rows().fsdp_post_all_gather(tuple(outputs), self._metadata, self.weight_dtype, **options)

    def view_weights(self, memory: Tensor) -> None:
        (parameter,) = self.parameters
        self._inputs()  # for the metadata that go with a weight
        assert self._sizes is not None
        pairs = zip(self._regions, self._sizes, strict=True)
        self._outputs = [memory[region].view(dtype) for region, (_, dtype) in pairs]
        with torch.no_grad():
            whole, inner_tensors = self._whole(None)
        if whole.shape != parameter.shape:
            raise NotImplementedError(
                f"YaFSDP: fsdp_post_all_gather of {self._class.kind.__name__} makes {tuple(whole.shape)} of a "
                f"parameter of {tuple(parameter.shape)}"
            )
        parameter.weight = nn.Parameter(whole) if type(whole) is not Tensor else nn.Parameter(whole.new_empty(0))
        if type(whole) is Tensor:
            parameter.weight.data = whole  # with a version of its own, as in FlatParameters
        slot = memory.untyped_storage().data_ptr()
        self._own_memory = [values for values in inner_tensors if values.untyped_storage().data_ptr() != slot]

    @torch.no_grad()
    def copy_in_shard(self, lane: Lane) -> list[Tensor]:
        for output, values in zip(self._outputs, self._inputs(), strict=True):
            lane.copy_in(output, values)
        self._is_gathered = True
        return [output.view(torch.uint8) for output in self._outputs]  # gloo knows no fp8

    @torch.no_grad()
    def finish_gather(self) -> None:
        if not self._is_gathered:
            return
        for values in self._own_memory:
            values.untyped_storage().resize_(values.numel() * values.itemsize)
        self._whole(self.parameters[0].weight)
        self._is_gathered, self._metadata = False, None

    def set_weights_present(self, *, present: bool) -> None:
        if not present:
            self._is_gathered = False
            for values in self._own_memory:
                values.untyped_storage().resize_(0)
        self._set_version(present=present)

    def changed_weight(self) -> UnitParameter | None:
        (parameter,) = self.parameters
        assert parameter.weight is not None
        return parameter if parameter.weight._version != self._version(present=True) else None
