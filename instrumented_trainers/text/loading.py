"""The text of a training run: its tokenizer, its batches, and where a resumed training continues in it."""

import ctypes
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from instrumented_trainers.checkpoints.resume import ResumePoint
from instrumented_trainers.config import InvalidConfigError, TrainingConfig
from instrumented_trainers.text import batches, documents, tokenizer
from instrumented_trainers.text.batches import Batches
from instrumented_trainers.text.stream import Position, StreamedBatches, is_held_out, number_pieces
from instrumented_trainers.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

Result = TypeVar("Result")
_TRAINING_TEXT_BYTES = 1 << 28
"""Of the text, how much a tokenizer is trained on."""


@dataclass(frozen=True)
class Text:
    """What a rank trains on, and the tokens that the model is evaluated on, shape (n,), or None."""

    batches: Batches | StreamedBatches
    evaluation: Tensor | None


def load(config: TrainingConfig, rank: int, origin: ResumePoint | None) -> Text:
    """Return the rank's text. Every rank calls it; the first one trains the tokenizer, or tokenizes the text.

    Raises InvalidConfigError on all ranks if the text or the tokenizer cannot be used.
    """
    words = make_tokenizer(config, origin)
    evaluation = _read(config, list(config.eval_data), words) if config.eval_data else None
    if config.stream:
        if config.eval_split:
            evaluation = on_first_rank(lambda: _held_out(config, words))
        return Text(_stream_batches(config, words, rank, origin), evaluation)
    tokens = _read(config, sources(config), words)
    if config.eval_split:
        tokens, evaluation = tokens.tensor_split([round(len(tokens) * (1 - config.eval_split))])
    sequences, first = (origin.seal.sequences, origin.seal.step * config.micro_batches) if origin else (0, 0)
    layout = config.layout
    place, ranks = layout.data_rank(rank), layout.data_ranks
    batches = Batches(tokens, config.tokens, config.batch, place, ranks, config.seed, sequences, first)
    return Text(batches, evaluation)


def make_tokenizer(config: TrainingConfig, origin: ResumePoint | None) -> Tokenizer:
    """Return the training's tokenizer; if it is not that of bytes, it is in the run's folder."""
    if tokenizer.source(config) is None and config.train_tokenizer is None:
        return ByteTokenizer()
    path = config.out / tokenizer.FILE
    on_first_rank(lambda: _provide(config, origin, path))
    return FileTokenizer(path, config.separator)


def sources(config: TrainingConfig) -> list[Path]:
    """Return the files of the training's text."""
    return list(config.data) or batches.standard_library()


def on_first_rank(function: Callable[[], Result]) -> Result:
    """Return on every rank what `function` returns on the first, or raise the InvalidConfigError that it raises."""
    outcome: Result | InvalidConfigError | None = None
    if dist.get_rank() == 0:
        try:
            outcome = function()
        except InvalidConfigError as error:
            outcome = error
    outcome = _broadcast(outcome)
    if isinstance(outcome, InvalidConfigError):
        raise outcome
    return outcome


def _broadcast(value: Any) -> Any:
    """Return the first rank's value, without NumPy, which `broadcast_object_list` needs."""
    first = dist.get_rank() == 0
    packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if first else torch.empty(0)
    size = torch.tensor([len(packed)])
    dist.broadcast(size, src=0)
    if not first:
        packed = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(packed, src=0)
    # S301: it is this program's own first rank that wrote it
    return value if first else pickle.loads(ctypes.string_at(packed.data_ptr(), len(packed)))  # noqa: S301


def _read(config: TrainingConfig, paths: list[Path], words: Tokenizer) -> Tensor:
    """Return all tokens of the files. Every rank calls it."""
    if isinstance(words, ByteTokenizer):  # reading is quicker than sending
        return batches.read_tokens(paths, words, field=config.text_field)
    return on_first_rank(lambda: batches.read_tokens(paths, words, field=config.text_field))


def _held_out_every(config: TrainingConfig) -> int:
    """Return of how many streamed documents one is held out; 0: none is."""
    return round(1 / config.eval_split) if config.eval_split else 0


def _held_out(config: TrainingConfig, words: Tokenizer) -> Tensor:
    """Return the tokens of held-out documents, as many as are evaluated."""
    missing = config.eval_steps * config.layout.data_ranks * config.batch * config.tokens + 1
    parts, one_in = [torch.empty(0, dtype=torch.int32)], _held_out_every(config)
    for piece, place in number_pieces(sources(config), config.text_field, Position()):
        if missing > 0 and is_held_out(place.piece, one_in):
            separator = torch.tensor([words.separator] if piece.ends_document else [], dtype=torch.int32)
            parts += [*words.encode([piece.text]), separator]
            missing -= len(parts[-2]) + len(separator)
        if missing <= 0:
            break
    return torch.cat(parts)


def _provide(config: TrainingConfig, origin: ResumePoint | None, path: Path) -> None:
    """Put the tokenizer into the run's folder: the user's, that of the resumed run, or one trained now."""
    source = tokenizer.source(config)
    if source is not None:
        tokenizer.vocabulary(source)  # raises if it is none
        _copy(source, path)
    elif origin is not None:
        _copy(origin.path.resolve().parents[1] / tokenizer.FILE, path)
    else:
        assert config.train_tokenizer is not None
        tokenizer.train(_sample(config), config.train_tokenizer, path)


def _copy(source: Path, path: Path) -> None:
    if not source.is_file():
        raise InvalidConfigError(
            f"--resume: the tokenizer of the run is missing: {source}; give it as --tokenizer FILE"
        )
    if source.resolve() != path.resolve():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)


def _sample(config: TrainingConfig) -> Iterator[bytes]:
    """Yield the documents at the beginning of the text."""
    left_bytes = _TRAINING_TEXT_BYTES
    for path in sources(config):
        for piece in documents.read(path, field=config.text_field):
            yield piece.text
            left_bytes -= len(piece.text)
            if left_bytes <= 0:
                return


def _stream_batches(config: TrainingConfig, words: Tokenizer, rank: int, origin: ResumePoint | None) -> StreamedBatches:
    if origin is not None and origin.seal.data_ranks != config.layout.data_ranks:
        raise InvalidConfigError(
            f"--stream: the documents were divided among {origin.seal.data_ranks} ranks and cannot be redistributed to "
            f"{config.layout.data_ranks}; resume with --world-size {origin.seal.world_size}"
        )
    return StreamedBatches(
        sources(config),
        words,
        field=config.text_field,
        length=config.tokens,
        batch=config.batch,
        rank=config.layout.data_rank(rank),
        world_size=config.layout.data_ranks,
        held_out_every=_held_out_every(config),
    )
