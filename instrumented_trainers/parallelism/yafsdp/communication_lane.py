"""The lane on which a model's collectives run, one after the other, concurrently with compute.

Both lanes guarantee: a collective starts after the compute issued before the call, overlaps the compute issued after
it, and has finished for the compute issued after `wait`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from instrumented_trainers.parallelism.yafsdp.rank_programs import wait_for

# torch 2.13 renamed both and warns at the old names, which are all that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingCollective(Protocol):
    """A running collective."""

    def wait(self) -> Any:
        """Make later compute wait for the collective."""


DelayedRead: TypeAlias = Callable[[], list[int]]
"""Returns values that a collective leaves, when the host may wait for them."""


@dataclass(frozen=True)
class Ranks:
    """Who a model is sharded over and, where each shard is on several ranks, who has the same shard."""

    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Self:
        """Return the ranks of a mesh: one dim is the shards, of two the first is the replicas.

        Raises NotImplementedError for a mesh of more dims, ValueError for one that this rank is not in.
        """
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"YaFSDP: rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}: only its ranks may shard and "
                "run the module"
            )
        if mesh.ndim == 1:
            return cls(mesh.get_group())
        if mesh.ndim == 2:
            return cls(mesh.get_group(1), mesh.get_group(0) if mesh.size(0) > 1 else None)
        raise NotImplementedError(
            f"YaFSDP shards over the last dim of a mesh and replicates over the first; this one has {mesh.ndim} dims "
            f"{mesh.mesh_dim_names or ''}, so hand it the part that is data-parallel: mesh['dp_replicate', 'dp_shard']"
        )

    @property
    def count(self) -> int:
        """Return over how many ranks gradients are averaged."""
        return self.shards.size() * (self.replicas.size() if self.replicas is not None else 1)

    @property
    def all(self) -> tuple[int, ...]:
        """Return the global numbers of the ranks that this one shares a coordinate with."""
        return tuple(dict.fromkeys(rank for group in self.members for rank in group))

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Return the global numbers of the ranks; equal for two groups of the same ranks."""
        groups = (self.shards, self.replicas)
        return tuple(tuple(dist.get_process_group_ranks(group)) for group in groups if group is not None)


class Lane:
    """Issues the collectives of one model. A subclass runs them concurrently with compute.

    Where shards have replicas, a sum over the shards' ranks is summed over the replicas' ranks next: what goes there is
    a shard, not the whole.
    """

    host_waits = True
    """Whether waiting for a collective makes the host wait, too."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.world_size = ranks.shards.size()
        self.rank = ranks.shards.rank()

    def all_gather(self, buffers: Sequence[Tensor]) -> PendingCollective:
        """Gather every rank's chunk of each tensor in place; this rank's own chunk must lie there already."""
        raise NotImplementedError

    def reduce_scatter(self, buffers: Sequence[Tensor], *, over_replicas: bool = True) -> PendingCollective:
        """Sum this rank's chunk of every rank's tensors in place; the rest of them is undefined afterwards."""
        raise NotImplementedError

    def all_reduce_max(self, values: Tensor) -> PendingCollective:
        """Replace each value, in place, by its maximum over all ranks."""
        raise NotImplementedError

    def read_later(self, values: Tensor, pending: PendingCollective) -> DelayedRead:
        """Return a function that returns the integers that the collective leaves in `values`."""
        raise NotImplementedError

    def copy_in(self, buffer: Tensor, shard: Tensor) -> None:
        """Copy this rank's shard, cast, into its chunk of `buffer`; the next collective starts after that.

        A shard in host memory must not change before `wait_for_copies`.
        """
        self.chunk(buffer).copy_(shard)

    def copy_out(self, values: Tensor, host: Tensor) -> None:
        """Copy values to host memory, where they are after `wait_for_copies`."""
        host.copy_(values)

    def wait_for_copies(self) -> None:
        """Make the host wait until all copies from and to host memory have finished."""

    def chunk(self, buffer: Tensor) -> Tensor:
        """Return this rank's chunk of a flat tensor: one of world_size equal parts."""
        return buffer.view(self.world_size, -1)[self.rank]


class GlooLane(Lane):
    """For gloo: its threads run the collectives, and a pending collective is gloo's own Work."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._replica_sum: _HybridReduction | None = None

    def all_gather(self, buffers: Sequence[Tensor]) -> PendingCollective:
        group = self.ranks.shards
        return _Works([all_gather_single(buffer, self.chunk(buffer), group=group, async_op=True) for buffer in buffers])

    def reduce_scatter(self, buffers: Sequence[Tensor], *, over_replicas: bool = True) -> PendingCollective:
        chunks, group = [self.chunk(buffer) for buffer in buffers], self.ranks.shards
        works = _Works(
            [
                _reduce_scatter(chunk, buffer, group=group, async_op=True)
                for chunk, buffer in zip(chunks, buffers, strict=True)
            ]
        )
        if self.ranks.replicas is None or not over_replicas:
            return works
        # The all-reduce must follow the finished reduce-scatter. The previous unit's should have finished by now: it
        # continues at this point of the program, which is the same on all ranks.
        if self._replica_sum is not None:
            self._replica_sum.start_all_reduce()
        self._replica_sum = _HybridReduction(works, chunks, self.ranks.replicas)
        return self._replica_sum

    def all_reduce_max(self, values: Tensor) -> PendingCollective:
        over_shards = _Works([dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.ranks.shards, async_op=True)])
        if self.ranks.replicas is None:
            return over_shards
        over_shards.wait()
        return _Works([dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.ranks.replicas, async_op=True)])

    def read_later(self, values: Tensor, pending: PendingCollective) -> DelayedRead:
        def read() -> list[int]:
            pending.wait()
            return values.tolist()

        return read


class _Works:
    """Collectives that are waited for together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            wait_for(work)


class _HybridReduction:
    """Sums over the shards' ranks that are to be summed over the replicas' ranks when they are over."""

    def __init__(self, works: _Works, chunks: Sequence[Tensor], replicas: dist.ProcessGroup) -> None:
        self._works, self._chunks, self._replicas = works, chunks, replicas
        self._all_reduce_started = False

    def start_all_reduce(self) -> None:
        if not self._all_reduce_started:
            self._works.wait()
            self._works = _Works(
                [dist.all_reduce(chunk, group=self._replicas, async_op=True) for chunk in self._chunks]
            )
            self._all_reduce_started = True

    def wait(self) -> None:
        self.start_all_reduce()
        self._works.wait()


class CudaStreamLane(Lane):
    """For CUDA: one high-priority stream, ordered against the computing stream by events. The host never waits.

    Sums over replicas run on a second one. Copies from and to host memory run on a stream of their own, so that the
    copies of one unit overlap the collectives of another.

    The tensors must outlive their use on the stream: buffers that live as long as the model do, others would need
    ``record_stream``.
    """

    host_waits = False

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        super().__init__(ranks)
        self.stream = torch.cuda.Stream(device, priority=-1)
        # Another communicator than the shards': its sums of one unit overlap the next unit's reduce-scatter.
        self._replica_stream = torch.cuda.Stream(device, priority=-1) if ranks.replicas is not None else None
        self._copies: torch.cuda.Stream | None = None
        self._on_host: Tensor | None = None
        """Pinned memory for values that are read later: each time after those of the last time have been read."""

    def all_gather(self, buffers: Sequence[Tensor]) -> PendingCollective:
        def gather() -> None:
            for buffer in buffers:
                all_gather_single(buffer, self.chunk(buffer), group=self.ranks.shards)

        return self._issue(gather)

    def reduce_scatter(self, buffers: Sequence[Tensor], *, over_replicas: bool = True) -> PendingCollective:
        def sum_up() -> None:
            for buffer in buffers:
                _reduce_scatter(self.chunk(buffer), buffer, group=self.ranks.shards)

        sums = self._issue(sum_up)
        if self._replica_stream is None or not over_replicas:
            return sums
        self._replica_stream.wait_stream(self.stream)
        with torch.cuda.stream(self._replica_stream):
            for buffer in buffers:
                dist.all_reduce(self.chunk(buffer), group=self.ranks.replicas)
        return _StreamEvent(self._replica_stream)

    def all_reduce_max(self, values: Tensor) -> PendingCollective:
        def over_all() -> None:
            for group in (self.ranks.shards, self.ranks.replicas):
                if group is not None:
                    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)

        return self._issue(over_all)

    def read_later(self, values: Tensor, pending: PendingCollective) -> DelayedRead:  # noqa: ARG002 -- ordered by the stream
        if self._on_host is None or self._on_host.shape != values.shape:
            self._on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        on_host = self._on_host
        with torch.cuda.stream(self.stream):
            on_host.copy_(values, non_blocking=True)
            copied = self.stream.record_event()

        def read() -> list[int]:
            copied.synchronize()
            return on_host.tolist()

        return read

    def copy_in(self, buffer: Tensor, shard: Tensor) -> None:
        if shard.is_cuda:
            super().copy_in(buffer, shard)
            return
        chunk, copies = self.chunk(buffer), self._copy_stream()
        copies.wait_stream(torch.cuda.current_stream(copies.device))  # which may use the buffer until here
        with torch.cuda.stream(copies):
            chunk.copy_(shard.to(chunk.device, non_blocking=True))  # the device casts faster than the host
        self.stream.wait_stream(copies)

    def copy_out(self, values: Tensor, host: Tensor) -> None:
        copies = self._copy_stream()
        copies.wait_stream(torch.cuda.current_stream(copies.device))
        values.record_stream(copies)
        with torch.cuda.stream(copies):
            host.copy_(values, non_blocking=True)

    def wait_for_copies(self) -> None:
        if self._copies is not None:
            self._copies.synchronize()

    def _copy_stream(self) -> torch.cuda.Stream:
        if self._copies is None:
            self._copies = torch.cuda.Stream(self.stream.device)
        return self._copies

    def _issue(self, collectives: Callable[[], Any]) -> PendingCollective:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            collectives()
        return _StreamEvent(self.stream)


class _StreamEvent:
    """This moment on the lane's stream, for which the current stream of its device can be made to wait."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device, self._event = stream.device, stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


def lane_for(device: torch.device, ranks: Ranks) -> Lane:
    """Return the lane for a device. Raises NotImplementedError where there is none for its kind."""
    if device.type == "cpu":
        return GlooLane(ranks)
    if device.type == "cuda":
        return CudaStreamLane(ranks, device)
    raise NotImplementedError(f"YaFSDP runs on cpu and cuda, not on {device.type}")
