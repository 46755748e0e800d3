"""The causes of lost time that a replay can take away, by name, each with the rule that speaks of it."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from tracekit.errors import InputError


@dataclass(frozen=True)
class Cause:
    """One cause: its name, the rule whose findings it prices, what is taken away, and what the answer rests on."""

    name: str
    code: str
    summary: str
    basis: str
    confidence: float = 0.9
    """How sure an answer is whose waits are known and whose replay reproduces the recording, 0 to 1."""


_LISTED = (
    Cause(
        "late-launch",
        "HOST001",
        "the host launches everything at once: its own time between calls and in launches is nothing",
        "the host's time between the calls that the trace has, less data loading, saves, allocator calls and waits",
    ),
    Cause(
        "blocking-sync",
        "HOST002",
        "the host never waits for the device",
        "synchronizing calls, saves and allocator calls apart; FSDP1's rate limiter stays",
    ),
    Cause(
        "rate-limiter",
        "HOST002",
        "the host is not held back by FSDP1's limit of two gathers",
        "spans rate_limiter",
        0.6,
    ),
    Cause("data-loading", "HOST003", "every batch is there when it is asked for", "phase data and DataLoader's spans"),
    Cause("allocator", "MEM001", "the allocator makes no calls to the device", "cudaMalloc, cudaFree and their waits"),
    Cause("checkpoint", "CKPT001", "no save stops the training thread", "phase checkpoint"),
    Cause(
        "preparation",
        "COMM004",
        "nothing has to be copied, cast or divided before a collective",
        "work under a collective's span, or directly before it on its stream",
        0.6,
    ),
    Cause(
        "give-way",
        "STREAM001",
        "what prepares a collective takes as long beside compute as it does alone",
        "the same kernel alone, by its time per byte of the message where sizes differ",
        0.8,
    ),
    Cause(
        "slowed-compute",
        "STREAM003",
        "compute takes as long beside a collective as it does alone",
        "the same kernel (name, grid, shapes) alone and beside collectives",
        0.7,
    ),
    Cause(
        "slowed-collectives",
        "STREAM004",
        "collectives carry as much beside compute as they do alone",
        "collectives of the same op, group and size, alone and beside compute",
        0.7,
    ),
    Cause(
        "shared-queue",
        "STREAM002",
        "a stream need not wait until what was launched earlier on others has started",
        "the order of all starts, where it never differs from the order of launches",
    ),
    Cause(
        "shared-communicator",
        "STREAM002",
        "collectives of one group on several streams run side by side",
        "the order of collectives in a group, where they never overlap",
        0.4,
    ),
    Cause(
        "straggler",
        "RANK001",
        "no rank takes longer for its own work than its peers",
        "compute and host time by step and phase, against the median of the other ranks",
    ),
    Cause(
        "slow-link",
        "RANK002",
        "collectives of one kind and size take no longer in any group or step than in the fastest",
        "transfer times by op, size and place, across groups and steps",
        0.8,
    ),
    Cause("communication", "COMM001", "transfers take no time", "recorded transfers, waiting for peers apart", 0.8),
    Cause(
        "late-gathers",
        "COMM001",
        "each all-gather may start one unit earlier (prefetch)",
        "an all-gather waits for the compute that the one before it waited for",
        0.7,
    ),
    Cause(
        "small-collectives",
        "COMM002",
        "collectives of one unit go as one",
        "time against size of all collectives of the op: what each costs besides its bytes",
        0.7,
    ),
    Cause(
        "micro-batch-reductions",
        "COMM003",
        "gradients are reduced once a step",
        "all but the last reduction of a unit in a step, with their preparation",
    ),
    Cause(
        "recomputation",
        "MEM002",
        "no activation is computed twice",
        "forward ops that run again in backward (activation checkpointing)",
    ),
)
CAUSES: Mapping[str, Cause] = {cause.name: cause for cause in _LISTED}


def find(name: str) -> Cause:
    """Return the cause of this name. Raises InputError, with the nearest name, for any other."""
    if name in CAUSES:
        return CAUSES[name]
    near = difflib.get_close_matches(name, CAUSES, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    raise InputError(f"{name!r} is no cause; {guess}there are: {', '.join(CAUSES)}")
