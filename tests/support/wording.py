"""Messages compared exactly with golden files: a file for each module of tests, a section for each test. Not a test.

`pytest --update-golden` rewrites the sections of the tests that run; they are then reviewed as code.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

_TEMPORARY = re.compile(rf"{tempfile.gettempdir()}/(tmp|tracekit-)\w+")


class Wording:
    """The messages of one test, in the order in which it compares them."""

    def __init__(self, path: Path, test: str, *, is_updated: bool, names: Mapping[str, str]) -> None:
        """Use the section `test` of the file at `path`; folders of this machine are written by their `names`."""
        self._path, self._test, self._is_updated, self._names = path, test, is_updated, dict(names)
        self._expected = _sections(path).get(test, [])
        self._messages: list[str] = []

    def __call__(self, *messages: object) -> None:
        """Compare messages with the next ones of the section."""
        for message in messages:
            text = str(message).removesuffix("\n")
            for folder, name in self._names.items():
                text = text.replace(folder, name)
            text = _TEMPORARY.sub("TEMPORARY", text)
            place = len(self._messages)
            self._messages.append(text)
            if not self._is_updated:
                assert place < len(self._expected), f"{self._path}: lacks {text!r}; write it with --update-golden"
                assert text == self._expected[place], f"not as in {self._path}; if intended, --update-golden"

    @contextmanager
    def raises(self, error: type[BaseException]) -> Iterator[None]:
        """Expect an error and compare its message."""
        with pytest.raises(error) as raised:
            yield
        self(raised.value)

    def end(self) -> None:
        """Write the section if it is updated; else expect that all its messages were compared."""
        left = self._expected[len(self._messages) :]
        assert self._is_updated or not left, f"{self._path}: no more said: {left}; if intended, --update-golden"
        if self._is_updated:
            sections = _sections(self._path)
            sections.pop(self._test, None)
            if self._messages:
                sections[self._test] = self._messages
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = "\n".join(_as_text(test, messages) for test, messages in sorted(sections.items()))
            self._path.write_text(text, encoding="utf-8")


def _as_text(test: str, messages: list[str]) -> str:
    lines = [line for message in messages for line in ("- " + message.replace("\n", "\n  ")).split("\n")]
    return "\n".join((f"# {test}", *lines, ""))


def _sections(path: Path) -> dict[str, list[str]]:
    """Messages of a file by test.

    >>> sorted(_sections(Path("there is none")))
    []
    """
    sections: dict[str, list[str]] = {}
    messages: list[str] = []
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        if line.startswith("# "):
            messages = sections.setdefault(line[2:], [])
        elif line.startswith("- "):
            messages.append(line[2:])
        elif line.startswith("  "):
            messages[-1] += "\n" + line[2:]
    return sections
