"""Compact storage of a memory snapshot: frames and stacks once each, events by column."""

from array import array
from collections.abc import Sequence
from typing import Any

EVENT_KEY, FRAME_KEY = "action", "filename"


class Stack(int):
    """The number of a call stack."""


class Event(int):
    """The number of a row in `Rows`."""


class FrameTable:
    """Frames and stacks, each once. `stacks` has the frames of all stacks concatenated; stack i ends at `ends[i]`."""

    def __init__(self) -> None:
        self.frames: dict[tuple[str, str, int], int] = {}
        self.stacks = array("i")
        self.ends = array("q")
        self._numbers: dict[bytes, Stack] = {}

    def frame(self, fields: dict[str, Any]) -> int:
        """Return the number of a frame, by its fields."""
        key = (str(fields.get("name", "")), str(fields.get(FRAME_KEY, "")), _line(fields.get("line")))
        return self.frames.setdefault(key, len(self.frames))

    def stack(self, frames: "array[int]") -> Stack:
        """Return the number of a stack."""
        key = frames.tobytes()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = Stack(len(self.ends))
            self.stacks.extend(frames)
            self.ends.append(len(self.stacks))
        return number


class EventColumns:
    """Events by column; MISSING stands for an absent value."""

    MISSING = -(1 << 63)
    FIELDS = ("time_us", "addr", "size", "stream", EVENT_KEY, "frames")

    def __init__(self) -> None:
        self.numbers = tuple(array("q") for _ in self.FIELDS[:4])
        self.stack = array("i")
        self.action = array("h")
        self.actions: dict[str, int] = {}

    def add(self, values: Sequence[Any], stack: int) -> Event:
        """Append one event: its fields but the last, in order, and its stack (-1: none).

        Raises OverflowError or TypeError if a value is not an integer or too large.
        """
        *fields, action = values
        for column, value in zip(self.numbers, fields, strict=True):
            column.append(self.MISSING if value is None else value)
        number = self.actions.get(action)
        if number is None:
            if type(action) is not str:
                raise TypeError("an action that is not text")
            number = self.actions[action] = len(self.actions)
        self.action.append(number)
        self.stack.append(stack)
        return Event(len(self.stack) - 1)

    def add_many(self, columns: Sequence[Sequence[Any]], stacks: Sequence[int]) -> range:
        """Append events by column: the fields but the last, in order, and the stacks; return their numbers.

        Raises OverflowError or TypeError if a value is not an integer or too large.
        """
        first, actions = len(self.stack), columns[-1]
        for action in set(actions) - self.actions.keys():
            if type(action) is not str:
                raise TypeError("an action that is not text")
            self.actions[action] = len(self.actions)
        for stored, column in zip(self.numbers, columns, strict=False):
            stored.extend(column)
        self.action.extend(map(self.actions.__getitem__, actions))
        self.stack.extend(stacks)
        return range(first, first + len(stacks))


def _line(value: object) -> int:
    return value if isinstance(value, int) and abs(value) < 1 << 31 else 0
