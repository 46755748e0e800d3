"""CAUSES: every cause of lost time that a replay can remove, and those of plug-ins.

A cause stands in one module with its transform. What-if answers, prices, single stalls, pages and docs iterate the
registry; its order is that of answers with equal savings.
"""

from collections.abc import Iterable

from tracekit.errors import InputError, did_you_mean
from tracekit.model import plugins
from tracekit.replay.graph.causes.cause import Cause
from tracekit.replay.graph.causes.collectives import (
    COMMUNICATION,
    LATE_GATHERS,
    SHARED_COMMUNICATOR,
    SHARED_QUEUE,
    SLOW_LINK,
    SMALL_COLLECTIVES,
    UNBALANCED_EXPERTS,
)
from tracekit.replay.graph.causes.contention import (
    GIVE_WAY,
    PREPARATION,
    SLOWED_BY_COPIES,
    SLOWED_COLLECTIVES,
    SLOWED_COMPUTE,
)
from tracekit.replay.graph.causes.device_time import (
    ANOMALY_CHECKS,
    CASTS,
    CLOCK_DROP,
    DETERMINISTIC_FILLS,
    DEVICE_COPIES,
    DEVICE_STALL,
    HOST_COPIES,
    IDLE_TENSOR_CORES,
    INTERRUPTED_PYTHON,
    MICRO_BATCH_REDUCTIONS,
    MISALIGNED_PRODUCTS,
    PARTIAL_WAVES,
    RECOMPUTATION,
    SIDE_WORK,
    SLOW_ARITHMETIC,
    SMALL_OPS,
    STRAGGLER,
    UNEVEN_WORK,
    UNFUSED_KERNELS,
    UNFUSED_OPTIMIZER,
    VALUE_READS,
)
from tracekit.replay.graph.causes.host import (
    ALLOCATOR,
    BLOCKING_SYNC,
    CHECKPOINT,
    COMPILATION,
    DATA_LOADING,
    GARBAGE_COLLECTION,
    LATE_LAUNCH,
    OVERSUBSCRIBED_CORES,
    RATE_LIMITER,
)
from tracekit.replay.graph.causes.stalls import OCCASIONAL_STRAGGLER, SINGLE_STALL, STALLED_COLLECTIVE

CAUSES: tuple[Cause, ...] = (
    LATE_LAUNCH, BLOCKING_SYNC, RATE_LIMITER, DATA_LOADING, COMPILATION, GARBAGE_COLLECTION, ALLOCATOR, CHECKPOINT,
    OVERSUBSCRIBED_CORES, DEVICE_STALL, CLOCK_DROP, MISALIGNED_PRODUCTS, IDLE_TENSOR_CORES, UNFUSED_OPTIMIZER,
    UNFUSED_KERNELS, PARTIAL_WAVES, SLOW_ARITHMETIC, VALUE_READS, CASTS, SMALL_OPS, ANOMALY_CHECKS,
    DETERMINISTIC_FILLS, SIDE_WORK, INTERRUPTED_PYTHON, HOST_COPIES, DEVICE_COPIES, PREPARATION, GIVE_WAY,
    SLOWED_COMPUTE, SLOWED_BY_COPIES, SLOWED_COLLECTIVES, SHARED_QUEUE, SHARED_COMMUNICATOR, STRAGGLER, UNEVEN_WORK,
    SLOW_LINK, UNBALANCED_EXPERTS, COMMUNICATION, LATE_GATHERS, SMALL_COLLECTIVES, MICRO_BATCH_REDUCTIONS,
    RECOMPUTATION, SINGLE_STALL, STALLED_COLLECTIVE, OCCASIONAL_STRAGGLER,
)  # fmt: skip


def all_causes() -> tuple[Cause, ...]:
    """Our causes and those that other distributions add by the entry point group ``tracekit.causes``."""
    return CAUSES + tuple(point.load() for point in plugins.entry_points(group="tracekit.causes"))


def containing(cause: Cause) -> tuple[Cause, ...]:
    """Return the causes that contain a part of the time of this one."""
    return tuple(other for other in all_causes() if cause in other.contains)


def run_causes() -> tuple[Cause, ...]:
    """Causes that can be removed from a run as it is, without the stalls of a finding."""
    return tuple(cause for cause in all_causes() if not cause.is_of_finding)


def find(name: str) -> Cause:
    """Cause with this name. Raises InputError with the nearest name for any other."""
    by_name = {cause.name: cause for cause in all_causes()}
    if name in by_name:
        return by_name[name]
    names = [cause.name for cause in run_causes()]
    raise InputError(f"{name!r} is not a known cause{did_you_mean(name, names)}; known causes: {', '.join(names)}")


def in_order(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Causes in the order in which they are removed, each once."""
    positions = {cause: position for position, cause in enumerate(all_causes())}
    return tuple(sorted(set(causes), key=lambda cause: (cause.place, positions.get(cause, len(positions)), cause.name)))
