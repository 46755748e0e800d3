"""Runs: what there is, what it came to, listed without loading any of it."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import streamlit as st

from dashboard import run_store, runs_table, widgets
from dashboard.run_catalog import Listing, RunEntry
from dashboard.runs_table import RunFilter
from tracekit.cli.watch.run_watch import Watch
from tracekit.errors import InputError, RuleError, TracekitError
from tracekit.model import escaping, units
from tracekit.report import charts

ROW_PX = 35
MAX_HEIGHT_PX = 740
MOST_WATCHED = 16
_COLOURS = {"error": "#D55E00", "warning": "#E69F00", "info": "#56B4E9", runs_table.GOOD: "#009E73"}

Relist = Callable[[], Listing]


def page(relist: Relist, forget: Callable[[], None]) -> None:
    """List the runs, to be looked through, opened, compared and checked.

    `relist` lists them as they are now, `forget` makes it look again.
    """
    st.fragment(_shown)(relist, forget)  # what one looks for or selects needs no other part of the page made anew


def _shown(relist: Relist, forget: Callable[[], None]) -> None:
    all_known = relist()
    listed = all_known.entries
    title = st.empty()
    if all_known.omitted:
        st.caption(
            f"Only the newest {len(listed):,} of {len(listed) + all_known.omitted:,} runs are listed: open the "
            "dashboard on a folder further down to see the others."
        )
    shown = runs_table.filter_runs(listed, _wanted(listed))
    count = f"{len(shown):,} of {len(listed):,} shown" if len(shown) < len(listed) else f"{len(listed):,}"
    title.html(f'<div class="tk-title"><b>Runs</b><span>{count}</span></div>')
    if not shown:
        st.info("No run is like that. Take a filter back, or write less into the search.")
        return
    chosen = _table(shown)
    _actions(shown, chosen, forget)
    _live([entry for entry in shown if entry.is_live])


def _wanted(listed: Sequence[RunEntry]) -> RunFilter:
    strategies, models = (
        sorted({getattr(entry, name) or runs_table.UNKNOWN for entry in listed}) for name in ("strategy", "model")
    )
    verdicts = [each for each in runs_table.VERDICTS if any(runs_table.verdict(entry) == each for entry in listed)]
    first, second = st.columns([3, 1]), st.columns([1, 1, 1, 1, 1])
    text = first[0].text_input(
        "Find", key=widgets.bind_text("find"), placeholder="Find by name, strategy, model, verdict", max_chars=200,
        label_visibility="collapsed",
    )  # fmt: skip
    orders = list(runs_table.ORDERS)
    order = first[1].selectbox(
        "Order", orders, key=widgets.bind("order", orders), format_func="Order: {}".format, label_visibility="collapsed"
    )
    several = {
        name: second[place].multiselect(
            name.capitalize(), options, key=widgets.bind_several(name, options), placeholder="All",
            format_func=escaping.inert,
        )
        for place, (name, options) in enumerate(
            {"strategy": strategies, "model": models, "verdict": verdicts}.items()
        )
    }  # fmt: skip
    periods = list(runs_table.PERIODS)
    since = second[3].selectbox("Recorded", periods, key=widgets.bind("recorded", periods))
    with second[4]:
        step_ms = _step_range(listed)
    return RunFilter(
        text,
        several["strategy"],
        several["model"],
        several["verdict"],
        runs_table.PERIODS[since],
        step_ms,
        order,
    )


def _step_range(listed: Sequence[RunEntry]) -> tuple[float, float] | None:
    known = [entry.summary.step_time_ns / 1e6 for entry in listed if entry.summary and entry.summary.step_time_ns]
    if not known or max(known) <= min(known):
        return None
    whole = (float(int(min(known))), float(int(max(known)) + 1))
    step_ms = max(0.01, round((whole[1] - whole[0]) / 200, 2))
    key = widgets.bind_number("step", *whole, whole)
    chosen: tuple[float, float] = st.slider("Step time, ms", *whole, key=key, step=step_ms)
    return None if chosen == whole else chosen


def _table(shown: Sequence[RunEntry]) -> list[RunEntry]:
    """Show the runs and return those selected."""
    table = runs_table.table(shown)
    told = sorted({chip for chips in table["verdict"].to_list() for chip in chips})
    config = st.column_config
    event = st.dataframe(
        table,
        hide_index=True,
        placeholder=widgets.MISSING,
        on_select="rerun",
        selection_mode="multi-row",
        column_config={
            "run": config.TextColumn(width="medium"),  # pinned, Streamlit would write it in grey
            "verdict": config.MultiselectColumn(options=told, color=[_colour(chip) for chip in told]),
            "step_ms": config.NumberColumn("step time", format="%.4g ms"),
            "steps": config.LineChartColumn("steps", width="small", y_min=0, color=charts.COLOURS["compute"]),
            "exposed": config.NumberColumn(
                "exposed", format="percent", help="Share of the time in communication that no compute hides"
            ),
            "gain": config.NumberColumn(
                "to gain", format="percent", help="Share of the step that the costliest finding takes"
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


def _actions(shown: Sequence[RunEntry], chosen: Sequence[RunEntry], forget: Callable[[], None]) -> None:
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
        f"Check {len(unchecked)} run{'s' * (len(unchecked) > 1)}" if unchecked else "All are checked",
        disabled=not unchecked,
        width="stretch",
    ):
        _check(unchecked)
        forget()
        st.rerun()
    columns[3].caption(
        "Select a run by the box before it to open it, several to compare them. Checking reads the traces once; what "
        "it finds is kept until they change."
    )
    for message in st.session_state.pop("check_failed", ()):
        widgets.problem(message)


def _check(unchecked: Sequence[RunEntry]) -> None:
    """Check runs one after the other; what cannot be is said after the page was made anew."""
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
    """Say where trainings are that write at this moment."""
    for entry in recording[:MOST_WATCHED]:
        try:
            run_store.refuse_links(entry)  # a log, too, may lead out of what the dashboard was opened on
        except InputError:
            continue
        told = _watched(entry.path)
        if told:
            st.caption(f"**{widgets.plain(entry.name)}** {widgets.plain(told)}")


def _watched(path: str) -> str:
    watch, lock = _watch(path)
    now_s = time.time()
    with lock:
        watch.poll(now_s)
        picture = watch.state(now_s)
    if not picture.steps_done:
        return "is being recorded; no step is logged yet"
    parts_of = [f"is at step {picture.steps_done:,}"]
    if picture.median_step_ns:
        parts_of.append(f"{units.duration(picture.median_step_ns)} a step")
    if picture.loss is not None:
        parts_of.append(f"loss {picture.loss:.4g}")
    if picture.outlier_count:
        parts_of.append(f"{picture.outlier_count} steps out of line")
    return ", ".join(parts_of) + (", and has ended" if picture.is_over else "")


@st.cache_resource(max_entries=MOST_WATCHED, show_spinner=False)
def _watch(path: str) -> tuple[Watch, threading.Lock]:
    return Watch(Path(path)), threading.Lock()
