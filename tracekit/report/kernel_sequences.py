"""Sequences of kernels -> text for a terminal: a table of their measures, and below it the kernels of each."""

import itertools
import re
from collections.abc import Sequence

import polars as pl
from rich.console import RenderableType

from tracekit.model import escaping
from tracekit.report import text_layout

_HEADINGS = {"time_ratio": "share", "number": "#", "gap_ns": "gaps", "op_ns": "on\nhost", "per_step": "per\nstep"}
_DROP_ORDER = ("launches", "time_ratio", "op_ns", "per_step", "op")
_NAMESPACES = re.compile(r"\(anonymous namespace\)::|\b(?:\w+::)+|^void ")
_MAX_NAME = 60


def as_text(rows: pl.DataFrame, *, top: int, width: int, color: bool = False) -> str:
    """Return the first `top` sequences, columns as `analysis.compute.kernel_sequences` makes them."""
    if rows.is_empty():
        return "No sequence of kernels occurs twice.\n"
    sequences = rows.head(top).with_row_index("number", offset=1)
    measures = text_layout.fit_columns(sequences.drop("kernels"), _HEADINGS, _DROP_ORDER, width=width)
    parts: list[RenderableType] = [text_layout.frame(measures, _HEADINGS, gap=text_layout.gap(width)), ""]
    for number, kernels in sequences.select("number", "kernels").iter_rows():
        parts.append(text_layout.hanging(f"{number}", text_layout.line(" → ".join(_count_repeats(kernels)))))
    more = rows.height - sequences.height
    if more:
        parts.append(text_layout.dim(f"and {more:,} more: --top {rows.height}; whole names with --format json"))
    return text_layout.print_to_string(parts, width=width, color=color)


def _count_repeats(kernels: Sequence[str]) -> list[str]:
    """Return short names of the kernels; one that follows itself once, with its count."""
    runs = [(name, len(list(same))) for name, same in itertools.groupby(kernels)]
    names = [(escaping.inert(_NAMESPACES.sub("", name), _MAX_NAME), count) for name, count in runs]
    return [name + (f" ×{count}" if count > 1 else "") for name, count in names]
