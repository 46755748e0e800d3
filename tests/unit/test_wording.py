"""The comparison of messages with golden files fails if a message differs, is missing or is new."""

from pathlib import Path

import pytest

from tests.support.wording import Wording

MESSAGES = ("one line", "two\n\nlines\n", "/tmp/tmpabc123/run: gone", "HOME/x")


def compared(path: Path, *messages: str, is_updated: bool = False, test: str = "test_a[1]") -> None:
    wording = Wording(path, test, is_updated=is_updated, names={str(path.parent): "HERE"})
    wording(*messages)
    wording.end()


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    compared(path, *MESSAGES, is_updated=True)
    compared(path, f"{tmp_path}/x: gone", is_updated=True, test="test_b")
    return path


def test_written_messages_are_those_that_are_compared(golden: Path) -> None:
    compared(golden, *MESSAGES)
    compared(golden, f"{golden.parent}/x: gone", test="test_b")
    assert "- HERE/x: gone\n" in golden.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "messages", [("One line",), ("two\n\nlines\n",), (*MESSAGES, "one more")], ids=["other", "order", "more"]
)
def test_other_messages_fail(golden: Path, messages: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="--update-golden"):
        compared(golden, *messages)


def test_a_message_that_is_gone_fails(golden: Path) -> None:
    with pytest.raises(AssertionError, match="--update-golden"):
        compared(golden, *MESSAGES[:-1])


def test_an_update_replaces_the_section_of_its_test_alone(golden: Path) -> None:
    compared(golden, "new", is_updated=True)
    compared(golden, "new")
    compared(golden, f"{golden.parent}/x: gone", test="test_b")


def test_the_message_of_an_error_is_compared(golden: Path) -> None:
    wording = Wording(golden, "test_a[1]", is_updated=False, names={})
    with wording.raises(ValueError):
        raise ValueError("one line")
    with pytest.raises(AssertionError), wording.raises(ValueError):
        raise ValueError("another")
