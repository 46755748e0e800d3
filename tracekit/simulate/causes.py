"""Inject faults: each function takes a job and a fault's arguments, and returns the job with the fault.

All raise ValueError for invalid arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tracekit.simulate import engine, memory
from tracekit.simulate.job import HSDP, Impairments, Job

_STALL = 1.3  # times a step: the host runs ahead, so only a longer delay makes the device wait


def step_ns(job: Job) -> int:
    """Return how long a step of the job takes without faults."""
    healthy = replace(job, impairments=Impairments(), ranks_written=1, steps=2)
    return engine.simulate(healthy).total_ns // 2


def slow_rank(job: Job, given: Sequence[str]) -> Job:
    """Let a rank compute slowly: arguments RANK, FACTOR."""
    rank, factor = _rank(job, given, 0), _factor(given, 1, 1.3)
    return _impaired(job, slow_ranks={**job.impairments.slow_ranks, rank: (factor, 0)})


def straggler(job: Job, given: Sequence[str]) -> Job:
    """Let a rank compute slowly from a step on: STEP, RANK, FACTOR."""
    since = _step(job, given, 0, job.steps // 2)
    rank, factor = _rank(job, given, 1), _factor(given, 2, 1.3)
    return _impaired(job, slow_ranks={**job.impairments.slow_ranks, rank: (factor, since)})


def slow_link(job: Job, given: Sequence[str]) -> Job:
    """Let collectives through a rank's network link be slow: RANK, FACTOR, STEP."""
    usual = 0 if job.strategy == HSDP else job.steps // 2
    rank, factor, since = _rank(job, given, 0), _factor(given, 1, 2.5), _step(job, given, 2, usual)
    return _impaired(job, slow_links={**job.impairments.slow_links, rank: (factor, since)})


def late_launch(job: Job, given: Sequence[str]) -> Job:
    """Let the host lose time before each layer: DURATION."""
    passes = job.model.layers * job.micro_batches
    return _impaired(job, launch_delay_ns=_duration(given, 0, lambda: round(_STALL * step_ns(job) / passes)))


def host_sync(job: Job, given: Sequence[str]) -> Job:
    """Let the host read each layer's output and process it: DURATION."""
    passes = job.model.layers * job.micro_batches
    return _impaired(job, host_read_ns=_duration(given, 0, lambda: step_ns(job) // (10 * passes)))


def data_stall(job: Job, given: Sequence[str]) -> Job:
    """Let each batch be late: DURATION."""
    return _impaired(job, data_stall_ns=_duration(given, 0, lambda: round(_STALL * step_ns(job))))


_LEAST_SAVE_NS = 500_000_000  # shorter ones do no harm


def save(job: Job, given: Sequence[str]) -> Job:
    """Let a save block training: DURATION, STEP."""
    if job.steps < 2:
        raise ValueError("it needs --steps 2 or more: a save lies between two steps")
    took_ns = _duration(given, 0, lambda: max(_LEAST_SAVE_NS, step_ns(job)))
    return _impaired(job, save_ns=took_ns, save_step=_step(job, given, 1, (job.steps - 1) // 2))


def retry(job: Job, given: Sequence[str]) -> Job:
    """Let the allocator run out of memory: CALLS."""
    if job.steps < 2:
        raise ValueError("it needs --steps 2 or more: allocation retries happen in steady state")
    calls = _count(given, 0) if given else max(8, step_ns(job) // 10_000_000)
    return _impaired(job, retry_steps=tuple(range(1, job.steps)), retry_cuda_calls=calls)


def recompute(job: Job, given: Sequence[str]) -> Job:
    """Let more layers recompute: LAYERS."""
    most = job.model.layers - job.checkpoint_layers
    if not most:
        raise ValueError("all layers recompute already (--checkpoint-layers)")
    if memory.peak_bytes(job) > job.hardware.memory_bytes:
        raise ValueError("the activations do not fit into memory, so recomputation would not be needless")
    return _impaired(job, extra_checkpointed_layers=min(most, _count(given, 0) if given else most))


def slow_network(job: Job, given: Sequence[str]) -> Job:
    """Let all links be slow: FACTOR."""
    factor, hardware = _factor(given, 0, 4.0), job.hardware
    node, network = hardware.node_bytes_per_s / factor, hardware.network_bytes_per_s / factor
    return replace(job, hardware=replace(hardware, node_bytes_per_s=node, network_bytes_per_s=network))


def sm_contention(job: Job, given: Sequence[str]) -> Job:
    """Let resident collectives slow compute: FACTOR."""
    return replace(job, hardware=replace(job.hardware, collective_slows_compute=_factor(given, 0, 1.6) - 1))


def starved_collectives(job: Job, given: Sequence[str]) -> Job:
    """Let compute slow collectives: FACTOR."""
    return replace(job, hardware=replace(job.hardware, compute_slows_collective=_factor(given, 0, 2.0) - 1))


def split_collectives(job: Job, given: Sequence[str]) -> Job:
    """Let each unit be gathered and reduced in pieces: COUNT."""
    return _impaired(job, collectives_per_unit=_count(given, 0) if given else 32)


def switch(**changes: bool) -> Callable[[Job, Sequence[str]], Job]:
    """Return the cause that sets these fields of `Troubles`."""

    def cause_it(job: Job, given: Sequence[str]) -> Job:
        if given:
            raise ValueError("it takes no arguments")
        return _impaired(job, **changes)

    return cause_it


def _impaired(job: Job, **changes: object) -> Job:
    return replace(job, impairments=replace(job.impairments, **changes))  # type: ignore[arg-type]


def accumulating(job: Job) -> Job:
    """Return the job with several micro-batches."""
    return job if job.micro_batches > 1 else replace(job, micro_batches=2)


def since(job: Job, slow: Mapping[int, tuple[float, int]]) -> tuple[int, ...]:
    """Return the steps from the first trouble of `slow` on."""
    return tuple(range(min(since for _, since in slow.values()), job.steps))


# Arguments -----------------------------------------------------------------------------------------------------------


def _rank(job: Job, arguments: Sequence[str], index: int) -> int:
    # Not rank 0 by default: the others are compared with it.
    text = (
        arguments[index]
        if len(arguments) > index and arguments[index]
        else str(1 + job.seed % (min(job.ranks_written, job.gpus) - 1 or 1))
    )
    if not text.isdecimal() or int(text) >= job.gpus:
        raise ValueError(f"{text!r} is not a rank of {job.gpus}")
    return int(text)


def _factor(arguments: Sequence[str], index: int, default: float) -> float:
    text = arguments[index] if len(arguments) > index and arguments[index] else str(default)
    factor = float(text)
    if not 1 < factor < 1000:
        raise ValueError(f"{text} is not a factor above 1")
    return factor


def _step(job: Job, arguments: Sequence[str], index: int, default: int) -> int:
    text = arguments[index] if len(arguments) > index and arguments[index] else str(default)
    if not text.isdecimal() or int(text) >= job.steps:
        raise ValueError(f"{text!r} is not a step of {job.steps}")
    return int(text)


def _count(arguments: Sequence[str], index: int) -> int:
    if not arguments[index].isdecimal() or int(arguments[index]) < 1:
        raise ValueError(f"{arguments[index]!r} is not a positive integer")
    return int(arguments[index])


def _duration(arguments: Sequence[str], index: int, default: Callable[[], int]) -> int:
    if len(arguments) <= index or not arguments[index]:
        return default()
    for unit, ns in (("us", 1e3), ("ms", 1e6), ("s", 1e9)):
        number = arguments[index].removesuffix(unit)
        if number != arguments[index] and number.replace(".", "", 1).isdecimal():
            return round(float(number) * ns)
    raise ValueError(f"{arguments[index]!r} is not a duration such as 20ms")
