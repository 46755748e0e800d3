"""Streamed text: packed without a gap, divided among ranks, continued exactly."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrumented_trainers.config import InvalidConfigError
from instrumented_trainers.text.stream import StreamedBatches
from instrumented_trainers.text.tokenizer import BETWEEN_DOCUMENTS, ByteTokenizer
from tests.support.wording import Wording

LENGTH, BATCH = 8, 2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files of documents of 0 to 40 bytes, each byte of them the document's number."""
    folder, order = tmp_path_factory.mktemp("text"), random.Random(0)
    paths = []
    for name, numbers in (("a", range(17)), ("b", range(17, 40))):
        paths.append(folder / f"{name}.jsonl")
        rows = [json.dumps({"text": chr(number) * order.choice([0, 1, 3, 8, 40])}) + "\n" for number in numbers]
        paths[-1].write_text("".join(rows))
    return paths


def stream(paths: list[Path], *, rank: int = 0, world_size: int = 1, held_out_every: int = 0) -> StreamedBatches:
    return StreamedBatches(
        paths,
        ByteTokenizer(),
        field="text",
        length=LENGTH,
        batch=BATCH,
        rank=rank,
        world_size=world_size,
        held_out_every=held_out_every,
    )


def text_of(paths: list[Path], numbers: list[int]) -> list[int]:
    """Return the tokens of the documents of these numbers."""
    rows = [json.loads(line)["text"] for path in paths for line in path.read_text().splitlines()]
    return [token for number in numbers for token in (*rows[number].encode(), BETWEEN_DOCUMENTS)]


def tokens(batches: StreamedBatches) -> Iterator[int]:
    """Yield the tokens of the batches in order; targets are the tokens that follow."""
    number = 0
    while True:
        inputs, targets = batches.batch_at(number)
        assert inputs.shape == targets.shape == (BATCH, LENGTH)
        assert inputs[:, 1:].equal(targets[:, :-1])
        for row, following in zip(inputs.tolist(), targets.tolist(), strict=True):
            yield from row
            last = following[-1]
        number += 1
        assert 0 <= last <= BETWEEN_DOCUMENTS


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_packs_its_own_documents_pass_after_pass(world_size: int, files: list[Path]) -> None:
    for rank in range(world_size):
        expected = text_of(files, list(range(rank, 40, world_size)))
        read = tokens(stream(files, rank=rank, world_size=world_size))
        assert [next(read) for _ in range(2 * len(expected))] == expected * 2


def test_held_out_documents_are_left_out_on_every_rank(files: list[Path]) -> None:
    kept = [number for number in range(40) if number % 4 != 3]
    for rank in range(2):
        expected = text_of(files, kept[rank::2])
        read = tokens(stream(files, rank=rank, world_size=2, held_out_every=4))
        assert [next(read) for _ in range(len(expected))] == expected


@given(steps=st.integers(0, 120), rank=st.integers(0, 2), held_out_every=st.sampled_from([0, 2, 5]))
def test_a_restored_stream_continues_exactly(files: list[Path], steps: int, rank: int, held_out_every: int) -> None:
    first = stream(files, rank=rank, world_size=3, held_out_every=held_out_every)
    for number in range(steps):
        first.batch_at(number)
    second = stream(files, rank=rank, world_size=3, held_out_every=held_out_every)
    second.restore(first.state)
    assert str(second.state) == str(first.state)
    for number in range(20):
        for left, right in zip(first.batch_at(number), second.batch_at(number), strict=True):
            assert left.equal(right)


def test_fewer_documents_than_ranks_are_refused(tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abcdefghijklmnopqrstuvwxyz"}\n')
    stream([path], rank=0, world_size=2).batch_at(0)
    with wording.raises(InvalidConfigError):
        stream([path], rank=1, world_size=2).batch_at(0)
