"""Tokenizers: bytes, or those of the library `tokenizers`, read from a file or trained."""

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from instrumented_trainers.config import InvalidConfigError, TrainingConfig

FILE = "tokenizer.json"
"""The name of a run's tokenizer in its folder."""
BETWEEN_DOCUMENTS = 256
TOKENS = 257
"""How many different tokens bytes make, with the one between documents; a model's vocabulary must hold them."""
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]", "<pad>")


class Tokenizer(Protocol):
    """Turns text into tokens. `separator` is the token between two documents."""

    separator: int

    def encode(self, texts: Sequence[bytes]) -> list[Tensor]:
        """Return the tokens of each text, shape (n,), of an integer type."""
        ...


class ByteTokenizer:
    """One token per byte."""

    separator = BETWEEN_DOCUMENTS

    def encode(self, texts: Sequence[bytes]) -> list[Tensor]:
        return [_bytes(text) for text in texts]


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16) if text else torch.empty(0).short()


class FileTokenizer:
    """A tokenizer of the library `tokenizers`, from its ``tokenizer.json``; bytes that are no UTF-8 are replaced.

    Raises InvalidConfigError if the library is missing, the file cannot be read, or no token separates documents.
    """

    def __init__(self, path: Path, separator: str | None) -> None:
        try:
            self._tokenizer = _tokenizers().Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare exceptions
            if isinstance(error, InvalidConfigError):
                raise
            raise InvalidConfigError(f"--tokenizer {path}: cannot be read: {error}") from error
        self.separator = separator_of(path, separator).number

    def encode(self, texts: Sequence[bytes]) -> list[Tensor]:
        words = [text.decode("utf-8", "replace") for text in texts]
        encodings = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)
        return [torch.tensor(encoding.ids, dtype=torch.int32) for encoding in encodings]


def source(config: TrainingConfig) -> Path | None:
    """Return the tokenizer's file: the user's, else that in the folder of the pretrained weights, if there is one."""
    if config.tokenizer is not None or config.init_from is None:
        return config.tokenizer
    return config.init_from / FILE if (config.init_from / FILE).is_file() else None


def train(texts: Iterable[bytes], vocabulary: int, path: Path) -> None:
    """Train a byte-level BPE tokenizer of up to `vocabulary` tokens on the texts and save it at `path`.

    Its first token ends a document. Raises InvalidConfigError if `tokenizers` is not installed.
    """
    library = _tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_SEPARATORS[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode("utf-8", "replace") for text in texts), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


@dataclass(frozen=True)
class Token:
    """A token of a vocabulary."""

    text: str
    number: int


def separator_of(path: Path, name: str | None) -> Token:
    """Return the token of a ``tokenizer.json`` that ends a document: the one named, or one of a usual name.

    Raises InvalidConfigError if there is none.
    """
    tokens = _tokens(path)
    for candidate in _SEPARATORS if name is None else (name,):
        if candidate in tokens:
            return Token(candidate, tokens[candidate])
    words = "no token that ends a document is known" if name is None else f"{name!r} is no token"
    raise InvalidConfigError(f"--tokenizer {path}: {words}; name one with --separator")


def vocabulary(path: Path) -> int:
    """Number of tokens of a ``tokenizer.json``: its highest number and one. Raises InvalidConfigError."""
    return 1 + max(_tokens(path).values())


@functools.cache
def _tokens(path: Path) -> dict[str, int]:
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        tokens = words["model"]["vocab"]
        if not isinstance(tokens, dict):  # with scores, in the order of their numbers
            tokens = {token: number for number, (token, _) in enumerate(tokens)}
        return tokens | {token["content"]: token["id"] for token in words.get("added_tokens", ())}
    except OSError as error:
        raise InvalidConfigError(f"--tokenizer {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfigError(f"--tokenizer {path}: no tokenizer.json of the library `tokenizers`") from error


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ModuleNotFoundError as error:
        raise InvalidConfigError("a tokenizer needs `tokenizers`: pip install 'torch-tracekit[tokenizers]'") from error
    return tokenizers
