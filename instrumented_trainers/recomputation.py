"""Selective activation checkpointing: layers store what is costly to compute, and recompute what is cheap.

https://arxiv.org/abs/2205.05198, section 5, recomputes the attention scores only; with flash attention there are none,
so what is left to recompute are norms, rotations, activations and products of single elements.
"""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
# Not all of them exist in every version of torch.
_STORED = frozenset(
    getattr(torch.ops.aten, name).default for name in (*_MATRIX_PRODUCTS, *_ATTENTION) if hasattr(torch.ops.aten, name)
)


def selective_contexts() -> Any:
    """Return the pair of contexts that `torch.utils.checkpoint` runs forward and recomputation in."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _STORED else CheckpointPolicy.PREFER_RECOMPUTE
