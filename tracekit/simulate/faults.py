"""The faults that can be injected into a job, each with the rule that should find it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from tracekit.errors import InputError, did_you_mean
from tracekit.simulate import engine, fault_registry, hybrid_faults, memory
from tracekit.simulate.fault_registry import Fault, FaultRequest, impair, on_hardware, register, switch
from tracekit.simulate.job import DDP, FSDP1, FSDP2, HSDP, YAFSDP, YAFSDP_V1, Impairments, Job

_STALL = 1.3  # times a step: the host runs ahead, so only a longer delay makes the device wait
_LEAST_SAVE_NS = 500_000_000  # shorter ones do no harm

FAULTS: dict[str, Fault] = {}
_fault = partial(register, FAULTS)


def parse(text: str) -> FaultRequest:
    """Parse ``NAME[:ARGUMENT…]``. Raises InputError for an unknown fault."""
    name, *arguments = text.split(":")
    if name not in FAULTS:
        raise InputError(
            f"{name!r} is not a fault{did_you_mean(name, FAULTS)}; tracekit simulate --list-faults lists all"
        )
    return FaultRequest(FAULTS[name], tuple(arguments))


def inject(job: Job, requests: Sequence[FaultRequest]) -> Job:
    """Return the job with these faults. Raises InputError where one is impossible or its arguments are invalid."""
    for request in requests:
        _require_layout(job, request.fault)
        if job.hybrid is None and job.strategy not in request.fault.strategies:
            raise InputError(
                f"{request.fault.name} is not possible under {job.strategy}; use one of: "
                f"{', '.join(request.fault.strategies)}"
            )
        job = request.fault.prepare(job)
    for request in requests:
        try:
            job = request.fault.inject(job, request.arguments)
        except ValueError as error:
            raise InputError(f"{request.fault.name}: {error}; usage: {request.fault.usage}") from error
    return job


def _require_layout(job: Job, fault: Fault) -> None:
    if job.hybrid is None and not fault.plain:
        raise InputError(f"{fault.name} needs a layout: --pp, --tp or --ep; usage: {fault.usage}")
    if job.hybrid is not None and not fault.hybrid:
        possible = ", ".join(other.name for other in FAULTS.values() if other.hybrid)
        raise InputError(f"{fault.name} is not simulated with --pp, --tp or --ep; use one of: {possible}")


def without(job: Job, requests: Sequence[FaultRequest], removed: FaultRequest) -> Job:
    """Return the job with all `requests` but one: `job` has none of them yet."""
    for request in requests:
        job = request.fault.prepare(job)
    if removed.fault.remove is not None:
        return removed.fault.remove(inject(job, requests))
    return inject(job, [request for request in requests if request is not removed])


def without_give_way(job: Job) -> Job:
    """Return the job on a machine without the give-way effect."""
    return on_hardware(job, give_way=0.0, give_way_high_priority=0.0)


def listing() -> str:
    """Return a line for each fault: its name, its rule, its usage, and what it does."""
    width = max(map(len, FAULTS))
    return "\n".join(f"{f.name:<{width}}  {f.code:<9}  {f.usage}: {f.summary}" for f in FAULTS.values())


# The faults ----------------------------------------------------------------------------------------------------------


def _steps_since(job: Job, slow: Mapping[int, tuple[float, int]]) -> tuple[int, ...]:
    return tuple(range(min(since for _, since in slow.values()), job.steps))


def _step_ns(job: Job) -> int:
    """Return the time of a step of the job without faults."""
    healthy = replace(job, impairments=Impairments(), ranks_written=1, steps=2)
    return engine.total_ns(healthy) // 2


@_fault(
    "slow-rank", "RANK001", "[:RANK[:FACTOR]]", "one rank's kernels take FACTOR times as long (1.3)",
    ranks=lambda job: tuple(job.impairments.slow_ranks), hybrid=True,
)  # fmt: skip
def _slow_rank(job: Job, args: Sequence[str]) -> Job:
    rank, factor = fault_registry.rank(job, args, 0), fault_registry.factor(args, 1, 1.3)
    return impair(job, slow_ranks={**job.impairments.slow_ranks, rank: (factor, 0)})


@_fault(
    "throttled-gpu", "RANK001", "[:RANK[:FACTOR]]",
    "one rank's GPU is too hot: its clock is 1/FACTOR of the others' (1.3), and the metrics log has the counters",
    prepare=lambda job: replace(job, device_metrics=True), ranks=lambda job: job.impairments.throttled_ranks,
    hybrid=True, traces_of="slow-rank",
)  # fmt: skip
def _throttled_gpu(job: Job, args: Sequence[str]) -> Job:
    slow, rank = _slow_rank(job, args), fault_registry.rank(job, args, 0)
    return impair(slow, throttled_ranks=(*job.impairments.throttled_ranks, rank))


@_fault(
    "straggler-from-step", "RANK001", "[:STEP[:RANK[:FACTOR]]]", "one rank is slow from a step on (the middle one)",
    steps=lambda job: _steps_since(job, job.impairments.slow_ranks),
    ranks=lambda job: tuple(job.impairments.slow_ranks),
)  # fmt: skip
def _straggler_from_step(job: Job, args: Sequence[str]) -> Job:
    since = fault_registry.step(job, args, 0, job.steps // 2)
    rank, factor = fault_registry.rank(job, args, 1), fault_registry.factor(args, 2, 1.3)
    return impair(job, slow_ranks={**job.impairments.slow_ranks, rank: (factor, since)})


@_fault(
    "slow-link", "RANK002", "[:RANK[:FACTOR[:STEP]]]",
    "collectives through one rank's network link take FACTOR times as long (2.5), where all ranks share one group "
    "from the middle step on",
    steps=lambda job: _steps_since(job, job.impairments.slow_links),
    ranks=lambda job: tuple(job.impairments.slow_links),
)  # fmt: skip
def _slow_link(job: Job, args: Sequence[str]) -> Job:
    usual = 0 if job.strategy == HSDP else job.steps // 2
    rank, factor, since = (
        fault_registry.rank(job, args, 0),
        fault_registry.factor(args, 1, 2.5),
        fault_registry.step(job, args, 2, usual),
    )
    return impair(job, slow_links={**job.impairments.slow_links, rank: (factor, since)})


@_fault(
    "late-launch", "HOST001", "[:DURATION]",
    "the host loses DURATION in Python before each layer's forward pass (1.3 steps over all layers)", hybrid=True,
)  # fmt: skip
def _late_launch(job: Job, args: Sequence[str]) -> Job:
    passes = job.model.layers * job.micro_batches
    return impair(job, launch_delay_ns=fault_registry.duration(args, lambda: round(_STALL * _step_ns(job) / passes)))


@_fault(
    "host-sync", "HOST002", "[:DURATION]",
    "each layer's output is read on the host (.item()), which waits for the device and then processes it for "
    "DURATION (a tenth of a step over all layers)",
)  # fmt: skip
def _host_sync(job: Job, args: Sequence[str]) -> Job:
    passes = job.model.layers * job.micro_batches
    return impair(job, host_read_ns=fault_registry.duration(args, lambda: _step_ns(job) // (10 * passes)))


@_fault(
    "dataloader-stall", "HOST003", "[:DURATION]", "each batch arrives after DURATION (1.3 steps)",
    steps=lambda job: tuple(range(min(1, job.steps - 1), job.steps)), hybrid=True,
)  # fmt: skip
def _dataloader_stall(job: Job, args: Sequence[str]) -> Job:
    return impair(job, data_stall_ns=fault_registry.duration(args, lambda: round(_STALL * _step_ns(job))))


@_fault(
    "host-stall", "STEP001", "[:RANK[:DURATION[:STEP]]]",
    "one rank's host stops once for DURATION (1.3 times the steps so far, for it runs ahead) between forward and "
    "backward of a step (the middle one)",
    steps=lambda job: tuple(sorted({step for step, _ in job.impairments.host_stalls.values()})),
    ranks=lambda job: tuple(job.impairments.host_stalls),
)  # fmt: skip
def _host_stall(job: Job, args: Sequence[str]) -> Job:
    rank, step = fault_registry.rank(job, args, 0), fault_registry.step(job, args, 2, job.steps // 2)
    took_ns = fault_registry.duration(args[1:], lambda: (step + 1) * round(_STALL * _step_ns(job)))
    return impair(job, host_stalls={**job.impairments.host_stalls, rank: (step, took_ns)})


@_fault(
    "stalled-collective", "STEP004", "[:DURATION[:STEP]]",
    "the first collective of a step (the middle one) takes DURATION longer (1.3 steps) although all ranks have arrived",
    steps=lambda job: (job.impairments.stalled_collective or (0, 0))[:1], hybrid=True,
)  # fmt: skip
def _stalled_collective(job: Job, args: Sequence[str]) -> Job:
    if job.steps < 2:
        raise ValueError("it needs --steps 2 or more: other steps show how long the collective usually takes")
    took_ns = fault_registry.duration(args, lambda: round(_STALL * _step_ns(job)))
    return impair(job, stalled_collective=(fault_registry.step(job, args, 1, job.steps // 2), took_ns))


@_fault(
    "checkpoint-stall", "CKPT001", "[:DURATION[:STEP]]",
    "a save blocks training for DURATION (one step, at least half a second) after a step",
    steps=lambda job: (job.impairments.save_step,),
)  # fmt: skip
def _checkpoint_stall(job: Job, args: Sequence[str]) -> Job:
    if job.steps < 2:
        raise ValueError("it needs --steps 2 or more: a save lies between two steps")
    took_ns = fault_registry.duration(args, lambda: max(_LEAST_SAVE_NS, _step_ns(job)))
    return impair(job, save_ns=took_ns, save_step=fault_registry.step(job, args, 1, (job.steps - 1) // 2))


@_fault(
    "allocator-retry", "MEM001", "[:CALLS]",
    "in every step except the first the allocator waits for the device, frees its cache in CALLS calls, and "
    "allocates as many segments again",
    steps=lambda job: job.impairments.retry_steps,
)  # fmt: skip
def _allocator_retry(job: Job, args: Sequence[str]) -> Job:
    if job.steps < 2:
        raise ValueError("it needs --steps 2 or more: allocation retries happen in steady state")
    calls = fault_registry.count(args, lambda: max(8, _step_ns(job) // 10_000_000))
    return impair(job, retry_steps=tuple(range(1, job.steps)), retry_cuda_calls=calls)


_fault(
    "give-way", "STREAM001", "",
    "gradients are cast and divided on the communication stream during the main compute (under fsdp1 always)",
    strategies=(FSDP2, HSDP, YAFSDP), remove=without_give_way,
)(switch(prepares_on_communication=True))  # fmt: skip

_fault(
    "serialized-communicators", "STREAM002", "",
    "one queue feeds all streams (CUDA_DEVICE_MAX_CONNECTIONS=1), so collectives and compute are serialized",
    strategies=(FSDP1, FSDP2, HSDP, YAFSDP, YAFSDP_V1),
)(switch(shares_queue=True))  # fmt: skip


@_fault(
    "sm-contention", "STREAM003", "[:FACTOR]",
    "compute takes FACTOR times as long (1.6) while a collective is resident",
    remove=lambda job: on_hardware(job, collective_slows_compute=0.0),
)  # fmt: skip
def _sm_contention(job: Job, args: Sequence[str]) -> Job:
    return on_hardware(job, collective_slows_compute=fault_registry.factor(args, 0, 1.6) - 1)


@_fault("starved-collectives", "STREAM004", "[:FACTOR]", "collectives take FACTOR times as long (2) while compute runs")
def _starved_collectives(job: Job, args: Sequence[str]) -> Job:
    return on_hardware(job, compute_slows_collective=fault_registry.factor(args, 0, 2.0) - 1)


_fault(
    "no-prefetch", "COMM001", "", "each layer is gathered only when it is about to run",
    strategies=(FSDP1, FSDP2, HSDP, YAFSDP),
)(switch(prefetches=False))  # fmt: skip


@_fault("slow-network", "COMM001", "[:FACTOR]", "all links have 1/FACTOR of their bandwidth (4)")
def _slow_network(job: Job, args: Sequence[str]) -> Job:
    factor, hardware = fault_registry.factor(args, 0, 4.0), job.hardware
    node, network = hardware.node_bytes_per_s / factor, hardware.network_bytes_per_s / factor
    return on_hardware(job, node_bytes_per_s=node, network_bytes_per_s=network)


@_fault("small-collectives", "COMM002", "[:COUNT]", "each unit is gathered and reduced in COUNT collectives (32)")
def _small_collectives(job: Job, args: Sequence[str]) -> Job:
    return impair(job, collectives_per_unit=fault_registry.count(args, lambda: 32))


_fault(
    "reduce-every-microbatch", "COMM003", "",
    "gradients are reduced at every micro-batch (of 2, if --micro-batches is 1)", strategies=(DDP, FSDP1, FSDP2, HSDP),
    prepare=lambda job: replace(job, micro_batches=max(job.micro_batches, 2)),
)(switch(reduces_every_micro_batch=True))  # fmt: skip


@_fault(
    "needless-recomputation", "MEM002", "[:LAYERS]",
    "LAYERS more layers (all) recompute activations that would fit into memory",
)  # fmt: skip
def _needless_recomputation(job: Job, args: Sequence[str]) -> Job:
    max_layers = job.model.layers - job.checkpoint_layers
    if not max_layers:
        raise ValueError("all layers recompute already (--checkpoint-layers)")
    if memory.peak_bytes(job) > job.hardware.memory_bytes:
        raise ValueError("the activations do not fit into memory, so recomputation would not be needless")
    return impair(job, extra_checkpointed_layers=min(max_layers, fault_registry.count(args, lambda: max_layers)))


FAULTS |= hybrid_faults.FAULTS
