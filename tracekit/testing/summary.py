"""The table at the end: what each recorded test measured."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracekit.model import escaping
from tracekit.regression.metrics import metric_of

if TYPE_CHECKING:
    import pytest

    from tracekit.testing.verdict import SummaryRow

_COLUMNS = ("step_time_ns", "exposed_communication_ratio", "peak_allocated_bytes", "allocations")
_HEADER = ("test", "step", "exposed", "peak", "allocations", "budgets", "costliest finding")
_LEAST = 20
_GAP = "  "


def write(rows: "Sequence[SummaryRow]", terminal: "pytest.TerminalReporter") -> None:
    """Write a line per test: where it stands, what a step took, its costliest finding."""
    terminal.section("recorded trainings", sep="=", bold=True)
    table = lines(rows, terminal._tw.fullwidth)
    for line, failed in zip(table, [False, *(row["failed"] for row in rows)], strict=True):
        terminal.write_line(line, red=failed)


def lines(rows: "Sequence[SummaryRow]", width: int) -> list[str]:
    """Return the table as lines, the header first, at most `width` wide where that is 80 or more.

    Where it is too wide, tests lose their beginning and findings are left out.
    """
    cells = [_HEADER, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = width - 1 - len(_GAP) * (len(widths) - 1)
    if sum(widths[1:]) + min(widths[0], 2 * _LEAST) > room:
        cells, widths, room = [row[:-1] for row in cells], widths[:-1], room + len(_GAP)
    widths[-1] = min(widths[-1], max(_LEAST, room - sum(widths[1:-1]) - min(widths[0], _LEAST)))
    widths[0] = max(_LEAST, min(widths[0], room - sum(widths[1:])))
    return [_line(row, widths) for row in cells]


def _cells(row: "SummaryRow") -> tuple[str, ...]:
    numbers = [_number(column, row[column]) for column in _COLUMNS]  # type: ignore[literal-required]  # its own
    cells = (row["test"].rpartition("/")[2], *numbers, row["outcome"], row["finding"])
    return tuple(map(escaping.inert, cells))


def _number(column: str, value: float | None) -> str:
    return f"{value:,.0f}" if column == "allocations" and value is not None else metric_of(column).text(value)


def _line(cells: "Sequence[str]", widths: "Sequence[int]") -> str:
    padded = [_ending(cells[0], widths[0]).ljust(widths[0])]
    padded += [cell.rjust(width) for cell, width in zip(cells[1:5], widths[1:5], strict=True)]
    padded += [escaping.inert(cell, width).ljust(width) for cell, width in zip(cells[5:], widths[5:], strict=True)]
    return _GAP.join(padded).rstrip()


def _ending(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[1 - width :]
