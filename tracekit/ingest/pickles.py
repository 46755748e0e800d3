"""Pickles of any origin -> plain data, by a child process that can run none of their code: see `pickle_child`."""

import contextlib
import signal
import subprocess
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from tracekit.conventions import python_child
from tracekit.ingest import pickle_child

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


def read(kind: str, source: ByteSource) -> tuple[bytes, memoryview]:
    """The JSON and the columns of a pickle of this kind, such as `pickle_child.SNAPSHOT`. Raises PickleError."""
    child = subprocess.Popen(  # noqa: S603 our own file
        python_child.script_command(_PROGRAM, kind),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=python_child.bare_environment(),
    )
    with child:
        try:
            # The child answers when it has read everything, or refuses it: then it reads no more.
            with contextlib.suppress(BrokenPipeError), cast("BinaryIO", child.stdin) as pipe:
                while block := source.read(_COPY_BYTES):
                    pipe.write(block)
            answer = cast("BinaryIO", child.stdout).read()
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise _failure(child.returncode, answer.decode("utf-8", "replace"))
    end = answer.index(b"\n") + 1
    return answer[:end], memoryview(answer)[end:]


def _failure(code: int, reason: str) -> PickleError:
    if code == pickle_child.WRONG_FORM:
        return WrongFormError(reason)
    if code == pickle_child.REFUSED:
        return PickleError(reason)
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return PickleError("takes far more time than its size: refused")
    return PickleError("is truncated or damaged")  # it crashed the interpreter
