"""What a report says, as a value: lines, tables and notes for people, and the same as values for programs.

A builder makes a document of results; the renderers in `render` write it and compute nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl


LEAST_TEXT, LONGEST_TEXT = 22, 60


class Emphasis(Enum):
    """How much words stand out, and whether they are good news."""

    STRONG = auto()
    FAINT = auto()
    GOOD = auto()
    BETTER = auto()
    WORSE = auto()
    WARNING = auto()
    DOUBTFUL = auto()
    NOTE = auto()


Words = str | tuple[str, Emphasis]


@dataclass(frozen=True)
class Line:
    """Words on a line, which wraps where it is too long; with a mark before it, it is an item of a list."""

    words: tuple[Words, ...]
    mark: str = ""
    indent: int = 0
    wraps: bool = True
    right: str = ""
    """Strong words at the right margin."""


@dataclass(frozen=True, eq=False)
class Table:
    """Rows whose columns carry their units in their names (`escaping.heading`).

    Columns without any value are left out, others where there is little room: those of `early_drop` before a text is
    cut, those of `drop_order` where texts of `least_text` characters do not fit; the first of each goes first.
    """

    rows: "pl.DataFrame"
    headings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    drop_order: tuple[str, ...] = ()
    early_drop: tuple[str, ...] = ()
    least_text: int = LEAST_TEXT
    longest_text: int = LONGEST_TEXT
    indent: int = 0


@dataclass(frozen=True)
class Cells:
    """A table of texts: its numbers have different units, or are words. Columns are numbered from 0."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()
    """The columns of numbers, which are never cut."""
    emphases: tuple[Emphasis | None, ...] = ()
    """How a cell of each row stands out."""
    drop_order: tuple[int, ...] = ()
    early_drop: tuple[int, ...] = ()
    dropped_note: str = ""
    """A sentence on the columns that are left out for lack of room, with {} for their names."""
    cuts_first: bool = True
    """Whether the texts of the first column may be cut."""
    least_text: int = LEAST_TEXT
    longest_text: int = LONGEST_TEXT
    indent: int = 0
    emphasized: int = -1
    """The column of the cells that stand out, such as the verdict; the last one unless stated."""


@dataclass(frozen=True)
class Definitions:
    """Terms with what they mean: rows of lines, of which only the last one wraps."""

    rows: tuple[tuple[Line, ...], ...]
    indent: int = 0


@dataclass(frozen=True)
class Trend:
    """A quantity over runs: its first and latest value, the interval of that, all values, and the verdict."""

    name: str
    first: str
    latest: str
    interval: str
    values: tuple[float, ...]
    verdict: str
    emphasis: Emphasis


@dataclass(frozen=True)
class Trends:
    """Quantities over runs, each drawn as a line of bars that takes the room there is."""

    rows: tuple[Trend, ...]


Part = Line | Table | Cells | Definitions | Trends
Section = Sequence[Part]


@dataclass(frozen=True, eq=False)
class Document:
    """A report: sections, what to read first in the first one, then notes; `values` is the same for programs."""

    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()
    values: object = None


def line(*words: Words, mark: str = "", indent: int = 0) -> Line:
    """Words on a line of their own."""
    return Line(words, mark, indent)


def heading(text: str, after: str = "") -> Line:
    """A strong line, and faint words after it."""
    return Line(((text, Emphasis.STRONG), (after, Emphasis.FAINT)))


def faint(text: str, indent: int = 0) -> Line:
    """A line that is less important than others."""
    return Line(((text, Emphasis.FAINT),), indent=indent)


def items(texts: Sequence[str], mark: str = "·") -> tuple[Line, ...]:
    """A list."""
    return tuple(Line((text,), mark=mark) for text in texts)
