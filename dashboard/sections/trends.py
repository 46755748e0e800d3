"""Trends: metrics of checked runs over time, where they changed, and with which commit."""

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
import streamlit as st

from dashboard import widgets
from dashboard.run_store import regression
from dashboard.run_store.regression import Group, Series
from tracekit.errors import TracekitError
from tracekit.model import escaping, units
from tracekit.report import headlines
from tracekit.report import history as history_text
from tracekit.report.charts import many_runs
from tracekit.report.comparison import label
from tracekit.report.headlines import Headline

MAX_DRAWN = 4
MIN_RUNS = 3
"""Fewer runs show no change, and are no proof that nothing changed."""


def show(path: Path) -> None:
    """Show the metrics of one kind of run, what changed, and the run that a person picks."""
    try:
        groups = regression.history(path)
    except TracekitError as error:
        widgets.problem(str(error))
        return
    if not groups:
        widgets.info("This history contains no run yet: tracekit check RUN --history FILE adds one.")
        return
    numbers = list(range(len(groups)))
    number = st.selectbox(
        "Runs of", numbers, key="history_group", format_func=lambda number: escaping.inert(_name(groups[number]), 300)
    )
    group = groups[number if number is not None else 0]
    widgets.headline(_headline(group))
    _changes(group)
    by_label = {label(series.metric): series for series in _changed_first(group.series)}
    metrics = st.multiselect("Metrics", list(by_label), list(by_label)[:MAX_DRAWN], key=f"history_{group.fingerprint}")
    for name in metrics:
        widgets.subheader(widgets.plain(name[:1].upper() + name[1:]))
        widgets.caption(widgets.plain(history_text.verdict(by_label[name])))
        _clickable(many_runs.of_series(group, by_label[name]), group, by_label[name])
    _run(group)


def _headline(group: Group) -> Headline:
    if group.runs.height < MIN_RUNS:
        return Headline(f"{units.count(group.runs.height, 'run')} of {MIN_RUNS} that a change of level needs at least")
    changed = [series for series in group.series if series.shifts or series.drifts]
    runs = f"{group.runs.height} runs"
    if not changed:
        return Headline(f"No metric changed its level in {runs}", status=headlines.GOOD)
    first = changed[0]
    text = f"{len(changed)} of {len(group.series)} metrics changed in {runs}: {label(first.metric)}"
    is_worse = any(shift.is_worse for series in changed for shift in series.shifts)
    return Headline(f"{text}, {history_text.verdict(first)}", status="warning" if is_worse else headlines.INFO)


def _name(group: Group) -> str:
    return f"{history_text.identity_text(group)} · {group.runs.height} runs · {group.fingerprint}"


def _changed_first(series: Sequence[Series]) -> list[Series]:
    """Return the metrics, those that changed or drift first."""
    return sorted(series, key=lambda metric: (not metric.shifts, not metric.drifts))


def _changes(group: Group) -> None:
    """Show each change with its commits and what else changed, the latest first."""
    changes = history_text.changes_by_run(group)
    if not changes:
        widgets.caption("No metric changed its level.")
    for shifts in changes[: history_text.MAX_CHANGES]:
        with st.container(border=True):
            heads = "".join(
                f"<p><b>{'worse' if shift.is_worse else 'better'}: {escaping.escape(label(shift.metric))}</b> "
                f"{escaping.escape(history_text.before_and_after(shift))}</p>"
                for shift in shifts
            )
            widgets.html(heads + escaping.html_table(("", ""), history_text.context(group, shifts[0])))


def _clickable(figure: go.Figure, group: Group, series: Series) -> None:
    """Show a figure whose points choose the run shown below."""
    key = f"history-{group.fingerprint}-{series.metric}"
    figure.update_layout(clickmode="event+select", dragmode=False)
    clicked = widgets.clickable(figure, key=key)
    number = clicked[0] if clicked else None
    if number is not None and st.session_state.get(f"{key}-last") != number:
        st.session_state[_run_key(group)] = int(number)
    st.session_state[f"{key}-last"] = number


def _run_key(group: Group) -> str:
    return f"history-run-{group.fingerprint}"


def _run(group: Group) -> None:
    """Show one run: its commit message, metrics and findings."""
    widgets.subheader("One run")
    numbers = list(range(group.runs.height))
    if st.session_state.get(_run_key(group)) not in numbers:
        st.session_state[_run_key(group)] = numbers[-1]
    number = st.selectbox(
        "Run, or click a point above",
        numbers,
        key=_run_key(group),
        format_func=lambda n: (
            f"{n + 1} · {history_text.utc_minute(int(group.runs['at_ns'][n]))} · {history_text.run_text(group.runs, n)}"
        ),
    )
    row = group.runs.row(number if number is not None else -1, named=True)
    about_column, metrics_column = st.columns(2)
    with about_column:
        about = [(word, escaping.inert(row[word] or "unknown")) for word in ("commit", "branch", "name")]
        widgets.html(escaping.html_table(("", ""), about))
        if row["commit_text"]:
            st.text("\n".join(escaping.inert(line, 500) for line in row["commit_text"].splitlines()))
        if row["passed"] is not None:
            widgets.caption(widgets.plain("passed" if row["passed"] else f"failed: {', '.join(row['failures'] or ())}"))
    with metrics_column:
        metrics = group.metrics.filter(run=row["run"]).select("metric", "median", "low", "high")
        cells = [
            [label(key), *(regression.metric_text(key, value) for value in values)]
            for key, *values in metrics.iter_rows()
        ]
        widgets.html(escaping.html_table(metrics.columns, cells, right=[False, True, True, True]))
    run_findings = group.findings.filter(run=row["run"])
    if run_findings.height:
        widgets.frame(run_findings.select("finding", "name", "severity", "impact_ratio", "cost_ns", "message"))
