"""Trainings of 2 real gloo ranks whose saves stall in one way each, manufactured; what they leave is the logs alone."""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from instrumented_trainers.faults.save import SlowDisk
from tracekit import conventions
from tracekit.capture.checkpoints import auto_recording

WORLD_SIZE = 2
DELAY_S = 1.2
STEPS, SAVED_AFTER = 60, 30
_ELEMENTS = 1 << 18
_MOST_STEPS = 4000
_HOGS = 4


class Training:
    """A rank's steps, with a save after some of them; `log` is where what is recorded goes.

    A step is all Python, or, with `device_step_s`, waiting as for a device.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.steps = 0
        self.device_step_s = 0.0
        self._times_ns: list[int] = []

    def run(self, save: Callable[[], Any]) -> None:
        """Train, save once, and go on until that is done, if it returns a future."""
        self._train(SAVED_AFTER - 1)
        saved = self._step(save)
        pending = saved if isinstance(saved, Future) else None
        while pending is not None and not pending.done() and self.steps < _MOST_STEPS:
            self._step()
        if pending is not None:
            pending.result()
        self._train(STEPS - SAVED_AFTER)

    def save_often(self, save: Callable[[int], Future[Any]]) -> None:
        """Train, and save three times, each time as soon as the save before is done."""
        self._train(SAVED_AFTER)
        pending = save(0)
        for number in (1, 2):
            self._train(2)
            pending.result()
            pending = save(number)
        self._train(2)
        pending.result()

    def finish(self) -> None:
        """Write the metrics log."""
        rows = [{"step": step, conventions.STEP_TIME_METRIC: took_ns} for step, took_ns in enumerate(self._times_ns)]
        path = self.log / conventions.rank_file(dist.get_rank(), conventions.METRICS_SUFFIX)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def _train(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self, save: Callable[[], Any] | None = None) -> Any:
        began_ns = time.monotonic_ns()
        if self.device_step_s:
            time.sleep(self.device_step_s)
        else:
            sum(number * number for number in range(60_000))
        self.steps += 1
        saved = save() if save else None
        self._times_ns.append(time.monotonic_ns() - began_ns)
        return saved


_now: dict[str, Training] = {}


def record() -> None:
    """Record saves and loads of this process from now on, into the log of the training that runs."""
    folder = lambda: _now["training"].log if "training" in _now else None  # noqa: E731
    auto_recording.watch_distributed_checkpoints(folder, dist.get_rank, lambda: _now["training"].steps)


def perform(name: str, folder: Path) -> None:
    """Run one scenario on this rank: its log goes to `folder`/log, its checkpoints to `folder`."""
    log = folder / "log"
    log.mkdir(parents=True, exist_ok=True)
    training = _now["training"] = Training(log)
    try:
        dist.barrier()
        SCENARIOS[name].run(training, folder)
        training.finish()
    finally:
        _now.pop("training")
    dist.barrier()
    if dist.get_rank() == 0:
        for checkpoint in folder.glob("step*"):
            shutil.rmtree(checkpoint)


def _state(tensors: int = 4, elements: int = _ELEMENTS, *, shared: bool = False) -> dict[str, Any]:
    prefix = "all" if shared else f"rank{dist.get_rank()}"
    return {f"{prefix}.{number}": torch.ones(elements) for number in range(tensors)}


def _slow_writer(path: Path, rate: int, rank: int | None = None) -> FileSystemWriter:
    writer = FileSystemWriter(path)
    SlowDisk(rate, rank).prepare_writer(writer, dist.get_rank())
    return writer


class _SlowPlanner(DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        time.sleep(DELAY_S)
        return super().create_local_plan()


class _SlowFetch(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        time.sleep(DELAY_S / 4)
        return super().resolve_data(write_item)


class _BusyFetch(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        until_s = time.thread_time() + 3e-3
        while time.thread_time() < until_s:
            pass
        return super().resolve_data(write_item)


class _SlowStager(BlockingAsyncStager):
    def stage(self, state_dict: Any) -> Any:
        time.sleep(DELAY_S)
        return super().stage(state_dict)


@contextlib.contextmanager
def _slow(name: str) -> Iterator[None]:
    original = getattr(os, name)

    @functools.wraps(original)
    def slow(*args: Any) -> None:
        time.sleep(DELAY_S)
        if args:
            original(*args)

    setattr(os, name, slow)
    try:
        yield
    finally:
        setattr(os, name, original)


@contextlib.contextmanager
def _hogs() -> Iterator[None]:
    running = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(_HOGS)]
    try:
        yield
    finally:
        for hog in running:
            hog.kill()
            hog.wait()


def _healthy(training: Training, folder: Path) -> None:
    training.run(lambda: dcp.save(_state(), checkpoint_id=folder / "step"))


def _write(training: Training, folder: Path) -> None:
    training.run(lambda: dcp.save(_state(), storage_writer=_slow_writer(folder / "step", 3_000_000)))


def _straggler(training: Training, folder: Path) -> None:
    training.run(lambda: dcp.save(_state(), storage_writer=_slow_writer(folder / "step", 3_000_000, rank=1)))


def _fsync(training: Training, folder: Path) -> None:
    with _slow("fsync"):
        training.run(lambda: dcp.save(_state(), checkpoint_id=folder / "step"))


def _global_sync(training: Training, folder: Path) -> None:
    with _slow("sync"):
        writer = FsspecWriter(f"memory://{folder.name}", overwrite=True)
        training.run(lambda: dcp.save(_state(), storage_writer=writer))


def _small(training: Training, folder: Path) -> None:
    training.run(lambda: dcp.save(_state(800, 64), checkpoint_id=folder / "step"))


def _plan(training: Training, folder: Path) -> None:
    training.run(lambda: dcp.save(_state(), checkpoint_id=folder / "step", planner=_SlowPlanner()))


def _fetch(training: Training, folder: Path) -> None:
    training.run(lambda: dcp.save(_state(), checkpoint_id=folder / "step", planner=_SlowFetch()))


def _staging(training: Training, folder: Path) -> None:
    training.run(lambda: dcp.async_save(_state(), checkpoint_id=folder / "step", async_stager=_SlowStager()))


def _upload(training: Training, folder: Path) -> None:
    def save(number: int) -> Future[Any]:
        return dcp.async_save(_state(), storage_writer=_slow_writer(folder / f"step{number}", 10_000_000))  # type: ignore[return-value]

    training.save_often(save)


def _gil(training: Training, folder: Path) -> None:
    # Two processors have room for one rank with two busy threads, which distinguishes a lock from a lack of processors.
    tensors = 600
    if dist.get_rank() == 1:
        tensors, training.device_step_s = 1, 5e-3
    training.run(lambda: dcp.async_save(_state(tensors, 64), checkpoint_id=folder / "step", planner=_BusyFetch()))


def _cpu(training: Training, folder: Path) -> None:
    with contextlib.ExitStack() as hogs:

        def save() -> Any:
            hogs.enter_context(_hogs())
            pending = dcp.async_save(_state(), storage_writer=_slow_writer(folder / "step", 3_000_000))
            pending.add_done_callback(lambda _: hogs.close())  # type: ignore[union-attr]
            return pending

        training.run(save)


def _restore(_: Training, folder: Path) -> None:
    # The state is the same on both ranks, so it is saved once and loaded whole by each.
    dcp.save(_state(shared=True), checkpoint_id=folder / "step")
    dist.barrier()
    dcp.load(_state(shared=True), checkpoint_id=folder / "step")


@dataclass(frozen=True)
class Scenario:
    """One way to stall, and the rule that must say so; "" for none."""

    run: Callable[[Training, Path], None]
    code: str
    how: str


SCENARIOS = {
    "healthy": Scenario(_healthy, "", "nothing"),
    "serialize": Scenario(_small, "CKPT002", "800 tensors of 256 B on each rank"),
    "device-to-host": Scenario(_fetch, "CKPT003", "300 ms for each tensor's fetching"),
    "write bandwidth": Scenario(_write, "CKPT004", "streams of 3 MB/s"),
    "fsync": Scenario(_fsync, "CKPT005", "1.2 s for each fsync"),
    "straggler": Scenario(_straggler, "CKPT006", "streams of 3 MB/s on rank 1"),
    "plan": Scenario(_plan, "CKPT007", "1.2 s for each local plan"),
    "global sync": Scenario(_global_sync, "CKPT008", "memory://, 1.2 s for os.sync"),
    "GIL": Scenario(
        _gil, "CKPT009", "async_save by thread of 600 tensors of 256 B on rank 0, Python busy 3 ms with each"
    ),
    "CPU contention": Scenario(_cpu, "CKPT010", "async_save at 3 MB/s with 4 busy processes for each rank"),
    "blocking staging": Scenario(_staging, "CKPT011", "a stager that takes 1.2 s"),
    "unfinished upload": Scenario(_upload, "CKPT011", "async_save at 10 MB/s, waited for before the next"),
    "replicated restore": Scenario(_restore, "CKPT012", "both ranks load one state whole"),
}
