"""Pickles of any origin -> plain data, by a child process that can run none of their code: see `pickle_child`."""

import contextlib
import json
import signal
import subprocess
from pathlib import Path
from typing import BinaryIO, Protocol, Self, cast

from tracekit.conventions import python_child
from tracekit.ingest import budget, pickle_child

_PROGRAM = Path(pickle_child.__file__)
_COPY_BYTES = 1 << 18


class ByteSource(Protocol):
    """What can be read in parts: a file, a member of an archive, a decompressed stream."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end."""


class PickleError(ValueError):
    """A pickle that is truncated, damaged or not plain data. The message is a predicate, such as "is truncated"."""


class WrongFormError(PickleError):
    """A pickle of plain data that is not what it should be. The message is the reason."""


class OverBudgetError(PickleError):
    """A pickle that needs more memory or time than its budget. The message also states how to allow more."""


class ManyPickles:
    """A child process that reads many small pickles, each as if it had a process of its own. A context manager."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.__exit__(None, None, None)
            self._child = None

    def read(self, kind: str, data: bytes) -> tuple[bytes, memoryview]:
        """The JSON and the columns of a pickle of this kind. Raises PickleError."""
        if self._child is None:
            self._child = _start(pickle_child.MANY)
        requests, answers = cast("BinaryIO", self._child.stdin), cast("BinaryIO", self._child.stdout)
        try:
            requests.write(f"{kind} {len(data)}\n".encode() + data)
            requests.flush()
            code, size = map(int, answers.readline().split())
        except (BrokenPipeError, ValueError):  # something ended the child: the next pickle gets another
            self._child.kill()
            code, size, self._child = -signal.SIGKILL, 0, None
        return _content(code, answers.read(size))


def read(kind: str, source: ByteSource) -> tuple[bytes, memoryview]:
    """The JSON and the columns of a pickle of this kind, such as `pickle_child.SNAPSHOT`. Raises PickleError."""
    with _start(kind) as child:
        try:
            # The child answers when it has read everything, or refuses it: then it reads no more.
            with contextlib.suppress(BrokenPipeError), cast("BinaryIO", child.stdin) as pipe:
                while block := source.read(_COPY_BYTES):
                    pipe.write(block)
            answer = cast("BinaryIO", child.stdout).read()
        except BaseException:
            child.kill()
            raise
    return _content(child.returncode, answer)


def _start(kind: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 our own file
        python_child.script_command(_PROGRAM, kind, json.dumps(budget.pickle_limits())),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=python_child.bare_environment(),
    )


def _content(code: int, answer: bytes) -> tuple[bytes, memoryview]:
    """JSON and columns of the answer of a child that ended with this exit code. Raises PickleError."""
    if code:
        raise _failure(code, answer.decode("utf-8", "replace"))
    end = answer.index(b"\n") + 1
    return answer[:end], memoryview(answer)[end:]


def _failure(code: int, reason: str) -> PickleError:
    if code == pickle_child.WRONG_FORM:
        return WrongFormError(reason)
    if code == pickle_child.REFUSED:
        return PickleError(reason)
    if code == pickle_child.OVER_BUDGET:
        return OverBudgetError(f"{reason}; {budget.remedy()}")
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        seconds = f"{budget.pickle_limits().seconds:g} s and more for its size"
        return OverBudgetError(f"takes more than {seconds} to read; {budget.remedy()}")
    return PickleError("is truncated or damaged")  # it crashed the interpreter
