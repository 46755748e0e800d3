"""Critical path: what one step waited for over all ranks, who owns its time, and the slack of everything else."""

import polars as pl
import streamlit as st

from dashboard import moments, run_store, widgets
from dashboard.run_entry import RunEntry
from dashboard.run_store import OpenRun, tables, what_if
from dashboard.run_store.what_if import CriticalPath
from dashboard.url_state import bind
from tracekit.errors import RuleError, TracekitError
from tracekit.model import units
from tracekit.report import charts
from tracekit.report.headlines import Headline

_MOST_ROWS = 400
_LABELS = {"host": "host time", "memcpy": "copy", "memset": "memory set"}
_FIRST = ("rank", "kind", "name", "dur_ns", "step_ratio", "slack_ns", "count")
"""The columns of an owner in front of the rest."""


def choose(entry: RunEntry) -> CriticalPath | None:
    """Return the critical path of the step that a person picks, or show why there is none."""
    try:
        run = run_store.open_run(entry)
        steps = run.table(tables.BREAKDOWN_BY_STEP)["step"].drop_nulls().unique().sort().to_list()
        representative = run.result_of(tables.representative_step) or {}
        default = representative.get("step")
        step = st.selectbox("Step", steps, key=bind("step", steps, default), width=160) if steps else None
        with widgets.measuring("Walking back from the end of the step"):
            return what_if.critical_path(run, step)
    except (TracekitError, RuleError) as error:
        widgets.caption(widgets.plain(f"The critical path is not shown: {error}"))
        return None


def show(run: OpenRun, path: CriticalPath) -> None:
    """Draw the path of one step with its owners, and what is not on it."""
    widgets.headline(_headline(path))
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
    width = st.column_config.Column("name", width=widgets.MAX_NAME_PX)
    widgets.frame(rows.head(_MOST_ROWS), key=key, first=_FIRST, column_config={"name": width})


def _numbers(path: CriticalPath) -> None:
    kinds = path.shares_by("kind").select("kind", "step_ratio").rows()[:4]
    top_rank = path.shares_by("rank").row(0, named=True)
    widgets.numbers(
        {
            f"Step, on rank {path.rank}": units.duration(path.step_ns),
            **{str(_LABELS.get(kind, kind)).capitalize(): units.share(ratio) for kind, ratio in kinds},
            f"On rank {top_rank['rank']}": units.share(top_rank["step_ratio"]),
        }
    )


def _chart(run: OpenRun, path: CriticalPath) -> None:
    widgets.subheader("Path, first to last")
    parts = what_if.placed_parts(run, path)
    clicked = widgets.clickable(charts.critical_path(parts, path.start_ns), key=f"critical-path-{run.entry.name}")
    if clicked is None:
        widgets.caption(
            "Each bar is in the row of the rank that owns the time: its kernel or collective, its host, or its idle "
            "device. Drag to zoom, click a bar to show it in the timeline."
        )
    elif st.button(f"Show rank {clicked[0]} in the timeline", key="critical-path-show"):
        moment = {"rank": clicked[0], "start_ns": clicked[1], "dur_ns": clicked[2], "window": path.window}
        step = {"path": True} if path.step is None else {"path": True, "step": path.step}
        moments.show(run.entry, moment, ranks=(), **step)


def _headline(path: CriticalPath) -> Headline:
    kind, ratio = path.shares_by("kind").select("kind", "step_ratio").row(0)
    rank, of_rank = path.shares_by("rank").select("rank", "step_ratio").row(0)
    duration = units.duration(path.step_ns)
    step = f"the window ({duration})" if path.step is None else f"step {path.step} ({duration})"
    return Headline(
        f"{units.share(ratio)} of the critical path of {step} is {_LABELS.get(kind, kind)}, and {units.share(of_rank)} "
        f"of it is on rank {rank}"
    )
