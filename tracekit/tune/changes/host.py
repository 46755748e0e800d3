"""Changes of what the host does: loading of data, threads, garbage collection, launches."""

from collections.abc import Sequence

from tracekit.replay.graph.causes.collectives import SHARED_QUEUE
from tracekit.replay.graph.causes.host import (
    ALLOCATOR,
    CHECKPOINT,
    DATA_LOADING,
    GARBAGE_COLLECTION,
    OVERSUBSCRIBED_CORES,
)
from tracekit.tune.changes.change import ON, CallKeyword, Change, Risk, TunedRun

_MOST_WORKERS = 4
"""Of a rank at first: more workers take cores from the ranks, and shared memory for their batches."""


def _workers(run: TunedRun) -> Sequence[str]:
    """Worker processes: one per core of the rank up to the limit, then twice as many."""
    first = min(_MOST_WORKERS, run.cores_per_rank or _MOST_WORKERS)
    return (str(first), str(2 * first))


def _threads(run: TunedRun) -> Sequence[str]:
    """Threads that share a host's cores evenly, unless the ranks have so many already."""
    fair = run.cores_per_rank or 1
    return (str(fair),) if run.is_on_cpu and run.manifest.processors.threads != fair else ()


def _on_gpu(run: TunedRun) -> Sequence[str]:
    return () if run.is_on_cpu else (ON,)


def _background_save(run: TunedRun) -> Sequence[str]:
    is_background = run.options.get("background_save") is True
    return () if is_background or (run.is_of_trainers and not run.number("checkpoint_every", 0)) else (ON,)


DATALOADER_WORKERS = Change(
    name="dataloader-workers",
    summary="worker processes load the next batches while the model trains",
    risk=Risk.ROUNDING,  # random augmentation draws from the workers' generators
    causes=(DATA_LOADING,),
    codes=("HOST003",),
    is_divided=True,
    is_uneven=True,
    # Our trainers have no DataLoader.
    values=lambda run: () if run.is_of_trainers else _workers(run),
    keyword=CallKeyword(("DataLoader", "StatefulDataLoader"), "num_workers={value}, persistent_workers=True"),
)
DATALOADER_PREFETCH = Change(
    name="dataloader-prefetch",
    summary="each worker process loads more batches ahead (the default is 2)",
    risk=Risk.SAME,
    causes=(DATA_LOADING,),
    is_partial=True,
    is_uneven=True,
    values=lambda run: () if run.is_of_trainers else ("4",),
    keyword=CallKeyword(("DataLoader", "StatefulDataLoader"), "prefetch_factor={value}"),
)
THREADS_PER_RANK = Change(
    name="threads-per-rank",
    summary="ranks on one host divide its cores among their threads",
    risk=Risk.ROUNDING,  # sums over threads are in another order
    causes=(OVERSUBSCRIBED_CORES,),
    codes=("HOST007",),
    values=_threads,
    variable="OMP_NUM_THREADS={value}",
)
EXPANDABLE_SEGMENTS = Change(
    name="expandable-segments",
    summary="the allocator extends segments instead of calling cudaMalloc and cudaFree",
    risk=Risk.SAME,
    causes=(ALLOCATOR,),
    codes=("MEM001",),
    values=_on_gpu,
    variable="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    joins_variable=True,
)
DEVICE_QUEUES = Change(
    name="device-queues",
    summary="streams get hardware queues of their own, so that none waits for another's launches",
    risk=Risk.SAME,
    causes=(SHARED_QUEUE,),
    codes=("STREAM002",),
    values=lambda run: () if run.is_on_cpu else ("8",),
    variable="CUDA_DEVICE_MAX_CONNECTIONS={value}",
)
GC_FREEZE = Change(
    name="gc-freeze",
    summary="objects that exist before training are frozen, and garbage is collected between steps at fixed intervals",
    risk=Risk.SAME,
    causes=(GARBAGE_COLLECTION,),
    codes=("HOST006",),
    values=lambda run: () if run.is_of_trainers else (ON,),
)
BACKGROUND_SAVE = Change(
    name="background-save",
    summary="checkpoints are written by a background thread while training continues",
    risk=Risk.MEMORY,  # of the host: the copy that is written
    causes=(CHECKPOINT,),
    codes=("CKPT001",),
    is_partial=True,  # copying to the host still blocks
    values=_background_save,
    is_uneven=True,
    option="--background-save",
)
