"""What a training says of itself while it runs, without stopping the device to say it."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor


class Reading:
    """A number on its way from the device. `value` waits for it only if it is not there yet."""

    def __init__(self, number: Tensor) -> None:
        self._host = number.detach().to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if number.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def value(self) -> float:
        """Return the number."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._host)


class Progress:
    """A line every few steps on rank 0, and nothing on other ranks. It speaks of a step once the next one is done."""

    def __init__(self, *, rank: int, steps: int, every: int) -> None:
        self._speaks = rank == 0
        self._steps = steps
        self._every = every
        self._due: Callable[[], str] | None = None

    def step(self, step: int, loss: Reading, *, tokens: int, elapsed_ns: int) -> None:
        """Note the end of a step that took `elapsed_ns` for the `tokens` of all ranks."""
        self.flush()
        if step % self._every == 0 or step == self._steps - 1:
            self._due = lambda: (
                f"step {step:4d} of {self._steps}   loss {loss.value():.4f}   {elapsed_ns / 1e6:6.0f} ms   "
                f"{tokens * 1e9 / elapsed_ns:,.0f} tokens/s"
            )

    def flush(self) -> None:
        """Say what is due."""
        due, self._due = self._due, None
        if due is not None:
            self._print(due())

    def say(self, line: str) -> None:
        """Print a line of output, after what is due."""
        self.flush()
        self._print(line)

    def _print(self, line: str) -> None:
        if self._speaks:
            sys.stdout.write(f"  {line}\n")
            sys.stdout.flush()
