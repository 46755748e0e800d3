"""Cross entropy of logits of which each rank has a part of the vocabulary (loss parallelism).

No rank has the logits of the whole vocabulary: what is communicated are two numbers and a maximum per token.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instrumented_trainers.parallelism.collective_functions import all_reduced
from instrumented_trainers.regions import Axis


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, axis: Axis) -> Tensor:
    """Return the loss of each token, shape (S), in nats, the same on every rank of the axis.

    `logits` (S, V / ranks) are this rank's, `targets` (S) numbers of the whole vocabulary.
    """
    return _CrossEntropy.apply(logits, targets, axis)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis) -> Tensor:
        highest = logits.amax(dim=-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=axis.group)
        shifted = logits - highest[:, None]
        local = targets - axis.index * logits.shape[-1]
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(elsewhere, 0)
        exponentials = shifted.exp()
        target_logits = shifted.gather(1, local[:, None]).squeeze(1).masked_fill(elsewhere, 0)
        total, target_logits = all_reduced(torch.stack((exponentials.sum(dim=-1), target_logits)), axis)
        ctx.save_for_backward(exponentials.div_(total[:, None]), local, elsewhere)
        return total.log() - target_logits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        chances, local, elsewhere = ctx.saved_tensors
        targets = (~elsewhere).to(chances.dtype)[:, None]
        return chances.scatter_add(1, local[:, None], -targets).mul_(gradient[:, None]), None, None
