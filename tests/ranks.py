"""Run functions on every rank of a real process group, each rank in a process of its own.

Importing torch costs seconds a process, so one set of processes runs many cases, each in a fresh process group: a case
that fails on one rank does not spoil the next. Rendezvous is a file, so no port can be taken.

    def total() -> float:                      # at the top of a test module, so that a spawned process can import it
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    def test_sum() -> None:
        assert ranks.run(3, total) == [3.0, 3.0, 3.0]
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

_LOG_TAIL_CHARACTERS = 2000


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
    timeout_s: float = 120,
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
    timeout_s: float = 240,
    case_timeout_s: float = 60,
    environment: Mapping[str, str] | None = None,
    cuda: bool = False,
) -> dict[str, Outcome]:
    """Call each function on every rank, one after the other, and return the outcomes by name.

    A collective that waits longer than `case_timeout_s` fails its case; after `timeout_s` all processes are killed and
    what has no answer by then has failed. `environment` is added to that of the rank processes. With `cuda` they talk
    by NCCL and share the GPUs that are there, even if it is one.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as path:
        folder = Path(path)
        (folder / "cases.pickle").write_bytes(pickle.dumps(list(cases.items())))
        spawn = multiprocessing.get_context("spawn")
        processes = [
            spawn.Process(target=_serve, args=(rank, world_size, folder, case_timeout_s, cuda), daemon=True)
            for rank in range(world_size)
        ]
        # Threads that spin on a core that another rank needs cost more than they give.
        with _environment({"OMP_NUM_THREADS": "1"} | dict(environment or {})):
            for process in processes:
                process.start()
        late = _join(processes, time.monotonic() + timeout_s)
        endings = [
            f"no answer within {timeout_s:g} s" if rank in late else f"ended with exit code {process.exitcode}"
            for rank, process in enumerate(processes)
        ]
        return {name: _collect(folder, index, name, endings) for index, name in enumerate(cases)}


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


def _join(processes: list[Any], deadline: float) -> set[int]:
    """Wait until all have ended or the deadline is over; kill the rest and return their ranks."""
    late = set()
    for rank, process in enumerate(processes):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            late.add(rank)
            process.kill()
            process.join()
    return late


def _collect(folder: Path, index: int, name: str, endings: list[str]) -> Outcome:
    values, errors = [], {}
    for rank, ending in enumerate(endings):
        answer = folder / f"case{index}.rank{rank}.pickle"
        value, error = (
            pickle.loads(answer.read_bytes()) if answer.exists() else (None, f"{ending}\n{_log(folder, rank)}")
        )
        values.append(value)
        if error is not None:
            errors[rank] = error
    return Outcome(name, tuple(values), errors)


def _log(folder: Path, rank: int) -> str:
    log = folder / f"rank{rank}.log"
    return log.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:] if log.exists() else ""


# In a rank's process -------------------------------------------------------------------------------------------------


def _serve(rank: int, world_size: int, folder: Path, case_timeout_s: float, cuda: bool) -> None:
    _redirect_output(folder / f"rank{rank}.log")
    if cuda:
        _take_gpu(rank)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    cases: list[tuple[str, Callable[[], Any]]] = pickle.loads((folder / "cases.pickle").read_bytes())
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    for index, (name, function) in enumerate(cases):
        print(f"case {name}", flush=True)
        store = folder / f"case{index}.store"
        answer = _answer(function, rank, world_size, store, case_timeout_s, backend=backend)
        partial = folder / f"case{index}.rank{rank}.partial"
        partial.write_bytes(answer)
        partial.rename(partial.with_suffix(".pickle"))


def _take_gpu(rank: int) -> None:
    import torch

    # NCCL refuses two ranks of one host on one GPU; of two hosts it lets them.
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    torch.cuda.set_device(rank % torch.cuda.device_count())


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
        return pickle.dumps((function(), None))
    except Exception:  # noqa: BLE001 -- whatever a case raises is its outcome
        return pickle.dumps((None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _redirect_output(path: Path) -> None:
    """Send what this process and its C++ libraries print to a file; it is shown only if the rank dies."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
