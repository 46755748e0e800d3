"""Results of verifying a checkpoint."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

WHOLE, DAMAGED, UNREADABLE = "whole", "damaged", "unreadable"
_OF_RANK_0 = (".metadata", "seal.json")  # written by the coordinator
_RANK_OF_FILE = re.compile(r"^__(\d{1,9})_\d+\.distcp$|(?:^|[_-])rank[-_]?(\d{1,9})(?!\d)")


@dataclass(frozen=True)
class Problem:
    """One problem: the file, and the rank that wrote it if the file name states it."""

    file: str
    what: str
    rank: int | None = None
    is_readable: bool = True
    """False if the file could not be read, so that it may be whole."""


@dataclass(frozen=True)
class Part:
    """The result of one kind of check in a folder; `checked_bytes` are verified by a checksum."""

    kind: str
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    files: int = 0
    total_bytes: int = 0
    checked_bytes: int = 0


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """One checkpoint: path, format, problems, what could not be verified, and what to do."""

    path: str
    kinds: tuple[str, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    files: int
    total_bytes: int
    checked_bytes: int
    remedy: str = ""

    @property
    def status(self) -> str:
        """Return DAMAGED, UNREADABLE if the only problems are files that cannot be read, else WHOLE."""
        if any(problem.is_readable for problem in self.problems):
            return DAMAGED
        return UNREADABLE if self.problems else WHOLE


def problem(file: str, what: str) -> Problem:
    """Return a problem of a file, with the rank in its name."""
    return Problem(file, what, rank_of(file))


def unreadable(file: str, error: OSError) -> Problem:
    """Return the problem of a file that is missing or cannot be read."""
    if isinstance(error, FileNotFoundError):
        return problem(file, "is missing")
    return Problem(file, f"cannot be read: {error.strerror or error}", rank_of(file), is_readable=False)


def rank_of(file: str) -> int | None:
    """Rank that wrote a file, by its name.

    >>> rank_of("__12_0.distcp"), rank_of("model_rank3.pt"), rank_of(".metadata"), rank_of("model.safetensors")
    (12, 3, 0, None)
    """
    if file in _OF_RANK_0:
        return 0
    match = _RANK_OF_FILE.search(file)
    return int(match[1] or match[2]) if match else None


def combine(path: str, parts: Iterable[Part]) -> VerifiedCheckpoint:
    """Return the combined result of all checks of one checkpoint."""
    parts = list(parts)
    return VerifiedCheckpoint(
        path,
        kinds=tuple(part.kind for part in parts),
        problems=tuple(problem for part in parts for problem in part.problems),
        notes=tuple(note for part in parts for note in part.notes),
        files=sum(part.files for part in parts),
        total_bytes=sum(part.total_bytes for part in parts),
        checked_bytes=sum(part.checked_bytes for part in parts),
    )
