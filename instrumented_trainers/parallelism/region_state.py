"""State of parameters that are divided over ranks: it is saved and loaded as parts of whole tensors.

A checkpoint then has the whole names and shapes, and another layout, or one process, can load it. YaFSDP's state leaves
the engine so already.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from instrumented_trainers import regions
from instrumented_trainers.parallelism.yafsdp.flat_shard import FlatShard
from instrumented_trainers.regions import Region

_WRAPPER = "module."  # DDP's


@dataclass(frozen=True)
class RegionPlace:
    """The place of a region's elements, or of the rows of it that FSDP2 left to this rank."""

    region: Region
    origin: int = 0
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # as of process groups

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the whole parameter."""
        return self.region.shape

    @property
    def part_shape(self) -> torch.Size:
        """Return the shape of the region."""
        return self.region.sizes

    @property
    def offsets(self) -> torch.Size:
        """Offset of the region along each dim."""
        return self.region.offsets

    def original(self, local: Tensor) -> Tensor:
        """Return the tensor as the strategy has it: plain, or a DTensor."""
        if self.mesh is None:
            return local.view(self.part_shape)
        stride = torch.empty(self.part_shape, device="meta").stride()
        rows = local.view(-1, *self.part_shape[1:])
        return DTensor.from_local(
            rows, self.mesh, self.placements, run_check=False, shape=self.part_shape, stride=stride
        )

    @torch.no_grad()
    def gather(self, local: Tensor) -> Tensor:
        """Return the whole tensor of which each rank has its range in `local`. All ranks call it."""
        part = self.original(local)
        return self.region.gather(part.full_tensor() if isinstance(part, DTensor) else part)


def with_whole_shapes(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of `checkpoint_state`'s form whose tensors of divided parameters know their place in the whole.

    They share the memory of those in `state`.
    """
    parameter_regions = named_regions(model)
    if not parameter_regions:
        return state
    optimizer = state["optimizer"]
    by_name = {
        name: {key: _place_tensor(value, parameter_regions.get(name)) for key, value in values.items()}
        for name, values in optimizer["state"].items()
    }
    return {
        "model": {name: _place_tensor(value, parameter_regions.get(name)) for name, value in state["model"].items()},
        "optimizer": {**optimizer, "state": by_name},
    }


def with_own_shapes(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state that `with_whole_shapes` was given, with what was loaded since."""
    optimizer = state["optimizer"]
    by_name = {
        name: {key: _original(value) for key, value in values.items()} for name, values in optimizer["state"].items()
    }
    return {
        "model": {name: _original(value) for name, value in state["model"].items()},
        "optimizer": {**optimizer, "state": by_name},
    }


def named_regions(model: nn.Module) -> Mapping[str, Region]:
    """Return the regions of a model's divided parameters by their names, those without wrappers."""
    return {
        f"{prefix}.{name}".removeprefix(".").removeprefix(_WRAPPER): region
        for prefix, module in model.named_modules()
        for name in module._parameters
        if (region := regions.region_of(module, name)) is not None
    }


def _place_tensor(value: Any, region: Region | None) -> Any:
    if region is None or not isinstance(value, Tensor) or isinstance(value, FlatShard) or value.shape != region.sizes:
        return value  # such as the number of steps
    if not isinstance(value, DTensor):
        return FlatShard(value.detach().view(-1), RegionPlace(region))
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    origin = offsets[0] * value.shape[1:].numel()
    place = RegionPlace(region, origin, value.device_mesh, tuple(value.placements))
    return FlatShard(value.to_local().detach().view(-1), place)


def _original(value: Any) -> Any:
    if isinstance(value, FlatShard) and isinstance(value.place, RegionPlace):
        return value.place.original(value.local)
    return value
