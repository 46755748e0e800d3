"""The loss that is trained on."""

import torch
from torch import Tensor
from torch.nn import functional


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (B, T, V) against the next tokens (B, T), in fp32 at least."""
    return functional.cross_entropy(upcast(logits).flatten(0, 1), targets.flatten())


def upcast(logits: Tensor) -> Tensor:
    """Return logits in fp32 where they are in lower precision."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
