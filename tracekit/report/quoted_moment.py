"""The moment that a finding quotes: its row of evidence, the ranks that are part of it, and a small picture of both.

Where a rank waits for another, the late rank comes first and those that wait for it below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from tracekit.model import escaping, units
from tracekit.report import phrases
from tracekit.rules.rule import Finding
from tracekit.sync import alignment

MAX_WAITING = 7
"""Ranks that wait for the late one, of which a moment has a row each."""
MAX_SLICES = 200
"""The longest slices of evidence that a picture has."""
CONTEXT_RATIO, CONTEXT_NS = 1.5, 2_000
"""What is shown on both sides of a moment: this share of its duration, and at least so many ns."""
_MOMENT = ("rank", "start_ns", "dur_ns")


@dataclass(frozen=True)
class Slice:
    """A part of a row of a picture: its place and width as shares of the picture's width.

    `mark` is "quoted" for the moment that the finding quotes, "late" for the same time on the late rank.
    """

    left: float
    width: float
    mark: str = ""


@dataclass(frozen=True)
class Row:
    """One rank of a picture: its steps behind its slices of evidence."""

    rank: int
    steps: Sequence[Slice]
    slices: Sequence[Slice]


def quoted_row(finding: Finding) -> Mapping[str, Any] | None:
    """Row of evidence whose moment the sentence of a finding quotes (`phrases.place`); None where none has a moment."""
    return finding.evidence.drop_nulls(_MOMENT).row(0, named=True) if phrases.has_moment(finding) else None


def leading_ranks(rows: pl.DataFrame, row: Mapping[str, Any]) -> tuple[int, ...]:
    """Ranks of the moment of a row of evidence: the late rank, then those that wait longest for it in the same step.

    Only the row's own rank where the row names no late rank.
    """
    column = next((name for name in phrases.LATE_RANK_COLUMNS if row.get(name) is not None), None)
    if column is None:
        return (int(row["rank"]),)
    late = int(row[column])
    same_step = [pl.col(name).eq_missing(row[name]) for name in ("window", "step") if name in rows.columns]
    waits = rows.drop_nulls([column, "rank", "dur_ns"]).filter(pl.col(column) == late, pl.col("rank") != late)
    waits = waits.filter(*same_step)
    longest = waits.group_by("rank").agg(pl.col("dur_ns").max()).sort("dur_ns", "rank", descending=[True, False])
    return tuple(dict.fromkeys([late, int(row["rank"]), *longest["rank"].head(MAX_WAITING).to_list()]))


def context_ns(dur_ns: int) -> int:
    """Time that is shown before and after a moment of this duration."""
    return max(int(dur_ns * CONTEXT_RATIO), CONTEXT_NS)


def picture(finding: Finding, steps: pl.DataFrame, clock: pl.DataFrame) -> str:
    """Small timeline of the moment that a finding quotes, as HTML: '' where its evidence has no moment.

    `steps` is `breakdown.by_step`, `clock` is `breakdown.run_clock`: both are measured by every check.
    """
    row = quoted_row(finding)
    if row is None:
        return ""
    ranks, window = leading_ranks(finding.evidence, row), row.get("window") or 0
    slices = _on_run_clock(finding.evidence.drop_nulls(_MOMENT), ranks, window, clock)
    quoted = slices.filter(pl.col("evidence_row") == 0)
    if quoted.is_empty():
        return ""
    begin_ns, dur_ns = quoted.select("start_ns", "dur_ns").row(0)
    left_ns, width_ns = begin_ns - context_ns(dur_ns), dur_ns + 2 * context_ns(dur_ns)
    step_spans = _on_run_clock(steps.drop_nulls("step").rename({"duration_ns": "dur_ns"}), ranks, window, clock)
    moment = Slice((begin_ns - left_ns) / width_ns, dur_ns / width_ns)
    marks = {ranks[0]: replace(moment, mark="late"), int(row["rank"]): replace(moment, mark="quoted")}
    others = slices.filter(pl.col("evidence_row") > 0)
    rows = []
    for rank in ranks:
        parts = _slices(others.filter(rank=rank), left_ns, width_ns)
        parts += [marks[rank]] if rank in marks else []
        rows.append(Row(rank, _slices(step_spans.filter(rank=rank), left_ns, width_ns), parts))
    name = f"{phrases.place(finding)}: {units.duration(dur_ns)} of {units.duration(width_ns)} shown"
    return escaping.fragment("moment", name, rows)


def _on_run_clock(table: pl.DataFrame, ranks: Sequence[int], window: int, clock: pl.DataFrame) -> pl.DataFrame:
    """Rows of some ranks in a window, with their numbers in the table; start_ns on the clock of the run."""
    table = table.with_row_index("evidence_row")
    if "window" not in table.columns:
        table = table.with_columns(window=pl.lit(0, pl.Int64))
    rows = table.filter(pl.col("rank").is_in(ranks), pl.col("window").fill_null(0) == window)
    rows = rows.with_columns(pl.col("window").fill_null(0)).select("evidence_row", "window", *_MOMENT)
    return alignment.on_run_clock(rows, clock, ("start_ns",)).drop_nulls("start_ns")


def _slices(rows: pl.DataFrame, left_ns: int, width_ns: int) -> list[Slice]:
    """The longest parts of rows within a picture."""
    begin = ((pl.col("start_ns") - left_ns) / width_ns).clip(0, 1)
    end = ((pl.col("start_ns") + pl.col("dur_ns") - left_ns) / width_ns).clip(0, 1)
    parts = rows.select(begin.alias("left"), (end - begin).alias("width")).filter(pl.col("width") > 0)
    return [Slice(*part) for part in parts.sort("width", descending=True).head(MAX_SLICES).iter_rows()]
