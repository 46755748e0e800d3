"""Ranks: a map of ranks and steps, one step of all ranks beside each other, and who waits for whom."""

import polars as pl
import streamlit as st

from dashboard import rule_families, run_facts, run_store, timeline_links, widgets
from dashboard.run_catalog import RunEntry
from tracekit.analysis.communication import exposed_communication
from tracekit.analysis.parallelism import rank_timelines
from tracekit.analysis.time import slices
from tracekit.model import units
from tracekit.model.intervals import Window
from tracekit.report import charts
from tracekit.sync import alignment

WHOLE = "all"


def page(entry: RunEntry) -> None:
    """Let a person pick a step and draw what each rank does in it."""
    held = rule_families.begin(entry)
    if held is None:
        return
    with held.lock, st.spinner("Measuring"):
        doings, offsets = held.run.run_table(rank_timelines.states), held.run.offsets
    _map(entry)
    st.subheader("One step, rank by rank")
    window, step = _choose(entry)
    mine = doings.filter(pl.col("window") == window)
    whole = _span(entry, offsets, window, step)
    part = _choose_part(entry, whole, window, step)
    st.caption(
        f"{'all steps' if step is None else f'step {step}'} · {units.duration(whole[1] - whole[0])} from the first "
        f"rank that begins it to the last that ends it · {_clocks(offsets, window)}"
    )
    widgets.chart(charts.rank_activity(mine, part, origin_ns=whole[0]), key="ranks", scrollZoom=True)
    st.caption(
        "Drag across to zoom, double-click to see all. A collective moves data from when its last rank has come; until "
        "then the others wait for that rank. What compute hides is drawn as compute."
    )
    st.subheader("Where the time of this part goes, and for which rank each waits")
    widgets.frame(rank_timelines.totals(mine, part), key="ranks-totals")


def _map(entry: RunEntry) -> None:
    """Draw the map of ranks and steps; a click on a cell chooses that step below, and leads to the timeline."""
    whole = run_facts.across(entry, exposed_communication.spread)
    if whole.is_empty():
        st.caption("The traces mark no steps, so ranks cannot be compared step by step.")
        return
    windows = whole["window"].unique().sort().to_list()
    shown = st.session_state.get("window")
    table = whole.filter(pl.col("window") == (shown if shown in windows else windows[0]))
    st.subheader("Ranks against steps")
    measures = list(charts.MEASURES)
    measure = st.segmented_control(
        "Colour",
        measures,
        format_func=charts.MEASURES.get,
        key=widgets.bind("colour", measures),
        label_visibility="collapsed",
        required=True,
    )
    clicked = widgets.clickable(charts.step_heatmap(table, measure), key=f"ranks-map-{entry.name}")
    _chosen(entry, table, clicked and clicked[:2])


def _chosen(entry: RunEntry, table: pl.DataFrame, cell: tuple[int, ...] | None) -> None:
    if cell is None:
        st.caption("Click on a cell to choose its step below, and to see it in the timeline.")
        st.session_state.pop(f"ranks-cell-{entry.name}", None)
        return
    rank, step = cell
    if st.session_state.get(f"ranks-cell-{entry.name}") != cell:
        st.session_state[f"ranks-cell-{entry.name}"] = cell
        st.session_state["step"] = step
    row = table.filter(pl.col("rank") == rank, pl.col("step") == step)
    if row.height and st.button(f"Show rank {rank}, step {step} in the timeline", key="ranks-show"):
        timeline_links.show(entry, row.rename({"duration_ns": "dur_ns"}).row(0, named=True))


def _choose(entry: RunEntry) -> tuple[int, int | None]:
    by_step = run_store.by_step(entry).drop_nulls("step")
    windows = run_store.by_rank(entry)["window"].unique().sort().to_list()
    typical = slices.representative_step(by_step)
    place = st.container(horizontal=True)
    window = windows[0]
    if windows[1:]:
        window = place.selectbox("Window", windows, key=widgets.bind("window", windows), width=160)
    steps = by_step.filter(pl.col("window") == window)["step"].unique().sort().to_list()
    first = typical["step"] if typical and typical["step"] in steps else None
    choices = [WHOLE, *steps]
    key = widgets.bind("step", choices, WHOLE if first is None else first)
    chosen = place.selectbox("Step", choices, key=key, width=160)
    return window, None if chosen == WHOLE else chosen


def _span(entry: RunEntry, offsets: pl.DataFrame, window: int, step: int | None) -> Window:
    rows = run_store.by_rank(entry) if step is None else run_store.by_step(entry).filter(pl.col("step") == step)
    rows = rows.filter(pl.col("window") == window).with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    shifted = alignment.on_run_clock(rows, offsets, ("start_ns", "end_ns"))
    return int(shifted["start_ns"].min()), int(shifted["end_ns"].max())  # type: ignore[arg-type]  # whole ns


def _choose_part(entry: RunEntry, whole: Window, window: int, step: int | None) -> Window:
    length_ms = (whole[1] - whole[0]) / 1e6
    left_ms, right_ms = st.slider(
        "Part drawn, ms",
        0.0,
        length_ms,
        (0.0, length_ms),
        step=length_ms / 1000,
        key=f"ranks-part-{entry.name}-{window}-{step}",
    )
    left_ns, right_ns = (whole[0] + round(edge * 1e6) for edge in (left_ms, right_ms))
    return (left_ns, right_ns) if right_ns > left_ns else whole


def _clocks(offsets: pl.DataFrame, window: int) -> str:
    known = offsets.filter(pl.col("window") == window)["residual_ns"].drop_nulls()
    if known.is_empty():
        return "the clocks of the ranks could not be compared, so nobody is said to wait"
    return f"clocks of the ranks agree within {units.duration(int(known.max()))}"  # type: ignore[arg-type]  # whole ns
