"""Run functions on every rank of a real process group, each rank in a process of its own.

Importing torch costs seconds a process. So one set of processes runs many cases, each in a fresh process group: a case
that fails on one rank does not spoil the next. And the processes come from a server that has imported torch, done
nothing with it and started no thread: each begins as a new one would. Rendezvous is a file, so no port can be taken.

    def total() -> float:                      # at the top of a test module, so that a spawned process can import it
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    def test_sum() -> None:
        assert ranks.run(3, total) == [3.0, 3.0, 3.0]
"""

import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from instrumented_trainers.launch import share_gpus

_LOG_TAIL_CHARACTERS = 4000
# What the other ranks may take to say what they saw of one that died: none of them can end the case.
_AFTER_DEATH_S = 10
# Threads that spin on a core that another rank needs cost more than they give.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class RankError(AssertionError):
    """A case raised on some rank, or a rank gave no answer in time. The message holds every rank's own words."""


@dataclass(frozen=True)
class Outcome:
    """What one case came to: by rank the value it returned, and for each rank that failed its words."""

    name: str
    values: tuple[Any, ...]
    errors: Mapping[int, str]

    def results(self) -> list[Any]:
        """Return the values by rank. Raises RankError if any rank failed."""
        if self.errors:
            words = "\n".join(f"--- rank {rank}\n{error}" for rank, error in sorted(self.errors.items()))
            raise RankError(f"case {self.name!r} failed on rank {', '.join(map(str, sorted(self.errors)))}\n{words}")
        return list(self.values)


def run(
    world_size: int,
    function: Callable[[], Any],
    *,
    timeout_s: float = 480,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `function` on every rank and return what it returned, by rank. Raises RankError if a rank failed.

    `function` must be importable (top level of a module, or a functools.partial of such) and so must what it returns.
    """
    return run_cases(world_size, {"it": function}, timeout_s=timeout_s, environment=environment)["it"].results()


def run_cases(
    world_size: int,
    cases: Mapping[str, Callable[[], Any]],
    *,
    timeout_s: float = 480,
    case_timeout_s: float = 480,
    environment: Mapping[str, str] | None = None,
    cuda: bool = False,
) -> dict[str, Outcome]:
    """Call each function on every rank, one after the other, and return the outcomes by name.

    A collective that waits longer than `case_timeout_s` fails its case; after `timeout_s` all processes are killed and
    what has no answer by then has failed. `environment` is added to that of the rank processes. With `cuda` they talk
    by NCCL and share the GPUs that are there, even if it is one.
    """
    return run_worlds(
        {world_size: cases}, timeout_s=timeout_s, case_timeout_s=case_timeout_s, environment=environment, cuda=cuda
    )[world_size]


def run_worlds(
    cases: Mapping[int, Mapping[str, Callable[[], Any]]],
    *,
    timeout_s: float = 480,
    case_timeout_s: float = 480,
    environment: Mapping[str, str] | None = None,
    cuda: bool = False,
    imported: str = "tests.support.imported_by_ranks",
) -> dict[int, dict[str, Outcome]]:
    """Call functions as `run_cases` does, on several numbers of ranks; return the outcomes by number and name.

    One set of processes serves all: as many as the most ranks. Small worlds run at the same time as larger ones where
    they fit. The processes are forked from one that has imported the module `imported`.
    """
    places = _places(cases)
    jobs = [
        Job(f"{size}-{index}", name, function, first=places[size], ranks=size)
        for size in places
        for index, (name, function) in enumerate(cases[size].items())
    ]
    with tempfile.TemporaryDirectory(prefix="ranks-") as path:
        folder = Path(path)
        (folder / "cases.pickle").write_bytes(pickle.dumps(jobs))
        own = {**os.environ, **_ONE_THREAD, **(environment or {})}
        processes = [
            _context(cuda).Process(target=_serve, args=(number, folder, case_timeout_s, cuda, own), daemon=True)
            for number in range(max(cases))
        ]
        with _environment(_ONE_THREAD), _forked_from(imported):
            for process in processes:
                process.start()
        killed = _join(processes, timeout_s)
        endings = [
            killed.get(number, f"ended with exit code {process.exitcode}") for number, process in enumerate(processes)
        ]
        outcomes: dict[int, dict[str, Outcome]] = {size: {} for size in cases}
        for job in jobs:
            outcomes[job.ranks][job.name] = _collect(folder, job, endings)
        return outcomes


@dataclass(frozen=True)
class Job:
    """One case on so many ranks, the first of them on the process of number `first`."""

    key: str
    name: str
    function: Callable[[], Any]
    first: int
    ranks: int

    def answer(self, folder: Path, rank: int) -> Path:
        return folder / f"case{self.key}.rank{rank}.pickle"


def _places(sizes: Iterable[int]) -> dict[int, int]:
    """Return on which process each world begins, the largest first, those that fit together at the same time.

    >>> _places([1, 2, 3, 4])
    {4: 0, 3: 0, 1: 3, 2: 0}
    """
    left = sorted(sizes, reverse=True)
    most, places = left[0], {}
    while left:
        first = 0
        for size in [size for size in left if size <= most]:
            if first + size <= most:
                places[size] = first
                first += size
                left.remove(size)
    return places


def _context(cuda: bool) -> Any:
    if cuda:  # whose libraries want a process from its beginning
        return multiprocessing.get_context("spawn")
    return multiprocessing.get_context("forkserver")


@contextmanager
def _forked_from(imported: str) -> Iterator[None]:
    """Have processes that are started inside forked from the server that has imported a module, one for each module."""
    usual = multiprocessing.forkserver.connect_to_new_process
    multiprocessing.forkserver.connect_to_new_process = _server(imported).connect_to_new_process
    try:
        yield
    finally:
        multiprocessing.forkserver.connect_to_new_process = usual


@functools.cache
def _server(imported: str) -> Any:
    server = multiprocessing.forkserver.ForkServer()
    server.set_forkserver_preload([imported])
    return server


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Have processes that are started inside inherit the settings."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _join(processes: list[Any], timeout_s: float) -> dict[int, str]:
    """Wait until all have ended, one has died or the time is over; kill the rest and return why, by number."""
    running, reason = dict(enumerate(processes)), f"no answer within {timeout_s:g} s"
    deadline = time.monotonic() + timeout_s
    while running and (left_s := deadline - time.monotonic()) > 0:
        multiprocessing.connection.wait([process.sentinel for process in running.values()], left_s)
        for number in [number for number, process in running.items() if process.exitcode is not None]:
            if running.pop(number).exitcode:
                reason = f"killed, for process {number} died"
                deadline = min(deadline, time.monotonic() + _AFTER_DEATH_S)
    for process in running.values():
        process.kill()
        process.join()
    return dict.fromkeys(running, reason)


def _collect(folder: Path, job: Job, endings: list[str]) -> Outcome:
    values, errors = [], {}
    for rank, number in enumerate(range(job.first, job.first + job.ranks)):
        answer = job.answer(folder, rank)
        value, error = (
            pickle.loads(answer.read_bytes())
            if answer.exists()
            else (None, f"{endings[number]}\n{_log(folder, number)}")
        )
        values.append(value)
        if error is not None:
            errors[rank] = error
    return Outcome(job.name, tuple(values), errors)


def _log(folder: Path, number: int) -> str:
    log = folder / f"process{number}.log"
    return log.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:] if log.exists() else ""


# In a rank's process -------------------------------------------------------------------------------------------------


def _serve(number: int, folder: Path, case_timeout_s: float, cuda: bool, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    _redirect_output(folder / f"process{number}.log")
    faulthandler.enable()  # a rank that dies in native code leaves where it was
    backend = "gloo"
    if cuda:
        backend = "cpu:gloo,cuda:nccl"
        _take_gpu(number)
    jobs: list[Job] = pickle.loads((folder / "cases.pickle").read_bytes())
    for job in jobs:
        rank = number - job.first
        if not 0 <= rank < job.ranks:
            continue
        print(f"case {job.name} on {job.ranks} ranks", flush=True)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.ranks))
        os.environ["LOCAL_RANK"] = str(_gpu(number) if cuda else rank)
        store = folder / f"case{job.key}.store"
        answer = _answer(job.function, rank, job.ranks, store, case_timeout_s, backend=backend)
        path = job.answer(folder, rank)
        partial = path.with_suffix(".partial")
        partial.write_bytes(answer)
        partial.rename(path)


def _take_gpu(number: int) -> None:
    import torch

    share_gpus(number)
    torch.cuda.set_device(_gpu(number))


def _gpu(number: int) -> int:
    import torch

    return number % torch.cuda.device_count()


def _answer(
    function: Callable[[], Any], rank: int, world_size: int, store: Path, timeout_s: float, *, backend: str
) -> bytes:
    import torch.distributed as dist

    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        _wait_for_all(store.with_suffix(".ready"), world_size, timeout_s)
        return pickle.dumps((function(), None))
    except Exception:  # noqa: BLE001 -- whatever a case raises is its outcome
        return pickle.dumps((None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _wait_for_all(path: Path, world_size: int, timeout_s: float) -> None:
    """Return when all ranks are connected: one whose case ends at once would hang up on those that still connect."""
    import torch.distributed as dist

    store = dist.FileStore(str(path), world_size)
    if store.add("connected", 1) == world_size:
        store.set("all", "connected")
    store.wait(["all"], timedelta(seconds=timeout_s))


def _redirect_output(path: Path) -> None:
    """Send what this process and its C++ libraries print to a file; it is shown only if the rank dies."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
