"""Trends -> a table for a terminal, each quantity as a line of bars."""

import math
from collections.abc import Sequence

from rich.table import Table

from tracekit.report.document import Trend, Trends
from tracekit.report.render import layout

_BARS = "▁▂▃▄▅▆▇█"
_MOST_BARS, _LEAST_BARS = 40, 10
_WIDE, _OTHER_COLUMNS_WIDE, _OTHER_COLUMNS = 110, 90, 66  # characters, and those of the columns without bars


def table(trends: Trends, styles: Sequence[str], width: int) -> Table:
    """Rows of trends with as many bars as fit; `styles` are those of the verdicts. Narrow ones have no interval."""
    is_wide = width >= _WIDE
    bar_count = max(_LEAST_BARS, min(_MOST_BARS, width - (_OTHER_COLUMNS_WIDE if is_wide else _OTHER_COLUMNS)))
    rows = [_row(trend, bar_count, is_wide=is_wide) for trend in trends.rows]
    header = ["", "first", "latest", *(["95% interval"] if is_wide else []), "runs", ""]
    right = [False, True, True, *([True] if is_wide else []), False, False]
    drawn = layout.table(header, rows, right=right, last_styles=styles)
    for column in (0, -2):
        drawn.columns[column].no_wrap = True
        drawn.columns[column].min_width = max(len(row[column]) for row in rows)
    return drawn


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


def _row(trend: Trend, bar_count: int, *, is_wide: bool) -> list[str]:
    interval = [trend.interval] if is_wide else []
    return [trend.name, trend.first, trend.latest, *interval, sparkline(trend.values[-bar_count:]), trend.verdict]
