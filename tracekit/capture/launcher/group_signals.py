"""Distinguish a signal to the whole process group from a signal to one process: siginfo does not say which it is."""

import contextlib
import ctypes
import os
import signal

from tracekit.conventions import regular_files

_PR_SET_PDEATHSIG = 1


class GroupSignals:
    """A process that does nothing: in the same process group, it gets every signal to the group, and no other.

    Signals stay pending there, as it blocks them. The kernel signals the newest member of a group first, so a signal to
    the group is pending there before this process, which is older, gets it.
    """

    def __init__(self) -> None:
        """Start the process; the caller blocks the signals in question, which it inherits."""
        self._process_id = self._start()

    def take(self, number: int) -> bool:
        """Whether a signal that this process got was sent to its group."""
        if not _pending_signals(self._process_id) >> (number - 1) & 1:
            return False
        earlier, self._process_id = self._process_id, self._start()  # a pending signal cannot be seen to arrive again
        _end(earlier)
        return True

    def close(self) -> None:
        """End the process."""
        _end(self._process_id)

    def _start(self) -> int:
        process_id = os.fork()
        if process_id == 0:
            end_with_parent()
            os.closerange(0, os.sysconf("SC_OPEN_MAX"))  # a reader of our output waits for all who may write there
            while True:
                signal.pause()
        return process_id


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _pending_signals(process_id: int) -> int:
    """Bits of the signals that a process has got and not handled; 0 where the system does not show them."""
    try:
        status = regular_files.read_text(f"/proc/{process_id}/status")
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("ShdPnd:")), 0)


def _end(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
