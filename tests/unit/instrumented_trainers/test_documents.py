"""Documents from files of each format, from any place on."""

import json
from pathlib import Path

import pytest

from instrumented_trainers.config import InvalidConfigError
from instrumented_trainers.text import documents
from instrumented_trainers.text.documents import Piece
from tests.support.wording import Wording

TEXTS = ["one", "", "two\nlines", "drei: ü"]


def written(folder: Path, suffix: str) -> Path:
    """Write the texts as rows of a file in the format of the suffix."""
    path = folder / f"texts{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps({"id": 1, "body": text}) + "\n" for text in TEXTS), encoding="utf-8")
        return path
    datasets = pytest.importorskip("datasets", reason="needs the extra [datasets]")
    table = datasets.Dataset.from_dict({"id": [1] * len(TEXTS), "body": TEXTS})
    if suffix == ".parquet":
        table.to_parquet(path)
        return path
    table.save_to_disk(folder / "table")
    return next((folder / "table").glob("*.arrow"))


@pytest.mark.parametrize("suffix", [".jsonl", ".arrow", ".parquet"])
def test_a_row_is_a_document_and_reading_begins_at_any(suffix: str, tmp_path: Path) -> None:
    path = written(tmp_path, suffix)
    pieces = list(documents.read(path, field="body"))
    assert [piece.text.decode() for piece in pieces] == TEXTS
    assert all(piece.ends_document for piece in pieces)
    for index, piece in enumerate(pieces):
        assert list(documents.read(path, field="body", begin=piece.begin)) == pieces[index:]
    assert list(documents.read(path, field="body", begin=pieces[-1].end)) == []


def test_plain_text_is_one_document_in_pieces_of_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 5)
    path = tmp_path / "text"
    path.write_bytes(b"one\ntwo\nthree\nlast \xff")
    pieces = list(documents.read(path, field="text"))
    assert pieces == [
        Piece(b"one\ntwo\n", 0, 8, ends_document=False),
        Piece(b"three\n", 8, 14, ends_document=False),
        Piece(b"last \xff", 14, 20),
    ]
    assert list(documents.read(path, field="text", begin=8)) == pieces[1:]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"body": "x"}', "byte 14: no text in 'text' (body); name its field with --text-field"),
        ('{"text": 3}', "byte 14: no text in 'text' (text)"),
        ("[3]", "byte 14: no text in 'text' (no object)"),
        ("{", "byte 14: not a line of JSON: "),
    ],
)
def test_a_line_without_text_is_refused_with_its_place(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(InvalidConfigError) as refused:
        list(documents.read(path, field="text"))
    assert f"--data {path}, {words}" in str(refused.value)


def test_without_the_library_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with wording.raises(InvalidConfigError):
        list(documents.read(tmp_path / "x.parquet", field="text"))
