"""Kernels and operators: what ran, how often, how long, and how soon after its launch."""

import polars as pl
import streamlit as st

from dashboard import rule_families, run_facts, widgets
from dashboard.run_catalog import RunEntry
from tracekit.analysis.compute import kernels
from tracekit.analysis.host import ops
from tracekit.report import charts

KERNELS, OPERATORS = "kernels", "operators"
LABELS = {"unit": "module (FSDP unit)", "span": "FSDP span", "op": "operator that launched", "shapes": "input shapes"}
WIDE, NAME_PX = ("name", "op", "shapes"), 330


def page(entry: RunEntry) -> None:
    """List what ran on devices or on the host's threads, added up as a person chooses."""
    held = rule_families.begin(entry)
    if held is None:
        return
    rule_families.show(held, "HOST")
    left, middle, right = st.columns([2, 4, 3])
    with left:
        whats = (KERNELS, OPERATORS)
        what = st.segmented_control("What", whats, key=widgets.bind("what", whats), required=True)
    with middle:
        keys = kernels.KEYS if what == KERNELS else ops.KEYS
        chosen = st.multiselect("Added up by", keys, key=widgets.bind_several("by", keys, ["name"]), format_func=_label)
        by = tuple(chosen) or ("name",)
    with right:
        wanted = st.text_input("Search", key=widgets.bind_text("search"), placeholder="part of a name, any case")
    kinds = _kinds() if what == OPERATORS else ()
    with st.spinner("Adding up"):
        table = run_facts.kernels(entry, by) if what == KERNELS else run_facts.ops(entry, by, kinds)
    found = _searched(table, by, wanted)
    if found.is_empty():
        st.info("Nothing has such a name." if wanted else "The traces hold nothing of this kind.")
        return
    _shown(found, by, what)


def _label(key: str) -> str:
    return LABELS.get(key, key)


def _kinds() -> tuple[str, ...]:
    chosen = st.pills(
        "Kinds of host slices",
        ops.KINDS,
        selection_mode="multi",
        key=widgets.bind_several("kinds", ops.KINDS, ["cpu_op"]),
    )
    return tuple(chosen) or ("cpu_op",)


def _searched(table: pl.DataFrame, by: tuple[str, ...], wanted: str) -> pl.DataFrame:
    if not wanted.strip():
        return table
    lowered = wanted.strip().lower()
    return table.filter(
        pl.any_horizontal(
            pl.col(name).cast(pl.String).str.to_lowercase().str.contains(lowered, literal=True).fill_null(value=False)
            for name in (*by, "kind")
        )
    )


def _shown(found: pl.DataFrame, by: tuple[str, ...], what: str) -> None:
    measure = "total_ns" if what == KERNELS else "self_ns"
    st.caption(_about(found, what))
    widgets.chart(charts.top_bars(found, by, measure=measure), key="kernels-top")
    first = [*by, "kind", "time_ratio", "self_ratio", measure, "total_ns", "count", "delay_p50_ns", "delay_p95_ns"]
    known = [name for name in found.columns if found[name].null_count() < found.height or name in by]
    ordered = sorted(known, key=lambda name: first.index(name) if name in first else len(first))
    widths = {name: st.column_config.Column(LABELS.get(name, name), width=NAME_PX) for name in by if name in WIDE}
    widgets.frame(found.select(ordered), key=what, column_config=widths)


def _about(found: pl.DataFrame, what: str) -> str:
    rows = f"{found.height:,} row{'s' * (found.height != 1)}. "
    if what == OPERATORS:
        return rows + (
            "self is the time in no slice inside, of any kind, so that self times add up; device is the time of the "
            "kernels that the op itself launched; self share is of all recorded slices."
        )
    delays = (
        "delay is from the end of the launching call to the start: a few µs say that the device waited for the host. "
        if "delay_p50_ns" in found.columns
        else ""
    )
    return (
        rows
        + delays
        + (
            "time share is of the device time of all ranks, idle time included; spread share is the most time on a "
            "rank less the least, over the mean."
        )
    )
