"""Real text as tokens: one token per byte, and one between two documents."""

import functools
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from instrumented_trainers.config import InvalidConfigError

BETWEEN_DOCUMENTS = 256
TOKENS = 257
"""How many different tokens there are; a model's vocabulary must hold them."""


def standard_library() -> list[Path]:
    """Return the source files of Python's standard library, its packages left out: text that every machine has."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def read_tokens(paths: Sequence[Path]) -> Tensor:
    """Return the files' bytes one after the other, shape (n,), int16, with a token of its own between two files."""
    between = torch.tensor([BETWEEN_DOCUMENTS], dtype=torch.int16)
    parts = []
    for path in paths:
        text = path.read_bytes()
        if text:
            parts += [torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16), between]
    return torch.cat(parts) if parts else between[:0]


@dataclass(frozen=True)
class Batches:
    """Which tokens each rank trains on. No two ranks see the same sequence within a pass over the text.

    The text is cut into sequences of `length` tokens, reshuffled for each pass. What a rank gets follows from the
    seed and its place alone, so a resumed training continues at its position, also with other ranks or batches.
    """

    tokens: Tensor
    length: int
    batch: int
    rank: int
    world_size: int
    seed: int
    taken: int = 0
    """Sequences that the training had taken by the time it came to micro-batch `first`."""
    first: int = 0

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise InvalidConfigError(
                f"the text has {len(self.tokens):,} tokens, which is too short for sequences of {self.length}: "
                "give more --data or fewer --tokens"
            )

    @property
    def sequences(self) -> int:
        """Return how many sequences the text holds."""
        return (len(self.tokens) - 1) // self.length

    def batch_at(self, number: int) -> tuple[Tensor, Tensor]:
        """Return this rank's micro-batch of that number: tokens and the tokens that follow them, both (B, T) int64."""
        place = self.taken_before(number) + self.rank * self.batch
        rows = [self._sequence(place + index) for index in range(self.batch)]
        both = torch.stack(rows).long()
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def taken_before(self, number: int) -> int:
        """Return how many sequences all ranks together have taken before the micro-batch of that number."""
        return self.taken + (number - self.first) * self.world_size * self.batch

    def _sequence(self, number: int) -> Tensor:
        number_of_pass, place = divmod(number, self.sequences)
        start = _order(self.sequences, self.seed * 1_000_003 + number_of_pass)[place] * self.length
        return self.tokens[start : start + self.length + 1]


@functools.lru_cache(maxsize=2)
def _order(sequences: int, seed: int) -> list[int]:
    return torch.randperm(sequences, generator=torch.Generator().manual_seed(seed)).tolist()
