"""A shard as ``torch.distributed.checkpoint`` takes it, which can reshard it.

A rank's shard of a parameter is a range of the flattened parameter; the checkpoint wants boxes. `FlatShard` says which
boxes a range is, through the three methods that the checkpoint's planner asks any tensor for.
"""

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from instrumented_trainers.parallelism.yafsdp.layout import Layout, boxes
from instrumented_trainers.parallelism.yafsdp.rank_programs import note, waiting
from instrumented_trainers.regions import Region


@dataclass(frozen=True)
class Place:
    """Where a shard lies: in which parameter of which layout, and on which rank of which."""

    layout: Layout
    index: int
    origin: int
    """The number of the shard's first element in the flattened parameter."""
    ranks: dist.ProcessGroup
    device: torch.device
    """Where the ranks' collectives run."""
    region: Region | None = None
    """Which part of the whole parameter the flattened one is, where tensor parallelism divides it."""
    replicas: dist.ProcessGroup | None = None
    """Who has the same shard, where there are replicas."""
    shows_whole: bool = False
    """Whether a program sees the whole parameter, as that of a DTensor, not the part that is flattened."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # process groups are not copied when asynchronous saving copies a shard to the host

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the whole parameter."""
        return self.part_shape if self.region is None else self.region.shape

    @property
    def part_shape(self) -> torch.Size:
        """Return the shape of the part that is flattened."""
        return self.layout.shapes[self.index]

    @property
    def visible_shape(self) -> torch.Size:
        """Return the shape that a program sees."""
        return self.shape if self.shows_whole else self.part_shape

    @functools.cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups of ranks over which the elements lie that a program sees, one within the other."""
        return (self.ranks, *(self.region.groups if self.shows_whole and self.region is not None else ()))

    @property
    def offsets(self) -> torch.Size:
        """Offset of that part in the whole parameter, along each dim."""
        return torch.Size([0] * len(self.part_shape)) if self.region is None else self.region.offsets

    @torch.no_grad()
    def gather(self, local: Tensor) -> Tensor:
        """Return the whole tensor of which each rank has its part in `local`, on the device of `local`."""
        full = self.gather_part(local)
        return full if self.region is None else self.region.gather(full)

    def gather_visible(self, local: Tensor) -> Tensor:
        """Return the tensor that a program sees."""
        return self.gather(local) if self.shows_whole else self.gather_part(local)

    def cut_visible(self, full: Tensor, numel: int) -> Tensor:
        """Return the `numel` elements that lie here of a tensor as a program sees it."""
        return self.part_of(full, numel) if self.shows_whole else self.cut(full, numel)

    @torch.no_grad()
    def gather_part(self, local: Tensor) -> Tensor:
        """Return the tensor that is flattened: the whole one, but for tensor parallelism."""
        parts = [self.layout.part(self.index, rank) for rank in range(self.ranks.size())]
        longest = max(part.stop - part.start for part in parts)
        sent = torch.zeros(longest, dtype=local.dtype, device=self.device)
        sent[: local.numel()] = local
        received = [torch.empty_like(sent) for _ in parts]
        note(f"gather of a {tuple(self.part_shape)}")
        waiting(dist.all_gather, received, sent, group=self.ranks)
        full = torch.empty(self.part_shape.numel(), dtype=local.dtype, device=local.device)
        for part, values in zip(parts, received, strict=True):
            length = part.stop - part.start
            full[part.origin : part.origin + length] = values[:length]
        return full.view(self.part_shape)

    def cut(self, full: Tensor, numel: int) -> Tensor:
        """Return the `numel` elements that lie here of a tensor that is flattened."""
        return full.reshape(-1)[self.origin : self.origin + numel]

    @torch.no_grad()
    def part_of(self, full: Tensor, numel: int) -> Tensor:
        """Return the `numel` elements of a whole tensor that lie here."""
        if self.region is not None:
            full = self.region.part_of(full)
        return self.cut(full, numel)


@dataclass(frozen=True)
class Owned:
    """The place of a tensor of which one rank has all elements and the others none."""

    shape: torch.Size
    owner: int
    """Its number among `ranks`."""
    ranks: dist.ProcessGroup
    device: torch.device
    origin: int = 0

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @property
    def part_shape(self) -> torch.Size:
        """Shape of the flattened tensor: the whole."""
        return self.shape

    @property
    def offsets(self) -> torch.Size:
        """Offset of that, along each dim: 0."""
        return torch.Size([0] * len(self.shape))

    @torch.no_grad()
    def gather(self, local: Tensor) -> Tensor:
        """Return the whole tensor, on every rank, on the device of `local`."""
        sent = torch.zeros(self.shape, dtype=local.dtype, device=self.device)
        if self.ranks.rank() == self.owner:
            sent.copy_(local.view(self.shape))
        waiting(dist.broadcast, sent, group=self.ranks, group_src=self.owner)
        return sent.to(local.device)


class ShardPlace(Protocol):
    """Where a range of elements lies in a whole tensor: in a part of it, flattened, from `origin` on."""

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the whole tensor."""

    @property
    def part_shape(self) -> torch.Size:
        """Return the shape of the part."""

    @property
    def offsets(self) -> torch.Size:
        """Offset of the part in the whole, along each dim."""

    @property
    def origin(self) -> int:
        """Return the number of the range's first element in the flattened part."""

    def gather(self, local: Tensor) -> Tensor:
        """Return the whole tensor of which each rank has its range in `local`. All ranks call it."""


class FlatShard(Tensor):
    """A tensor of which this rank has a range of elements, in row-major order. It can be saved and loaded.

    `local` is not copied: what is loaded lands in it.
    """

    local: Tensor
    """The elements that this rank has: one dim."""
    place: ShardPlace
    pieces: list[tuple[torch.Size, Tensor]]
    """The boxes that this rank has: each one's offsets and its elements, a view of `local`."""

    @staticmethod
    def __new__(cls, local: Tensor, place: ShardPlace) -> Self:
        shard = Tensor._make_wrapper_subclass(cls, place.shape, dtype=local.dtype, device=local.device)
        shard.local, shard.place, shard.pieces = local, place, []
        offset = 0
        for offsets, sizes in boxes(place.part_shape, place.origin, place.origin + local.numel()):
            size, begin = torch.Size(sizes), torch.Size(map(operator.add, offsets, place.offsets))
            shard.pieces.append((begin, local[offset : offset + size.numel()].view(size)))
            offset += size.numel()
        if not place.shape.numel():  # no range of it has elements, and a checkpoint needs one piece of each tensor
            shard.pieces.append((place.offsets, local.view(place.part_shape)))
        return shard

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets, piece.size()),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.size(),
                ),
            )
            for offsets, piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, piece.size()) for offsets, piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, piece in self.pieces:
            if offsets == index.offset:
                return piece
        raise ValueError(f"{index.fqn}: this rank has no part that begins at {index.offset}")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shard = args[0]
        if function is torch.ops.aten.detach.default:
            return shard
        if function in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            return cls(function(shard.local, *args[1:], **(kwargs or {})), shard.place)
        if function is torch.ops.aten.new_empty.default:
            # How asynchronous saving copies: it makes an empty one on the host, then copies the attributes into it.
            empty = torch.empty(0, dtype=shard.dtype, device=(kwargs or {}).get("device"))
            return cls(empty, dataclasses.replace(shard.place, origin=0))  # type: ignore[type-var]
        raise NotImplementedError(
            f"YaFSDP: this rank has a part of the tensor only, which can be saved and loaded, not computed with "
            f"({function}); call full_tensor() on all ranks to get it whole"
        )

    def full_tensor(self) -> Tensor:
        """Return the whole tensor, on every rank. All ranks must call it."""
        return self.place.gather(self.local)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            "YaFSDP: this rank has a part of the tensor only, so torch.save would lose the others; save with "
            "torch.distributed.checkpoint, or get it whole, on all ranks: torch.distributed.checkpoint.state_dict."
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FlatShard(shape={tuple(self.shape)}, pieces={[tuple(piece.shape) for _, piece in self.pieces]})"
