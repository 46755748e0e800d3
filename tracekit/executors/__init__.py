"""Executors that measure the facts of a run's traces outside this process: worker processes, or a Dask cluster.

A task is a source (a path and how to read it) and the names of facts; the result is an Arrow table for each fact, never
a trace. A trace that cannot be read is a value, not an exception. If a worker is lost, its task is repeated.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tracekit.errors import ConfigError

if TYPE_CHECKING:
    from tracekit.model.executor import Executor

THREADS, PROCESSES, DASK = "threads", "processes", "dask"


@contextlib.contextmanager
def open_executor(kind: str, *, workers: int | None = None, cluster: str | None = None) -> "Iterator[Executor]":
    """Yield the executor of a kind (threads, processes, dask), and stop its workers after the block.

    `workers` is by default one for each processor. `cluster` is for Dask: see `tracekit.executors.dask_cluster`. Raises
    ConfigError if these do not fit together, MissingExtraError if Dask is not installed.
    """
    if cluster is not None and kind != DASK:
        raise ConfigError(f"--cluster {cluster}: a cluster needs --executor {DASK}")
    if workers is not None and cluster is not None:
        raise ConfigError(f"--workers {workers}: --cluster {cluster} says how many workers there are")
    if kind == THREADS:
        from tracekit.model.executor import Threads

        yield Threads(workers)
    elif kind == PROCESSES:
        from tracekit.executors.processes import Processes

        with contextlib.closing(Processes(workers or processors())) as executor:
            yield executor
    elif kind == DASK:
        from tracekit.executors.dask_cluster import DaskCluster

        with contextlib.closing(DaskCluster(cluster or f"local:{workers or processors()}")) as executor:
            yield executor
    else:
        raise ConfigError(f"--executor {kind}: expected {THREADS}, {PROCESSES} or {DASK}")


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
