"""Kernels: kernels and operators by name, phase, operator or shapes; modules; time by call stack; the roofline."""

import contextlib

import polars as pl
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import findings, widgets
from dashboard.pages.page import Needs, Page
from dashboard.run_store import OpenRun, tables
from dashboard.url_state import bind, bind_several, bind_text
from tracekit.errors import InputError
from tracekit.model import escaping, units
from tracekit.report import charts, headlines
from tracekit.report.headlines import Headline

KERNELS, OPERATORS, MODULES, STACKS, ROOFLINE = LEVELS = "kernels", "operators", "modules", "call stacks", "roofline"
LABELS = {"unit": "module (FSDP unit)", "span": "FSDP span", "op": "launching operator", "shapes": "input shapes"}
_MEASURES = {
    "compute_ns": "compute time",
    "communication_ns": "communication time",
    "copy_ns": "copy time",
    "host_ns": "host time",
    "flops": "operations (FLOP)",
    "sent_bytes": "bytes sent",
    "allocated_bytes": "memory allocated",
}
_UNITS = {"flops": units.operations, "sent_bytes": units.size, "allocated_bytes": units.size}
_DEFAULT_KINDS = ("cpu_op",)
WIDE = ("name", "op", "shapes")
BY_NAME = ("name",)


def show(run: OpenRun) -> None:
    """List what ran on devices or on host threads, grouped by the chosen columns."""
    findings.show_families(run, "HOST", "COMP")
    level = st.segmented_control("Show", LEVELS, key=bind("what", LEVELS), required=True)
    middle, right = st.columns(2)
    if level in _VIEWS:
        _VIEWS[level](run, middle)
        return
    keys = tables.KERNEL_KEYS if level == KERNELS else tables.OPERATOR_KEYS
    columns = middle.multiselect(
        "Group by", keys, key=bind_several("by", keys, ["name"]), format_func=lambda key: LABELS.get(key, key)
    )
    by = tuple(columns) or BY_NAME
    text = right.text_input("Search", key=bind_text("search"), placeholder="part of a name, any case")
    kinds: tuple[str, ...] = ()
    if level == OPERATORS:
        key = bind_several("kinds", tables.HOST_KINDS, _DEFAULT_KINDS)
        chosen_kinds = st.pills("Kinds of host slices", tables.HOST_KINDS, selection_mode="multi", key=key)
        kinds = tuple(chosen_kinds) or _DEFAULT_KINDS
    with widgets.measuring("Adding up"):
        table = _kernels(run, by) if level == KERNELS else run.cached_table(tables.operators, by, kinds)
    rows = _search(table, by, text)
    if rows.is_empty():
        widgets.info("No name contains this text." if text else "The traces contain nothing of this kind.")
        return
    _show_rows(rows, by, level)


def _show_modules(run: OpenRun, place: DeltaGenerator) -> None:
    """Draw what the modules of the model take, and list them."""
    measure = place.selectbox("Measure", tables.MODULE_MEASURES, key=_bind_measure(), format_func=_MEASURES.get)
    with widgets.measuring("Adding up"):
        table = run.cached_table(tables.by_module)
    if not table["module"].count():
        widgets.info(
            "The traces name no modules. Record with `tracekit record --modules`, or with the profiler's "
            "`with_stack=True`; FSDP's units count as modules, too."
        )
        return
    widgets.caption(
        "Each module is as wide as what it takes with the modules inside it, backward included; click one to see it "
        "alone. What belongs to no module, such as the optimizer, is shown apart. Ranks are summed."
    )
    title = f"{_MEASURES[measure]} of {run.entry.name}"
    shares = tables.module_shares(table, measure)
    figure = charts.icicle(shares, title, _UNITS.get(measure, units.duration))
    widgets.chart(figure, key="kernels-modules")
    totals = [f"total_{name}" for name in tables.MODULE_MEASURES]
    table = table.with_columns(pl.col("module").fill_null(tables.OUTSIDE_MODULES))
    ordered = table.sort(f"total_{measure}", "module", descending=[True, False], nulls_last=True)
    display = ordered.select("module", "calls", *totals, measure)
    widgets.frame(display, key="modules", labels={measure: f"own {escaping.heading(measure)}"})


def _show_stacks(run: OpenRun, place: DeltaGenerator) -> None:
    """Draw the time of the device or the host by call stack."""
    kinds = tables.CALL_TREE_KINDS
    kind = place.segmented_control("Time of", kinds, key=_bind_time_of(run), required=True)
    try:
        with widgets.measuring("Adding up"):
            tree = run.cached_table(tables.call_tree, kind)
    except InputError as error:
        widgets.info(widgets.plain(str(error)[:1].upper() + str(error)[1:]))
        return
    widgets.caption(
        "Each frame is as wide as its time and that of the frames below it; click one to see it alone. "
        + (
            "Kernels and copies are below the ops, spans and Python frames around their launch. "
            if kind == kinds[-1]
            else "The outermost frames are kinds of threads. "
        )
        + "Python frames need recorded stacks. `tracekit kernels --by stack` writes all of it for other viewers."
    )
    widgets.chart(charts.icicle(tree, f"{kind} time of {run.entry.name}"), key="kernels-stacks")


def _show_roofline(run: OpenRun, place: DeltaGenerator) -> None:  # noqa: ARG001 the signature of a view
    """Draw how far calls are from what the device allows, and list them, the most time above that first."""
    roofs = _roofs(run)
    with widgets.measuring("Adding up"):
        rows = run.cached_table(tables.rooflines_by_call)
    if rows.is_empty() or roofs["device"].n_unique() != 1:
        widgets.info(
            "There is no roofline: it needs input shapes (`record_shapes=True`) and one known kind of device. The "
            "table `devices` of the settings file describes devices that are not listed."
        )
        return
    widgets.caption(
        "Each marker is an operator with inputs of the same shapes, its area the time of its kernels. The lines are "
        f"the peaks of {roofs['device'][0]} by element type. Operators without products have no operations: they are "
        f"drawn at {charts.WITHOUT_PRODUCTS} operations per byte, by their bandwidth. Calls of the last 1% of "
        "the time are in the table only."
    )
    widgets.chart(charts.roofline(rows, roofs), key="kernels-roofline")
    widgets.frame(
        rows,
        key="roofline",
        first=("name", "work_ns", "above_ns", "roofline_ratio", "count", "shapes"),
        labels={"work_ns": "kernel time", "above_ns": "above the roofline", "roofline_ratio": "of the roofline"},
    )


_VIEWS = {MODULES: _show_modules, STACKS: _show_stacks, ROOFLINE: _show_roofline}


def _kernels(run: OpenRun, by: tuple[str, ...] = BY_NAME) -> pl.DataFrame:
    """Kernels by some columns; by name they were measured when the run was checked."""
    return run.table(tables.KERNELS_BY_NAME) if by == BY_NAME else run.cached_table(tables.kernels, by)


def _search(table: pl.DataFrame, by: tuple[str, ...], text: str) -> pl.DataFrame:
    if not text.strip():
        return table
    names = (pl.col(name).cast(pl.String).str.to_lowercase() for name in (*by, "kind"))
    lowered = text.strip().lower()
    matches = (name.str.contains(lowered, literal=True).fill_null(value=False) for name in names)
    return table.filter(pl.any_horizontal(matches))


def _show_rows(rows: pl.DataFrame, by: tuple[str, ...], level: str) -> None:
    measure = "total_ns" if level == KERNELS else "self_ns"
    widgets.caption(_about(rows, level))
    widgets.chart(charts.top_bars(rows, by, measure=measure), key="kernels-top")
    totals = ("time_ratio", "self_ratio", "self_ns", "total_ns", "count", "delay_p50_ns", "device_ns", "spread_ratio")
    widths = {
        name: st.column_config.Column(LABELS.get(name, name), width=widgets.MAX_NAME_PX) for name in by if name in WIDE
    }
    labels = {"p50_ns": "median", "delay_p50_ns": "delay", "delay_p95_ns": "p95 delay", "spread_ratio": "spread"}
    # The figure shows the kind, by its colour.
    ordered = rows.select(pl.exclude("kind"), "kind")
    widgets.frame(ordered, key=level, first=(*by, *totals), column_config=widths, labels=labels)


def _about(rows: pl.DataFrame, level: str) -> str:
    count = f"{units.count(rows.height, 'row')}. "
    if level == OPERATORS:
        return count + (
            "*Self* is the time outside of all nested slices, so self times add up. *Device* is the time of the "
            "kernels that the operator itself launched. *Self share* is of all recorded slices."
        )
    delay = (
        "*Delay* is from the end of the launching call to the start (median); a few µs mean that the device was idle. "
    )
    return (
        count
        + (delay if rows["delay_p50_ns"].count() else "")
        + "*Time share* is of the device time of all ranks, idle time included. *Spread* is the difference between "
        "the ranks with most and least time, over the mean."
    )


def _roofs(run: OpenRun) -> pl.DataFrame:
    return run.table(tables.ROOFS).select("device", "dtype", "flops_per_s", "memory_bytes_per_s").unique()


def _bind_measure() -> str:
    return bind("measure", tables.MODULE_MEASURES)


def _bind_time_of(run: OpenRun) -> str:
    kinds = tables.CALL_TREE_KINDS
    return bind("time_of", kinds, kinds[-1] if run.table(tables.DEVICES)["devices"].sum() else kinds[0])


def _headline(run: OpenRun) -> Headline | None:
    """Return the answer of the view that is shown; where it has no data, that of the kernels."""
    level = st.session_state[bind("what", LEVELS)]
    of_view = _HEADLINES[level](run) if level in _HEADLINES else None
    if of_view is not None:
        return of_view
    table = _kernels(run)
    return headlines.kernels(run.report, table) if table.height else _operators_headline(run)


def _operators_headline(run: OpenRun) -> Headline | None:
    kinds = tuple(st.session_state[bind_several("kinds", tables.HOST_KINDS, _DEFAULT_KINDS)]) or _DEFAULT_KINDS
    return headlines.kernels(run.report, run.cached_table(tables.operators, BY_NAME, kinds))


def _modules_headline(run: OpenRun) -> Headline | None:
    measure = st.session_state[_bind_measure()]
    text = _UNITS.get(measure, units.duration)
    return headlines.modules(run.report, run.cached_table(tables.by_module), measure, _MEASURES[measure], text)


def _stacks_headline(run: OpenRun) -> Headline | None:
    kind = st.session_state[_bind_time_of(run)]
    with contextlib.suppress(InputError):  # shown below
        return headlines.call_stacks(run.report, run.cached_table(tables.call_tree, kind), kind)
    return None


def _roofline_headline(run: OpenRun) -> Headline | None:
    if _roofs(run)["device"].n_unique() != 1:
        return None
    return headlines.roofline(run.report, run.cached_table(tables.rooflines_by_call))


_HEADLINES = {
    OPERATORS: _operators_headline,
    MODULES: _modules_headline,
    STACKS: _stacks_headline,
    ROOFLINE: _roofline_headline,
}

PAGE = Page.described_by(__doc__, "kernels", show, Needs.WORK, families=("HOST", "COMP"), headline=_headline)
