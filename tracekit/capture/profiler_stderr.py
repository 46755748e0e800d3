"""What the profiler says on stderr of its own workings kept off the terminal, and nothing else."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

_STDERR = 2
_NOISE = (
    b"Memory block of unknown size was allocated before the profiling",
    b"gpuGetDeviceCount failed",  # a torch built for CUDA, profiled on a machine without a driver
    b"External init callback must run in same thread",  # a loop that does not run on the main thread
    b"Failed to write to log file",  # the recorder says so too, with the file's name
)


@contextlib.contextmanager
def without_profiler_noise() -> Iterator[None]:
    """Drop Kineto's ``USDT:`` lines and remarks on what the profiler cannot see here; pass all other lines on.

    These go to the file descriptor, so that is led through a pipe meanwhile. (Log levels would silence errors
    too, and are left to the user.)
    """
    sys.stderr.flush()
    try:
        terminal, (out, into) = os.dup(_STDERR), os.pipe()
    except OSError:  # no stderr, nothing to keep clean
        yield
        return
    os.dup2(into, _STDERR)
    os.close(into)
    # A child process born meanwhile holds the pipe as its stderr: the thread then serves it as long as it lives.
    reader = threading.Thread(target=_pass_on, args=(out, terminal), name="tracekit-stderr", daemon=True)
    reader.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, _STDERR)
        reader.join(timeout=1.0)


def _pass_on(out: int, terminal: int) -> None:
    with open(out, "rb") as lines, open(terminal, "wb", buffering=0) as target:
        for line in lines:
            if not _is_noise(line):
                target.write(line)


def _is_noise(line: bytes) -> bool:
    return line.startswith(b"USDT:") or any(remark in line for remark in _NOISE)
