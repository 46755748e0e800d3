"""Filter the profiler's own noise out of stderr, and nothing else."""

import contextlib
import os
import threading
from collections.abc import Iterator

from tracekit.capture import notices

_STDERR = 2
_NOISE = (
    b"Memory block of unknown size was allocated before the profiling",
    b"gpuGetDeviceCount failed",  # a torch built for CUDA, profiled on a machine without a driver
    b"External init callback must run in same thread",  # a loop that does not run on the main thread
    b"Failed to write to log file",  # the recorder reports it, with the file's name
)


@contextlib.contextmanager
def without_profiler_noise() -> Iterator[None]:
    """Drop Kineto's ``USDT:`` lines and its remarks on what it cannot profile here; pass all other lines on.

    They go to the file descriptor, which is therefore replaced by a pipe. (Log levels would silence errors too, and
    are the user's to set.)
    """
    notices.flush()
    try:
        terminal, (out, into) = os.dup(_STDERR), os.pipe()
    except OSError:  # no stderr, nothing to filter
        yield
        return
    os.dup2(into, _STDERR)
    os.close(into)
    # A child process started meanwhile inherits the pipe as its stderr: the thread serves it as long as it lives.
    reader = threading.Thread(target=_pass_on, args=(out, terminal), name="tracekit-stderr", daemon=True)
    reader.start()
    try:
        yield
    finally:
        notices.flush()
        os.dup2(terminal, _STDERR)
        reader.join(timeout=1.0)


def _pass_on(out: int, terminal: int) -> None:
    with open(out, "rb") as lines, open(terminal, "wb", buffering=0) as target:
        for line in lines:
            if not _is_noise(line):
                target.write(line)


def _is_noise(line: bytes) -> bool:
    return line.startswith(b"USDT:") or any(remark in line for remark in _NOISE)
