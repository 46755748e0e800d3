"""A tracekit command that is killed before its n-th operation on a file, or after an amount of CPU time. Not a test.

    python -m tests.fuzz.killed FOLDER count|operation|cpu NUMBER COMMAND…

Operations are those of Python on paths in FOLDER, by its audit events. `count` kills nothing; the last line of stderr
is the number of operations, and the CPU time in µs since the first one.
"""

import os
import signal
import sys
import time

from tracekit import cli

_OPERATIONS = {
    "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.utime",
    "os.chmod", "shutil.rmtree", "shutil.move", "os.listdir", "os.scandir",
}  # fmt: skip


class Killer:
    """Counts operations on files of a folder; ends the process by SIGKILL at its moment."""

    def __init__(self, folder: str, mode: str, number: int) -> None:
        self._folder = folder
        self._mode = mode
        self._number = number
        self.operations = 0
        self.since_s: float | None = None

    def saw(self, event: str, arguments: tuple[object, ...]) -> None:
        """Count one audit event."""
        if event not in _OPERATIONS or not any(self._is_inside(each) for each in arguments):
            return
        if self.since_s is None:
            self.since_s = time.process_time()
            if self._mode == "cpu":
                # Threads that compute in C are ended, too: the signal has no handler.
                signal.setitimer(signal.ITIMER_PROF, self._number / 1e6)
        self.operations += 1
        if self._mode == "operation" and self.operations > self._number:
            os.kill(os.getpid(), signal.SIGKILL)

    def cpu_us(self) -> int:
        """Return the CPU time since the first operation, in µs."""
        return 0 if self.since_s is None else round((time.process_time() - self.since_s) * 1e6)

    def _is_inside(self, argument: object) -> bool:
        if isinstance(argument, bytes):
            argument = os.fsdecode(argument)
        return isinstance(argument, str) and argument.startswith(self._folder)


def main() -> None:
    """Run the command."""
    folder, mode, number, *command = sys.argv[1:]
    killer = Killer(folder, mode, int(number))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    sys.argv = ["tracekit", *command]
    sys.addaudithook(killer.saw)
    try:
        cli.main()
    finally:
        if mode == "count":
            print(f"\n{killer.operations} {killer.cpu_us()}", file=sys.stderr)


if __name__ == "__main__":
    main()
