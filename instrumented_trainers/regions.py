"""Which part of a whole parameter a rank has where tensor or expert parallelism divides the parameter.

A region is an axis-aligned box. Modules know the regions of their parameters by name, so a data-parallel strategy may
replace the parameters by shards of them.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

_REGIONS = "_parameter_regions"  # on a module: its regions by the names of its own parameters


@dataclass(frozen=True)
class Axis:
    """A mesh axis as this rank sees it: the ranks along it that share all other coordinates."""

    name: str
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.group.size()

    @property
    def index(self) -> int:
        """Return this rank's coordinate."""
        return self.group.rank()

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # process groups cannot be copied


@dataclass(frozen=True)
class Region:
    """A part of a parameter of `shape`: for each of `cuts`, an axis and a dim, one of equal chunks of that dim."""

    shape: torch.Size
    cuts: tuple[tuple[Axis, int], ...] = ()

    @property
    def sizes(self) -> torch.Size:
        """Return the shape of the part."""
        sizes = list(self.shape)
        for axis, dim in self.cuts:
            sizes[dim] //= axis.size
        return torch.Size(sizes)

    @property
    def offsets(self) -> torch.Size:
        """Offset of the part along each dim."""
        offsets = [0] * len(self.shape)
        for axis, dim in self.cuts:
            offsets[dim] = axis.index * (self.shape[dim] // axis.size)
        return torch.Size(offsets)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups of ranks over which the parts lie."""
        return tuple(axis.group for axis, _ in self.cuts)

    def part_of(self, full: Tensor) -> Tensor:
        """Return a view of the part of a whole tensor."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            full = full.narrow(dim, offset, size)
        return full

    @torch.no_grad()
    def gather(self, part: Tensor) -> Tensor:
        """Return the whole tensor of which each rank along the axes has its `part`."""
        for axis, dim in reversed(self.cuts):
            parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(axis.size)]
            dist.all_gather(parts, part.contiguous(), group=axis.group)
            part = torch.cat(parts, dim)
        return part


def region_of(module: nn.Module, name: str) -> Region | None:
    """Return the region of the module's own parameter of that name; None if each rank has the whole parameter."""
    return getattr(module, _REGIONS, {}).get(name)


def cut(module: nn.Module, name: str, axis: Axis, dim: int) -> None:
    """Replace the module's own parameter by this rank's part of it. Raises ValueError if equal parts are impossible."""
    parameter = module._parameters[name]
    assert parameter is not None
    if parameter.shape[dim] % axis.size:
        place = f"{name!r} of {type(module).__name__} {tuple(parameter.shape)}"
        raise ValueError(f"{place} cannot be divided into {axis.size} along dim {dim}")
    before = region_of(module, name) or Region(parameter.shape)
    view = Region(parameter.shape, ((axis, dim),)).part_of(parameter.detach())
    part = view.clone(memory_format=torch.contiguous_format)
    module._parameters[name] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    mark(module, name, dataclasses.replace(before, cuts=(*before.cuts, (axis, dim))))


def specialize(module: nn.Module, kind: type[nn.Module], **attributes: object) -> None:
    """Make a module an instance of `kind`, a subclass of its class, with further attributes, in place.

    Parents, optimizers and hooks hold the module and its parameters, so no other module may take its place; FSDP2's
    `fully_shard` changes the class for the same reason. Raises TypeError for a class that is no subclass.
    """
    if not issubclass(kind, type(module)):
        raise TypeError(f"{kind.__name__} is no subclass of {type(module).__name__}")
    module.__class__ = kind
    for name, attribute in attributes.items():
        setattr(module, name, attribute)


def mark(module: nn.Module, name: str, region: Region) -> None:
    """Let the module know the region of its own parameter of that name."""
    setattr(module, _REGIONS, {**getattr(module, _REGIONS, {}), name: region})


def parameter_regions(model: nn.Module) -> Iterator[tuple[nn.Parameter, Region]]:
    """Yield the parameters of which ranks have parts, with their regions; what stands at several places once."""
    seen: set[int] = set()
    for module in model.modules():
        for name, region in getattr(module, _REGIONS, {}).items():
            parameter = module._parameters.get(name)
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, region
