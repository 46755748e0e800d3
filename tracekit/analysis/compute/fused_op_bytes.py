"""Bytes that fused operators move: `_foreach_*`, fused optimizers, and the fused norms of other libraries."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from tracekit.analysis.compute.op_inputs import Inputs, total_bytes

_Formula: TypeAlias = Callable[[Inputs], int]
_STATISTIC_BYTES = 4
"""Norms keep the mean and the inverse deviation of a row in 32 bits."""


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


def formula(name: str) -> _Formula | None:
    """Return the formula of the bytes of an operator; None for operators of no such library."""
    return _FORMULAS.get(name)


def _norm(statistics: int) -> _Formula:
    """Return the formula of a norm of a tensor, followed by its weights: each is read, a result of its size written."""

    def bytes_moved(inputs: Inputs) -> int:
        normed, weights = inputs.tensor(0), inputs.tensors(1)
        rows = normed.elements // (weights[0].elements if weights else normed.shape[-1])
        return 2 * normed.bytes + sum(weight.bytes for weight in weights) + rows * statistics * _STATISTIC_BYTES

    return bytes_moved


def _gradient(saved: int) -> _Formula:
    """Return the formula of a backward call: gradients of `saved` tensors of the gradient's size, which it reads."""
    return lambda inputs: (1 + 2 * saved) * inputs.tensor(0).bytes


def _softmax(inputs: Inputs) -> int:
    """Count the scores, a mask if there is one, and the result."""
    return 2 * inputs.tensor(0).bytes + sum(tensor.bytes for tensor in inputs.tensors(1) if len(tensor.shape) > 1)


def _causal_softmax(inputs: Inputs) -> int:
    """Count the scores up to the diagonal, and the whole result, whose rest is zero."""
    scores = inputs.tensor(0)
    rows, columns = scores.shape[-2:]
    read = rows * (rows + 1) // 2 * (scores.bytes // (rows * columns)) if rows == columns else scores.bytes
    return read + scores.bytes


_FORMULAS: Mapping[str, _Formula] = {
    **{f"Fused{kind}Function": _norm(2) for kind in ("LayerNorm", "LayerNormAffine", "LayerNormAffineMixedDtypes")},
    **{f"Fused{kind}Function": _norm(1) for kind in ("RMSNorm", "RMSNormAffine", "RMSNormAffineMixedDtypes")},
    "FastLayerNormFN": _norm(2),
    "LigerRMSNormFunction": _norm(1),
    "LigerLayerNormFunction": _norm(2),
    **{
        f"{name}Backward": _gradient(1)
        for name in (
            "FusedLayerNormFunction", "FusedLayerNormAffineFunction", "FusedLayerNormAffineMixedDtypesFunction",
            "FusedRMSNormFunction", "FusedRMSNormAffineFunction", "FusedRMSNormAffineMixedDtypesFunction",
            "FastLayerNormFN", "LigerRMSNormFunction", "LigerLayerNormFunction", "ScaledSoftmax",
            "ScaledMaskedSoftmax", "ScaledUpperTriangMaskedSoftmax",
        )
    },
    "ScaledSoftmax": _softmax,
    "ScaledMaskedSoftmax": _softmax,
    "ScaledUpperTriangMaskedSoftmax": _causal_softmax,
    **{f"Liger{kind}MulFunction": lambda inputs: 3 * inputs.tensor(0).bytes for kind in ("SiLU", "GELU")},
    **{f"Liger{kind}MulFunctionBackward": _gradient(2) for kind in ("SiLU", "GELU")},
}  # fmt: skip
