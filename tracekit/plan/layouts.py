"""Layouts of a training over GPUs: which fit into memory, how fast each would be, and what limits it.

A step of m micro-batches on p pipeline stages of v chunks takes, with L layers a stage:

    (m + (p − 1) / v) · (L · layer + p2p) + exposed data-parallel communication

A layer takes its matrix products at the rate that the hardware reaches, its other operators at memory bandwidth, and
the collectives of tensor, context and expert parallelism, which wait for their input and are exposed. Pipeline stages
send after each chunk. ZeRO-1 reduces gradients and gathers weights once per step, behind the last micro-batch's
backward; FSDP gathers per micro-batch, behind compute. Parts that are hidden in practice, such as expert-parallel
communication by DualPipe, count in full; what stragglers, storage and the host cost does not count.

Sources: arXiv 2104.04473 (schedules, traffic), 2205.05198 (sequence parallelism, activations), 1910.02054 (ZeRO).
Ranks are numbered as Megatron's: tp varies fastest, then cp, dp, and pp slowest.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from tracekit.conventions import strategies
from tracekit.errors import ConfigError
from tracekit.plan import memory, pipeline
from tracekit.plan.checkpoint import Layout
from tracekit.plan.hardware import Hardware
from tracekit.plan.memory import FULL, NONE, RECOMPUTATIONS, Workload
from tracekit.plan.models import Model

MEMORY_RATIO = 0.92
"""Share of a device's memory that a plan may fill; the rest is the context's, NCCL's and fragmentation."""
_LONG_SEQUENCE = 16_384
"""From here on context parallelism is tried."""
_ELEMENT_BYTES, _GRADIENT_BYTES = 2, 4
COMPUTE, BUBBLE, PP = "compute", "pipeline bubble", "pipeline transfers"
TP, CP, EP = "tensor parallelism", "context parallelism", "expert parallelism"
DP = "data parallelism"


@dataclass(frozen=True)
class Job:
    """A model to train on `gpus`, `batch` sequences of `sequence` tokens a step."""

    model: Model
    hardware: Hardware
    gpus: int
    gpus_per_node: int
    sequence: int
    batch: int

    def __post_init__(self) -> None:
        if min(self.gpus, self.gpus_per_node, self.sequence, self.batch) < 1:
            raise ConfigError("GPUs, GPUs per node, sequence and batch must be 1 or more")

    @classmethod
    def of(
        cls,
        model: Model,
        hardware: Hardware,
        *,
        gpus: int,
        gpus_per_node: int = 8,
        sequence: int | None = None,
        batch: int | None = None,
    ) -> "Job":
        """Return the job with the model's own sequence and tokens per step where none are given."""
        length = sequence or model.sequence
        return cls(model, hardware, gpus, gpus_per_node, length, batch or default_batch(model, length, gpus))


def default_batch(model: Model, sequence: int, gpus: int) -> int:
    """Sequences per step in the model's training; more for GPUs that are no power of two, so that ranks can share them.

    >>> from tracekit.plan import models
    >>> default_batch(models.find("70b"), 4096, 512), default_batch(models.find("70b"), 4096, 576)
    (1024, 1152)
    """
    batch = max(1, model.batch_tokens // sequence)
    odd = max(1, gpus) // max(1, gpus & -gpus)  # without its factors of two
    shared = odd << max(0, (batch // odd).bit_length() - 1)
    return math.ceil(batch / shared) * shared if odd > 1 and odd <= batch else batch


@dataclass(frozen=True)
class Mesh:
    """Ranks along each axis; `ep` of the `dp` ranks share a layer's experts. `zero` is the stage of ZeRO."""

    pp: int
    dp: int
    tp: int
    cp: int = 1
    ep: int = 1
    zero: int = 1
    chunks: int = 1
    """Chunks of layers per stage, of an interleaved schedule."""


@dataclass(frozen=True)
class LayoutPlan:
    """A layout that fits, with what a step costs on it. Traffic is what a rank sends per step, in bytes."""

    pp: int
    dp: int
    tp: int
    cp: int
    ep: int
    zero: int
    virtual_stages: int
    micro_batch: int
    micro_batches: int
    recompute: str
    memory_bytes: float
    bubble_ratio: float
    mfu_ratio: float
    step_seconds: float
    tokens_per_second: float
    tp_bytes: float
    cp_bytes: float
    ep_bytes: float
    pp_bytes: float
    dp_bytes: float
    limited_by: str
    """What takes most of the time that is no compute; compute, if it takes 80% or more."""


def best(job: Job, *, tp: int | None = None, pp: int | None = None, zero: int | None = None) -> LayoutPlan:
    """Fastest layout that fits, with these ranks and this stage where stated. Raises ConfigError if there is none."""
    stated = {name: value for name, value in (("tp", tp), ("pp", pp), ("zero", zero)) if value is not None}
    for layout in plan(job):
        if all(getattr(layout, name) == value for name, value in stated.items()):
            return layout
    constraints = ", ".join(f"--{name} {value}" for name, value in stated.items())
    raise ConfigError(f"no layout with {constraints} fits: tracekit plan layout shows those that do; leave one out")


def step_seconds_by_part(job: Job, layout: LayoutPlan) -> dict[str, float]:
    """Seconds of a step on a layout of this job by what they are spent on; these add up to the step."""
    mesh = Mesh(layout.pp, layout.dp, layout.tp, layout.cp, layout.ep, layout.zero, layout.virtual_stages)
    return _step_parts(job, mesh, _workload(job, mesh, layout.micro_batch, layout.recompute))


def plan(job: Job, *, count: int | None = None) -> list[LayoutPlan]:
    """Return the layouts that fit, the fastest first, at most `count`. Raises ConfigError if there is none."""
    plans = [option for candidate in _candidates(job) if (option := _plan_layout(job, *candidate)) is not None]
    if not plans:
        raise ConfigError(
            f"no layout of {job.model.name} fits on {job.gpus} GPUs of {job.hardware.memory_bytes / 2**30:.0f} GiB "
            f"with {job.batch} sequences a step: more GPUs, shorter sequences, or a batch that more ranks can share"
        )
    # Of layouts that are equally fast, the one with the least model parallelism and then memory is the simplest.
    plans.sort(key=lambda option: (-round(option.mfu_ratio, 4), option.tp * option.pp * option.cp, option.memory_bytes))
    return _distinct(plans)[:count]


def _distinct(plans: list[LayoutPlan]) -> list[LayoutPlan]:
    """Return the best plan of each mesh: micro-batches, chunks and recomputation are details of one."""
    best: dict[tuple[int, ...], LayoutPlan] = {}
    for option in plans:
        best.setdefault((option.pp, option.dp, option.tp, option.cp, option.ep, option.zero), option)
    return list(best.values())


# What to try ----------------------------------------------------------------------------------------------------------


def _candidates(job: Job) -> Iterator[tuple[Mesh, int, str]]:
    """Yield meshes with a micro-batch and a way of recomputation."""
    for mesh in _meshes(job):
        for micro_batch, recompute in itertools.product((1, 2, 4, 8), RECOMPUTATIONS):
            per_rank = job.batch / mesh.dp / micro_batch
            if per_rank < 1 or per_rank != int(per_rank) or (mesh.chunks > 1 and per_rank % mesh.pp):
                continue  # an interleaved schedule takes micro-batches in groups of as many as there are stages
            yield mesh, micro_batch, recompute


def _meshes(job: Job) -> Iterator[Mesh]:
    model = job.model
    contexts = _powers(32) if job.sequence >= _LONG_SEQUENCE else [1]
    for tp, pp, cp in itertools.product(_powers(job.gpus_per_node), _stages(model.layers), contexts):
        dp, rest = divmod(job.gpus, tp * pp * cp)
        if rest or not dp or model.heads % tp or job.sequence % (2 * cp):
            continue
        for ep in _expert_ranks(model, dp):
            per_stage = math.ceil(model.layers / pp)
            for chunks in [1] if pp == 1 else [v for v in range(1, per_stage + 1) if per_stage % v == 0]:
                yield Mesh(pp, dp, tp, cp, ep, zero=1, chunks=chunks)
            if pp == 1:
                yield Mesh(pp, dp, tp, cp, ep, zero=3)


def _powers(largest: int) -> list[int]:
    return [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent <= largest]


def _stages(layers: int) -> list[int]:
    """Return numbers of stages: divisors of the layers, and powers of two, of which some stages have a layer fewer."""
    return sorted({p for p in range(1, layers + 1) if layers % p == 0} | set(_powers(layers)))


def _expert_ranks(model: Model, dp: int) -> list[int]:
    if model.experts is None:
        return [1]
    return [ep for ep in _powers(dp) if model.experts.count % ep == 0 and dp % ep == 0]


# What it costs --------------------------------------------------------------------------------------------------------


def _plan_layout(job: Job, mesh: Mesh, micro_batch: int, recompute: str) -> LayoutPlan | None:
    """Return the plan, or None if it does not fit into memory."""
    work = _workload(job, mesh, micro_batch, recompute)
    micro_batches = work.micro_batches
    needed = memory_bytes(job, mesh, work)
    if needed > MEMORY_RATIO * job.hardware.memory_bytes:
        return None
    parts = _step_parts(job, mesh, work)
    seconds = sum(parts.values())
    tokens, peak = job.batch * job.sequence, job.hardware.peak_flops_per_s
    bubble = pipeline.bubble_to_ideal_ratio(mesh.pp, micro_batches, chunks=mesh.chunks)
    times = micro_batches * math.ceil(job.model.layers / mesh.pp)
    rest = {name: part for name, part in parts.items() if name != COMPUTE}
    largest = max(rest, key=lambda name: rest[name])
    return LayoutPlan(
        pp=mesh.pp,
        dp=mesh.dp,
        tp=mesh.tp,
        cp=mesh.cp,
        ep=mesh.ep,
        zero=mesh.zero,
        virtual_stages=mesh.chunks,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        recompute=recompute,
        memory_bytes=needed,
        bubble_ratio=bubble / (1 + bubble),
        mfu_ratio=tokens * flops_per_token(job.model, job.sequence) / (seconds * job.gpus * peak),
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        tp_bytes=times * _tp_bytes(job, mesh, work),
        cp_bytes=times * _cp_bytes(job, mesh, work),
        ep_bytes=times * _ep_bytes(job, mesh, work),
        pp_bytes=micro_batches * _pp_bytes(job, mesh, work),
        dp_bytes=_dp_bytes(job, mesh, work),
        limited_by=COMPUTE if parts[COMPUTE] >= 0.8 * seconds else largest,
    )


def _workload(job: Job, mesh: Mesh, micro_batch: int, recompute: str) -> Workload:
    micro_batches = job.batch // (mesh.dp * micro_batch)
    return Workload(job.sequence // mesh.cp, micro_batch, micro_batches, recompute, sequence_parallel=mesh.tp > 1)


def flops_per_token(model: Model, sequence: int) -> float:
    """Return the floating-point operations of training on one token, recomputation left out, all of attention counted.

    6 per active weight and 12 s h a layer: arXiv 2204.02311, appendix B, by which most MFUs are published.
    """
    return 6.0 * model.active_parameters + 12.0 * model.layers * sequence * model.width


def memory_bytes(job: Job, mesh: Mesh, work: Workload) -> float:
    """Return the bytes of a rank of the first stage: state, activations in flight, and FSDP's gathered layers."""
    model = job.model
    experts = model.expert_layers * (model.experts.count if model.experts else 0) * model.expert_parameters
    layout = Layout(mesh.tp, mesh.pp, mesh.dp * mesh.cp, mesh.zero, job.gpus_per_node)
    dense = memory.plan(model.parameters - experts, layout)
    state = dense.total_bytes
    if experts:
        expert_layout = Layout(mesh.tp, mesh.pp, max(1, mesh.dp * mesh.cp // mesh.ep), mesh.zero, job.gpus_per_node)
        state += memory.plan(experts / mesh.ep, expert_layout).total_bytes
    gathered = 0.0
    if mesh.zero == 3:  # the layer that runs and the next one, in 16 bits, and a gradient that is reduced
        gathered = (2 * _ELEMENT_BYTES + _GRADIENT_BYTES) * model.largest_layer_parameters / mesh.tp / mesh.ep
    interleaved = pipeline.activation_ratio(mesh.pp, mesh.chunks, pipeline.PLAIN)
    return (
        state
        + gathered
        + interleaved * memory.activations_of(model, work, layout)
        + (0.0 if mesh.pp > 1 else 2 * 4 * work.batch * work.sequence * job.model.vocabulary / mesh.tp)
    )


def _step_parts(job: Job, mesh: Mesh, work: Workload) -> dict[str, float]:
    """Return the seconds of a step by what they are spent on."""
    layers, times = math.ceil(job.model.layers / mesh.pp), work.micro_batches
    node, network = _rates(job)
    within = mesh.tp * mesh.cp <= job.gpus_per_node
    experts_within = mesh.tp * mesh.cp * mesh.ep <= job.gpus_per_node
    # Compute of a layer and micro-batch: forward, twice that backward, and what is recomputed.
    model, hardware = job.model, job.hardware
    tokens = work.batch * work.sequence
    weights = (model.active_parameters - model.outer_parameters) / model.layers
    attention = 2.0 * job.sequence * model.width  # causal: half of 4 s h
    products = tokens * (2.0 * weights + attention) / mesh.tp / hardware.flops_per_s
    divided = mesh.tp if work.sequence_parallel else 1
    elementwise = tokens * hardware.elementwise_bytes * model.width / divided / hardware.memory_bytes_per_s
    compute = times * (
        layers
        * ((4 if work.recomputation == FULL else 3) * products + (3 if work.recomputation == NONE else 4) * elementwise)
        + (6.0 * work.batch * work.sequence * job.model.outer_parameters / mesh.tp / job.hardware.flops_per_s) / mesh.pp
    )
    again = 1.5 if work.recomputation == FULL else 1.0  # a recomputed forward pass communicates once more
    parts = {
        COMPUTE: compute,
        TP: again * times * layers * _tp_bytes(job, mesh, work) / (node if mesh.tp <= job.gpus_per_node else network),
        CP: again * times * layers * _cp_bytes(job, mesh, work) / (node if within else network),
        EP: again * times * layers * _ep_bytes(job, mesh, work) / (node if experts_within else network),
        PP: times * _pp_bytes(job, mesh, work) / (node if job.gpus <= job.gpus_per_node else network),
    }
    parts[BUBBLE] = sum(parts.values()) * pipeline.bubble_to_ideal_ratio(mesh.pp, times, chunks=mesh.chunks)
    parts[DP] = _exposed_dp_seconds(job, mesh, work, compute / times)
    return parts


def _exposed_dp_seconds(job: Job, mesh: Mesh, work: Workload, micro_batch_seconds: float) -> float:
    """Return the time that data-parallel communication adds to a step.

    ZeRO-1: what the backward pass of the last micro-batch, two thirds of it, does not hide. FSDP: what a micro-batch's
    compute does not hide, each time.
    """
    node, network = _rates(job)
    rate = node if mesh.tp * mesh.cp * mesh.dp <= job.gpus_per_node else network
    seconds = _dp_bytes(job, mesh, work) / rate
    if mesh.zero == 3:
        return max(0.0, seconds - work.micro_batches * micro_batch_seconds)
    return max(0.0, seconds - 2 / 3 * micro_batch_seconds)


# What a rank sends ----------------------------------------------------------------------------------------------------


def _tp_bytes(job: Job, mesh: Mesh, work: Workload) -> float:
    """Return 8 b s h (t − 1)/t numbers per layer and micro-batch, forward and backward (arXiv 2104.04473, 3.2)."""
    hidden = _ELEMENT_BYTES * work.batch * work.sequence * job.model.width
    return 8.0 * hidden * (mesh.tp - 1) / mesh.tp


def _cp_bytes(job: Job, mesh: Mesh, work: Workload) -> float:
    """Return the keys and values that a rank passes on in a ring, and their gradients, per layer and micro-batch."""
    shared = 2 * job.model.width * job.model.key_value_heads / job.model.heads / mesh.tp
    return 3.0 * _ELEMENT_BYTES * work.batch * work.sequence * shared * (mesh.cp - 1)


def _ep_bytes(job: Job, mesh: Mesh, work: Workload) -> float:
    """Return the bytes dispatched and combined, forward and backward, per layer (an average one) and micro-batch."""
    if job.model.experts is None or mesh.ep == 1:
        return 0.0
    sent = _ELEMENT_BYTES * work.batch * work.sequence * job.model.width * job.model.experts.active / mesh.tp
    return 4.0 * sent * (mesh.ep - 1) / mesh.ep * job.model.expert_layers / job.model.layers


def _pp_bytes(job: Job, mesh: Mesh, work: Workload) -> float:
    """Return the bytes that a stage sends per micro-batch, forward and backward, after each of its chunks."""
    if mesh.pp == 1:
        return 0.0
    return 2.0 * mesh.chunks * _ELEMENT_BYTES * work.batch * work.sequence * job.model.width / mesh.tp


def _dp_bytes(job: Job, mesh: Mesh, work: Workload) -> float:
    """Return the bytes of data parallelism per step: weights in 16 bits, gradients in 32 (arXiv 1910.02054, part 7)."""
    model, ranks = job.model, mesh.dp * mesh.cp
    experts = model.expert_layers * (model.experts.count if model.experts else 0) * model.expert_parameters
    of_experts = max(1, ranks // mesh.ep)
    strategy = strategies.ZERO_STAGES[mesh.zero]
    dense = strategy.sent_bytes(model.parameters - experts, ranks=ranks, micro_batches=work.micro_batches)
    sparse = strategy.sent_bytes(experts / mesh.ep, ranks=of_experts, micro_batches=work.micro_batches)
    return (dense + sparse) / mesh.tp / mesh.pp


def _rates(job: Job) -> tuple[float, float]:
    """Return the bytes per second of a rank inside a node, and over the network that the ranks of a node share."""
    return job.hardware.node_bytes_per_s, job.hardware.network_bytes_per_s / job.gpus_per_node
