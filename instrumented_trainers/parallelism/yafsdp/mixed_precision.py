"""Which precision a unit computes in and which its gradients are summed in."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Precision of one unit. The weights that the optimizer sees keep the dtype they had.

    `param_dtype` is what weights are gathered and computed in (None: their own dtype), `reduce_dtype` what gradients
    are summed over ranks in (None: param_dtype); they are added up over micro-batches in the weights' own dtype.
    Floating-point inputs of a unit are cast to param_dtype unless `cast_forward_inputs` is off, its outputs to
    `output_dtype` where given.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    @classmethod
    def of(cls, policy: Any) -> Self:
        """Return the policy, or the same of FSDP2's class of that name."""
        if isinstance(policy, cls):
            return policy
        return cls(policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs)

    def cast_inputs(self, inputs: Any) -> Any:
        """Return `inputs`, any nesting of containers, with floating-point tensors in param_dtype."""
        return _cast(inputs, self.param_dtype) if self.cast_forward_inputs else inputs

    def cast_outputs(self, outputs: Any) -> Any:
        """Return `outputs`, any nesting of containers, with floating-point tensors in output_dtype."""
        return _cast(outputs, self.output_dtype)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in any nesting of tuples, lists, dicts and dataclasses."""
    for leaf in tree_iter(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)
