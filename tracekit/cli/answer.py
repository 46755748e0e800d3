"""What a stored answer is: the text that a command has printed, and the inputs that it was made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

STDOUT, STDERR = 1, 2


class Kind(StrEnum):
    """What a command can read."""

    RUN = "run"
    FILE = "file"
    SOURCES = "sources"
    """The Python files in a folder."""
    DAY = "day"


@dataclass(frozen=True)
class Input:
    """Something that a command reads."""

    kind: Kind
    path: str = ""
    names: tuple[str, ...] = ()
    """Of a run, how names of other tools' files end; of sources, the folders that are left out."""


@dataclass(frozen=True)
class State:
    """The state of an input, and when it changed last."""

    stamp: str
    touched_ns: int = 0


@dataclass(frozen=True)
class Answer:
    """What a command has printed, as texts by stream in order, and its exit code."""

    texts: Sequence[tuple[int, str]]
    exit_code: int
