"""Progress lines of a training, printed without synchronizing the device."""

import sys
from collections.abc import Callable

from instrumented_trainers.throughput import Throughput
from tracekit.capture.metrics import Pending, PendingScalar


class Progress:
    """A line every few steps on rank 0, and nothing on other ranks. A step's line is printed after the next step."""

    def __init__(self, throughput: Throughput, *, rank: int, steps: int, log_every: int) -> None:
        self._throughput = throughput
        self._prints = rank == 0
        self._steps = steps
        self._every = log_every
        self._due: Callable[[], str] | None = None

    def step(self, step: int, loss: PendingScalar, *, elapsed: Pending) -> None:
        """Note the end of a step that took `elapsed` ns."""
        self.flush()
        if step % self._every == 0 or step == self._steps - 1:
            self._due = lambda: (
                f"step {step:4d} of {self._steps}   loss {loss.value():.4f}   {elapsed.value() / 1e6:6.0f} ms   "
                f"{self._throughput.describe(elapsed.value())}"
            )

    def flush(self) -> None:
        """Print the pending line."""
        due, self._due = self._due, None
        if due is not None:
            self._print(due())

    def print(self, line: str) -> None:
        """Print a line, after the pending one."""
        self.flush()
        self._print(line)

    def _print(self, line: str) -> None:
        if self._prints:
            sys.stdout.write(f"  {line}\n")
            sys.stdout.flush()
