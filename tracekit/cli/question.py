"""Questions: a command on unchanged input prints what it printed before, without importing tables and rules.

A command states what it reads where it reads it (`Question.reads`). One that reads or writes anything else withdraws
its answer.

The key of a stored answer has the words of the command and all that shapes output around it: the current folder with
the settings files that are searched from there, the terminal, variables, tracekit's code and what is installed. An
entry also has what the command has read: it is used only while the states of all of that are those that it was made of.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO

from tracekit import conventions

if TYPE_CHECKING:
    from tracekit.ingest.file_states import FileStates


STDOUT, STDERR = 1, 2
_PACKAGE = Path(conventions.__file__).parents[1]
_SETTINGS_FILES, _REPOSITORY = ("tracekit.toml", "pyproject.toml"), ".git"
_VARIABLES = (
    "TRACEKIT_",
    "PYTHON",
    "LC_",
    "LANG",
    "NO_COLOR",
    "FORCE_COLOR",
    "COLORTERM",
    "TERM",
    "TTY_",
    "COLUMNS",
    "LINES",
    "JUPYTER_",
    "GITHUB_ACTIONS",
    "TF_BUILD",
    "TEAMCITY_VERSION",
)
"""How the names of variables begin that shape output."""
_DISTRIBUTIONS = (".dist-info", ".egg-info", ".egg-link", ".pth")
_GROUPS = ("tracekit.rules", "tracekit.readers", "tracekit.metrics", "tracekit.causes")
_NO_SOURCES = ("__pycache__",)


class Kind(StrEnum):
    """What a command can read."""

    RUN = "run"
    FILE = "file"
    SOURCES = "sources"
    """The Python files in a folder."""
    DAY = "day"


@dataclass(frozen=True)
class Input:
    """Something that a command reads."""

    kind: Kind
    path: str = ""
    names: tuple[str, ...] = ()
    """Of a run, how names of other tools' files end; of sources, the folders that are left out."""


@dataclass(frozen=True)
class State:
    """The state of an input, and when it changed last."""

    stamp: str
    touched_ns: int = 0


@dataclass(frozen=True)
class Answer:
    """What a command has printed, as texts by stream in order, and its exit code."""

    texts: Sequence[tuple[int, str]]
    exit_code: int


ANSWERED = ("check", "summary")
"""The commands whose answers are stored."""
_CODES = (0, 1)
"""The exit codes of a command that has printed its result; errors are found again."""
_UNSURE_NS = 2 * 10**9
"""A file that changed so shortly before may change again at the same time: FAT and NFS keep times in units of 2 s."""


class Question:
    """A command that was started, what it has read so far, and what it has printed."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        """Ask a command by its words; without words, or for other commands, nothing is stored."""
        self._words, self._began_ns = tuple(words), time.time_ns()
        self._context: State | None = None
        self._inputs: dict[Input, State] = {}
        self._texts: list[tuple[int, str]] = []
        is_help = not {"--help", "-h"}.isdisjoint(words)
        if words and words[0] in ANSWERED and not is_help and None not in (sys.stdout, sys.stderr):
            self._context = context_state(self._words)

    def answer(self) -> Answer | None:
        """Answer that is stored; None if there is none, or it was made of other input."""
        if self._context is None:
            return None
        from tracekit.ingest.disk_cache import DiskCache

        answer, stamps = DiskCache.of_user("answers").get(_key(self._context), _read) or (None, {})
        is_current = all((state := state_of(source)) and state.stamp == stamp for source, stamp in stamps.items())
        return answer if is_current else None

    def reads(self, source: Input) -> None:
        """Note what the command is about to read."""
        if self._context is None or source in self._inputs:
            return
        state = state_of(source)
        if state is None:
            self.withdraw()
        else:
            self._inputs[source] = state

    def withdraw(self) -> None:
        """Store no answer: the command reads or writes something else."""
        self._context = None
        self._texts.clear()

    def prints(self, stream: int, text: str) -> None:
        """Note what the command has printed."""
        if self._context is not None:
            self._texts.append((stream, text))

    def store(self, exit_code: object) -> None:
        """Store the answer, unless something that it was made of has changed since, or shortly before."""
        if self._context is None or not self._inputs or exit_code not in _CODES:
            return
        from tracekit.ingest.disk_cache import DiskCache

        for source in plugin_inputs():
            self.reads(source)
        settled_ns = self._began_ns - _UNSURE_NS
        is_settled = all(state.touched_ns < settled_ns for state in (self._context, *self._inputs.values()))
        states = {source: state_of(source) for source in self._inputs}
        if is_settled and states == self._inputs and context_state(self._words) == self._context:
            answer = Answer(self._texts, int(exit_code == 1))
            DiskCache.of_user("answers").put(_key(self._context), partial(_write, answer, self._inputs))


current: ContextVar[Question] = ContextVar("question", default=Question())  # noqa: B039  # it stores nothing
"""The question that this process answers; one that stores nothing where there is none."""


@contextmanager
def current_question(question: Question) -> Iterator[None]:
    """Make a question the current one. Its answer is stored when the command exits."""
    token = current.set(question)
    try:
        yield
    except SystemExit as leaving:
        question.store(leaving.code or 0)
        raise
    finally:
        current.reset(token)


def state_of(source: Input) -> State | None:
    """State of an input now; None if it cannot be known, or is being written."""
    from tracekit.ingest import file_states

    if source.kind is Kind.DAY:
        return State(str(datetime.datetime.now(datetime.UTC).date()))
    if source.kind is Kind.RUN:
        states = file_states.of_run(source.path, source.names)
        if states and any(file.path.endswith(conventions.PARTIAL_SUFFIX) for file in states.files):
            return None
    elif source.kind is Kind.SOURCES:
        states = file_states.of_tree(source.path, ".py", left_out=source.names)
    else:
        states = file_states.of_files([source.path])
    return None if states is None else _state(states, os.path.realpath(source.path))


def context_state(words: Sequence[str]) -> State | None:
    """State of all that shapes output, except what the command reads; None if it cannot be known."""
    from tracekit.ingest import file_states

    try:
        folder = Path.cwd()
    except OSError:  # it was removed
        return None
    places = (folder, *folder.parents)
    repositories = [str(place) for place in places if (place / _REPOSITORY).exists()]
    settings = [str(place / name) for place in places for name in _SETTINGS_FILES]
    package = file_states.of_tree(str(_PACKAGE), left_out=_NO_SOURCES)
    if package is None:
        return None
    files = file_states.FileStates((*package.files, *file_states.of_files([*settings, *_installed_packages()]).files))
    terminal = [(stream.isatty(), stream.encoding) for stream in (sys.stdout, sys.stderr)]
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES))
    around = (str(folder), repositories, terminal, shutil.get_terminal_size(), variables, sys.version, sys.path)
    return _state(files, words, *around)


def plugin_inputs() -> Iterator[Input]:
    """Yield the sources of the plug-ins that were imported."""
    from tracekit.ingest.disk_cache import plugin_source
    from tracekit.model import plugins as distributions

    for point in (point for group in _GROUPS for point in distributions.entry_points(group)):
        if point.module in sys.modules:
            plugin = point.load()
            source = plugin_source(plugin if isinstance(plugin, (type, ModuleType)) else type(plugin))
            yield Input(Kind.SOURCES if source.is_dir() else Kind.FILE, str(source), _NO_SOURCES)


def _installed_packages() -> Iterator[str]:
    """Yield the paths of what is installed: names with versions, and the entry points of each distribution."""
    for place in dict.fromkeys(sys.path):
        try:
            with os.scandir(place or os.curdir) as entries:
                names = sorted(entry.name for entry in entries if entry.name.endswith(_DISTRIBUTIONS))
        except OSError:  # the import path may name folders that do not exist, and archives
            yield place
            continue
        for name in names:
            yield f"{place}/{name}"
            yield f"{place}/{name}/entry_points.txt"


def _state(states: "FileStates", *contexts: object) -> State:
    return State(json.dumps([states.stamp, *contexts]), states.touched_ns)


def _key(context: State) -> str:
    return hashlib.sha256(context.stamp.encode()).hexdigest()


def _write(answer: Answer, inputs: Mapping[Input, State], file: BinaryIO) -> None:
    stamps = [(*dataclasses.astuple(source), state.stamp) for source, state in inputs.items()]
    content = json.dumps([answer.texts, answer.exit_code, stamps]).encode()
    file.write(b"%08x\n%s" % (zlib.crc32(content), content))


def _read(file: BinaryIO) -> tuple[Answer, Mapping[Input, str]]:
    checksum, _, content = file.read().partition(b"\n")
    if int(checksum, 16) != zlib.crc32(content):
        raise ValueError("the answer is damaged")
    texts, exit_code, inputs = json.loads(content)
    stamps = {Input(Kind(kind), path, tuple(names)): stamp for kind, path, names, stamp in inputs}
    return Answer([(stream, text) for stream, text in texts], exit_code), stamps
