"""The interface of a fault: hooks into the training loop, and its usage."""

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter

from instrumented_trainers.parallelism import ShardOptions

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>us|ms|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMG]i?B)/s")
_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Fault:
    """One fault. The loop calls all its hooks; by default they do nothing.

    A subclass states in its docstring what it does and which rules should find it, and in `usage` its arguments.
    """

    name: ClassVar[str]
    usage: ClassVar[str]
    seen_by: ClassVar[tuple[str, ...]]
    """Codes of the rules, or families of rules, that should find it in a recording."""
    needs_saves: ClassVar[bool] = False
    """Whether it needs checkpoint saves."""
    saves_in_background: ClassVar[bool] = False

    argument: ClassVar[Callable[[str], Any] | None] = None
    """Parses the only argument, which may be left out; None without one."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the fault with the arguments in `text`, empty for none. Raises ValueError if they are invalid."""
        if not text:
            return cls()
        if cls.argument is None:
            raise ValueError("takes no arguments")
        return cls(cls.argument(text))  # type: ignore[call-arg]

    def problem(self, strategy: str, world_size: int) -> str | None:
        """Return why it is impossible in such a training, or None."""
        return None

    def stage_problem(self, stages: int) -> str | None:
        """Return why it is impossible in a pipeline of so many stages (1: no pipeline), or None."""
        return None

    def change_options(self, options: ShardOptions) -> ShardOptions:
        """Return the changed sharding options."""
        return options

    def prepare(self, layers: Sequence[nn.Module], rank: int, device: str) -> None:
        """Add hooks to the sharded layers."""

    def during_stage(self, stage: int, device: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager around a forward or backward of a pipeline's stage."""
        return contextlib.nullcontext()

    def delay_batch(self) -> None:
        """Called before each batch."""

    def end_step(self, device: str) -> None:
        """Called after the optimizer's step."""

    def prepare_writer(self, writer: FileSystemWriter, rank: int) -> None:
        """Change how a save writes."""

    def during_save(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager around a save, on the saving thread."""
        return contextlib.nullcontext()

    def add_state(self, rank: int) -> dict[str, Tensor]:
        """Return additional tensors that this rank saves, under names that no other rank uses."""
        return {}


def count(text: str) -> int:
    """Return a number of 1 or more. Raises ValueError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a positive integer")
    return int(text)


def duration_ns(text: str) -> int:
    """Return a duration in ns.

    >>> duration_ns("20ms"), duration_ns("1.5s")
    (20000000, 1500000000)

    Raises ValueError for anything else.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 20ms, 500us or 1.5s")
    return round(float(match["number"]) * _SECONDS[match["unit"]] * 1e9)


def bytes_per_second(text: str) -> int:
    """Return a rate in bytes per second.

    >>> bytes_per_second("40MB/s"), bytes_per_second("1GiB/s")
    (40000000, 1073741824)

    Raises ValueError for anything else, and for a rate of 0.
    """
    match = _RATE.fullmatch(text)
    rate = round(float(match["number"]) * _BYTES[match["unit"]]) if match else 0
    if rate == 0:
        raise ValueError(f"{text!r} is not a rate such as 40MB/s or 1GiB/s")
    return rate
