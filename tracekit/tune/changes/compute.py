"""Changes of what is computed: fused kernels, tensor cores, recomputation."""

from collections.abc import Sequence

from tracekit.analysis.parallelism import workload
from tracekit.replay.graph import strategies
from tracekit.replay.graph.causes.device_time import (
    IDLE_TENSOR_CORES,
    RECOMPUTATION,
    SMALL_OPS,
    UNFUSED_KERNELS,
    UNFUSED_OPTIMIZER,
)
from tracekit.replay.graph.causes.host import LATE_LAUNCH
from tracekit.replay.graph.strategies import Prediction
from tracekit.tune.changes.change import ON, CallKeyword, Change, Risk, TunedRun, unknown_memory

_OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch that take fused=True."""


def _fewer_layers(run: TunedRun) -> Sequence[str]:
    """Layers that recompute: none, else half of today's."""
    today = run.number("checkpoint_layers", 0)
    if not run.is_of_trainers:
        return ("0",)
    return tuple(str(layers) for layers in dict.fromkeys((0, today // 2)) if layers < today)


def _predicted_recomputation(run: TunedRun, value: str) -> Prediction | None:
    fewer = run.number("checkpoint_layers", 0) - int(value)
    return strategies.predict_less_recomputation(run.run, fewer) if fewer > 0 and int(value) else None


def _selective(run: TunedRun) -> Sequence[str]:
    options = run.options
    recomputes_all = options.get("recompute") != "selective" and run.number("checkpoint_layers", 0) > 0
    return (ON,) if recomputes_all and options.get("reentrant") is not True else ()


RECOMPUTED_LAYERS = Change(
    name="recomputed-layers",
    summary="fewer layers recompute their activations in backward (activation checkpointing)",
    risk=Risk.MEMORY,
    causes=(RECOMPUTATION,),
    codes=("MEM002",),
    values=_fewer_layers,
    option="--checkpoint-layers {value}",
    predict=_predicted_recomputation,
    added_bytes=unknown_memory,
)
SELECTIVE_RECOMPUTATION = Change(
    name="selective-recomputation",
    summary="layers keep the outputs of matrix products and attention, and recompute the rest",
    risk=Risk.MEMORY,
    causes=(RECOMPUTATION,),
    codes=("MEM002",),
    is_partial=True,
    values=_selective,
    option="--recompute selective",
    added_bytes=unknown_memory,
)
FUSED_OPTIMIZER = Change(
    name="fused-optimizer",
    summary="one kernel updates parameters and optimizer state",
    risk=Risk.ROUNDING,
    causes=(UNFUSED_OPTIMIZER,),
    codes=("COMP003",),
    # Our trainers take fused optimizers wherever torch has them.
    values=lambda run: () if run.is_of_trainers else (ON,),
    keyword=CallKeyword(_OPTIMIZERS, "fused=True"),
)
COMPILE = Change(
    name="compile",
    summary="torch.compile fuses kernels and launches fewer",
    risk=Risk.ROUNDING,
    causes=(UNFUSED_KERNELS, SMALL_OPS, LATE_LAUNCH),
    codes=("COMP004", "COMP008"),
    is_partial=True,
    values=lambda run: () if run.is_of_trainers or workload.is_compiled(run.run) else (ON,),
    added_bytes=unknown_memory,
)
TENSOR_CORES = Change(
    name="tensor-cores",
    summary="32-bit matrix products use tensor cores (TF32)",
    risk=Risk.TRAINING,
    causes=(IDLE_TENSOR_CORES,),
    codes=("COMP002",),
    values=lambda run: () if run.is_on_cpu else ("1",),
    variable="TORCH_ALLOW_TF32_CUBLAS_OVERRIDE={value}",
)
