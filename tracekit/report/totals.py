"""Tables of kernels or ops -> text for a terminal: as many columns as fit, numbers are never cut."""

from collections.abc import Mapping

import polars as pl
from rich.console import RenderableType

from tracekit.model import escaping, units
from tracekit.report import text_layout

_MIN_TEXT = 22
_HEADINGS = {
    "time_ratio": "share",
    "self_ratio": "share",
    "spread_ratio": "rank\nspread",
    "most_rank": "most\non",
    "self_ns": "by\nitself",
    "device_ns": "on\ndevice",
}
# The columns that are dropped on a narrow terminal, in this order.
_DROP_ORDER = ("most_rank", "spread_ratio", "p50_ns", "kind", "mean_ns", "p95_ns", "max_ns", "total_ns")


def as_text(rows: pl.DataFrame, *, top: int, width: int, color: bool = False) -> str:
    """Return the first `top` rows as a table, and below it the share of the others."""
    share = next(name for name in ("time_ratio", "self_ratio") if name in rows.columns)
    if rows.is_empty():
        return f"The traces contain no {'kernels' if share == 'time_ratio' else 'ops of these kinds'}.\n"
    head, gap = _fitted(rows.head(top), width), text_layout.gap(width)
    parts: list[RenderableType] = [text_layout.frame(head, _HEADINGS, gap=gap, longest=escaping.MAX_TEXT)]
    rest = rows.slice(top)
    if rest.height:
        part = units.share(float(rest[share].sum() or 0))
        parts.append(text_layout.dim(f"and {rest.height:,} more, {part} together: --top {rows.height}"))
    return text_layout.print_to_string(parts, width=width, color=color)


def _fitted(rows: pl.DataFrame, width: int) -> pl.DataFrame:
    shown = text_layout.without_empty_columns(rows)
    for name in _DROP_ORDER:
        if least_width(shown, text_layout.gap(width), _HEADINGS) <= max(width, text_layout.MIN_WIDTH):
            break
        shown = shown.drop(name, strict=False)
    return shown


def least_width(rows: pl.DataFrame, gap: int, headings: Mapping[str, str]) -> int:
    """Return the least width of the table: full numbers, text cut to _MIN_TEXT."""
    widths = []
    for name, dtype in rows.schema.items():
        longest = max((len(escaping.cell(name, value)) for value in rows[name]), default=0)
        heading = max(map(len, headings.get(name, escaping.heading(name)).split("\n")))
        widths.append(max(heading, longest if dtype.is_numeric() else min(longest, _MIN_TEXT)))
    return sum(widths) + gap * (len(widths) - 1)
