"""Worker processes of this machine. They are started by spawning, not by forking: Polars does not survive a fork."""

import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import starmap

from tracekit.conventions import object_storage, python_child
from tracekit.executors import compressed_bytes, process_count_of, processors, worker_pool, worker_start
from tracekit.executors.worker_pool import TaskFuture, WorkerPool
from tracekit.model.source import LoadedTraces, Measured, Source, Threads
from tracekit.model.trace import TraceFact


class Processes(WorkerPool):
    """Worker processes, started when the first trace is measured. They share the processors of the machine."""

    LOST = (BrokenProcessPool,)

    def __init__(self, workers: int) -> None:
        """Use `workers` processes."""
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, source: Source, facts: Sequence[TraceFact], share: int) -> TaskFuture:
        """Submit the task of a source to the processes, which are started if there are none."""
        with python_child.safe_path():  # a new pool and a submitted task start processes
            if self._pool is None:
                self._pool = ProcessPoolExecutor(
                    self.workers,
                    mp_context=multiprocessing.get_context("spawn"),
                    initializer=worker_start.prepare,
                    initargs=(max(processors() // self.workers, 1),),
                )
            return self._pool.submit(worker_pool.measure, source, facts, share)

    def restart(self) -> None:
        """Stop the processes: if one is lost, the pool has stopped the others. The next task starts new ones."""
        self.close()

    def close(self) -> None:
        """Stop the processes; tasks that wait are dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


class ProcessesPerPass:
    """Worker processes for each pass over many or large local traces, else threads: for a server, where runs stay open.

    Unlike threads, processes leave the interpreter lock to the other requests of the server. None of them runs between
    two passes.
    """

    def measure(
        self, sources: Sequence[Source], facts: Sequence[TraceFact], loaded: LoadedTraces
    ) -> Iterator[Measured]:
        """Yield the facts of each source, in the order of `sources`."""
        files = {source.path: source.size_bytes for source in sources}
        workers = process_count_of(list(starmap(compressed_bytes, files.items())))
        if workers is None or any(map(object_storage.is_url, files)):
            yield from Threads().measure(sources, facts, loaded)
            return
        with contextlib.closing(Processes(workers)) as pool:
            yield from pool.measure(sources, facts, loaded)
