"""Memory of one rank: state per parameter, buffers, and activations.

ZeRO: arXiv 1910.02054. Activations: arXiv 2205.05198, in 2-byte numbers. YaFSDP: two buffers for weights and two for
gradients, each as large as the largest layer (https://github.com/yandex/YaFSDP).
"""

import math
from dataclasses import dataclass

from tracekit.conventions import strategies
from tracekit.conventions.strategies import YAFSDP, Strategy
from tracekit.errors import ConfigError
from tracekit.plan.checkpoint import Layout, check_positive
from tracekit.plan.models import Model

FULL_RECOMPUTATION_FACTOR = 2.0
"""Bytes per s·b·h of a layer of which only the input is stored, in 2-byte numbers."""
NONE, SELECTIVE, FULL = RECOMPUTATIONS = ("none", "selective", "full")


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

    `total_bytes` is the sum of what is known on the device. `offloaded_bytes` is what the rank keeps in host memory.
    `traffic_bytes_per_step` is what the rank sends for data parallelism: what is divided among ranks once more for each
    micro-batch.
    """

    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    buffer_bytes: float | None
    activation_bytes: float | None
    total_bytes: float
    traffic_bytes_per_step: float
    offloaded_bytes: float = 0.0


def state_bytes(params: float, strategy: Strategy, *, ranks: int) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer state that a strategy keeps on each of `ranks`.

    Ψ = 7.5e9 on 64 ranks: 120, 31.4, 16.6 and 1.88 GB in total for ZeRO stages 0 to 3 (arXiv 1910.02054, figure 1).
    """
    size = strategy.state_bytes
    return (
        strategy.per_rank(strategies.PARAMETERS, params * size.parameters, ranks),
        strategy.per_rank(strategies.GRADIENTS, params * size.gradients, ranks),
        strategy.per_rank(strategies.OPTIMIZER, params * size.optimizer, ranks),
    )


def plan(
    params: float,
    layout: Layout,
    *,
    model: Model | None = None,
    work: Workload | None = None,
    micro_batches: int = 1,
    with_yafsdp: bool = False,
    largest_layer: float | None = None,
    offload: bool = False,
) -> MemoryPlan:
    """Return the memory of one rank; of activations where model and work are given. Raises ConfigError.

    Tensor and pipeline parallelism take equal parts of the parameters. YaFSDP takes the place of the ZeRO stage, and
    needs the parameters of the largest layer, or the model; where a stage's part is smaller than that, its buffers are
    as large as the part. With `offload` the optimizer and what it steps lie in host memory: shards of weights and
    gradients, or under ZeRO 1 and 2 a copy of the rank's gradients (arXiv 2101.06840, section 4).
    """
    check_positive("parameters", params)
    check_positive("micro-batches", micro_batches)
    rank_params = params / (layout.tp * layout.pp)
    strategy = YAFSDP if with_yafsdp else strategies.ZERO_STAGES[layout.zero]
    weight, gradient, optimizer = state_bytes(rank_params, strategy, ranks=layout.dp)
    offloaded = 0.0
    if offload:
        # Bytes of weights and gradients in host memory. Raises ConfigError if ranks divide no state.
        if strategies.OPTIMIZER not in strategy.sharded:
            raise ConfigError(
                "offloading needs an optimizer that is divided among ranks: add --zero 1, 2 or 3, or --yafsdp"
            )
        size = strategy.state_bytes
        if strategy.shards_parameters:
            offloaded_copy_bytes = rank_params * (size.parameters + size.gradients) / layout.dp
        else:
            offloaded_copy_bytes = rank_params * size.gradients / layout.dp
        offloaded = optimizer + offloaded_copy_bytes
        optimizer = 0.0
        if strategy.shards_parameters:
            weight = gradient = 0.0
    buffers = _yafsdp_buffer_bytes(params, layout, model, largest_layer) if with_yafsdp else None
    activations = activations_of(model, work, layout) if model and work else None
    return MemoryPlan(
        weight,
        gradient,
        optimizer,
        buffers,
        activations,
        weight + gradient + optimizer + (buffers or 0) + (activations or 0),
        # The factor (n − 1)/n is taken as 1, as in arXiv 1910.02054, section 7.
        rank_params * strategies.GATHERED_BYTES * strategy.traffic_factor(micro_batches) if layout.dp > 1 else 0.0,
        offloaded,
    )


def _yafsdp_buffer_bytes(params: float, layout: Layout, model: Model | None, largest_layer: float | None) -> float:
    largest = largest_layer
    if largest is None and model is not None:
        largest = max(model.largest_layer_parameters, model.outer_parameters)
    if largest is None:
        raise ConfigError("YaFSDP's buffers are as large as the largest layer: give --largest-layer or --model")
    if not 0 < largest <= params:
        raise ConfigError("the largest layer must have parameters, and no more than the model")
    # Equal parts of a deep pipeline can be smaller than a layer, and no stage gathers more than it has.
    return YAFSDP.buffer_bytes * min(largest / layout.tp, params / (layout.tp * layout.pp))


def activations_of(model: Model, work: Workload, layout: Layout) -> float:
    """Return the bytes of activations of a Llama-style model that a rank of the first stage keeps for backward.

    Under 1F1B the first of p stages keeps those of min(p, m) micro-batches of its L / p layers.
    """
    factor = llama_factor(model, tp=layout.tp, work=work)
    layers = math.ceil(model.layers / layout.pp)
    in_flight = min(layout.pp, work.micro_batches)
    return in_flight * (factor * work.sequence * work.batch * model.width * layers)


def llama_factor(model: Model, *, tp: int = 1, work: Workload) -> float:
    """Return the bytes per s·b·h of a layer with flash attention, RMSNorm and SwiGLU; 40.5 for Llama 2 70B.

    2 each of both norms' inputs and outputs, the queries and the attention's output; 4 k/a of keys and values; 8 f/h of
    gate, up, their activation and product, without a gate 4 f/h; with experts as many for each that a token goes
    through, and 4 of what it is sent and gets back. Tensor parallelism divides all but the norms', sequence parallelism
    these too. Flash attention stores no scores. Selective recomputation repeats norms, activations and their products;
    what stays is the input, the outputs of the projections that backward reads, and that of attention.
    """
    if work.recomputation == FULL:
        return FULL_RECOMPUTATION_FACTOR / (tp if work.sequence_parallel else 1)
    is_selective = work.recomputation == SELECTIVE
    hidden, sent = float(model.hidden_width), 0.0
    if model.experts:
        through = model.experts.active + model.experts.shared
        hidden, sent = through * model.experts.width, 4.0 * model.experts.active
    products = (4 if model.gated else 2) * (1 if is_selective else 2) * hidden / model.width
    divided = 4 + 4 * model.key_value_heads / model.heads + products + sent
    around = 4 if is_selective else 8
    return (around / tp if work.sequence_parallel else around) + divided / tp
