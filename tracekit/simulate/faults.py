"""The faults that can be injected, each with the rule that should find it.

code       rule                                     faults
COMM001    communication that no compute hides      no-prefetch, slow-network
COMM002    collectives too small                    small-collectives
COMM003    gradients reduced at every micro-batch   reduce-every-microbatch
STREAM001  give-way                                 give-way
STREAM002  unnecessary serialization           serialized-communicators
STREAM003  compute slowed by collectives            sm-contention
STREAM004  collectives slowed by compute            starved-collectives
RANK001    straggling rank                          slow-rank, straggler-from-step
RANK002    slow link                                slow-link
HOST001    late launch                              late-launch
HOST002    blocking sync in the step                host-sync
HOST003    data-loading stall                       dataloader-stall
MEM001     allocator churn                          allocator-retry
MEM002     recomputation that memory could spare    needless-recomputation
CKPT001    blocking checkpoint                      checkpoint-stall
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tracekit.errors import InputError
from tracekit.simulate import causes
from tracekit.simulate.job import DDP, FSDP1, FSDP2, HSDP, YAFSDP, YAFSDP_V1, Job

_ALL = (DDP, FSDP1, FSDP2, HSDP, YAFSDP, YAFSDP_V1)


@dataclass(frozen=True)
class Fault:
    """One fault: its name, the code of the rule that should find it, and how it is injected into a job.

    `usage` shows its arguments. `prepare` returns a job in which the fault is possible but absent, `inject` adds it.
    Where a machine has some of it by itself, `remove` removes all of it; else the prepared job is the one without.
    """

    name: str
    code: str
    usage: str
    summary: str
    inject: Callable[[Job, Sequence[str]], Job]
    strategies: tuple[str, ...] = _ALL
    prepare: Callable[[Job], Job] = lambda job: job
    steps: Callable[[Job], tuple[int, ...]] = lambda job: tuple(range(job.steps))
    ranks: Callable[[Job], tuple[int, ...]] = lambda job: job.simulated_ranks
    remove: Callable[[Job], Job] | None = None


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
    return replace(job, hardware=replace(job.hardware, give_way=0.0, give_way_high_priority=0.0))


def without_contention(job: Job) -> Job:
    """Return the job on a machine whose resident collectives don't slow compute."""
    return replace(job, hardware=replace(job.hardware, collective_slows_compute=0.0))


def listing() -> str:
    """Return a line for each fault: its name, its rule, its usage, and what it does."""
    width = max(map(len, FAULTS))
    return "\n".join(f"{f.name:<{width}}  {f.code:<9}  {f.usage}: {f.summary}" for f in FAULTS.values())


_LISTED = (
    Fault(
        "slow-rank",
        "RANK001",
        "slow-rank[:RANK[:FACTOR]]",
        "one rank's kernels take FACTOR times as long (1.3)",
        causes.slow_rank,
        ranks=lambda job: tuple(job.impairments.slow_ranks),
    ),
    Fault(
        "straggler-from-step",
        "RANK001",
        "straggler-from-step[:STEP[:RANK[:FACTOR]]]",
        "one rank is slow from a step on (the middle one)",
        causes.straggler,
        steps=lambda job: causes.since(job, job.impairments.slow_ranks),
        ranks=lambda job: tuple(job.impairments.slow_ranks),
    ),
    Fault(
        "slow-link",
        "RANK002",
        "slow-link[:RANK[:FACTOR[:STEP]]]",
        "collectives through one rank's network link take FACTOR times as long (2.5), where all ranks share one group "
        "from the middle step on",
        causes.slow_link,
        steps=lambda job: causes.since(job, job.impairments.slow_links),
        ranks=lambda job: tuple(job.impairments.slow_links),
    ),
    Fault(
        "late-launch",
        "HOST001",
        "late-launch[:DURATION]",
        "the host loses DURATION in Python before each layer's forward pass (1.3 steps over all layers)",
        causes.late_launch,
    ),
    Fault(
        "host-sync",
        "HOST002",
        "host-sync[:DURATION]",
        "each layer's output is read on the host (.item()), which waits for the device and then processes it for "
        "DURATION (a tenth of a step over all layers)",
        causes.host_sync,
    ),
    Fault(
        "dataloader-stall",
        "HOST003",
        "dataloader-stall[:DURATION]",
        "each batch arrives after DURATION (1.3 steps)",
        causes.data_stall,
        steps=lambda job: tuple(range(min(1, job.steps - 1), job.steps)),
    ),
    Fault(
        "checkpoint-stall",
        "CKPT001",
        "checkpoint-stall[:DURATION[:STEP]]",
        "a save blocks training for DURATION (one step, at least half a second) after a step",
        causes.save,
        steps=lambda job: (job.impairments.save_step,),
    ),
    Fault(
        "allocator-retry",
        "MEM001",
        "allocator-retry[:CALLS]",
        "in every step except the first the allocator waits for the device, frees its cache in CALLS calls, and "
        "allocates as many segments again",
        causes.retry,
        steps=lambda job: job.impairments.retry_steps,
    ),
    Fault(
        "give-way",
        "STREAM001",
        "give-way",
        "gradients are cast and divided on the communication stream during the main compute (under fsdp1 always)",
        causes.switch(prepares_on_communication=True),
        strategies=(FSDP2, HSDP, YAFSDP),
        remove=without_give_way,
    ),
    Fault(
        "serialized-communicators",
        "STREAM002",
        "serialized-communicators",
        "one queue feeds all streams (CUDA_DEVICE_MAX_CONNECTIONS=1), so collectives and compute are serialized",
        causes.switch(shares_queue=True),
        strategies=(FSDP1, FSDP2, HSDP, YAFSDP, YAFSDP_V1),
    ),
    Fault(
        "sm-contention",
        "STREAM003",
        "sm-contention[:FACTOR]",
        "compute takes FACTOR times as long (1.6) while a collective is resident",
        causes.sm_contention,
        remove=without_contention,
    ),
    Fault(
        "starved-collectives",
        "STREAM004",
        "starved-collectives[:FACTOR]",
        "collectives take FACTOR times as long (2) while compute runs",
        causes.starved_collectives,
    ),
    Fault(
        "no-prefetch",
        "COMM001",
        "no-prefetch",
        "each layer is gathered only when it is about to run",
        causes.switch(prefetches=False),
        strategies=(FSDP1, FSDP2, HSDP, YAFSDP),
    ),
    Fault(
        "slow-network",
        "COMM001",
        "slow-network[:FACTOR]",
        "all links have 1/FACTOR of their bandwidth (4)",
        causes.slow_network,
    ),
    Fault(
        "small-collectives",
        "COMM002",
        "small-collectives[:COUNT]",
        "each unit is gathered and reduced in COUNT collectives (32)",
        causes.split_collectives,
    ),
    Fault(
        "reduce-every-microbatch",
        "COMM003",
        "reduce-every-microbatch",
        "gradients are reduced at every micro-batch (of 2, if --micro-batches is 1)",
        causes.switch(reduces_every_micro_batch=True),
        strategies=(DDP, FSDP1, FSDP2, HSDP),
        prepare=causes.accumulating,
    ),
    Fault(
        "needless-recomputation",
        "MEM002",
        "needless-recomputation[:LAYERS]",
        "LAYERS more layers (all) recompute activations that would fit into memory",
        causes.recompute,
    ),
)
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _LISTED}
