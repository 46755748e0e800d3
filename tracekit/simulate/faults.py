"""The faults that can be injected into a job, each with the rule that should find it."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tracekit.errors import InputError
from tracekit.simulate import engine, memory
from tracekit.simulate.job import DDP, FSDP1, FSDP2, HSDP, STRATEGIES, YAFSDP, YAFSDP_V1, Impairments, Job

_STALL = 1.3  # times a step: the host runs ahead, so only a longer delay makes the device wait
_LEAST_SAVE_NS = 500_000_000  # shorter ones do no harm

_Inject: TypeAlias = Callable[[Job, Sequence[str]], Job]


@dataclass(frozen=True)
class Fault:
    """One fault: its name, the code of the rule that should find it, and how it is injected into a job.

    `usage` shows its arguments. `inject` raises ValueError for invalid arguments. `prepare` returns a job in which the
    fault is possible but absent, `inject` adds it. Where a machine has some of it by itself, `remove` removes all of
    it; else the prepared job is the one without.
    """

    name: str
    code: str
    usage: str
    summary: str
    inject: _Inject
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    prepare: Callable[[Job], Job] = lambda job: job
    steps: Callable[[Job], tuple[int, ...]] = lambda job: tuple(range(job.steps))
    ranks: Callable[[Job], tuple[int, ...]] = lambda job: job.simulated_ranks
    remove: Callable[[Job], Job] | None = None


FAULTS: dict[str, Fault] = {}


@dataclass(frozen=True)
class FaultRequest:
    """A requested fault with its arguments."""

    fault: Fault
    arguments: tuple[str, ...]


def parse(text: str) -> FaultRequest:
    """Parse ``NAME[:ARGUMENT…]``. Raises InputError for an unknown fault."""
    name, *arguments = text.split(":")
    if name not in FAULTS:
        near = difflib.get_close_matches(name, FAULTS, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"{name!r} is not a fault; {guess}tracekit simulate --list-faults lists all")
    return FaultRequest(FAULTS[name], tuple(arguments))


def inject(job: Job, requests: Sequence[FaultRequest]) -> Job:
    """Return the job with these faults. Raises InputError where one is impossible or its arguments are invalid."""
    for request in requests:
        if job.strategy not in request.fault.strategies:
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


def without(job: Job, requests: Sequence[FaultRequest], removed: FaultRequest) -> Job:
    """Return the job with all `requests` but one: `job` has none of them yet."""
    for each in requests:
        job = each.fault.prepare(job)
    if removed.fault.remove is not None:
        return removed.fault.remove(inject(job, requests))
    return inject(job, [each for each in requests if each is not removed])


def without_give_way(job: Job) -> Job:
    """Return the job on a machine without the give-way effect."""
    return _on_hardware(job, give_way=0.0, give_way_high_priority=0.0)


def listing() -> str:
    """Return a line for each fault: its name, its rule, its usage, and what it does."""
    width = max(map(len, FAULTS))
    return "\n".join(f"{f.name:<{width}}  {f.code:<9}  {f.usage}: {f.summary}" for f in FAULTS.values())


# The faults ----------------------------------------------------------------------------------------------------------


def _fault(name: str, code: str, arguments: str, summary: str, **fields: Any) -> Callable[[_Inject], _Inject]:
    """Register the decorated function as what injects a fault; `fields` are further fields of `Fault`."""

    def register(inject: _Inject) -> _Inject:
        FAULTS[name] = Fault(name, code, name + arguments, summary, inject, **fields)
        return inject

    return register


def _switch(**changes: bool) -> _Inject:
    """Return what injects a fault without arguments: it sets these fields of `Impairments`."""

    def inject(job: Job, given: Sequence[str]) -> Job:
        if given:
            raise ValueError("it takes no arguments")
        return _impaired(job, **changes)

    return inject


def _impaired(job: Job, **changes: object) -> Job:
    return replace(job, impairments=replace(job.impairments, **changes))  # type: ignore[arg-type]


def _on_hardware(job: Job, **changes: float) -> Job:
    return replace(job, hardware=replace(job.hardware, **changes))  # type: ignore[arg-type]


def _steps_since(job: Job, slow: Mapping[int, tuple[float, int]]) -> tuple[int, ...]:
    return tuple(range(min(since for _, since in slow.values()), job.steps))


def _step_ns(job: Job) -> int:
    """Return how long a step of the job takes without faults."""
    healthy = replace(job, impairments=Impairments(), ranks_written=1, steps=2)
    return engine.simulate(healthy).total_ns // 2


@_fault(
    "slow-rank",
    "RANK001",
    "[:RANK[:FACTOR]]",
    "one rank's kernels take FACTOR times as long (1.3)",
    ranks=lambda job: tuple(job.impairments.slow_ranks),
)
def _slow_rank(job: Job, given: Sequence[str]) -> Job:
    rank, factor = _rank(job, given, 0), _factor(given, 1, 1.3)
    return _impaired(job, slow_ranks={**job.impairments.slow_ranks, rank: (factor, 0)})


@_fault(
    "straggler-from-step",
    "RANK001",
    "[:STEP[:RANK[:FACTOR]]]",
    "one rank is slow from a step on (the middle one)",
    steps=lambda job: _steps_since(job, job.impairments.slow_ranks),
    ranks=lambda job: tuple(job.impairments.slow_ranks),
)
def _straggler_from_step(job: Job, given: Sequence[str]) -> Job:
    since = _step(job, given, 0, job.steps // 2)
    rank, factor = _rank(job, given, 1), _factor(given, 2, 1.3)
    return _impaired(job, slow_ranks={**job.impairments.slow_ranks, rank: (factor, since)})


@_fault(
    "slow-link",
    "RANK002",
    "[:RANK[:FACTOR[:STEP]]]",
    "collectives through one rank's network link take FACTOR times as long (2.5), where all ranks share one group "
    "from the middle step on",
    steps=lambda job: _steps_since(job, job.impairments.slow_links),
    ranks=lambda job: tuple(job.impairments.slow_links),
)
def _slow_link(job: Job, given: Sequence[str]) -> Job:
    usual = 0 if job.strategy == HSDP else job.steps // 2
    rank, factor, since = _rank(job, given, 0), _factor(given, 1, 2.5), _step(job, given, 2, usual)
    return _impaired(job, slow_links={**job.impairments.slow_links, rank: (factor, since)})


@_fault(
    "late-launch",
    "HOST001",
    "[:DURATION]",
    "the host loses DURATION in Python before each layer's forward pass (1.3 steps over all layers)",
)
def _late_launch(job: Job, given: Sequence[str]) -> Job:
    passes = job.model.layers * job.micro_batches
    return _impaired(job, launch_delay_ns=_duration(given, lambda: round(_STALL * _step_ns(job) / passes)))


@_fault(
    "host-sync",
    "HOST002",
    "[:DURATION]",
    "each layer's output is read on the host (.item()), which waits for the device and then processes it for "
    "DURATION (a tenth of a step over all layers)",
)
def _host_sync(job: Job, given: Sequence[str]) -> Job:
    passes = job.model.layers * job.micro_batches
    return _impaired(job, host_read_ns=_duration(given, lambda: _step_ns(job) // (10 * passes)))


@_fault(
    "dataloader-stall",
    "HOST003",
    "[:DURATION]",
    "each batch arrives after DURATION (1.3 steps)",
    steps=lambda job: tuple(range(min(1, job.steps - 1), job.steps)),
)
def _dataloader_stall(job: Job, given: Sequence[str]) -> Job:
    return _impaired(job, data_stall_ns=_duration(given, lambda: round(_STALL * _step_ns(job))))


@_fault(
    "checkpoint-stall",
    "CKPT001",
    "[:DURATION[:STEP]]",
    "a save blocks training for DURATION (one step, at least half a second) after a step",
    steps=lambda job: (job.impairments.save_step,),
)
def _checkpoint_stall(job: Job, given: Sequence[str]) -> Job:
    if job.steps < 2:
        raise ValueError("it needs --steps 2 or more: a save lies between two steps")
    took_ns = _duration(given, lambda: max(_LEAST_SAVE_NS, _step_ns(job)))
    return _impaired(job, save_ns=took_ns, save_step=_step(job, given, 1, (job.steps - 1) // 2))


@_fault(
    "allocator-retry",
    "MEM001",
    "[:CALLS]",
    "in every step except the first the allocator waits for the device, frees its cache in CALLS calls, and "
    "allocates as many segments again",
    steps=lambda job: job.impairments.retry_steps,
)
def _allocator_retry(job: Job, given: Sequence[str]) -> Job:
    if job.steps < 2:
        raise ValueError("it needs --steps 2 or more: allocation retries happen in steady state")
    calls = _count(given, lambda: max(8, _step_ns(job) // 10_000_000))
    return _impaired(job, retry_steps=tuple(range(1, job.steps)), retry_cuda_calls=calls)


_fault(
    "give-way",
    "STREAM001",
    "",
    "gradients are cast and divided on the communication stream during the main compute (under fsdp1 always)",
    strategies=(FSDP2, HSDP, YAFSDP),
    remove=without_give_way,
)(_switch(prepares_on_communication=True))

_fault(
    "serialized-communicators",
    "STREAM002",
    "",
    "one queue feeds all streams (CUDA_DEVICE_MAX_CONNECTIONS=1), so collectives and compute are serialized",
    strategies=(FSDP1, FSDP2, HSDP, YAFSDP, YAFSDP_V1),
)(_switch(shares_queue=True))


@_fault(
    "sm-contention",
    "STREAM003",
    "[:FACTOR]",
    "compute takes FACTOR times as long (1.6) while a collective is resident",
    remove=lambda job: _on_hardware(job, collective_slows_compute=0.0),
)
def _sm_contention(job: Job, given: Sequence[str]) -> Job:
    return _on_hardware(job, collective_slows_compute=_factor(given, 0, 1.6) - 1)


@_fault("starved-collectives", "STREAM004", "[:FACTOR]", "collectives take FACTOR times as long (2) while compute runs")
def _starved_collectives(job: Job, given: Sequence[str]) -> Job:
    return _on_hardware(job, compute_slows_collective=_factor(given, 0, 2.0) - 1)


_fault(
    "no-prefetch",
    "COMM001",
    "",
    "each layer is gathered only when it is about to run",
    strategies=(FSDP1, FSDP2, HSDP, YAFSDP),
)(_switch(prefetches=False))


@_fault("slow-network", "COMM001", "[:FACTOR]", "all links have 1/FACTOR of their bandwidth (4)")
def _slow_network(job: Job, given: Sequence[str]) -> Job:
    factor, hardware = _factor(given, 0, 4.0), job.hardware
    node, network = hardware.node_bytes_per_s / factor, hardware.network_bytes_per_s / factor
    return _on_hardware(job, node_bytes_per_s=node, network_bytes_per_s=network)


@_fault("small-collectives", "COMM002", "[:COUNT]", "each unit is gathered and reduced in COUNT collectives (32)")
def _small_collectives(job: Job, given: Sequence[str]) -> Job:
    return _impaired(job, collectives_per_unit=_count(given, lambda: 32))


_fault(
    "reduce-every-microbatch",
    "COMM003",
    "",
    "gradients are reduced at every micro-batch (of 2, if --micro-batches is 1)",
    strategies=(DDP, FSDP1, FSDP2, HSDP),
    prepare=lambda job: replace(job, micro_batches=max(job.micro_batches, 2)),
)(_switch(reduces_every_micro_batch=True))


@_fault(
    "needless-recomputation",
    "MEM002",
    "[:LAYERS]",
    "LAYERS more layers (all) recompute activations that would fit into memory",
)
def _needless_recomputation(job: Job, given: Sequence[str]) -> Job:
    most = job.model.layers - job.checkpoint_layers
    if not most:
        raise ValueError("all layers recompute already (--checkpoint-layers)")
    if memory.peak_bytes(job) > job.hardware.memory_bytes:
        raise ValueError("the activations do not fit into memory, so recomputation would not be needless")
    return _impaired(job, extra_checkpointed_layers=min(most, _count(given, lambda: most)))


# Arguments -----------------------------------------------------------------------------------------------------------


def _argument(arguments: Sequence[str], index: int, default: object) -> str:
    return arguments[index] if len(arguments) > index and arguments[index] else str(default)


def _rank(job: Job, arguments: Sequence[str], index: int) -> int:
    # Not rank 0 by default: the others are compared with it.
    text = _argument(arguments, index, 1 + job.seed % (min(job.ranks_written, job.gpus) - 1 or 1))
    if not text.isdecimal() or int(text) >= job.gpus:
        raise ValueError(f"{text!r} is not a rank of {job.gpus}")
    return int(text)


def _factor(arguments: Sequence[str], index: int, default: float) -> float:
    text = _argument(arguments, index, default)
    if not 1 < float(text) < 1000:
        raise ValueError(f"{text} is not a factor above 1")
    return float(text)


def _step(job: Job, arguments: Sequence[str], index: int, default: int) -> int:
    text = _argument(arguments, index, default)
    if not text.isdecimal() or int(text) >= job.steps:
        raise ValueError(f"{text!r} is not a step of {job.steps}")
    return int(text)


def _count(arguments: Sequence[str], default: Callable[[], int]) -> int:
    if not arguments:
        return default()
    if not arguments[0].isdecimal() or int(arguments[0]) < 1:
        raise ValueError(f"{arguments[0]!r} is not a positive integer")
    return int(arguments[0])


def _duration(arguments: Sequence[str], default: Callable[[], int]) -> int:
    if not arguments or not arguments[0]:
        return default()
    for unit, ns in (("us", 1e3), ("ms", 1e6), ("s", 1e9)):
        number = arguments[0].removesuffix(unit)
        if number != arguments[0] and number.replace(".", "", 1).isdecimal():
            return round(float(number) * ns)
    raise ValueError(f"{arguments[0]!r} is not a duration such as 20ms")
