"""Ranks: one step of all ranks beside each other, and who waits for whom."""

import polars as pl
import streamlit as st

from dashboard import opened, parts
from dashboard.catalog import Entry
from tracekit import align, charts, units
from tracekit.analysis import lockstep, slices
from tracekit.intervals import Window

WHOLE = "all"


def page(entry: Entry) -> None:
    """Let a person pick a step and draw what each rank does in it."""
    held = parts.open_or_say(entry)
    if held is None:
        return
    parts.heading(entry, held)
    if opened.by_rank(entry).is_empty():
        st.info("The traces hold no work to draw: no kernels, and no operators on a CPU run.")
        return
    with held.lock, st.spinner("Measuring"):
        doings, offsets = held.run.across(lockstep.doings), held.run.offsets
    window, step = _choose(entry)
    mine = doings.filter(pl.col("window") == window)
    whole = _span(entry, offsets, window, step)
    part = _choose_part(entry, whole, window, step)
    st.caption(
        f"{'all steps' if step is None else f'step {step}'} · {units.duration(whole[1] - whole[0])} from the first "
        f"rank that begins it to the last that ends it · {_clocks(offsets, window)}"
    )
    parts.chart(charts.ranks(mine, part, origin_ns=whole[0]), key="ranks", scrollZoom=True)
    st.caption(
        "Drag across to zoom, double-click to see all. A collective moves data from when its last rank has come; until "
        "then the others wait for that rank. What compute hides is drawn as compute."
    )
    st.subheader("Where the time of this part goes, and for which rank each waits")
    parts.frame(lockstep.totals(mine, part))


def _choose(entry: Entry) -> tuple[int, int | None]:
    by_step = opened.by_step(entry).drop_nulls("step")
    windows = opened.by_rank(entry)["window"].unique().sort().to_list()
    typical = slices.typical_step(by_step)
    columns = st.columns([1, 1, 4])
    with columns[1]:
        window = st.selectbox("Window", windows, key=f"ranks-window-{entry.name}") if windows[1:] else windows[0]
    steps = by_step.filter(pl.col("window") == window)["step"].unique().sort().to_list()
    first = typical["step"] if typical and typical["step"] in steps else None
    with columns[0]:
        chosen = st.selectbox(
            "Step", [WHOLE, *steps], index=1 + steps.index(first) if first is not None else 0, key=f"ranks-{entry.name}"
        )
    return window, None if chosen == WHOLE else chosen


def _span(entry: Entry, offsets: pl.DataFrame, window: int, step: int | None) -> Window:
    rows = opened.by_rank(entry) if step is None else opened.by_step(entry).filter(pl.col("step") == step)
    rows = rows.filter(pl.col("window") == window).with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    shifted = align.shifted(rows, offsets, ("start_ns", "end_ns"))
    return int(shifted["start_ns"].min()), int(shifted["end_ns"].max())  # type: ignore[arg-type]  # whole ns


def _choose_part(entry: Entry, whole: Window, window: int, step: int | None) -> Window:
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
