"""Runs: all runs with verdict, step time and potential saving; search, open, compare and check them."""

from collections.abc import Sequence

import streamlit as st

from dashboard import run_store, runs_table, widgets
from dashboard.pages.page import ALL_RUNS, Needs, Page
from dashboard.run_catalog import Catalog
from dashboard.run_entry import RunEntry
from dashboard.runs_table import RunFilter
from dashboard.url_state import bind, bind_number, bind_several, bind_text
from tracekit.errors import RuleError, TracekitError
from tracekit.model import escaping, units
from tracekit.report import charts
from tracekit.report.headlines import Headline

ROW_PX = 35
MAX_HEIGHT_PX = 740
VERDICT_PX = 180
MAX_NAME = 60
_COLOURS = {"error": "#D55E00", "warning": "#E69F00", "info": "#56B4E9", runs_table.GOOD: "#009E73"}


def show(catalog: Catalog) -> None:
    """List the runs, to search, open, compare and check them."""
    st.fragment(_list)(catalog)  # a search or a selection reruns only this


def _list(catalog: Catalog) -> None:
    listing = catalog.listing()
    entries = listing.entries
    title = st.empty()
    if listing.omitted:
        st.caption(
            f"Only the newest {len(entries):,} of {len(entries) + listing.omitted:,} runs are listed: open the "
            "dashboard on a subfolder to see the others."
        )
    shown = runs_table.filter_runs(entries, _choose_filter(entries))
    count = f"{len(shown):,} of {len(entries):,} shown" if len(shown) < len(entries) else f"{len(entries):,}"
    with title.container():
        widgets.title("Runs", count)
        widgets.headline(_headline(entries))
    if not shown:
        st.info("No run matches. Remove a filter or shorten the search text.")
        return
    _actions(shown, _table(shown), catalog)
    _live([entry for entry in shown if entry.is_live])


def _headline(entries: Sequence[RunEntry]) -> Headline:
    """Return which run loses most, and how many are not checked."""
    checked = [entry for entry in entries if entry.summary is not None]
    unchecked = sum(entry.summary is None and not entry.problem for entry in entries)
    more = f"{unchecked} of {len(entries):,} runs are not checked yet" if unchecked else ""
    costliest = max(checked, key=lambda entry: entry.summary.impact if entry.summary else 0.0, default=None)
    if costliest is None or costliest.summary is None:
        return Headline(more or "No run can be opened")
    if not costliest.summary.impact:
        return Headline(f"No check of {len(checked):,} runs found lost time", more)
    of_step = f"its costliest finding takes {units.share(costliest.summary.impact)} of its step time"
    return Headline(f"{escaping.inert(costliest.name, MAX_NAME)} has the largest potential saving: {of_step}", more)


def _choose_filter(entries: Sequence[RunEntry]) -> RunFilter:
    verdicts = {runs_table.verdict(entry) for entry in entries}
    choices = {
        "strategy": sorted({entry.strategy or runs_table.UNKNOWN for entry in entries}),
        "model": sorted({entry.model or runs_table.UNKNOWN for entry in entries}),
        "verdict": [name for name in runs_table.VERDICTS if name in verdicts],
    }
    first, second = st.columns([3, 1]), st.columns([1, 1, 1, 1, 1])
    text = first[0].text_input(
        "Search", key=bind_text("find"), placeholder="Search name, strategy, model, verdict", max_chars=200,
        label_visibility="collapsed",
    )  # fmt: skip
    orders = list(runs_table.ORDERS)
    order = first[1].selectbox(
        "Order", orders, key=bind("order", orders), format_func="Order: {}".format, label_visibility="collapsed"
    )
    several = [
        cell.multiselect(
            name.capitalize(), options, key=bind_several(name, options), placeholder="All", format_func=escaping.inert
        )
        for cell, (name, options) in zip(second, choices.items(), strict=False)
    ]
    periods = list(runs_table.PERIODS)
    since = second[3].selectbox("Recorded", periods, key=bind("recorded", periods))
    with second[4]:
        step_ms = _step_range(entries)
    return RunFilter(text, *several, runs_table.PERIODS[since], step_ms, order)


def _step_range(entries: Sequence[RunEntry]) -> tuple[float, float] | None:
    known = [entry.summary.step_time_ns / 1e6 for entry in entries if entry.summary and entry.summary.step_time_ns]
    if not known or max(known) <= min(known):
        return None
    full = (float(int(min(known))), float(int(max(known)) + 1))
    step_ms = max(0.01, round((full[1] - full[0]) / 200, 2))
    key = bind_number("step", *full, full)
    chosen: tuple[float, float] = st.slider("Step time, ms", *full, key=key, step=step_ms)
    return None if chosen == full else chosen


def _table(shown: Sequence[RunEntry]) -> list[RunEntry]:
    """Show the runs and return those selected."""
    table = runs_table.table(shown)
    chips = sorted({chip for cell in table["verdict"].to_list() for chip in cell})
    config = st.column_config
    event = st.dataframe(
        table,
        hide_index=True,
        placeholder=widgets.MISSING,
        on_select="rerun",
        selection_mode="multi-row",
        column_config={
            "run": config.TextColumn(width="medium"),  # pinned, Streamlit would write it in grey
            "verdict": config.MultiselectColumn(width=VERDICT_PX, options=chips, color=[_colour(c) for c in chips]),
            "step_ms": config.NumberColumn("step time", format="%.2f ms"),
            "steps": config.LineChartColumn("steps", width="small", y_min=0, color=charts.COLOURS["compute"]),
            "exposed": config.NumberColumn(format="%.1f%%", help="Share of the time in exposed communication"),
            "saving": config.NumberColumn(
                format="%.1f%%", help="Potential saving: cost of the most expensive finding, as a share of the step"
            ),
            "recorded": config.DatetimeColumn("recorded", format="YYYY-MM-DD HH:mm", timezone="UTC"),
            "size": config.NumberColumn(format="%.2f MiB"),
        },
        height=min(ROW_PX * (len(shown) + 1) + 3, MAX_HEIGHT_PX),
        key=f"runs-{hash(tuple(entry.name for entry in shown))}",  # rows are selected by their number
    )
    return [shown[row] for row in event["selection"]["rows"] if row < len(shown)]


def _colour(chip: str) -> str:
    return next((colour for word, colour in _COLOURS.items() if word in chip), charts.COLOURS["phase"])


def _actions(shown: Sequence[RunEntry], chosen: Sequence[RunEntry], catalog: Catalog) -> None:
    unchecked = [entry for entry in chosen or shown if entry.summary is None and not entry.problem]
    columns = st.columns([1, 1, 1, 3])
    if columns[0].button("Open this run", type="primary", disabled=len(chosen) != 1, width="stretch"):
        widgets.go_to("overview", run=chosen[0].name)
    if columns[1].button(
        f"Compare {len(chosen)}" if len(chosen) > 1 else "Compare",
        disabled=not 2 <= len(chosen) <= 1 + widgets.MAX_COMPARED,
        width="stretch",
    ):
        names = [entry.name for entry in chosen]
        widgets.go_to("compare", run=names[0], compare=names[1:])
    if columns[2].button(
        f"Check {len(unchecked)} run{'s' * (len(unchecked) > 1)}" if unchecked else "All runs are checked",
        disabled=not unchecked,
        width="stretch",
    ):
        _check(unchecked)
        catalog.forget()
        st.rerun()
    columns[3].caption(
        "Select a run by its check box to open it, or several to compare them. A check reads the traces once; its "
        "findings are cached until the traces change."
    )
    for message in st.session_state.pop("check_failed", ()):
        widgets.problem(message)


def _check(unchecked: Sequence[RunEntry]) -> None:
    """Check runs one after the other; errors are shown after the page has been rerun."""
    failed: list[str] = []
    bar = st.progress(0.0)
    for number, entry in enumerate(unchecked):
        bar.progress(number / len(unchecked), f"{number + 1} of {len(unchecked)}: {widgets.plain(entry.name)}")
        try:
            run_store.check(entry)
        except (TracekitError, RuleError) as error:
            failed.append(f"{entry.name}: {error}")
    bar.empty()
    st.session_state["check_failed"] = failed


def _live(recording: Sequence[RunEntry]) -> None:
    """Show the progress of runs that are being recorded."""
    for entry in recording[: run_store.MAX_WATCHED]:
        state = run_store.training_state(entry)
        if state is None:
            continue
        parts = [f"is at step {state.steps_done:,}" if state.steps_done else "has logged no step yet"]
        if state.median_step_ns:
            parts.append(f"{units.duration(state.median_step_ns)} per step")
        if state.loss is not None:
            parts.append(f"loss {state.loss:.4g}")
        if state.outlier_count:
            parts.append(f"{state.outlier_count} outlier steps")
        if state.steps_done and state.is_over:
            parts.append("and has ended")
        st.caption(f"**{widgets.plain(entry.name)}** {widgets.plain(', '.join(parts))}")


PAGE = Page.described_by(__doc__, "runs", show, Needs.CATALOG, ALL_RUNS)
