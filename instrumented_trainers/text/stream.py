"""Batches of text that is read and tokenized while the training runs."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from instrumented_trainers.config import InvalidConfigError
from instrumented_trainers.text import documents
from instrumented_trainers.text.documents import Piece
from instrumented_trainers.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Position:
    """A place in the text: the piece of number `piece` in a pass, of which `unused_tokens` are left.

    It begins at `begin` in the file of number `file`. Piece -1: before the first.
    """

    number_of_pass: int = 0
    file: int = 0
    begin: int = 0
    piece: int = -1
    unused_tokens: int = 0


class StreamedBatches:
    """Which tokens a rank trains on: those of every `world_size`-th document, packed into sequences without a gap.

    A document's tokens are followed by the separator, then by those of the rank's next document; the last token of a
    sequence is the first of the next. Files are read in their order, pass after pass; one of `held_out_every` documents
    is left out, if that is not 0. Batches come in order; another object that restores `state` continues exactly.
    Raises InvalidConfigError in a pass that has no document for the rank.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        tokenizer: Tokenizer,
        *,
        field: str,
        length: int,
        batch: int,
        rank: int,
        world_size: int,
        held_out_every: int = 0,
    ) -> None:
        self._paths, self._tokenizer, self._field = tuple(paths), tokenizer, field
        self._length, self._batch, self._rank, self._world_size = length, batch, rank, world_size
        self._held_out_every = held_out_every
        self._tokens = torch.empty(0, dtype=torch.int32)
        self._position = Position()
        self._pieces = self._read(self._position)

    @property
    def state(self) -> dict[str, Tensor]:
        """Return this rank's position, for a checkpoint, under a name that no other rank has."""
        numbers = replace(self._position, unused_tokens=len(self._tokens))
        return {f"{self._rank}.position": torch.tensor(astuple(numbers), dtype=torch.int64)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue at the position that `state` had."""
        saved = Position(*state[f"{self._rank}.position"].tolist())
        self._tokens, self._position, self._pieces = self._tokens[:0], saved, self._read(saved)
        if saved.piece >= 0:
            # What is left is of the last piece: a piece is taken only when the ones before do not fill a sequence.
            self._take_piece()
            self._tokens = self._tokens[len(self._tokens) - saved.unused_tokens :]

    def batch_at(self, number: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 batches come in order
        """Return this rank's next micro-batch: tokens and the tokens that follow them, both (B, T) int64."""
        both = torch.stack([self._sequence() for _ in range(self._batch)]).long()
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def taken_before(self, number: int) -> int:
        """Number of sequences that all ranks together have taken before the micro-batch of that number."""
        return number * self._world_size * self._batch

    def _sequence(self) -> Tensor:
        while len(self._tokens) <= self._length:
            self._take_piece()
        sequence, self._tokens = self._tokens[: self._length + 1], self._tokens[self._length :]
        return sequence

    def _take_piece(self) -> None:
        """Append the tokens of this rank's next piece."""
        piece, self._position = next(self._pieces)
        separator = torch.full((1 if piece.ends_document else 0,), self._tokenizer.separator, dtype=torch.int32)
        self._tokens = torch.cat((self._tokens, *self._tokenizer.encode([piece.text]), separator)).int()

    def _read(self, place: Position) -> Iterator[tuple[Piece, Position]]:
        """Yield this rank's pieces and where they are, from a place on, pass after pass."""
        while True:
            has_documents = place.piece >= 0
            for piece, position in number_pieces(self._paths, self._field, place):
                if not is_held_out(position.piece, self._held_out_every) and self._is_own(position.piece):
                    has_documents = True
                    yield piece, position
            if not has_documents:
                raise InvalidConfigError(
                    f"--data: fewer documents than the {self._world_size} ranks, so that rank {self._rank} has none"
                )
            place = Position(place.number_of_pass + 1)

    def _is_own(self, number: int) -> bool:
        held_out = number // self._held_out_every if self._held_out_every else 0
        return (number - held_out) % self._world_size == self._rank


def number_pieces(paths: Sequence[Path], field: str, place: Position) -> Iterator[tuple[Piece, Position]]:
    """Yield the pieces of one pass from a place on, and where each is."""
    number, begin = max(place.piece, 0), place.begin
    for index in range(place.file, len(paths)):
        for piece in documents.read(paths[index], field=field, begin=begin):
            yield piece, Position(place.number_of_pass, index, piece.begin, number)
            number += 1
        begin = 0


def is_held_out(number: int, one_in: int) -> bool:
    """Return whether the piece of that number is left out of the training where one of `one_in` is (0: none)."""
    return one_in > 0 and number % one_in == one_in - 1
