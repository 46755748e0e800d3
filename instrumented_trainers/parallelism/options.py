"""What can be asked of every strategy."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ShardOptions:
    """Precision and memory. A strategy that cannot do what is asked says so."""

    param_dtype: torch.dtype | None = None
    """What weights are gathered and computed in; None: the dtype they have. The optimizer's weights keep theirs."""
    reduce_dtype: torch.dtype | None = None
    """What gradients are summed over ranks in; None: param_dtype."""
    reshard_after_forward: bool | int = True
    """Whether weights are let go after forward and gathered again for backward. (DDP never shards them.)

    A number: they stay sharded over groups of so many ranks, so that backward gathers from near ones. (FSDP2 only.)
    """
    buffers: int = 2
    """How many buffers for weights, and for gradients, the layers share in turn. (YaFSDP only.)"""
    gather_norms_once: bool = True
    """Whether the layers' norms are gathered once a step, all together, not with their layers. (YaFSDP only.)"""
    prefetch: int | None = None
    """How many layers ahead of the one that runs are gathered; None: as the strategy does by itself.

    FSDP1 can only be told 0, which turns its prefetching off; YaFSDP gathers ahead as far as it has `buffers`.
    """
