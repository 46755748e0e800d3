"""Checkpoint faults: slow writes, syncs or serialization, or saves that slow training down."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from instrumented_trainers.faults import fault
from instrumented_trainers.faults.fault import Fault, count, duration_ns


@dataclass(frozen=True)
class SlowDisk(Fault):
    """Checkpoints are written no faster than a given rate per rank, or on one rank only.

    Found by CKPT001 with the stage write; with a rank, the others' stage wait.
    """

    name: ClassVar[str] = "slow-disk"
    usage: ClassVar[str] = "slow-disk=RATE[:RANK], such as slow-disk=40MB/s"
    seen_by: ClassVar[tuple[str, ...]] = ("CKPT001",)
    needs_saves: ClassVar[bool] = True
    bytes_per_second: int
    rank: int | None = None

    @classmethod
    def parse(cls, text: str) -> "SlowDisk":
        rate, colon, rank = text.partition(":")
        if colon and not rank.isdecimal():
            raise ValueError(f"{rank!r} is not a rank")
        return cls(fault.bytes_per_second(rate), int(rank) if colon else None)

    def problem(self, strategy: str, world_size: int) -> str | None:
        return (
            f"rank {self.rank} does not exist: there are {world_size} ranks" if (self.rank or 0) >= world_size else None
        )

    def prepare_writer(self, writer: FileSystemWriter, rank: int) -> None:
        if self.rank not in (None, rank):
            return
        create_stream = writer.fs.create_stream

        @contextlib.contextmanager
        def create(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with create_stream(*args, **kwargs) as stream:
                yield _Throttled(stream, self.bytes_per_second)

        writer.fs.create_stream = create


@dataclass(frozen=True)
class SlowFsync(Fault):
    """Each fsync of a save takes longer: a busy or distant disk that acknowledges late.

    Found by CKPT001 with the stage fsync (and finish, in which the metadata is synced).
    """

    name: ClassVar[str] = "slow-fsync"
    usage: ClassVar[str] = "slow-fsync[=DURATION], added to each, 500ms"
    seen_by: ClassVar[tuple[str, ...]] = ("CKPT001",)
    needs_saves: ClassVar[bool] = True
    argument = staticmethod(duration_ns)
    delay_ns: int = 500_000_000

    @contextlib.contextmanager
    def during_save(self) -> Iterator[None]:
        fsync, thread = os.fsync, threading.get_ident()

        def slow(descriptor: Any) -> None:
            if threading.get_ident() == thread:
                time.sleep(self.delay_ns / 1e9)
            fsync(descriptor)

        os.fsync = slow
        try:
            yield
        finally:
            os.fsync = fsync


@dataclass(frozen=True)
class SmallTensors(Fault):
    """Each rank saves many additional tensors of 256 bytes, so that saving is Python-bound, not disk-bound.

    Found by CKPT001 with the stages serialize and plan.
    """

    name: ClassVar[str] = "small-tensors"
    usage: ClassVar[str] = "small-tensors[=COUNT], on each rank, 500"
    seen_by: ClassVar[tuple[str, ...]] = ("CKPT001",)
    needs_saves: ClassVar[bool] = True
    argument = staticmethod(count)
    count: int = 500

    def add_state(self, rank: int) -> dict[str, Tensor]:
        return {f"{self.name}.{rank}.{number}": torch.full((64,), float(number)) for number in range(self.count)}


@dataclass(frozen=True)
class GilSave(SmallTensors):
    """Checkpoints are saved by a background thread that often holds the GIL: many tensors of 256 bytes.

    Training continues meanwhile, but slower, because its Python waits for the GIL. Found by the CKPT family (GIL), and
    as longer steps during a save.
    """

    name: ClassVar[str] = "gil-save"
    usage: ClassVar[str] = "gil-save[=COUNT], tensors on each rank, 500"
    seen_by: ClassVar[tuple[str, ...]] = ("CKPT",)
    saves_in_background: ClassVar[bool] = True


class _Throttled:
    """A stream with a maximum write rate; a pause earns no credit."""

    def __init__(self, raw: Any, rate: int) -> None:
        self._raw = raw
        self._rate = rate

    def write(self, data: Any) -> int:
        began_s = time.monotonic()
        written = self._raw.write(data)
        ahead_s = began_s + memoryview(data).nbytes / self._rate - time.monotonic()
        if ahead_s > 0:
            time.sleep(ahead_s)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)
