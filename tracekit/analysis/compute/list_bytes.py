"""Bytes that operators on lists of tensors move: `_foreach_*` and fused optimizers.

Signatures: aten/src/ATen/native/native_functions.yaml of PyTorch 2.13.
"""

from collections.abc import Callable
from typing import TypeAlias

from tracekit.analysis.compute.op_inputs import Inputs, total_bytes

_Formula: TypeAlias = Callable[[Inputs], int]


def for_each(lists: int, *, writes: bool = True) -> _Formula:
    """Return the formula of an operator on lists of tensors, elementwise: it writes as much as the first list.

    The formula raises ValueError for lists whose shapes are not known.
    """

    def formula(inputs: Inputs) -> int:
        first, other_lists = inputs.tensor_list(0), inputs.lists(1, lists)
        if any(len(tensors) != len(first) for tensors in other_lists):
            raise ValueError("lists whose shapes are not known")
        return total_bytes(first) * (2 if writes else 1) + sum(map(total_bytes, other_lists))

    return formula


def fused_optimizer(needed: int, lists: int) -> _Formula:
    """Return the formula of an optimizer's kernel: parameters, gradients, then states, of `lists` lists at most.

    It reads all lists and writes all but the gradients. The first `needed` lists cannot be empty. The formula raises
    ValueError for lists whose shapes are not known.
    """

    def formula(inputs: Inputs) -> int:
        tensor_lists = inputs.lists(0, lists)
        if any(len(tensors) != len(tensor_lists[0]) for tensors in tensor_lists[:needed]) or not tensor_lists[0]:
            raise ValueError("lists whose shapes are not known")
        sizes = [total_bytes(tensors) for tensors in tensor_lists]
        return 2 * sum(sizes) - sizes[1]

    return formula
