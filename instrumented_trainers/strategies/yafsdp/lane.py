"""The one lane on which a model's collectives run, one after the other, beside the computation.

Both lanes promise the same: a collective starts after what was computed before the call, runs beside what is computed
after it, and is over, for whoever computes next, once its token was waited for.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both and warns at the old names, which are all that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Token(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Let what is computed after this call start only when the collective is over."""


class Lane:
    """Issues the collectives of one process group. `_issue` says how they run beside the computation."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def all_gather(self, whole: Tensor) -> Token:
        """Gather every rank's chunk of `whole` in place; this rank's own chunk must lie there already."""
        return self._issue(_all_gather, whole, self.chunk(whole))

    def reduce_scatter(self, whole: Tensor) -> Token:
        """Sum this rank's chunk of every rank's `whole` in place; the rest of `whole` is undefined afterwards."""
        return self._issue(_reduce_scatter, self.chunk(whole), whole)

    def maximum(self, values: Tensor) -> Token:
        """Replace each value, in place, by its maximum over the ranks."""
        return self._issue(dist.all_reduce, values, op=dist.ReduceOp.MAX)

    def chunk(self, whole: Tensor) -> Tensor:
        """Return this rank's chunk of a flat tensor: one of world_size equal parts."""
        return whole.view(self.world_size, -1)[self.rank]

    def _issue(self, collective: Callable[..., Any], *tensors: Tensor, **options: Any) -> Token:
        raise NotImplementedError


class HostLane(Lane):
    """For gloo: its threads run the collectives, and a token is gloo's own Work."""

    def _issue(self, collective: Callable[..., Any], *tensors: Tensor, **options: Any) -> Token:
        return collective(*tensors, group=self.group, async_op=True, **options)


class StreamLane(Lane):
    """For CUDA: one high-priority stream, ordered against the computing stream by events. The host never waits.

    The tensors must outlive their use on the stream: buffers that live as long as the model do, others would need
    ``record_stream``.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self.stream = torch.cuda.Stream(device, priority=-1)

    def _issue(self, collective: Callable[..., Any], *tensors: Tensor, **options: Any) -> Token:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            collective(*tensors, group=self.group, **options)
        return _Passed(self.stream.record_event())


class _Passed:
    """An event on the lane's stream that the current stream can be made to wait for."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def lane_for(device: torch.device, group: dist.ProcessGroup) -> Lane:
    """Return the lane for a device. Raises NotImplementedError where there is none for its kind."""
    if device.type == "cpu":
        return HostLane(group)
    if device.type == "cuda":
        return StreamLane(group, device)
    raise NotImplementedError(f"YaFSDP runs on cpu and cuda, not on {device.type}")
