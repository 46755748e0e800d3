"""Executors that measure the facts of a run's traces outside this process: worker processes, or a Dask cluster.

A task is a source (a path and how to read it) and the names of facts; the result is an Arrow table for each fact, never
a trace. A trace that cannot be read is a value, not an exception. If a worker is lost, its task is repeated. This
module imports no Polars: it decides how many threads Polars uses.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.errors import ConfigError

if TYPE_CHECKING:
    from tracekit.model.source import Executor

THREADS, PROCESSES, DASK = "threads", "processes", "dask"
PROCESSES_FROM = 32
"""Files from which starting processes (0.5 CPU s each) costs less than threads lose by sharing one interpreter lock."""
PROCESSES_FROM_BYTES = 64 << 20
"""Of compressed traces: fewer files are measured by processes from here on. They take 0.7 CPU-s per MiB."""
MAX_PROCESSES = 8
"""Each process needs 200 to 500 MiB, and for a large trace up to 65 times its compressed size."""
MAX_BYTES_AT_A_TIME = 64 << 20
"""Of compressed traces that processes read at the same time, so that they need at most about 4 GiB."""
_JSON_RATIO = 10
"""About how much smaller JSON is when it is compressed."""
_LARGE_BYTES = 4 << 20
"""Operations on tables of smaller traces take 0.1 to 0.3 ms each, so that several Polars threads only add switches."""
_MAX_FILES = 4096
_TRACE_SUFFIXES = (".json", ".json.gz", ".json.zst")
POLARS_THREADS = "POLARS_MAX_THREADS"


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
        from tracekit.model.source import Threads

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


# What measures a run where the user chose nothing: by the number and size of its files ------------------------------


def process_count(paths: Iterable[str]) -> int | None:
    """Return the number of processes that measure the runs at these paths by default; None if threads do."""
    return max(filter(None, (process_count_of(_trace_sizes(path)) for path in paths)), default=None)


def process_count_of(sizes: Sequence[int]) -> int | None:
    """Return the number of processes that measure traces by default; None if threads do.

    `sizes` are the `compressed_bytes` of their files.
    """
    if len(sizes) < PROCESSES_FROM and sum(sizes) < PROCESSES_FROM_BYTES:
        return None
    at_a_time = MAX_BYTES_AT_A_TIME // max(*sizes, 1)
    count = min(processors(), MAX_PROCESSES, len(sizes), at_a_time)
    return count if count > 1 else None


def compressed_bytes(name: str, size_bytes: int) -> int:
    """Return the size of a file, or about what it would be compressed, by its name."""
    return size_bytes // _JSON_RATIO if name.endswith(".json") else size_bytes


def limit_polars_threads(paths: Iterable[str]) -> None:
    """Let Polars use one thread in this process and its workers if all runs at these paths have small traces.

    It has no effect if Polars is imported already or the user has set POLARS_MAX_THREADS. URLs and paths that cannot be
    read have unknown sizes, so they change nothing.
    """
    # The medians are not those of `statistics`, which would be imported for this alone, with `decimal`.
    sizes = [sorted(_trace_sizes(path)) for path in paths]
    are_small = all(file_sizes and file_sizes[len(file_sizes) // 2] < _LARGE_BYTES for file_sizes in sizes)
    if "polars" not in sys.modules and are_small:
        os.environ.setdefault(POLARS_THREADS, "1")


def _trace_sizes(path: str) -> list[int]:
    """Return `compressed_bytes` of at most `_MAX_FILES` files of a local run; none if it cannot be listed."""
    sizes: list[int] = []
    try:
        for file in _json_files(Path(path)):
            sizes.append(compressed_bytes(file.name, file.stat().st_size))
            if len(sizes) == _MAX_FILES:
                break
    except (OSError, ValueError):  # the reader says what is wrong with it
        return []
    return sizes


def _json_files(path: Path) -> Iterator[Path]:
    """Yield a file itself, or the JSON files of a folder and of its folders (one for each node)."""
    if path.is_file():
        yield path
        return
    folders = []
    for entry in os.scandir(path):
        if entry.is_dir():
            folders.append(entry.path)
        elif entry.name.endswith(_TRACE_SUFFIXES) and entry.is_file():
            yield Path(entry.path)
    for folder in folders[:_MAX_FILES]:
        with os.scandir(folder) as entries:
            yield from (Path(file.path) for file in entries if file.name.endswith(_TRACE_SUFFIXES) and file.is_file())
