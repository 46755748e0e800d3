"""The causes of lost time that a replay can remove, by name, each with the rule that reports it."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from tracekit.errors import InputError


@dataclass(frozen=True)
class Cause:
    """One cause: name, rule whose findings it prices, what the replay removes, and the basis of the answer."""

    name: str
    code: str
    summary: str
    basis: str
    confidence: float = 0.9
    """Confidence of an answer if waits are known and the replay reproduces the recording, 0 to 1."""


_LISTED = (
    Cause(
        "late-launch",
        "HOST001",
        "the host takes no time between calls and in launches",
        "host time between recorded calls, without data loading, saves, allocator calls and waits",
    ),
    Cause(
        "blocking-sync",
        "HOST002",
        "the host never waits for the device in a call that leaves it idle",
        "synchronizing calls after which the device is idle, except those of saves and the allocator, and the host's "
        "pause after each; FSDP1's rate limiter stays",
    ),
    Cause(
        "rate-limiter",
        "HOST002",
        "FSDP1's limit of two all-gathers never delays the host",
        "rate_limiter spans",
        0.6,
    ),
    Cause("data-loading", "HOST003", "every batch is ready when requested", "phase data and DataLoader spans"),
    Cause("allocator", "MEM001", "the allocator makes no calls to the device", "cudaMalloc, cudaFree and their waits"),
    Cause("checkpoint", "CKPT001", "no save blocks the training thread", "phase checkpoint"),
    Cause(
        "device-stall",
        "STREAM005",
        "the device runs queued work at once and pauses no kernel",
        "times in which no device runs anything although work is queued, and kernels that take longer by as much",
        0.8,
    ),
    Cause(
        "clock-drop",
        "STEP003",
        "kernels are as fast as before the clock of their device dropped",
        "the same kernels before and after the moment from which on all are slower",
        0.8,
    ),
    Cause(
        "misaligned-products",
        "COMP001",
        "rows of matrix products begin at multiples of 16 bytes in memory",
        "kernels for other rows, at the share of the roofline that the other products reach",
        0.6,
    ),
    Cause(
        "idle-tensor-cores",
        "COMP002",
        "32-bit matrix products use tensor cores (TF32)",
        "kernels that do not, at half the peak in TF32 or 80% of the memory bandwidth",
        0.6,
    ),
    Cause(
        "unfused-optimizer",
        "COMP003",
        "one kernel updates parameters and optimizer state",
        "elementwise kernels of the optimizer, by their accesses to memory and those of a fused one",
        0.6,
    ),
    Cause(
        "unfused-kernels",
        "COMP004",
        "elementwise kernels in a row are one",
        "inputs that the kernel before wrote, by their share of the bytes that a kernel moves",
        0.6,
    ),
    Cause(
        "partial-waves",
        "COMP005",
        "the last wave of blocks of a matrix product fills the device",
        "blocks of products with one block per tile, by the number of multiprocessors",
        0.6,
    ),
    Cause(
        "preparation",
        "COMM004",
        "no copy, cast or division is needed before a collective",
        "work under a collective's span, or directly before it on its stream",
        0.6,
    ),
    Cause(
        "give-way",
        "STREAM001",
        "preparation of a collective is as fast with concurrent compute as alone",
        "the same kernel alone, by time per byte where message sizes differ",
        0.8,
    ),
    Cause(
        "slowed-compute",
        "STREAM003",
        "compute is as fast with concurrent collectives as alone",
        "the same kernel (name, grid, shapes) alone and overlapped by collectives",
        0.7,
    ),
    Cause(
        "slowed-collectives",
        "STREAM004",
        "collectives are as fast with concurrent compute as alone",
        "collectives of the same op, group and size, alone and overlapped by compute",
        0.7,
    ),
    Cause(
        "shared-queue",
        "STREAM002",
        "work on a stream does not wait until earlier-launched work on other streams has started",
        "the start order, where it never differs from the launch order",
    ),
    Cause(
        "shared-communicator",
        "STREAM002",
        "collectives of one group on different streams overlap",
        "the order of collectives in a group, where they never overlap",
        0.4,
    ),
    Cause(
        "straggler",
        "RANK001",
        "no rank waits for the rank, or the group of ranks (RANK004), that arrives late",
        "arrivals at collectives: the ranks without which the others would wait least",
    ),
    Cause(
        "slow-link",
        "RANK002",
        "collectives of one kind and size are as fast in every group and step as in the fastest",
        "transfer times by op, size and place, across groups and steps",
        0.8,
    ),
    Cause(
        "unbalanced-experts",
        "EP001",
        "the experts of each rank get the mean number of tokens of their group",
        "sizes of the all-to-alls around the experts, and the compute between them",
        0.8,
    ),
    Cause("communication", "COMM001", "transfers take no time", "recorded transfers, without waiting for peers", 0.8),
    Cause(
        "late-gathers",
        "COMM001",
        "each all-gather may start one unit earlier (prefetch)",
        "an all-gather waits for the compute that the previous one waited for",
        0.7,
    ),
    Cause(
        "small-collectives",
        "COMM002",
        "collectives of one unit are merged into one",
        "fixed cost per collective, from time against size of all collectives of the op",
        0.7,
    ),
    Cause(
        "micro-batch-reductions",
        "COMM003",
        "gradients are reduced once per step",
        "all but the last reduction of each unit in a step, with their preparation",
    ),
    Cause(
        "recomputation",
        "MEM002",
        "no activation is recomputed",
        "forward ops that run again in backward (activation checkpointing)",
    ),
)
CAUSES: Mapping[str, Cause] = {cause.name: cause for cause in _LISTED}
SINGLE_STALL = Cause(
    "single-stall",
    "STEP001",
    "no host stalls once for longer than in the other steps",
    "host time in the stalls of one finding",
    0.8,
)
STALLED_COLLECTIVE = Cause(
    "stalled-collective",
    "STEP004",
    "no single collective takes far longer than usual",
    "the excess of the collectives of one finding",
    0.8,
)
OF_FINDINGS: Mapping[str, Cause] = {cause.name: cause for cause in (SINGLE_STALL, STALLED_COLLECTIVE)}
"""Not among CAUSES, for these need the stalls of a finding."""


def find(name: str) -> Cause:
    """Return the cause with this name. Raises InputError with the nearest name for any other."""
    if name in CAUSES:
        return CAUSES[name]
    if name in OF_FINDINGS:
        return OF_FINDINGS[name]
    near = difflib.get_close_matches(name, CAUSES, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    raise InputError(f"{name!r} is not a known cause; {guess}known causes: {', '.join(CAUSES)}")
