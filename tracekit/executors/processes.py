"""Worker processes of this machine. They are started by spawning, not by forking: Polars does not survive a fork."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from tracekit.executors import processors, tasks, worker_start
from tracekit.executors.worker_pool import TaskFuture, WorkerPool
from tracekit.model.source import Source
from tracekit.model.trace import Fact


class Processes(WorkerPool):
    """Worker processes, started when the first trace is measured. They share the processors of the machine."""

    LOST = (BrokenProcessPool,)

    def __init__(self, workers: int) -> None:
        """Use `workers` processes."""
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, source: Source, facts: Sequence[Fact]) -> TaskFuture:
        """Submit the task of a source to the processes, which are started if there are none."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self.workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=worker_start.prepare,
                initargs=(max(processors() // self.workers, 1),),
            )
        return self._pool.submit(tasks.measure, source, facts)

    def restart(self) -> None:
        """Stop the processes: if one is lost, the pool has stopped the others. The next task starts new ones."""
        self.close()

    def close(self) -> None:
        """Stop the processes; tasks that wait are dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
