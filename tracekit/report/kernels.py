"""Tables of kernels or ops, and of sequences of kernels, as documents."""

import itertools
import re
from collections.abc import Sequence

import polars as pl

from tracekit.model import escaping, units
from tracekit.report.document import Document, Line, Table, faint, line

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
_SEQUENCE_HEADINGS = {
    "time_ratio": "share", "number": "#", "gap_ns": "gaps", "op_ns": "on\nhost", "per_step": "per\nstep",
}  # fmt: skip
_SEQUENCE_DROP_ORDER = ("launches", "time_ratio", "op_ns", "per_step", "op")
_NAMESPACES = re.compile(r"\(anonymous namespace\)::|\b(?:\w+::)+|^void ")
_MAX_NAME = 60


def document(rows: pl.DataFrame, top: int) -> Document:
    """The first `top` rows as a table, and below it the share of the others."""
    share = next(name for name in ("time_ratio", "self_ratio") if name in rows.columns)
    if rows.is_empty():
        what = "kernels" if share == "time_ratio" else "ops of these kinds"
        return Document(([line(f"The traces contain no {what}.")],))
    table = Table(rows.head(top), _HEADINGS, _DROP_ORDER, longest_text=escaping.MAX_TEXT)
    rest = rows.slice(top)
    part = units.share(float(rest[share].sum() or 0))
    more = [faint(f"and {rest.height:,} more, {part} together: --top {rows.height}")] if rest.height else []
    return Document(([table, *more],))


def sequences(rows: pl.DataFrame, top: int) -> Document:
    """The first `top` sequences and the kernels of each, columns as `analysis.compute.kernel_sequences` makes them."""
    if rows.is_empty():
        return Document(([line("No sequence of kernels occurs twice.")],))
    first = rows.head(top).with_row_index("number", offset=1)
    table = Table(first.drop("kernels"), _SEQUENCE_HEADINGS, _SEQUENCE_DROP_ORDER)
    lines = [
        Line((" → ".join(_count_repeats(kernels)),), mark=str(number))
        for number, kernels in first.select("number", "kernels").iter_rows()
    ]
    more = rows.height - first.height
    text = f"and {more:,} more: --top {rows.height}; whole names with --format json"
    return Document(([table], [*lines, *([faint(text)] if more else [])]))


def _count_repeats(kernels: Sequence[str]) -> list[str]:
    """Short names of the kernels; one that follows itself once, with its count."""
    runs = [(name, len(list(same))) for name, same in itertools.groupby(kernels)]
    names = [(escaping.inert(_NAMESPACES.sub("", name), _MAX_NAME), count) for name, count in runs]
    return [name + (f" ×{count}" if count > 1 else "") for name, count in names]
