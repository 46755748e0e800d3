"""Memory of one rank: state per parameter, buffers, and activations.

ZeRO: arXiv 1910.02054. Activations: arXiv 2205.05198, in 2-byte numbers. YaFSDP: two buffers for weights and two for
gradients, each as large as the largest layer (https://github.com/yandex/YaFSDP).
"""

import math
from dataclasses import dataclass

from tracekit.conventions.strategies import (
    GATHERED_BYTES,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    YAFSDP,
    ZERO_STAGES,
    Strategy,
)
from tracekit.errors import ConfigError
from tracekit.plan.checkpoint import Layout
from tracekit.plan.models import Model

GQA_SWIGLU_FACTOR = 40.5
"""Bytes per s·b·h of a layer of Llama 2 70B: flash attention, bf16, 8 key-value heads of 64, SwiGLU."""
FULL_RECOMPUTATION_FACTOR = 2.0
"""Bytes per s·b·h of a layer of which only the input is stored, in 2-byte numbers."""
NONE, SELECTIVE, FULL = RECOMPUTATIONS = ("none", "selective", "full")


@dataclass(frozen=True)
class StateMemory:
    """Bytes of one rank, without activations and buffers."""

    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    total_bytes: float


@dataclass(frozen=True)
class Workload:
    """What a step works on: `batch` sequences of `sequence` tokens in a micro-batch, and what backward recomputes."""

    sequence: int
    batch: int = 1
    micro_batches: int = 1
    recomputation: str = NONE
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if min(self.sequence, self.batch, self.micro_batches) < 1:
            raise ConfigError("sequence, batch and micro-batches must be 1 or more")
        if self.recomputation not in RECOMPUTATIONS:
            raise ConfigError(f"recomputation {self.recomputation!r} does not exist: {', '.join(RECOMPUTATIONS)}")


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank of the first pipeline stage, which needs most; None where an input was not given.

    `total_bytes` is the sum of what is known. `traffic_bytes_per_step` is what the rank sends for data parallelism.
    """

    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    buffer_bytes: float | None
    activation_bytes: float | None
    total_bytes: float
    traffic_bytes_per_step: float


def state(params: float, *, ranks: int, zero: int) -> StateMemory:
    """Return what `params` parameters take on each of `ranks` under a ZeRO stage; 0 is DDP, 3 is FSDP.

    Ψ = 7.5e9 on 64 ranks: 120, 31.4, 16.6 and 1.88 GB for stages 0 to 3 (arXiv 1910.02054, figure 1).
    """
    if not (0 < params < math.inf) or ranks < 1 or zero not in (0, 1, 2, 3):
        raise ConfigError("parameters must be above 0, ranks 1 or more, the ZeRO stage 0, 1, 2 or 3")
    return _state(ZERO_STAGES[zero], params, ranks)


def yafsdp(params: float, *, ranks: int, largest_layer: float) -> tuple[StateMemory, float]:
    """Return what YaFSDP with Adam keeps per rank, 18 N / W bytes, and the bytes of its buffers, 12 M."""
    if not (0 < largest_layer <= params < math.inf) or ranks < 1:
        raise ConfigError("parameters must be above 0, the largest layer no larger than all, ranks 1 or more")
    return _state(YAFSDP, params, ranks), YAFSDP.buffer_bytes * largest_layer


def _state(strategy: Strategy, params: float, ranks: int) -> StateMemory:
    size = strategy.state_bytes
    weight = strategy.per_rank(PARAMETERS, params * size.parameters, ranks)
    gradient = strategy.per_rank(GRADIENTS, params * size.gradients, ranks)
    optimizer = strategy.per_rank(OPTIMIZER, params * size.optimizer, ranks)
    return StateMemory(weight, gradient, optimizer, weight + gradient + optimizer)


def plan(
    params: float,
    layout: Layout,
    *,
    model: Model | None = None,
    work: Workload | None = None,
    with_yafsdp: bool = False,
    largest_layer: float | None = None,
) -> MemoryPlan:
    """Return the memory of one rank; of activations where model and work are given. Raises ConfigError.

    Tensor and pipeline parallelism take equal parts of the parameters. YaFSDP takes the place of the ZeRO stage, and
    needs the parameters of the largest layer, or the model; where a stage's part is smaller than that, its buffers are
    as large as the part.
    """
    own = params / (layout.tp * layout.pp)
    buffers: float | None = None
    if with_yafsdp:
        largest = largest_layer
        if largest is None and model is not None:
            largest = max(model.layer_parameters, model.outer_parameters)
        if largest is None:
            raise ConfigError("YaFSDP's buffers are as large as the largest layer: give --largest-layer or --model")
        # Equal parts of a deep pipeline can be smaller than a layer, and no stage gathers more than it has.
        gathered = min(largest / layout.tp, own) if largest <= params else largest / layout.tp
        state_memory, buffers = yafsdp(own, ranks=layout.dp, largest_layer=gathered)
    else:
        state_memory = state(own, ranks=layout.dp, zero=layout.zero)
    activations = activations_of(model, work, layout) if model and work else None
    return MemoryPlan(
        state_memory.weight_bytes,
        state_memory.gradient_bytes,
        state_memory.optimizer_bytes,
        buffers,
        activations,
        state_memory.total_bytes + (buffers or 0) + (activations or 0),
        data_parallel_bytes(own, layout, is_sharded=with_yafsdp),
    )


def data_parallel_bytes(params: float, layout: Layout, *, is_sharded: bool = False) -> float:
    """Return what a rank sends for data parallelism in a step, of 2-byte numbers; 0 without it.

    2 Ψ with DDP and ZeRO 1 and 2 (an all-reduce, or reduce-scatter and all-gather), 3 Ψ with ZeRO 3, FSDP and YaFSDP
    (weights are gathered twice): arXiv 1910.02054, section 7. The factor (n − 1)/n is taken as 1, as there.
    """
    if layout.dp == 1:
        return 0.0
    strategy = YAFSDP if is_sharded else ZERO_STAGES[layout.zero]
    return params * GATHERED_BYTES * strategy.traffic_factor


def activations_of(model: Model, work: Workload, layout: Layout) -> float:
    """Return the bytes of activations of a Llama-style model that a rank of the first stage keeps for backward.

    Under 1F1B the first of p stages keeps those of min(p, m) micro-batches of its L / p layers.
    """
    factor = llama_factor(model, tp=layout.tp, work=work)
    layers = math.ceil(model.layers / layout.pp)
    in_flight = min(layout.pp, work.micro_batches)
    return in_flight * activation_bytes(
        factor, sequence=work.sequence, batch=work.batch, width=model.width, layers=layers
    )


def llama_factor(model: Model, *, tp: int = 1, work: Workload) -> float:
    """Return the bytes per s·b·h of a layer with flash attention, RMSNorm and SwiGLU; 40.5 for Llama 2 70B.

    2 each of both norms' inputs and outputs, the queries and the attention's output; 4 k/a of keys and values; 8 f/h of
    gate, up, their activation and product. Tensor parallelism divides all but the norms', sequence parallelism these
    too. Flash attention keeps no scores, so selective recomputation saves nothing more.
    """
    if work.recomputation == FULL:
        return FULL_RECOMPUTATION_FACTOR / (tp if work.sequence_parallel else 1)
    divided = 4 + 4 * model.key_value_heads / model.heads + 8 * model.hidden_width / model.width
    return (8 / tp if work.sequence_parallel else 8) + divided / tp


def gpt_factor(*, width: int, heads: int, tp: int = 1, work: Workload) -> float:
    """Return the bytes per s·b·h of a layer of a GPT without flash attention (arXiv 2205.05198, table 2).

    34 + 5as/h; under t-fold tensor parallelism 10 + 24/t + 5as/(ht); with sequence parallelism (34 + 5as/h)/t. Without
    the scores (selective recomputation) the last term goes; with full recomputation 2 is left.
    """
    if work.recomputation == FULL:
        return FULL_RECOMPUTATION_FACTOR / (tp if work.sequence_parallel else 1)
    scores = 0.0 if work.recomputation == SELECTIVE else 5 * heads * work.sequence / (width * tp)
    return (34 / tp if work.sequence_parallel else 10 + 24 / tp) + scores


def activation_bytes(factor: float, *, sequence: int, batch: int, width: int, layers: int) -> float:
    """Return factor · s · b · h · L, in bytes; the factor is one of those above."""
    return factor * sequence * batch * width * layers
