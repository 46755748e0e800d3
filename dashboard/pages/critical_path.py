"""Critical path: what one step waited for over all ranks, who owns its time, and the slack of everything else."""

import polars as pl
import streamlit as st

from dashboard import moments, widgets
from dashboard.pages.page import Needs, Page
from dashboard.run_store import OpenRun, critical_path, tables
from dashboard.run_store.critical_path import CriticalPath
from dashboard.url_state import bind
from tracekit.errors import TracekitError
from tracekit.model import units
from tracekit.report import charts
from tracekit.report.headlines import Headline

_MOST_ROWS = 400
_LABELS = {"host": "host time", "memcpy": "copy", "memset": "memory set"}
_FIRST = ("rank", "kind", "name", "dur_ns", "step_ratio", "slack_ns", "count")
"""The columns of an owner in front of the rest."""


def show(run: OpenRun) -> None:
    """Draw the path of one step with its owners, and what is not on it."""
    step = _choose(run)
    try:
        with st.spinner("Walking back from the end of the step"):
            path = critical_path.explain(run, step)
    except TracekitError as error:
        widgets.info(widgets.plain(str(error)))
        return
    _numbers(path)
    for doubt in path.doubts:
        widgets.caption(widgets.plain(doubt))
    _chart(run, path)
    widgets.subheader("Owners of the path")
    _owners(path.shares, key="critical-path-owners")
    if path.has_modules:
        widgets.subheader("Modules of the path")
        by_module = path.shares_by("module", "kind").with_columns(pl.col("module").fill_null(tables.OUTSIDE_MODULES))
        widgets.frame(by_module.head(_MOST_ROWS), key="critical-path-modules")
    widgets.subheader("Not on the path")
    widgets.caption("Slack: how much later the work can end without delaying the step; the least of its pieces.")
    _owners(path.slack, key="critical-path-slack")


def _owners(rows: pl.DataFrame, *, key: str) -> None:
    """List owners with their numbers next to their names, also in a narrow window."""
    display = widgets.drop_empty(rows.head(_MOST_ROWS))
    first = [name for name in _FIRST if name in display.columns]
    widgets.frame(display.select(*first, pl.exclude(first)), key=key)


def _choose(run: OpenRun) -> int | None:
    """Return the step to explain; None is the representative one, which is also that of a run without marked steps."""
    steps = run.table(tables.BREAKDOWN_BY_STEP)
    steps_marked = steps["step"].drop_nulls().unique().sort().to_list()
    if not steps_marked:
        return None
    representative = run.result_of(tables.representative_step)
    default = representative["step"] if representative else steps_marked[0]
    chosen_step: int = st.selectbox("Step", steps_marked, key=bind("step", steps_marked, default), width=160)
    return chosen_step


def _numbers(path: CriticalPath) -> None:
    kinds = dict(path.shares_by("kind").select("kind", "step_ratio").rows())
    top_rank = path.shares_by("rank").row(0, named=True)
    widgets.numbers(
        {
            f"Step, on rank {path.rank}": units.duration(path.step_ns),
            **{_LABELS.get(kind, kind).capitalize(): units.share(ratio) for kind, ratio in list(kinds.items())[:4]},
            f"On rank {top_rank['rank']}": units.share(top_rank["step_ratio"]),
        }
    )


def _chart(run: OpenRun, path: CriticalPath) -> None:
    widgets.subheader("Path, first to last")
    parts = critical_path.placed_parts(run, path)
    clicked = widgets.clickable(charts.critical_path(parts, path.start_ns), key=f"critical-path-{run.entry.name}")
    if clicked is None:
        widgets.caption(
            "Each bar is in the row of the rank that owns the time: its kernel or collective, its host, or its idle "
            "device. Drag to zoom, click a bar to show it in the timeline."
        )
    elif st.button(f"Show rank {clicked[0]} in the timeline", key="critical-path-show"):
        st.session_state[widgets.SHOWN_PATH] = {"run": run.entry.name, "step": path.step}
        moment = {"rank": clicked[0], "start_ns": clicked[1], "dur_ns": clicked[2], "window": path.window}
        moments.show(run.entry, moment)


def _headline(run: OpenRun) -> Headline | None:
    try:
        path = critical_path.explain(run)
    except TracekitError:
        return None  # the page shows why
    kind, ratio = path.shares_by("kind").select("kind", "step_ratio").row(0)
    rank, of_rank = path.shares_by("rank").select("rank", "step_ratio").row(0)
    duration = units.duration(path.step_ns)
    step = f"the window ({duration})" if path.step is None else f"step {path.step} (representative, {duration})"
    return Headline(
        f"{units.share(ratio)} of the critical path of {step} is {_LABELS.get(kind, kind)}, and {units.share(of_rank)} "
        f"of it is on rank {rank}"
    )


PAGE = Page.described_by(__doc__, "criticalpath", show, Needs.WORK, headline=_headline)
