"""Start the ranks of a run, or be one that a launcher has started."""

import atexit
import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from instrumented_trainers.checkpoints import seal
from instrumented_trainers.config import InvalidConfigError, TrainingConfig, TrainingFailedError
from tracekit import conventions
from tracekit.capture import attempts
from tracekit.conventions import python_child

_GRACE_S = 5.0  # how long the other ranks have to end by themselves once one has failed
_SOCKETS_ONLY = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
_TIMED_OUT = "Timed out waiting"  # gloo's words for a peer that does not answer


def run(config: TrainingConfig, command: list[str]) -> int:
    """Run the training to its end and return the exit code: in this process under a launcher, else in new ones.

    If a rank fails, its traceback is printed once, the other ranks are ended, and the code is 1. For an invalid
    configuration one line is printed, and the code is 2.
    """
    if "RANK" in os.environ:
        return _train_launched(config, int(os.environ["RANK"]), command)
    try:
        if config.overwrite and config.resume is None and config.out.is_dir():
            shutil.rmtree(config.out)
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.stderr.write(f"instrumented_trainers: --out {config.out}: cannot be written: {error.strerror}\n")
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _processors() // config.world_size)))
    os.environ[conventions.LAUNCHED_VARIABLE] = str(attempts.process_start_ns() or time.time_ns())
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        end = _run_ranks(config, Path(folder), command)
    if end.message:
        sys.stderr.write(f"instrumented_trainers: {end.message}\n")
    _record_exit(config, end)
    return end.code


def _train_launched(config: TrainingConfig, rank: int, command: list[str]) -> int:
    try:
        _train_rank(config, rank, "env://", command)
    except (InvalidConfigError, TrainingFailedError) as error:
        if rank == 0:
            sys.stderr.write(f"instrumented_trainers: {error}\n")
        return 2 if isinstance(error, InvalidConfigError) else 1
    return 0


def leave(code: int) -> NoReturn:
    """End this process, a finished rank, like Python, but without finalizing the interpreter.

    gloo's threads may still release tensors. For that they need the GIL, and without an interpreter they abort: one of
    a hundred complete trainings failed so (pytorch#179291).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def recovery_hint(config: TrainingConfig, rank: int) -> str:
    """Describe what a killed rank was saving, and where to resume; empty if no save was running."""
    incomplete, complete = seal.unfinished_saves(config.checkpoints), seal.complete(config.checkpoints)
    if not incomplete:
        return ""
    rank_files = sorted(path.name for path in incomplete[-1].glob(f"__{rank}_*"))
    lost = f"{incomplete[-1].name}/{rank_files[-1]}" if rank_files else incomplete[-1].name
    way = f"resume with --resume {complete[-1]}" if complete else "there is no earlier checkpoint: start again"
    return f" while {lost} was written, so that {incomplete[-1].name} is incomplete and will not be loaded; {way}"


@dataclasses.dataclass(frozen=True)
class _RanksEnd:
    """How the ranks ended: exit code, what to say about it, and the Unix time in ns of the first failure, if any."""

    code: int
    message: str = ""
    failed_ns: int | None = None


def _record_exit(config: TrainingConfig, end: _RanksEnd) -> None:
    """Add the exit to the attempts log. A folder in which nothing was recorded stays empty, for the next try."""
    if not any(config.out.iterdir()):
        return
    launched_ns = attempts.launched_ns()
    assert launched_ns is not None
    reason = end.message.partition("\n")[0] or None
    try:
        attempts.append_exit(config.out, launched_ns=launched_ns, failed_ns=end.failed_ns, code=end.code, reason=reason)
    except OSError as error:
        sys.stderr.write(f"instrumented_trainers: {config.out}: the exit is not recorded: {error.strerror}\n")


def _run_ranks(config: TrainingConfig, folder: Path, command: list[str]) -> _RanksEnd:
    context = _context(config)
    ranks = [
        context.Process(target=_serve, args=(config, rank, folder, command), name=f"rank {rank}", daemon=True)
        for rank in range(config.world_size)
    ]
    signal.signal(signal.SIGTERM, lambda number, _frame: _pass_on(number, ranks))
    try:
        with python_child.safe_path(), _sigterm_blocked():
            for process in ranks:
                process.start()
        failed_ns = _join(ranks)
    except KeyboardInterrupt:
        _end(ranks)
        return _RanksEnd(130)
    except EOFError:
        return _RanksEnd(1, "the process that starts the ranks ended before they began")
    failed = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode}
    if not failed:
        return _RanksEnd(0)
    silent = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
    _end(ranks)
    return _RanksEnd(*_cause(folder, failed, silent, config), failed_ns)


def _context(config: TrainingConfig) -> SpawnContext | ForkServerContext:
    """Context that starts the processes of ranks: on CPUs a server that imports torch once for all of them."""
    if config.device == "cuda":  # whose libraries want a process from its beginning
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["instrumented_trainers.imported_by_ranks"])
    return context


@contextlib.contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Let SIGTERM wait until all ranks are started. The server of their processes blocks it for good."""
    resource_tracker.ensure_running()  # its start, which is part of the server's otherwise, ends the blocking
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _join(ranks: list[BaseProcess]) -> int | None:
    """Unix time in ns of the first failure. Wait until all ranks have ended, or some time after that failure."""
    failed_ns, deadline = None, None
    while alive := [process.sentinel for process in ranks if process.exitcode is None]:
        # After `alive`: the exit code of a rank that is no longer in it is known.
        if deadline is None and any(process.exitcode for process in ranks):
            failed_ns, deadline = time.time_ns(), time.monotonic() + _GRACE_S
        remaining_s = None if deadline is None else deadline - time.monotonic()
        if remaining_s is not None and remaining_s <= 0:
            break
        connection.wait(alive, remaining_s)
    if failed_ns is None and any(process.exitcode for process in ranks):  # all at once
        return time.time_ns()
    return failed_ns


def _end(ranks: list[BaseProcess]) -> None:
    """End the ranks that still run. Their grace period is over, and SIGTERM would let them finish a step."""
    for process in ranks:
        if process.pid is not None and process.exitcode is None:
            process.kill()
            process.join()


def _pass_on(number: int, ranks: list[BaseProcess]) -> None:
    """Forward SIGTERM: the ranks save and end; a second one ends them at once."""
    signal.signal(number, signal.default_int_handler)
    for process in ranks:
        if process.pid is not None and process.exitcode is None:
            process.terminate()


def _cause(folder: Path, failed: Mapping[int, int], silent: list[int], config: TrainingConfig) -> tuple[int, str]:
    """Return exit code and message of the rank that failed first; a killed rank leaves no message.

    If it timed out waiting for ranks that are still running, `silent`, the message names those.
    """
    if all(code == -signal.SIGTERM for code in failed.values()):
        return 128 + signal.SIGTERM, "ended by SIGTERM before the training began"
    for rank, code in failed.items():
        if code < 0:
            return 1, f"rank {rank} was killed by {signal.Signals(-code).name}{recovery_hint(config, rank)}"
    failures = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.json")]
    if not failures:
        return 1, "no reason given by " + ", ".join(f"rank {rank} (exit code {code})" for rank, code in failed.items())
    first = min(failures, key=lambda failure: failure["at_ns"])
    if silent and _TIMED_OUT in first["words"]:
        ranks = ", ".join(f"rank {rank}" for rank in silent)
        return 1, f"{ranks} did not respond within {config.timeout_s:g} s, while the other ranks waited"
    return first["code"], first["words"]


def _serve(config: TrainingConfig, rank: int, folder: Path, command: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        _train_rank(config, rank, f"file://{folder}/rendezvous", command)
    except (InvalidConfigError, TrainingFailedError) as error:
        _fail(folder, rank, code=2 if isinstance(error, InvalidConfigError) else 1, message=str(error))
    except BaseException:  # noqa: BLE001 the process ends here and leaves its reason to the one that started it
        _fail(folder, rank, code=1, message=f"rank {rank} failed\n{traceback.format_exc()}")
    leave(0)


def _fail(folder: Path, rank: int, *, code: int, message: str) -> NoReturn:
    failure = {"at_ns": time.time_ns(), "code": code, "words": message}
    (folder / f"rank{rank}.json").write_text(json.dumps(failure), encoding="utf-8")
    sys.stdout.flush()
    # Not by sys.exit: the process group's threads may wait for ranks that have ended.
    os._exit(code)


def _train_rank(config: TrainingConfig, rank: int, rendezvous: str, command: list[str]) -> None:
    # Imported here, where it is needed, so that --help and bad arguments answer at once.
    import torch
    import torch.distributed as dist

    from instrumented_trainers.loop import StopRequest, train
    from instrumented_trainers.parallelism import make_mesh

    stop = StopRequest()
    # torch warns of its own internals (deprecated storage, FSDP1's future) on every rank; none concerns the user.
    warnings.filterwarnings("ignore", module="torch")
    cuda = config.device == "cuda"
    gpu = int(os.environ.get("LOCAL_RANK", rank))
    if cuda and config.share_gpus:
        gpu %= torch.cuda.device_count()
        share_gpus(rank)
    if cuda:
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=config.world_size,
        timeout=timedelta(seconds=config.timeout_s),
        device_id=torch.device("cuda", gpu) if cuda else None,
    )
    train(config, make_mesh(config.layout, config.device, data_axes=config.data_axes), command, stop)
    dist.destroy_process_group()


def share_gpus(rank: int) -> None:
    """Let NCCL accept several ranks on one GPU, which it refuses to ranks of one host.

    So this process, which has not yet initialized NCCL, gets a host name of its own, and ranks communicate by sockets.
    """
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    for name, value in _SOCKETS_ONLY.items():
        os.environ.setdefault(name, value)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
