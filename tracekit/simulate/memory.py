"""The caching allocator of one simulated rank, as far as a trace shows it: what is allocated, what is reserved."""

from tracekit.conventions import pipeline_schedules
from tracekit.conventions.pipeline_schedules import FORWARD, INPUT_GRADIENT
from tracekit.conventions.strategies import GATHERED_BYTES, PP, REDUCED_BYTES, STRATEGIES
from tracekit.errors import InputError
from tracekit.plan.hardware import GIB
from tracekit.simulate import hybrid_layers
from tracekit.simulate.job import Job
from tracekit.simulate.recording import Allocation, RankRecord

_SEGMENT_BYTES = 2 << 20
_STATE_BYTES = 16  # per parameter and shard: fp32 weight, gradient and two moments
ACTIVATION_BYTES, INPUT_BYTES = 40.5, 2
"""Per token and unit of width, of a stored layer (16 bits, grouped heads, flash attention) and of a recomputed one."""
_LOGIT_BYTES = 6
_UNDIVIDED = (
    10 / 34
)  # the part of them that tensor parallelism divides only with sequence parallelism (arXiv 2205.05198)


class Memory:
    """The allocated buffers. The cache is as large as a step's peak from the start."""

    def __init__(self, job: Job, record: RankRecord) -> None:
        self._record = record
        self._allocated = static_bytes(job, record.rank)
        self._full = self._reserved = round_up(peak_bytes(job, record.rank))
        self._buffers: dict[str, tuple[int, int]] = {}
        self._addresses = 0x7F00_0000_0000

    def allocate(self, buffer: str, size_bytes: int, thread: int, at_ns: int) -> None:
        """Allocate a buffer."""
        size = round_up(size_bytes)
        self._addresses += size
        self._buffers[buffer] = (self._addresses, size)
        self._note(thread, at_ns, self._addresses, size)

    def free(self, buffer: str, thread: int, at_ns: int) -> None:
        """Free a buffer, if it was allocated."""
        if buffer in self._buffers:
            address, size = self._buffers.pop(buffer)
            self._addresses = 0x7F00_0000_0000 if not self._buffers else self._addresses
            self._note(thread, at_ns, address, -size)

    def flush(self, *, empties: bool) -> None:
        """Return the cache to the device, or allocate it again."""
        self._reserved = round_up(self._allocated) if empties else self._full

    def _note(self, thread: int, at_ns: int, address: int, delta_bytes: int) -> None:
        self._allocated += delta_bytes
        self._reserved = max(self._reserved, self._allocated)
        self._record.allocations.append(
            Allocation(thread, at_ns, address, delta_bytes, self._allocated, self._reserved)
        )


def static_bytes(job: Job, rank: int = 0) -> int:
    """Return the bytes that a rank always uses: its shard of the training state, and persistent buffers."""
    if job.hybrid is not None:
        return round_up(hybrid_layers.state_bytes(job, rank))
    model = job.model
    state_bytes = _STATE_BYTES * model.parameters // job.shards
    if buffer_bytes := STRATEGIES[job.strategy].buffer_bytes:  # the root has one buffer of each kind to itself
        root_bytes = (GATHERED_BYTES + REDUCED_BYTES) * 2 * model.outer_parameters
        state_bytes += buffer_bytes * model.layer_parameters + root_bytes
    return round_up(state_bytes)


def peak_bytes(job: Job, rank: int | None = None) -> int:
    """Return a rank's peak bytes of a step: static memory, activations, logits, and buffers for two units.

    Without a rank, of the one that needs most.
    """
    if job.hybrid is not None:
        peak_rank = _fullest_rank(job) if rank is None else rank
        return static_bytes(job, peak_rank) + _peak_activation_bytes(job, peak_rank)
    model, width_tokens = job.model, job.model.width * job.tokens
    stored_layers = job.model.layers - job.recomputed_layers
    activations = (ACTIVATION_BYTES * stored_layers + INPUT_BYTES * job.recomputed_layers) * width_tokens
    recomputing = ACTIVATION_BYTES * width_tokens if job.recomputed_layers else 0
    logits = _LOGIT_BYTES * model.vocabulary * job.tokens
    buffers = 0
    if not STRATEGIES[job.strategy].buffer_bytes:
        layer = (2 * GATHERED_BYTES * 2 + REDUCED_BYTES) * model.layer_parameters
        buffers = layer + (GATHERED_BYTES * 2 + REDUCED_BYTES) * 2 * model.outer_parameters
    return round(static_bytes(job) + activations + recomputing + logits + buffers)


def activation_bytes(job: Job, stage: int) -> int:
    """Return the bytes of one micro-batch's activations of a stage on a rank, in a job with a layout."""
    ranks = job.mesh.layout.tp
    undivided = 0 if job.mesh.sequence_parallel else _UNDIVIDED
    share = undivided + (1 - undivided) / ranks
    layers = round(ACTIVATION_BYTES * share * job.tokens * job.model.width * job.mesh.stage_layers[stage])
    is_last = stage == job.mesh.stages - 1
    return layers + (_LOGIT_BYTES * job.model.vocabulary * job.tokens // ranks if is_last else 0)


def require_fit(job: Job) -> None:
    """Raise InputError if a job does not fit into its GPUs' memory, with a suggestion."""
    needed, available = peak_bytes(job), job.hardware.memory_bytes
    if needed > available:
        raise InputError(
            f"{job.model.name} needs about {needed / GIB:.0f} GiB on each of {job.gpus} GPUs, {job.hardware.name} has "
            f"{available / GIB:.0f}: use more GPUs, a smaller --batch or --seq, or more --checkpoint-layers"
        )


def round_up(size_bytes: float) -> int:
    """Return a size rounded up to what the allocator takes from the device at once."""
    return -(-round(size_bytes) // _SEGMENT_BYTES) * _SEGMENT_BYTES


def _peak_activation_bytes(job: Job, rank: int) -> int:
    """Return the most that the activations of a rank's micro-batches in flight take."""
    place = job.mesh.layout.coordinate(rank)[PP]
    used_bytes = max_bytes = 0
    for action in pipeline_schedules.order(job.mesh.schedule, job.mesh.shape(job.micro_batches), place):
        size = activation_bytes(job, action.stage)
        if action.kind == FORWARD:
            used_bytes += size
        elif action.kind != INPUT_GRADIENT:
            used_bytes -= size
        max_bytes = max(max_bytes, used_bytes)
    return max_bytes


def _fullest_rank(job: Job) -> int:
    """Return the rank that uses the most memory: one of each place on the pp axis is looked at."""
    ranks = range(0, job.gpus, job.gpus // job.mesh.layout.pp)
    return max(ranks, key=lambda rank: hybrid_layers.state_bytes(job, rank) + _peak_activation_bytes(job, rank))
