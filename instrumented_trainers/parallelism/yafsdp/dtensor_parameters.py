"""Parameters that are DTensors, as torch's tensor and expert parallelism make them: this rank's part is sharded.

Modules compute with DTensors again, whose local tensors lie in the buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from instrumented_trainers.regions import Axis, Region


@dataclass(frozen=True)
class Division:
    """How a parameter is divided over ranks beneath YaFSDP."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @classmethod
    def of(cls, parameter: Tensor) -> Self | None:
        """Return how a parameter is divided; None for a plain tensor."""
        if not isinstance(parameter, DTensor):
            return None
        return cls(parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())

    @property
    def region(self) -> Region:
        """The part of the whole parameter that this rank has."""
        names = self.mesh.mesh_dim_names or tuple(map(str, range(self.mesh.ndim)))
        return Region(
            self.shape,
            tuple(
                (Axis(names[number], self.mesh.get_group(number)), placement.dim)
                for number, placement in enumerate(self.placements)
                if isinstance(placement, ShardPlacement)
            ),
        )

    def dtensor(self, part: Tensor) -> DTensor:
        """DTensor of which this rank has `part`, in its memory."""
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def part_of_gradient(self, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient that autograd has left."""
        assert isinstance(gradient, DTensor)
        return gradient.redistribute(placements=self.placements).to_local()


def local_part(tensor: Tensor) -> Tensor:
    """Part of a DTensor that this rank has; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def refuse_division(parameter: Tensor, name: str, data_ranks: Sequence[dist.ProcessGroup]) -> None:
    """Raise NotImplementedError for a DTensor whose parts YaFSDP cannot shard."""
    if not isinstance(parameter, DTensor):
        return
    if any(type(placement) not in (ShardPlacement, Replicate) for placement in parameter.placements):
        raise NotImplementedError(
            f"YaFSDP: {name} is a DTensor placed {parameter.placements}; it takes those that are sharded or replicated"
        )
    others = {int(rank) for rank in parameter.device_mesh.mesh.flatten()} - {dist.get_rank()}
    if shared := others & {rank for group in data_ranks for rank in dist.get_process_group_ranks(group)}:
        raise NotImplementedError(
            f"YaFSDP: {name} is a DTensor over ranks {sorted(shared)}, which YaFSDP shards over, too; hand it the part "
            "of the mesh that is data-parallel: fully_shard(module, mesh['dp'])"
        )
    mesh = parameter.device_mesh
    for number, placement in enumerate(parameter.placements):
        if isinstance(placement, ShardPlacement) and parameter.shape[placement.dim] % mesh.size(number):
            raise NotImplementedError(
                f"YaFSDP: {name} {tuple(parameter.shape)} is a DTensor of unequal parts along dim {placement.dim}"
            )
