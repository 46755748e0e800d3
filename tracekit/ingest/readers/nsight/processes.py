"""The processes of an Nsight Systems report: which of them are ranks, and which rank each is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tracekit.ingest.readers.normalize.numbers import MISSING
from tracekit.ingest.readers.normalize.sqlite_tables import Database
from tracekit.ingest.readers.nsight.nccl_ranges import Communicators
from tracekit.model.manifest import MAX_RANKS

THREAD_BITS = 24
DEVICE_TABLES = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
)
MPI_TABLES = ("MPI_P2P_EVENTS", "MPI_COLLECTIVES_EVENTS", "MPI_START_WAIT_EVENTS", "MPI_OTHER_EVENTS")
_NVTX = "NVTX_EVENTS"
Stated: TypeAlias = tuple[int | None, int | None]
"""A rank and the number of ranks; None where it is not known."""
_THREAD_NAME = 39  # event type of NVTX
_MPI_RANK = re.compile(r"MPI Rank (\d{1,6})$")
_ENVIRONMENT = "TARGET_INFO_SYSTEM_ENV"
_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


@dataclass(frozen=True)
class RankProcess:
    """A process that used a GPU or, in a report without GPU work, had NVTX ranges or MPI calls.

    `global_id` is its serialized id: hardware, virtual machine and process, with 24 bits for the thread at the end.
    It is None in reports of old versions, whose work does not state the process: then there is one.
    """

    global_id: int | None
    rank: int | None
    world_size: int | None
    is_rank_assumed: bool = False
    """Whether the rank is the place of its device among those of the report."""

    @property
    def process_id(self) -> int | None:
        """Return the process id on its host."""
        return None if self.global_id is None else self.global_id >> THREAD_BITS & (1 << THREAD_BITS) - 1


def ranks(database: Database, communicators: Communicators) -> list[RankProcess]:
    """Return the processes of a report that are ranks, in the order of their ranks.

    The rank is that of the MPI library, else that of the larger group: the largest NCCL communicator, which may be of a
    part of the ranks, or the environment that Nsight Systems was started in, if it recorded one process. Where several
    processes have no such ranks, or equal ones, each is assumed to be the place of its device.
    """
    ids = _processes(database)
    by_mpi, by_nccl = _mpi_ranks(database), communicators.world_ranks
    environment = _environment(database) if len(ids) == 1 else (None, None)
    by_pid = {pid: by_mpi.get(pid or 0) or _of_larger(by_nccl.get(pid or 0, (None, None)), environment) for pid in ids}
    if len(ids) == 1:
        return [RankProcess(pid, *stated) for pid, stated in by_pid.items()]
    values = [rank for rank, _ in by_pid.values()]
    if None not in values and len(set(values)) == len(values):
        return sorted((RankProcess(pid, *by_pid[pid]) for pid in ids), key=lambda process: process.rank or 0)
    return [RankProcess(pid, rank, None, is_rank_assumed=True) for rank, pid in enumerate(ids)]


def rows_of(database: Database, table: str, process: int | None, *conditions: str) -> str:
    """Return the condition that picks a process's rows of a table whose rows state threads, and fits the others."""
    if process is not None and database.has(table, "globalTid"):
        conditions = (*conditions, f"globalTid & {-1 << THREAD_BITS} = {process}")
    return f"WHERE {' AND '.join(conditions)}" if conditions else ""


def _processes(database: Database) -> list[int | None]:
    """Return the serialized ids of processes with work on a device, by device; else with NVTX ranges or MPI calls."""
    device_of: dict[int | None, int] = {}
    for table in DEVICE_TABLES:
        grouped = f"GROUP BY {'globalPid, ' if database.has(table, 'globalPid') else ''}deviceId"
        if not database.has(table, "deviceId"):
            continue
        work = database.integers(table, ("globalPid", "deviceId"), grouped)
        for process, device in zip(work["globalPid"].tolist(), work["deviceId"].tolist(), strict=True):
            pid = None if process == MISSING else process
            device_of[pid] = min(device, device_of.get(pid, device))
    if device_of:
        return sorted(device_of, key=lambda pid: (device_of[pid], pid or 0))[:MAX_RANKS]
    threads = np.concatenate([database.integers(table, ("globalTid",))["globalTid"] for table in (_NVTX, *MPI_TABLES)])
    pids = np.unique(threads[threads != MISSING] >> THREAD_BITS) << THREAD_BITS
    return [*pids.tolist()[:MAX_RANKS]] or [None]


def _of_larger(nccl: Stated, environment: Stated) -> Stated:
    """Return rank and size of the group with more ranks; of NCCL's if both are equal."""
    if environment[0] is not None and (nccl[0] is None or (environment[1] or 0) > (nccl[1] or 0)):
        return environment
    return nccl


def _mpi_ranks(database: Database) -> dict[int, Stated]:
    """Return rank and world size of each process by its serialized id; a report may have a part of the ranks only."""
    rows = database.integers("MPI_RANKS", ("globalTid", "rank"))
    pairs = zip((rows["globalTid"] >> THREAD_BITS << THREAD_BITS).tolist(), rows["rank"].tolist(), strict=True)
    ranks = {process: rank for process, rank in pairs if 0 <= rank < MAX_RANKS} or _named_ranks(database)
    sizes = database.integers("MPI_COMMUNICATORS", ("size",))["size"]
    stated = int(sizes.max(initial=0))  # MPI_COMM_WORLD has most ranks
    is_whole = len(ranks) > 1 and sorted(ranks.values()) == list(range(len(ranks)))
    size = len(ranks) if is_whole else None
    size = stated if max(ranks.values(), default=0) < stated <= MAX_RANKS else size
    return {process: (rank, size) for process, rank in ranks.items()}


def _named_ranks(database: Database) -> dict[int, int]:
    """Return the MPI ranks of reports before 2023.4, which only name threads after them."""
    where = f"WHERE eventType = {_THREAD_NAME}" if database.has(_NVTX, "eventType", "text", "globalTid") else "WHERE 0"
    thread_names = database.rows(_NVTX, ("globalTid", "text"), where)
    return {
        thread >> THREAD_BITS << THREAD_BITS: int(match[1])
        for thread, text in thread_names
        if isinstance(thread, int) and isinstance(text, str) and (match := _MPI_RANK.match(text)) is not None
    }


def _environment(database: Database) -> tuple[int | None, int | None]:
    """Return rank and world size of the environment that Nsight Systems was started in."""
    rows = database.rows(_ENVIRONMENT, ("name", "value"))
    variables = dict(
        pair.split("=", 1)
        for name, value in rows
        if name == "DeviceEnvironment" and isinstance(value, str)
        for pair in value.split(";")
        if re.match(r"[A-Z_]+=\d{1,7}$", pair)
    )
    for rank, size in _RANK_VARIABLES:
        if rank in variables:
            return _plausible(variables, rank, 0), _plausible(variables, size, 1)
    return None, None


def _plausible(variables: Mapping[str, str], name: str, lowest: int) -> int | None:
    value = int(variables.get(name, -1))
    return value if lowest <= value < MAX_RANKS + lowest else None
