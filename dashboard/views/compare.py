"""Compare: several runs side by side."""

from collections.abc import Sequence

import polars as pl
import streamlit as st

from dashboard import opened, parts
from dashboard.catalog import Entry
from tracekit import charts, markup
from tracekit.analysis import samples
from tracekit.errors import RuleError, TracekitError


def page(chosen: Sequence[Entry]) -> None:
    """Show the mean step of each chosen run, and the medians of what runs are compared by."""
    st.html('<div class="tk-title"><b>Compare</b></div>')
    if len(chosen) < 2:
        st.info("Pick one or more runs under 'Compare with' in the sidebar.")
        return
    usable = [entry for entry in chosen if _opens(entry)]
    steps = {entry.name: opened.by_step(entry) for entry in usable}
    drawn = {name: table for name, table in steps.items() if table.height}
    st.subheader("The mean step")
    if drawn:
        parts.chart(charts.comparison(drawn), key="comparison")
    else:
        st.info("None of these runs has a step to break down.")
    st.subheader("Medians")
    st.caption("Over all ranks and steps. A difference within the noise means nothing: `tracekit compare` judges that.")
    header, rows = _medians({entry.name: opened.measured(entry) for entry in usable})
    st.html(markup.html_table(header, rows, right=[False, *(True for _ in header[1:])]))


def _opens(entry: Entry) -> bool:
    if entry.problem:
        parts.problem(entry.problem)
        return False
    try:
        with st.spinner(f"Reading {parts.plain(entry.name)}"):
            opened.by_step(entry)
    except (TracekitError, RuleError) as error:
        parts.problem(f"{entry.name}: {error}")
        return False
    return True


def _medians(measured: dict[str, pl.DataFrame]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: one row per metric that any run tells, one column per run, the first the reference."""
    medians = {
        name: dict(table.group_by("metric").agg(pl.col("value").median()).iter_rows())
        for name, table in measured.items()
    }
    header = ["metric", *medians]
    rows = []
    for metric in samples.LOWER_IS_BETTER:
        values = [of_run.get(metric) for of_run in medians.values()]
        if any(value is not None for value in values):
            rows.append([markup.heading(metric), *_cells(metric, values)])
    return header, rows


def _cells(metric: str, values: Sequence[float | None]) -> list[str]:
    first = values[0]
    return [markup.cell(metric, first), *(markup.cell(metric, v) + _change(metric, first, v) for v in values[1:])]


def _change(metric: str, first: float | None, value: float | None) -> str:
    if first is None or value is None:
        return ""
    if metric.endswith("_ratio"):
        return f"  ({100 * (value - first):+.1f} points)".replace("-", "−")
    return f"  ({value / first - 1:+.1%})".replace("-", "−") if first else ""
