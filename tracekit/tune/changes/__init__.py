"""CHANGES: every change that may make a training faster, and those of plug-ins.

A change stands in one module with its values and how it is applied. Proposals, trials, settings and docs iterate the
registry; its order is that of changes with equal savings and risk.
"""

from tracekit.model import plugins
from tracekit.tune.changes.change import Change
from tracekit.tune.changes.communication import BUCKET_SIZE, FSDP_PREFETCH, KEEP_GATHERED, YAFSDP
from tracekit.tune.changes.compute import (
    COMPILE,
    FUSED_OPTIMIZER,
    RECOMPUTED_LAYERS,
    SELECTIVE_RECOMPUTATION,
    TENSOR_CORES,
)
from tracekit.tune.changes.host import (
    BACKGROUND_SAVE,
    DATALOADER_PREFETCH,
    DATALOADER_WORKERS,
    DEVICE_QUEUES,
    EXPANDABLE_SEGMENTS,
    GC_FREEZE,
    THREADS_PER_RANK,
)
from tracekit.tune.changes.micro_batches import FEWER_MICRO_BATCHES, MORE_MICRO_BATCHES, PIPELINE_SCHEDULE

CHANGES: tuple[Change, ...] = (
    DATALOADER_WORKERS, DATALOADER_PREFETCH, THREADS_PER_RANK, EXPANDABLE_SEGMENTS, DEVICE_QUEUES, GC_FREEZE,
    BACKGROUND_SAVE, FSDP_PREFETCH, KEEP_GATHERED, BUCKET_SIZE, YAFSDP, FUSED_OPTIMIZER, COMPILE, TENSOR_CORES,
    RECOMPUTED_LAYERS, SELECTIVE_RECOMPUTATION, FEWER_MICRO_BATCHES, MORE_MICRO_BATCHES, PIPELINE_SCHEDULE,
)  # fmt: skip


def all_changes() -> tuple[Change, ...]:
    """Our changes and those that other distributions add by the entry point group ``tracekit.changes``."""
    return CHANGES + tuple(point.load() for point in plugins.entry_points(group="tracekit.changes"))
