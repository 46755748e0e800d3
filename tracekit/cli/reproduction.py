"""A small scrubbed run on which a command fails as it failed before.

`crash_report` starts this as a process, which it ends when the time is over: each smaller run that still fails is left
in a folder of its own, the last one in the folder with the highest number.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import typer

from tracekit.cli import application
from tracekit.cli.crash_report import FOUND, REPEATED, place_of
from tracekit.conventions import plain_pickles, regular_files
from tracekit.errors import TracekitError

MAX_BYTES = 256 << 20
_REPEATED_OPTIONS = frozenset({"--by", "--select", "--set", "--of", "--kind", "--format", "--step", "--critical-path"})
_EVENTS = "traceEvents"

Files: TypeAlias = dict[str, "Content"]


@dataclass(frozen=True)
class Content:
    """A file: the events or lines that can be left out, and what is around them."""

    items: list[Any]
    document: dict[str, Any] | None
    """The trace without its events; None for lines of text, whose items are bytes."""

    def data(self) -> bytes:
        """Return the bytes of the file."""
        if self.document is None:
            return b"".join(self.items)
        return json.dumps(self.document | {_EVENTS: self.items}, indent=0).encode()


@dataclass(frozen=True)
class RepeatedCommand:
    """A command that can be repeated on another run: the words before and after it."""

    before: tuple[str, ...]
    run: Path
    after: tuple[str, ...]

    def failure(self, run: Path) -> str:
        """Return the place where the command fails on a run; "" if it does not."""
        try:
            application.app([*self.before, str(run), *self.after], prog_name="tracekit", standalone_mode=False)
        except Exception as error:  # noqa: BLE001 any of them may be the one that is looked for
            return "" if isinstance(error, TracekitError) else place_of(error)
        except SystemExit:
            pass
        return ""


def repeated_command(words: Sequence[str]) -> RepeatedCommand | None:
    """Return the command that `words` state, without options that name files; None if it cannot be repeated."""
    group: Any = typer.main.get_command(application.app)
    position = next((position for position, word in enumerate(words) if word in REPEATED), None)
    if position is None:
        return None
    command = group.get_command(None, words[position])
    values = command.make_context(words[position], list(words[position + 1 :]), resilient_parsing=True).params
    positional = [
        text for part in command.params if part.param_type_name == "argument" for text in _texts(values, part)
    ]
    if not positional or not Path(positional[0]).exists():
        return None
    before = [words[position]]
    for part in command.params:
        if values.get(part.name) != part.default and _REPEATED_OPTIONS & set(part.opts):
            is_flag = values[part.name] is True
            before += [part.opts[0]] if is_flag else _with_values(part.opts[0], _texts(values, part))
    return RepeatedCommand(tuple(before), Path(positional[0]), tuple(positional[1:]))


def _with_values(option: str, texts: Sequence[str]) -> list[str]:
    return [word for text in texts for word in (option, text)]


def _texts(values: Mapping[str, Any], part: Any) -> list[str]:
    value = values.get(part.name)
    if value is None:
        return []
    entries = value if isinstance(value, list | tuple) else (value,)
    return [str(getattr(entry, "value", entry)) for entry in entries]


def main() -> None:
    """Reduce the run of a command: arguments are a folder, where the command failed, and its words."""
    folder, place, *words = sys.argv[1:]
    command = repeated_command(words)
    if command is not None:
        reduce(command, place, Path(folder))


def reduce(command: RepeatedCommand, place: str, folder: Path) -> None:
    """Leave ever smaller scrubbed runs on which a command fails at a place in `folder`; none if it does not.

    Files are left out first, then halves, quarters, … of the events of each trace and of the lines of each log. Raises
    TracekitError if the run cannot be scrubbed.
    """
    from tracekit.ingest.scrub import scrub

    size = sum(path.stat().st_size for path in command.run.rglob("*")) if command.run.is_dir() else 0
    if max(size, command.run.stat().st_size) > MAX_BYTES:
        return
    copy = folder / "scrubbed" / ("run" if command.run.is_dir() else command.run.name)
    copy.parent.mkdir()
    names = scrub(command.run, copy).files
    state = {name: _content(copy / name if copy.is_dir() else copy) for name in names}
    tries = _Tries(command, place, folder, is_file=not copy.is_dir())
    if not tries.fails(state):
        return
    for name in names:
        without = {other: content for other, content in state.items() if other != name}
        if without and tries.fails(without):
            state = without
    for name in list(state):
        state = _reduce(state, name, tries.fails)


def _reduce(files: Files, name: str, fails: Callable[[Files], bool]) -> Files:
    """Return the files without those items of one that it need not have for the command to fail."""
    part = len(files[name].items) // 2
    while part:
        start = 0
        while start < len(items := files[name].items):
            shorter = files | {name: Content(items[:start] + items[start + part :], files[name].document)}
            if fails(shorter):
                files = shorter
            else:
                start += part
        part //= 2
    return files


class _Tries:
    """Runs the command on candidates, and leaves those that fail in `folder`."""

    def __init__(self, command: RepeatedCommand, place: str, folder: Path, *, is_file: bool) -> None:
        self._command, self._place, self._folder, self._is_file = command, place, folder, is_file
        self._count = 0

    def fails(self, files: Files) -> bool:
        """Return whether the command fails on these files at the place."""
        self._count += 1
        folder = self._folder / f"try-{self._count:06}" / "run"
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.data())
        is_failure = self._command.failure(folder / next(iter(files)) if self._is_file else folder) == self._place
        if is_failure:
            folder.rename(self._folder / f"{FOUND}{self._count:06}")
        return is_failure


def _content(path: Path) -> Content:
    """Return the content of a scrubbed file, unpacked, in parts that can be left out."""
    from tracekit.ingest.scrub import streams

    if plain_pickles.is_pickle(path):
        return Content([regular_files.read_bytes(path)], None)
    data = b"".join(streams.pieces(path))
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return Content(data.splitlines(keepends=True), None)
    if isinstance(document, dict) and isinstance(document.get(_EVENTS), list):
        return Content(document.pop(_EVENTS), document)
    return Content([data], None)


if __name__ == "__main__":
    main()
