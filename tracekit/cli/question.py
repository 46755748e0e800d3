"""Questions: a command on unchanged input prints what it printed before, without importing tables and rules.

A command states what it reads where it reads it (`current().reads`). One that reads or writes anything else withdraws
its answer. `tracekit.cli.answer_files` stores answers, and is imported only for a command that may have one.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

STDOUT, STDERR = 1, 2


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
            from tracekit.cli import answer_files

            self._context = answer_files.context(self._words)

    def answer(self) -> Answer | None:
        """Answer that is stored; None if there is none, or it was made of other input."""
        if self._context is None:
            return None
        from tracekit.cli import answer_files

        return answer_files.find(self._context)

    def reads(self, source: Input) -> None:
        """Note what the command is about to read."""
        if self._context is None or source in self._inputs:
            return
        from tracekit.cli import answer_files

        state = answer_files.state_of(source)
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
        from tracekit.cli import answer_files

        for source in answer_files.plugins():
            self.reads(source)
        settled_ns = self._began_ns - _UNSURE_NS
        is_settled = all(state.touched_ns < settled_ns for state in (self._context, *self._inputs.values()))
        states = {source: answer_files.state_of(source) for source in self._inputs}
        if is_settled and states == self._inputs and answer_files.context(self._words) == self._context:
            answer_files.store(self._context, Answer(self._texts, int(exit_code == 1)), self._inputs)


_current: ContextVar[Question] = ContextVar("question", default=Question())  # noqa: B039  # it stores nothing


def current() -> Question:
    """The question that this process answers; one that stores nothing where there is none."""
    return _current.get()


@contextmanager
def current_question(question: Question) -> Iterator[None]:
    """Make a question the current one. Its answer is stored when the command exits."""
    token = _current.set(question)
    try:
        yield
    except SystemExit as leaving:
        question.store(leaving.code or 0)
        raise
    finally:
        _current.reset(token)
