"""Compare: several runs side by side, judged as `tracekit compare` judges them."""

from collections.abc import Sequence

import streamlit as st

from dashboard import opened, parts
from dashboard.catalog import Entry
from tracekit import charts, markup
from tracekit.change import Change
from tracekit.compare import Comparison, Side, compare
from tracekit.errors import NotComparableError, RuleError, TracekitError
from tracekit.reports import comparison


def page(chosen: Sequence[Entry]) -> None:
    """Show the mean step of each chosen run, and how the others differ from the first."""
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
    if len(usable) < 2:
        return
    st.subheader(f"Against {parts.plain(usable[0].name)}")
    st.caption(
        "Medians over steps; the interval holds 95% of the changes that other steps of the same runs would have shown. "
        "Another run of the same program may differ by more."
    )
    reference = _side(usable[0])
    found = [each for entry in usable[1:] if (each := _compared(reference, _side(entry)))]
    if found:
        header, rows = _table(found)
        st.html(markup.html_table(header, rows, right=[False, *(True for _ in header[1:])]))
    for note in dict.fromkeys(note for each in found for note in each.notes):
        st.caption(parts.plain(note))


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


def _side(entry: Entry) -> Side:
    return Side(entry.name, opened.opened(entry).run.manifest, opened.measured(entry))


def _compared(reference: Side, candidate: Side) -> Comparison | None:
    """Return the comparison; runs of different kind are compared too, with a word on it."""
    try:
        return compare(reference, candidate, allow_different=True)
    except NotComparableError as error:
        parts.problem(str(error))
        return None


def _table(found: Sequence[Comparison]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: one row per metric that any two runs share, the reference's median, then each other's."""
    by_metric = [{change.metric: change for change in each.changes} for each in found]
    metrics = dict.fromkeys(change.metric for each in found for change in each.changes)
    header = ["metric", found[0].reference, *(each.candidate for each in found)]
    rows = []
    for metric in metrics:
        changes = [of_run.get(metric) for of_run in by_metric]
        reference = next(change.reference for change in changes if change)
        rows.append([comparison.label(metric), markup.cell(metric, reference), *(_cell(change) for change in changes)])
    return header, rows


def _cell(change: Change | None) -> str:
    if change is None:
        return parts.MISSING
    told = f"{markup.cell(change.metric, change.candidate)}  {comparison.change_in_words(change)}"
    return f"{told}: {change.verdict.value}".replace("-", "−")
