"""The order in which units run: recorded in each forward pass, it predicts the next forward and the backward.

Predictions decide only what is prefetched. They depend on program order alone, never on finished collectives, so
every rank predicts the same; a wrong one costs an all-gather, not correctness.
"""

from typing import Generic, TypeVar

U = TypeVar("U")


class ExecutionOrder(Generic[U]):
    """The units of the last and of this forward pass, and the position of the backward pass in it."""

    def __init__(self) -> None:
        self._predicted: list[U] = []
        self._position = 0  # in the prediction: what should run next
        self._ran: list[U] = []
        self._cursor = 0  # in what ran: the unit whose backward is running; past the end before the first

    def begin_forward(self) -> None:
        """Begin a forward pass; the one before becomes the prediction."""
        self._predicted = self._ran or self._predicted
        self._position = 0
        self._ran = []
        self._cursor = 0

    def record_forward(self, unit: U) -> None:
        """Note that the forward of `unit` begins. Predicted units that did not run before it are passed over."""
        self._ran.append(unit)
        self._cursor = len(self._ran)
        if unit in self._predicted[self._position :]:
            self._position = self._predicted.index(unit, self._position) + 1

    def next_forward(self, count: int) -> list[U]:
        """Return up to `count` units that should run next in forward, the nearest first."""
        return self._predicted[self._position : self._position + count]

    def reset_backward(self) -> None:
        """Note that a backward pass is over: the next one starts from the end again."""
        self._cursor = len(self._ran)

    def record_backward(self, unit: U) -> bool:
        """Note that the backward of `unit` begins. Return False for a repeated call."""
        if self._cursor > 0 and self._ran[self._cursor - 1] == unit:
            self._cursor -= 1
            return True
        if self._cursor < len(self._ran) and self._ran[self._cursor] == unit:
            return False
        for index in range(self._cursor - 1, -1, -1):
            if self._ran[index] == unit:
                self._cursor = index
                return True
        return False

    def is_next_backward(self, unit: U) -> bool:
        """Return whether the backward of `unit` should be the next to begin."""
        return self._cursor > 0 and self._ran[self._cursor - 1] == unit

    def next_backward(self, count: int) -> list[U]:
        """Return up to `count` units whose backward should come next, the nearest first."""
        return self._ran[max(0, self._cursor - count) : self._cursor][::-1]
