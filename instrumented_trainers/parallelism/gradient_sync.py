"""What a training loop does with gradients, the same words for every strategy."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def accumulate(model: nn.Module, last: bool) -> Iterator[None]:
    """Run forward and backward of one micro-batch inside; gradients are complete after the `last` of them.

    Gradients of micro-batches add up: divide the loss by their number.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    elif isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)) and not last:
        with model.no_sync():
            yield
    else:
        yield


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients so that their norm over all ranks is at most `max_norm`; return the norm before."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
