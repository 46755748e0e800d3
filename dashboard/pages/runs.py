"""Runs: all runs with verdict and potential saving; search, check, compare, open or chart them; trends of a history."""

import math
from collections.abc import Mapping, Sequence

import polars as pl
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import crashes, many_runs, run_store, runs_table, sharing, widgets
from dashboard.background_checks import Progress
from dashboard.pages.page import ALL_RUNS, Needs, Page, Selection
from dashboard.run_catalog import Catalog
from dashboard.run_entry import RunEntry
from dashboard.runs_table import RunFilter
from dashboard.sections import trends
from dashboard.url_state import bind, bind_number, bind_several, bind_text
from tracekit.model import escaping, units
from tracekit.report import charts
from tracekit.report.headlines import Headline

ROW_PX, HEADER_PX = 74, 38
MAX_HEIGHT_PX = 740
MAX_NAME = 60
MAX_SKIPPED = 200
TABLE, CHARTS, TRENDS = "table", "charts", "trends"
VIEWS = {TABLE: "Table", CHARTS: "Charts", TRENDS: "Trends"}
_SELECTED = "selected_runs"
VIEW = "view"
"""The view's parameter in the address."""
# Chips have white text, which needs darker colours than those of figures.
_COLOURS = {"error": "#B34A00", "warning": "#8A6100", "info": "#00699E", runs_table.GOOD: "#00795A"}
_OTHER_COLOUR = "#5F6875"


def show(selection: Selection) -> None:
    """List the runs, to search, open, compare and check them, or show the trends of a history, where there is one."""
    views = {view: text for view, text in VIEWS.items() if view != TRENDS or selection.history is not None}
    if selection.history is not None and st.session_state[bind(VIEW, list(views))] == TRENDS:
        sharing.begin(VIEWS[TRENDS])
        widgets.title("Runs", selection.history.name)
        widgets.segments("View", VIEW, views)
        trends.show(selection.history)
        return
    # A search or a selection reruns only the fragment.
    st.fragment(crashes.guard(_list, "the page Runs", "The other pages work."))(selection.catalog, views)


def _list(catalog: Catalog, views: Mapping[str, str]) -> None:
    listing = catalog.listing()
    entries = listing.entries
    title = st.empty()
    if listing.omitted:
        st.caption(
            f"Only the newest {len(entries):,} of {len(entries) + listing.omitted:,} runs are listed: open the "
            "dashboard on a subfolder to see the others."
        )
    _show_skipped(listing.skipped)
    matching = runs_table.filter_runs(entries, _choose_filter(entries))
    count = f"{len(matching):,} of {len(entries):,} shown" if len(matching) < len(entries) else f"{len(entries):,}"
    with title.container():
        widgets.title("Runs", count)
        widgets.headline(_headline(entries, catalog.checks.progress))
    if not matching:
        st.info("No run matches. Remove a filter or shorten the search text.")
        return
    view = widgets.segments("View", VIEW, views)
    if view == TRENDS:
        st.rerun()
    if view == TABLE:
        _actions(matching, _table(matching), catalog)
    else:
        catalog.checks.request_comparisons(matching)
        _check_button([entry for entry in matching if not entry.has_comparisons], catalog, st.columns([1, 3])[0])
        many_runs.show(matching)
    _live([entry for entry in matching if entry.is_live])


def _show_skipped(folders: Sequence[str]) -> None:
    if folders:
        with st.expander(f"{units.count(len(folders), 'folder')} skipped"):
            st.code("\n".join(escaping.inert(text) for text in folders[:MAX_SKIPPED]), language=None)


def _headline(entries: Sequence[RunEntry], progress: Progress) -> Headline:
    """Sentence on the run that loses most, and on how many are not checked."""
    summaries = {entry.name: entry.summary for entry in entries if entry.summary is not None}
    unchecked = sum(runs_table.verdict(entry) == runs_table.UNCHECKED for entry in entries)
    more = f"{len(summaries):,} of {units.count(len(summaries) + unchecked, 'run')} checked" if unchecked else ""
    if more and progress.current:
        more += f"; {escaping.inert(progress.current, MAX_NAME)} is being checked"
    if not summaries and progress.waiting:
        return Headline(f"Checking {units.count(progress.waiting, 'run')}, the smallest first", more)
    if not summaries:
        return Headline(more or "No run can be opened")
    name = max(summaries, key=lambda name: runs_table.largest_saving(summaries[name]))
    summary = summaries[name]
    if not summary.impact:
        return Headline(f"No check of {units.count(len(summaries), 'run')} found lost time", more)
    name, share = escaping.inert(name, MAX_NAME), units.share(summary.impact)
    about, _, _ = summary.first_finding.partition(". ")
    text = f"{name} has the largest potential saving, {share} of its step time"
    return Headline(text, ". ".join(filter(None, (about, more))))


def _choose_filter(entries: Sequence[RunEntry]) -> RunFilter:
    verdicts = {runs_table.verdict(entry) for entry in entries}
    choices = {
        "strategy": sorted({entry.strategy or runs_table.UNKNOWN for entry in entries}),
        "model": sorted({entry.model or runs_table.UNKNOWN for entry in entries}),
        "verdict": [name for name in runs_table.VERDICTS if name in verdicts],
    }
    first, second = st.columns([2, 1]), st.columns([1, 1, 1, 1, 1])
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
        step_ns = _step_range(entries)
    strategies, models, verdicts = several
    return RunFilter(text, strategies, models, verdicts, runs_table.PERIODS[since], step_ns, order)


def _step_range(entries: Sequence[RunEntry]) -> tuple[float, float] | None:
    known_ns = [entry.summary.step_time_ns for entry in entries if entry.summary and entry.summary.step_time_ns]
    if not known_ns or max(known_ns) <= min(known_ns):
        return None
    divisor, unit = widgets.time_unit(max(known_ns))
    # At most 200 positions, which are whole hundredths.
    width = max(0.01, math.ceil(max(known_ns) / divisor / 2) / 100)
    first, last = (time_ns / divisor // width for time_ns in (min(known_ns), max(known_ns)))
    full = (round(width * first, 2), round(width * (last + 1), 2))
    # The name in the address contains the unit: a link must not mean another time where other runs are listed.
    key = bind_number(f"step_{unit}", *full, full)
    low, high = st.slider(f"Step time, {unit}", *full, key=key, step=width)
    return None if (low, high) == full else (low * divisor, high * divisor)


def _table(entries: Sequence[RunEntry]) -> list[RunEntry]:
    """Show the runs and return those selected."""
    table = runs_table.table(entries)
    divisor, unit = widgets.time_unit(table.select(pl.col("step_ns").median().fill_null(0)).item())
    chips = table["verdict"].explode().unique().sort().to_list()
    key = f"runs-{hash(tuple(entry.name for entry in entries))}"  # rows are selected by their number
    # Rows move as results of checks arrive: those that are selected stay selected.
    selected_names = st.session_state.get(_SELECTED, ())
    selected_rows = [row for row, entry in enumerate(entries) if entry.name in selected_names]
    config = st.column_config
    event = st.dataframe(
        table.with_columns(pl.col("step_ns") / divisor),
        hide_index=True,
        placeholder=widgets.MISSING,
        on_select="rerun",
        selection_mode="multi-row",
        column_config={
            # In a window of 800 pixels, all columns up to the links are visible.
            "run": config.TextColumn(width=104),  # pinned, Streamlit would write it in grey
            "open": config.LinkColumn(width=52, display_text="open", help="Opens the run in a new tab"),
            "verdict": config.MultiselectColumn(width=96, options=chips, color=[_colour(c) for c in chips]),
            "step_ns": config.NumberColumn("step time", width=72, format=f"%.{2 if unit == 's' else 1}f {unit}"),
            "steps": config.LineChartColumn("steps", width="small", y_min=0, color=charts.COLOURS["compute"]),
            "exposed": config.NumberColumn(format="%.1f%%", help="Share of the time in exposed communication"),
            "saving": config.NumberColumn(
                width=58,
                format="%.1f%%",
                help="Potential saving: cost of the most expensive finding, as a share of the step",
            ),
            "costliest finding": config.TextColumn(
                width=136, help="Its saving, of the step time, is in the next column"
            ),
            "recorded": config.DatetimeColumn("recorded", width=84, format=_date_format(table), timezone="UTC"),
            "size": config.NumberColumn(format="%.2f MiB"),
        },
        row_height=ROW_PX,  # above 4 rem, Streamlit wraps text: a finding into four lines, without a part of a fifth
        height=min(ROW_PX * len(entries) + HEADER_PX, MAX_HEIGHT_PX),
        selection_default={"selection": {"rows": selected_rows}},
        key=key,
    )
    selected = [entries[row] for row in event["selection"]["rows"] if row < len(entries)]
    st.session_state[_SELECTED] = [entry.name for entry in selected]
    return selected


def _date_format(table: pl.DataFrame) -> str:
    """Short format of dates: with the time where all runs are of one year, else with the year."""
    return "MMM DD HH:mm" if table["recorded"].drop_nulls().dt.year().n_unique() < 2 else "YYYY-MM-DD"


def _colour(chip: str) -> str:
    return next((colour for word, colour in _COLOURS.items() if word in chip), _OTHER_COLOUR)


def _actions(listed: Sequence[RunEntry], selected: Sequence[RunEntry], catalog: Catalog) -> None:
    columns = st.columns([1, 1, 1, 3])  # the last one is empty: buttons stay narrow in wide windows
    if columns[0].button("Open this run", type="primary", disabled=len(selected) != 1, width="stretch"):
        st.session_state.pop(_SELECTED)
        widgets.go_to(runs_table.page_of(selected[0]) or "diagnosis", run=selected[0].name)
    if columns[1].button(
        f"Compare {len(selected)}" if len(selected) > 1 else "Compare",
        disabled=not 2 <= len(selected) <= 1 + widgets.MAX_COMPARED,
        width="stretch",
    ):
        st.session_state.pop(_SELECTED)
        # The oldest run is the reference, in whichever order the list is.
        by_age = sorted(selected, key=lambda entry: (entry.created_ns or 0, entry.name))
        names = [entry.name for entry in by_age]
        widgets.go_to("compare", run=names[0], compare=names[1:])
    _check_button([entry for entry in selected or listed if entry.summary is None], catalog, columns[2])
    st.caption(
        "Select a run by its check box to open it, or several to compare them. Runs are checked while this page is "
        "open; the findings are stored until the traces change."
    )


def _check_button(entries: Sequence[RunEntry], catalog: Catalog, place: DeltaGenerator) -> None:
    """Offer to check those runs that the background leaves out: large ones, those behind a URL, those that failed."""
    left_out = [entry for entry in entries if not entry.problem and not catalog.checks.is_due(entry)]
    if left_out and place.button(f"Check {units.count(len(left_out), 'run')}", width="stretch"):
        catalog.checks.request(left_out)
        catalog.forget()
        st.rerun()


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
