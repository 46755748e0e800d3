"""What all strategies take: options, and the device of a rank."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ShardOptions:
    """Precision and memory. A strategy raises NotImplementedError for what it does not support."""

    param_dtype: torch.dtype | None = None
    """What weights are gathered and computed in; None: the dtype they have. The optimizer's weights keep theirs."""
    reduce_dtype: torch.dtype | None = None
    """What gradients are summed over ranks in; None: param_dtype."""
    reshard_after_forward: bool | int = True
    """Whether weights are resharded after forward and gathered again for backward. (DDP never shards them.)

    A number: they are resharded to groups of so many ranks, so that backward gathers within a group. (FSDP2 only.)
    """
    buffers: int = 2
    """How many buffers for weights, and for gradients, the layers share; 2 is double buffering. (YaFSDP only.)"""
    gather_norms_once: bool = True
    """Whether the layers' norms are gathered once a step, all together, not with their layers. (YaFSDP only.)"""
    prefetch: int | None = None
    """How many layers to prefetch; None: the strategy's default.

    FSDP1 supports only 0, which turns prefetching off; YaFSDP prefetches as far as it has `buffers`.
    """
    offload: bool = False
    """Whether optimizer state, and shards of weights and gradients, lie in host memory. (FSDP2, YaFSDP, ZeRO-1.)"""


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device: the current one for CUDA, so set it before."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)
