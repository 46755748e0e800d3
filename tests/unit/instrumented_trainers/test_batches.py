from pathlib import Path

import torch

from instrumented_trainers.config import InvalidConfigError
from instrumented_trainers.model_config import PRESETS
from instrumented_trainers.text.batches import Batches, read_tokens, standard_library
from instrumented_trainers.text.tokenizer import BETWEEN_DOCUMENTS, TOKENS, ByteTokenizer
from tests.support.wording import Wording


def batches(rank: int = 0, *, seed: int = 0, tokens: int = 8 * 24 + 1) -> Batches:
    return Batches(torch.arange(tokens), length=8, batch=2, rank=rank, world_size=3, seed=seed)


def rows(rank: int, number: int, **options: int) -> list[tuple[int, ...]]:
    return [tuple(row) for row in batches(rank, **options).batch_at(number)[0].tolist()]


def test_a_token_is_a_byte_and_documents_are_separated(tmp_path: Path) -> None:
    for name, text in (("a", b"ab\xff"), ("empty", b""), ("b", b"c")):
        (tmp_path / name).write_bytes(text)
    tokens = read_tokens([tmp_path / name for name in ("a", "empty", "b")], ByteTokenizer())
    assert tokens.tolist() == [97, 98, 255, BETWEEN_DOCUMENTS, 99, BETWEEN_DOCUMENTS]


def test_every_machine_has_enough_text_and_every_vocabulary_holds_its_tokens() -> None:
    assert sum(path.stat().st_size for path in standard_library()) > 1_000_000
    assert min(config.vocabulary for config in PRESETS.values()) >= TOKENS


def test_targets_are_the_tokens_that_follow() -> None:
    tokens, targets = batches().batch_at(0)
    assert tokens.shape == targets.shape == (2, 8)
    assert torch.equal(targets, tokens + 1)


def test_ranks_share_a_pass_over_the_text_without_overlap() -> None:
    # 24 sequences, 3 ranks of 2: 4 micro-batches make one pass.
    seen = [row for number in range(4) for rank in range(3) for row in rows(rank, number)]
    assert len(set(seen)) == 24
    assert sorted(token for row in seen for token in row) == list(range(8 * 24))


def test_the_next_pass_is_shuffled_differently() -> None:
    first = [row for number in range(4) for rank in range(3) for row in rows(rank, number)]
    second = [row for number in range(4, 8) for rank in range(3) for row in rows(rank, number)]
    assert sorted(first) == sorted(second)
    assert first != second


def test_a_batch_depends_on_seed_and_position_alone() -> None:
    assert rows(1, 5) == rows(1, 5)
    assert rows(1, 5) != rows(1, 5, seed=1)


def test_text_too_short_for_one_sequence_is_refused(wording: Wording) -> None:
    with wording.raises(InvalidConfigError):
        batches(tokens=8)
