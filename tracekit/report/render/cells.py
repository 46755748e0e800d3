"""Tables and trends as cells of text, which every renderer writes."""

import math
from collections.abc import Sequence

from tracekit.model import escaping
from tracekit.report.document import Cells, Table, Trends

_BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 40


def of_part(part: Cells | Table | Trends) -> Cells:
    """A table of any kind as cells."""
    if isinstance(part, Table):
        return of_table(part)
    return of_trends(part) if isinstance(part, Trends) else part


def of_table(table: Table) -> Cells:
    """The numbers of a table in readable units by the endings of the column names, without empty columns."""
    rows = table.rows.select(name for name in table.rows.columns if table.rows[name].null_count() < table.rows.height)
    numbers = {name: number for number, name in enumerate(rows.columns)}
    return Cells(
        tuple(table.headings.get(name, escaping.heading(name)) for name in rows.columns),
        tuple(tuple(map(escaping.cell, rows.columns, row)) for row in rows.iter_rows()),
        tuple(numbers[name] for name, dtype in rows.schema.items() if dtype.is_numeric()),
        drop_order=tuple(numbers[name] for name in table.drop_order if name in numbers),
        early_drop=tuple(numbers[name] for name in table.early_drop if name in numbers),
        least_text=table.least_text,
        longest_text=table.longest_text,
        indent=table.indent,
    )


def of_trends(trends: Trends, *, has_interval: bool = True, bars: int = MOST_BARS) -> Cells:
    """One row per trend; its latest values, as many as there are bars, are a line."""
    interval = {"95% interval": [trend.interval for trend in trends.rows]} if has_interval else {}
    columns = {
        "": [trend.name for trend in trends.rows],
        "first": [trend.first for trend in trends.rows],
        "latest": [trend.latest for trend in trends.rows],
        **interval,
        "runs": [sparkline(trend.values[-bars:]) for trend in trends.rows],
        "verdict": [trend.verdict for trend in trends.rows],
    }
    return Cells(
        (*list(columns)[:-1], ""),
        tuple(zip(*columns.values(), strict=True)),
        tuple(range(1, 3 + len(interval))),
        tuple(trend.emphasis for trend in trends.rows),
    )


def sparkline(values: Sequence[float]) -> str:
    """Numbers as a line of bars from the smallest to the largest; a space where there is none.

    >>> sparkline([1.0, 2.0, float("nan"), 8.0])
    '▁▂ █'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    # A range of less than one percent is drawn flat, so that noise is not enlarged.
    span = max(high - low, abs(high) * 0.01) or 1.0
    levels = [None if not math.isfinite(value) else round((value - low) / span * (len(_BARS) - 1)) for value in values]
    return "".join(" " if level is None else _BARS[level] for level in levels)
