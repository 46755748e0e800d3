"""Workers of a Dask cluster: one on this machine, one that is running, or one that Slurm starts.

An address is `local:8` (eight processes here), the address of a scheduler (`tcp://host:8786`, `tls://…`), or `slurm:8`
(eight jobs, by dask-jobqueue, with its settings in ~/.config/dask/jobqueue.yaml). Workers read the files themselves:
they need the same paths, or a URL, and the same version of tracekit.
"""

import contextlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tracekit import conventions
from tracekit.conventions import python_child
from tracekit.errors import ConfigError, MissingExtraError
from tracekit.executors import processors, worker_pool
from tracekit.executors.worker_pool import TaskFuture, WorkerPool
from tracekit.model.source import Source
from tracekit.model.trace import TraceFact

try:
    import distributed
except ImportError as error:
    raise MissingExtraError(
        "--executor dask needs the package distributed: pip install 'torch-tracekit[cluster]'"
    ) from error

_LOCAL = re.compile(r"(local|slurm):([1-9][0-9]{0,5})\Z")
_SCHEDULER = re.compile(r"(tcp|tls|ws|wss|ucx)://\S+\Z")
_FIRST_WORKER_S = 30.0
_QUEUE_S = 3600.0
_STATUS_PAGE = "127.0.0.1:0"
"""Where Dask shows its status: at a free port, for this machine only."""
_JOB: Mapping[str, Any] = {"cores": 1, "processes": 1, "memory": "4GiB"}
"""What a job of Slurm has if dask-jobqueue's settings do not say so."""


class DaskCluster(WorkerPool):
    """Workers of a Dask cluster. Dask replaces lost workers by itself."""

    LOST = (distributed.KilledWorker, distributed.client.FutureCancelledError)

    def __init__(self, address: str) -> None:
        """Start or join the cluster, and wait for its first worker. Raises ConfigError if there is none."""
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(python_child.safe_path())  # Dask starts a lost worker again at any time
        self._address = address
        try:
            self._client = self._stack.enter_context(self._connect())
            self._wait_for_workers(_QUEUE_S if address.startswith("slurm:") else _FIRST_WORKER_S)
            self._require_same_version()
        except BaseException:
            self._stack.close()
            raise
        self.workers = sum(self._client.nthreads().values())

    def submit(self, source: Source, facts: Sequence[TraceFact], share: int) -> TaskFuture:
        """Submit the task of a source to the scheduler."""
        future: TaskFuture = self._client.submit(worker_pool.measure, source, facts, share, pure=False)
        return future

    def restart(self) -> None:
        """Wait until there is a worker again."""
        self._wait_for_workers(_FIRST_WORKER_S)

    def close(self) -> None:
        """Leave the cluster, and stop it if it was started here."""
        self._stack.close()

    def _connect(self) -> "distributed.Client":
        for name in ("distributed", "tornado"):  # a lost worker is reported in the run's data quality, not in log lines
            logging.getLogger(name).setLevel(logging.CRITICAL)
        local = _LOCAL.match(self._address)
        if local is None and not _SCHEDULER.match(self._address):
            raise ConfigError(
                f"--cluster {self._address}: expected local:N, slurm:N, or a scheduler such as tcp://host:8786"
            )
        try:
            if local is None:
                return distributed.Client(self._address, timeout=_FIRST_WORKER_S)
            start = _local_cluster if local[1] == "local" else _slurm_cluster
            return distributed.Client(self._stack.enter_context(start(int(local[2]))))
        except (OSError, TimeoutError) as error:
            raise ConfigError(
                f"--cluster {self._address}: no scheduler answers ({error}); check the address"
            ) from error

    def _wait_for_workers(self, timeout_s: float) -> None:
        try:
            self._client.wait_for_workers(1, timeout=timeout_s)
        except (TimeoutError, distributed.TimeoutError):
            raise ConfigError(
                f"--cluster {self._address}: no worker within {timeout_s:g} s; start workers, or look at the jobs"
            ) from None

    def _require_same_version(self) -> None:
        """Raise ConfigError if the workers have no tracekit or another version of it."""
        for worker, version in self._client.run(_version, on_error="return").items():
            if version != conventions.VERSION:
                has = f"tracekit {version}" if isinstance(version, str) else f"no tracekit ({version})"
                raise ConfigError(
                    f"--cluster {self._address}: worker {worker} has {has}; install {conventions.VERSION} there"
                )


def _version() -> str:
    from tracekit import conventions

    return conventions.VERSION


def _local_cluster(workers: int) -> Any:
    return distributed.LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address=_STATUS_PAGE,
        memory_limit=0,  # as for other executors, the machine's memory is the limit
        silence_logs=logging.CRITICAL,
        env={"POLARS_MAX_THREADS": os.environ.get("POLARS_MAX_THREADS", str(max(processors() // workers, 1)))},
    )


def _slurm_cluster(jobs: int) -> Any:
    import dask

    try:
        from dask_jobqueue import SLURMCluster
    except ImportError as error:
        raise MissingExtraError(
            "--cluster slurm:N needs the package dask-jobqueue: pip install 'torch-tracekit[cluster]'"
        ) from error
    settings = {key: value for key, value in _JOB.items() if dask.config.get(f"jobqueue.slurm.{key}", None) is None}
    cluster = SLURMCluster(scheduler_options={"dashboard_address": _STATUS_PAGE}, **settings)
    cluster.scale(jobs=jobs)
    return cluster
