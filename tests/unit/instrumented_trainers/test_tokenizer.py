"""Tokenizers from files, trained ones, and bytes."""

import sys
from pathlib import Path

import pytest

from instrumented_trainers.config import InvalidConfigError, TrainingConfig
from instrumented_trainers.sizes import model_config
from instrumented_trainers.text import tokenizer
from instrumented_trainers.text.batches import standard_library
from instrumented_trainers.text.tokenizer import ByteTokenizer, FileTokenizer
from tests.support.wording import Wording

TEXTS = [path.read_bytes() for path in standard_library()[:12]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers", reason="needs the extra [tokenizers]")
    path = tmp_path_factory.mktemp("run") / "tokenizer.json"
    tokenizer.train(iter(TEXTS), 700, path)
    return path


def test_a_trained_tokenizer_writes_any_text_and_gives_it_back(trained: Path) -> None:
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(trained))
    for text in (TEXTS[3], "Ελλάδα 水 \x00 🙂".encode()):
        (tokens,) = FileTokenizer(trained, None).encode([text])
        assert library.decode(tokens.tolist()).encode() == text
    assert len(FileTokenizer(trained, None).encode([TEXTS[3]])[0]) < len(TEXTS[3]) / 2


def test_a_trained_tokenizer_has_the_size_asked_for_and_separates_documents(trained: Path) -> None:
    assert tokenizer.vocabulary(trained) == 700
    assert FileTokenizer(trained, None).separator == 0
    assert FileTokenizer(trained, "e").separator > 0


def test_the_models_vocabulary_holds_the_tokens(trained: Path) -> None:
    base = TrainingConfig("ddp", Path("x"))
    assert model_config(base).vocabulary == 512
    assert model_config(TrainingConfig("ddp", Path("x"), tokenizer=trained)).vocabulary == 704
    assert model_config(TrainingConfig("ddp", Path("x"), train_tokenizer=1000)).vocabulary == 1024
    assert model_config(TrainingConfig("ddp", Path("x"), train_tokenizer=1000, model="7b")).vocabulary == 32_000


def test_a_file_that_is_no_tokenizer_is_refused(trained: Path, tmp_path: Path, wording: Wording) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"a": 1}')
    with pytest.raises(InvalidConfigError, match="cannot be read"):
        FileTokenizer(other, None)
    with wording.raises(InvalidConfigError):
        tokenizer.vocabulary(other)
    with pytest.raises(InvalidConfigError, match="'<nothing>' is no token"):
        FileTokenizer(trained, "<nothing>")


def test_bytes_are_tokens() -> None:
    assert [tokens.tolist() for tokens in ByteTokenizer().encode([b"a\xff", b""])] == [[97, 255], []]


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InvalidConfigError, match=r"pip install 'torch-tracekit\[tokenizers\]'"):
        tokenizer.train([b"text"], 300, tmp_path / "tokenizer.json")
