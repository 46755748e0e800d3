"""Batches of text that is in memory, tokenized and shuffled."""

import functools
import itertools
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from instrumented_trainers.config import InvalidConfigError
from instrumented_trainers.text import documents
from instrumented_trainers.text.tokenizer import Tokenizer

_PIECES = 256  # tokenized at a time, which the library does in parallel


def standard_library() -> list[Path]:
    """Return the source files of Python's standard library, its packages left out: text that every machine has."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def read_tokens(paths: Sequence[Path], tokenizer: Tokenizer, *, field: str = "text") -> Tensor:
    """Return the tokens of all documents in the files, shape (n,), the separator after each."""
    separator, parts = torch.tensor([tokenizer.separator], dtype=torch.int32), [torch.empty(0, dtype=torch.int16)]
    pieces = (piece for path in paths for piece in documents.read(path, field=field))
    while chunk := list(itertools.islice(pieces, _PIECES)):
        for piece, tokens in zip(chunk, tokenizer.encode([piece.text for piece in chunk]), strict=True):
            parts += [tokens, separator] if piece.ends_document else [tokens]
    return torch.cat(parts)


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
    sequences_taken: int = 0
    """Sequences that the training had taken by the time it came to micro-batch `first`."""
    first: int = 0

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise InvalidConfigError(
                f"the text has {len(self.tokens):,} tokens, which is too short for sequences of {self.length}: "
                "give more --data or fewer --tokens"
            )

    @property
    def state(self) -> dict[str, Tensor]:
        """Return nothing: a checkpoint needs only how many sequences were taken."""
        return {}

    @property
    def sequences(self) -> int:
        """Number of sequences of the text."""
        return (len(self.tokens) - 1) // self.length

    def batch_at(self, number: int) -> tuple[Tensor, Tensor]:
        """Return this rank's micro-batch of that number: tokens and the tokens that follow them, both (B, T) int64."""
        place = self.taken_before(number) + self.rank * self.batch
        rows = [self._sequence(place + index) for index in range(self.batch)]
        both = torch.stack(rows).long()
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def taken_before(self, number: int) -> int:
        """Number of sequences that all ranks together have taken before the micro-batch of that number."""
        return self.sequences_taken + (number - self.first) * self.world_size * self.batch

    def _sequence(self, number: int) -> Tensor:
        number_of_pass, place = divmod(number, self.sequences)
        start = _order(self.sequences, self.seed * 1_000_003 + number_of_pass)[place] * self.length
        return self.tokens[start : start + self.length + 1]


@functools.lru_cache(maxsize=2)
def _order(sequences: int, seed: int) -> list[int]:
    return torch.randperm(sequences, generator=torch.Generator().manual_seed(seed)).tolist()
