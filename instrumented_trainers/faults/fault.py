"""What a fault is: hooks into the training loop, and the words it is asked for in."""

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter

from instrumented_trainers.parallelism import ShardOptions


class Fault:
    """One trouble. Its hooks do nothing where it has none to make; the loop calls them all.

    A subclass says in its docstring what it does and which rules should see it, and in `usage` how it is asked for.
    """

    name: ClassVar[str]
    usage: ClassVar[str]
    seen_by: ClassVar[tuple[str, ...]]
    """Codes of the rules, or families of rules, that should see it in a recording."""
    needs_saves: ClassVar[bool] = False
    """Whether it is a trouble of checkpoints, so that without one there is none."""
    saves_in_background: ClassVar[bool] = False

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Return the fault with the arguments in `text`, empty for none. Raises ValueError if they make no sense."""
        if text:
            raise ValueError("takes no arguments")
        return cls()

    def problem(self, strategy: str, world_size: int) -> str | None:
        """Return why it cannot be made in such a training, or None."""
        return None

    def change_options(self, options: ShardOptions) -> ShardOptions:
        """Return how the model is to be sharded."""
        return options

    def prepare(self, layers: Sequence[nn.Module], rank: int, device: str) -> None:
        """Add hooks to the sharded layers."""

    def delay_batch(self) -> None:
        """Do what comes before a batch."""

    def end_step(self, device: str) -> None:
        """Do what comes after the optimizer's step."""

    def prepare_writer(self, writer: FileSystemWriter, rank: int) -> None:
        """Change how a save writes."""

    def during_save(self) -> contextlib.AbstractContextManager[Any]:
        """Return what surrounds a save, on the thread that saves."""
        return contextlib.nullcontext()

    def add_state(self, rank: int) -> dict[str, Tensor]:
        """Return what this rank saves besides the training's state, under names that no other rank has."""
        return {}


def count(text: str) -> int:
    """Return a number of 1 or more. Raises ValueError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is no count")
    return int(text)
