"""Tables of kernels or ops -> text for a terminal: as many columns as fit, numbers are never cut."""

import polars as pl
from rich.console import RenderableType

from tracekit.model import escaping, units
from tracekit.report import text_layout

_HEADINGS = {
    "time_ratio": "share",
    "self_ratio": "share",
    "spread_ratio": "rank\nspread",
    "delay_p50_ns": "delay\nmedian",
    "delay_p95_ns": "delay\np95",
    "most_rank": "most\non",
    "self_ns": "self\ntime",
    "device_ns": "on\ndevice",
    "tflops_per_s": "TFLOP/s",
    "tbytes_per_s": "TB/s",
    "roofline_ratio": "of\nroofline",
}
# The columns that are dropped on a narrow terminal, in this order.
_DROP_ORDER = (
    "delay_p95_ns", "delay_p50_ns", "most_rank", "spread_ratio",
    "p50_ns", "kind", "bytes", "flops", "mean_ns", "p95_ns", "max_ns", "total_ns",
)  # fmt: skip


def as_text(rows: pl.DataFrame, *, top: int, width: int, color: bool = False) -> str:
    """Return the first `top` rows as a table, and below it the share of the others."""
    share = next(name for name in ("time_ratio", "self_ratio") if name in rows.columns)
    if rows.is_empty():
        return f"The traces contain no {'kernels' if share == 'time_ratio' else 'ops of these kinds'}.\n"
    head, gap = text_layout.fit_columns(rows.head(top), _HEADINGS, _DROP_ORDER, width=width), text_layout.gap(width)
    parts: list[RenderableType] = [text_layout.frame(head, _HEADINGS, gap=gap, longest=escaping.MAX_TEXT)]
    rest = rows.slice(top)
    if rest.height:
        part = units.share(float(rest[share].sum() or 0))
        parts.append(text_layout.dim(f"and {rest.height:,} more, {part} together: --top {rows.height}"))
    return text_layout.print_to_string(parts, width=width, color=color)
