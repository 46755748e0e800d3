"""Timeline: one step of one rank, slice by slice, with the findings' evidence marked."""

from dataclasses import dataclass

import polars as pl
import streamlit as st

from dashboard import opened, parts
from dashboard.catalog import Entry
from tracekit import charts, markup, units
from tracekit.analysis import slices
from tracekit.intervals import Window
from tracekit.reports import fragments, words
from tracekit.rule import Finding

ALL_FINDINGS = "all findings"
WHOLE = "all"
_CONTEXT_RATIO = 0.02  # of the step, shown at least on both sides of a finding's moment


@dataclass(frozen=True)
class Spot:
    """Which trace, which step of it (None: all it holds), and its time in ns."""

    rank: int
    window: int
    step: int | None
    span: Window


def page(entry: Entry) -> None:
    """Let a person pick rank and step, or a finding, and draw that piece of the run."""
    held = parts.open_or_say(entry)
    if held is None:
        return
    parts.heading(entry, held)
    if opened.by_rank(entry).is_empty():
        st.info("The traces hold no work to draw: no kernels, and no operators on a CPU run.")
        return
    choices, of_part = st.columns([3, 2])
    with choices:
        found, spot = _choose(entry, held)
    with of_part:
        part = _choose_part(entry, spot)
    with held.lock, st.spinner("Drawing"):
        trace = held.run.trace(spot.rank, spot.window)
        marks = fragments.moments([found] if found else held.report.findings, rank=spot.rank, window=spot.window)
        figure = charts.timeline(trace, part, evidence=marks, origin_ns=spot.span[0])
    st.caption(_about(spot))
    parts.chart(figure, key="timeline", scrollZoom=True)
    st.caption(
        "Drag across to zoom, scroll to zoom at the pointer, double-click to see all. Point at a slice for more."
    )
    if found:
        parts.finding(found, held, key=f"{entry.name}-timeline")


def _choose(entry: Entry, held: opened.Opened) -> tuple[Finding | None, Spot]:
    findings = {k: f for k, f in parts.finding_keys(held.report.findings).items() if parts.can_be_shown(f)}
    keys = {name: f"{name}-{entry.name}" for name in ("finding", "rank", "window", "step", "part")}
    wanted = st.session_state.pop(parts.SHOWN_FINDING, None)
    if wanted in findings:
        st.session_state[keys["finding"]] = wanted
        _aim(entry, findings[wanted], keys)
    elif keys["rank"] not in st.session_state:
        _start(entry, keys)
    columns = st.columns([3, 1, 1, 1])
    with columns[0]:
        chosen = st.selectbox(
            "Finding",
            [ALL_FINDINGS, *findings],
            key=keys["finding"],
            format_func=lambda key: _label(findings[key]) if key in findings else key,
            on_change=lambda: _aim_at_chosen(entry, findings, keys),
        )
    by_rank = opened.by_rank(entry)
    with columns[1]:
        rank = st.selectbox("Rank", by_rank["rank"].unique().sort().to_list(), key=keys["rank"])
    windows = by_rank.filter(pl.col("rank") == rank)["window"].unique().sort().to_list()
    with columns[2]:
        steps = [WHOLE, *_steps(entry, rank, st.session_state.get(keys["window"], windows[0]))["step"].to_list()]
        step = st.selectbox("Step", steps, key=keys["step"])
    with columns[3]:
        window = st.selectbox("Window", windows, key=keys["window"]) if len(windows) > 1 else windows[0]
    return findings.get(chosen), _spot(entry, rank, window, None if step == WHOLE else step)


def _start(entry: Entry, keys: dict[str, str]) -> None:
    typical = slices.typical_step(opened.by_step(entry)) or slices.typical_step(opened.by_rank(entry))
    if typical is not None:
        _set(keys, rank=typical["rank"], window=typical["window"], step=typical["step"])


def _aim_at_chosen(entry: Entry, findings: dict[str, Finding], keys: dict[str, str]) -> None:
    found = findings.get(st.session_state[keys["finding"]])
    if found:
        _aim(entry, found, keys)


def _aim(entry: Entry, found: Finding, keys: dict[str, str]) -> None:
    """Set rank, step and part to the longest moment of the finding's evidence."""
    known = found.evidence.drop_nulls(["rank", "start_ns", "dur_ns"])
    row = known.sort("dur_ns", descending=True).row(0, named=True)
    rank, window = row["rank"], row.get("window") or 0
    holding = _steps(entry, rank, window).filter(
        pl.col("start_ns") <= row["start_ns"], pl.col("start_ns") + pl.col("duration_ns") > row["start_ns"]
    )
    step = holding["step"][0] if holding.height else None
    _set(keys, rank=rank, window=window, step=step)
    spot = _spot(entry, rank, window, step)
    around_ns = max(row["dur_ns"], int((spot.span[1] - spot.span[0]) * _CONTEXT_RATIO))
    left_ns, right_ns = row["start_ns"] - around_ns, row["start_ns"] + row["dur_ns"] + around_ns
    whole_ms = _length_ms(spot)
    part = (_ms(left_ns - spot.span[0]), _ms(right_ns - spot.span[0]))
    st.session_state[_part_key(entry, spot)] = tuple(min(max(edge, 0.0), whole_ms) for edge in part)


def _set(keys: dict[str, str], *, rank: int, window: int, step: int | None) -> None:
    st.session_state[keys["rank"]] = rank
    st.session_state[keys["window"]] = window
    st.session_state[keys["step"]] = WHOLE if step is None else step


def _steps(entry: Entry, rank: int, window: int) -> pl.DataFrame:
    steps = opened.by_step(entry).filter(pl.col("rank") == rank, pl.col("window") == window)
    return steps.filter(pl.col("step").is_not_null()).unique("step", keep="first").sort("step")


def _spot(entry: Entry, rank: int, window: int, step: int | None) -> Spot:
    rows = opened.by_rank(entry) if step is None else opened.by_step(entry).filter(pl.col("step") == step)
    rows = rows.filter(pl.col("rank") == rank, pl.col("window") == window)
    start_ns, end_ns = rows.select(
        pl.col("start_ns").min(), (pl.col("start_ns") + pl.col("duration_ns")).max().alias("end_ns")
    ).row(0)
    return Spot(rank, window, step, (start_ns, end_ns))


def _choose_part(entry: Entry, spot: Spot) -> Window:
    whole_ms, key = _length_ms(spot), _part_key(entry, spot)
    if key not in st.session_state:
        st.session_state[key] = (0.0, whole_ms)
    left_ms, right_ms = st.slider(
        "Part drawn, ms (a shorter part is drawn in full detail)", 0.0, whole_ms, key=key, step=whole_ms / 1000
    )
    left_ns, right_ns = (spot.span[0] + round(edge * 1e6) for edge in (left_ms, right_ms))
    return (left_ns, right_ns) if right_ns > left_ns else spot.span


def _part_key(entry: Entry, spot: Spot) -> str:
    return f"part-{entry.name}-{spot.rank}-{spot.window}-{spot.step}"


def _about(spot: Spot) -> str:
    length = units.duration(spot.span[1] - spot.span[0])
    step = "all steps" if spot.step is None else f"step {spot.step}"
    return f"rank {spot.rank} · {step} · {length} · 0 ms is the start of its first work on the device's main lane"


def _label(found: Finding) -> str:
    return markup.inert(f"{found.id}  {words.cost(found)}", 80)


def _length_ms(spot: Spot) -> float:
    return _ms(spot.span[1] - spot.span[0])


def _ms(ns: int) -> float:
    return ns / 1e6
