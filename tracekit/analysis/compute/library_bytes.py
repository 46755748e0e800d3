"""Bytes that fused norms, softmax and activations of other libraries move at least: Apex, Megatron-LM, Liger.

They are autograd functions, whose calls record the tensors that they are applied to; a backward call records the
gradient alone, and also reads what the forward call saved. Signatures: apex/normalization/fused_layer_norm.py and
apex/contrib/layer_norm of https://github.com/NVIDIA/apex, megatron/core/fusions/fused_softmax.py of
https://github.com/NVIDIA/Megatron-LM, src/liger_kernel/ops of https://github.com/linkedin/Liger-Kernel.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from tracekit.analysis.compute.op_inputs import Inputs

_Formula: TypeAlias = Callable[[Inputs], int]
_STATISTIC_BYTES = 4
"""Norms keep the mean and the inverse deviation of a row in 32 bits."""


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
