"""Charts of many runs: metrics by step and by group, and settings against the step time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import streamlit as st

from dashboard import widgets
from dashboard.run_entry import RunEntry
from dashboard.run_store import run_metrics
from dashboard.run_store.run_metrics import MFU, STEP_TIME, RunMetrics
from dashboard.url_state import bind, bind_several
from tracekit.errors import TracekitError
from tracekit.model import escaping, units
from tracekit.report import charts
from tracekit.report.charts import Axis, ChartedRun

MAX_DRAWN = 200
MAX_METRICS, MAX_AXES = 8, 8
DEFAULT_METRICS = (STEP_TIME, MFU, "exposed_communication_ratio", "peak_allocated_bytes")
DEFAULT_AXES = 5
NOT_KNOWN = "not known"
FOLDER, RANKS = "folder", "ranks"
TOP_FOLDER = "top folder"
"""Settings of every run, also without a manifest: where it is listed, and how many ranks it has."""
_NO_SETTINGS = ("created_ns", "command", "lineage", "windows", "schema", "arguments.out")
"""Fields that differ from run to run and are no settings."""


@dataclass(frozen=True, eq=False)
class _Run:
    entry: RunEntry
    settings: Mapping[str, str]
    values: Mapping[str, tuple[float, ...]]


def show(entries: Sequence[RunEntry]) -> None:
    """Draw the metrics of the checked runs among `entries` by a setting that a person chooses."""
    checked = [entry for entry in entries if entry.has_comparisons and not entry.problem]
    newest = sorted(checked, key=lambda entry: entry.created_ns or 0)[-MAX_DRAWN:]
    runs = _read(newest)
    _left_out(sum(not entry.problem for entry in entries), len(checked), len(newest), len(runs))
    if not runs:
        widgets.info("None of these runs is measured yet. The charts show each run when its check has ended.")
        return
    keys = _keys(runs)
    group_column, metrics_column = st.columns([1, 2])
    key = group_column.selectbox(
        "Group by", list(keys), key=bind("group", list(keys), "strategy"),
        format_func=lambda name: f"{name} ({units.count(keys[name], 'value')})",
    )  # fmt: skip
    names = {metric: run_metrics.label(metric) for metric in _metrics(runs)}
    metrics = metrics_column.multiselect(
        "Metrics", list(names), key=bind_several("metrics", list(names), DEFAULT_METRICS, at_most=MAX_METRICS),
        format_func=names.get, max_selections=MAX_METRICS, placeholder="Choose metrics",
    )  # fmt: skip
    groups = charts.in_groups([run.settings.get(key, NOT_KNOWN) for run in runs])
    widgets.note(_answer(runs, groups, key))
    for metric in metrics:
        _metric(runs, groups, metric)
    _settings(runs, groups, keys, key)


def _read(entries: Sequence[RunEntry]) -> list[_Run]:
    runs = []
    with st.spinner(f"Reading the metrics of {len(entries):,} checked runs"):
        for entry in entries:
            try:
                measured = run_metrics.of_run(entry)
            except TracekitError as error:
                widgets.problem(f"{entry.name}: {error}")
                continue
            if measured is not None:
                runs.append(_Run(entry, _own_settings(entry, measured), measured.values))
    return runs


def _own_settings(entry: RunEntry, metrics: RunMetrics) -> dict[str, str]:
    folder, _, _ = entry.name.rpartition("/")
    ranks = entry.world_size or (entry.summary.ranks if entry.summary else 0)
    return {FOLDER: escaping.inert(folder or TOP_FOLDER, run_metrics.MAX_VALUE), RANKS: str(ranks), **metrics.settings}


def _left_out(listed: int, checked: int, newest: int, drawn_count: int) -> None:
    parts = [f"{listed - checked:,} of {listed:,} listed runs are not measured yet"] if checked < listed else []
    parts += [f"only the newest {newest:,} are drawn"] if newest < checked else []
    parts += [f"{newest - drawn_count:,} changed since they were checked"] if drawn_count < newest else []
    widgets.caption(
        "The charts show the checked runs of the list, with its search and filters; the address carries the view. "
        "Click a point to open its run." + (f" {'; '.join(parts)}." if parts else "")
    )


def _keys(runs: Sequence[_Run]) -> dict[str, int]:
    """Return the settings with how many values each has: those that differ between runs first, few values first."""
    values_by_name: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.settings.items():
            values_by_name.setdefault(name, set()).add(value)
    counts = {name: len(values) for name, values in values_by_name.items()}
    by_use = sorted(counts, key=lambda name: (counts[name] == 1, _is_no_setting(name), name))
    return {name: counts[name] for name in by_use}


def _is_no_setting(name: str) -> bool:
    return name in _NO_SETTINGS or name.split(".")[0] in _NO_SETTINGS


def _metrics(runs: Sequence[_Run]) -> list[str]:
    measured = dict.fromkeys(metric for run in runs for metric in run.values)
    return [
        *(metric for metric in DEFAULT_METRICS if metric in measured),
        *(metric for metric in measured if metric not in DEFAULT_METRICS),
    ]


def _answer(runs: Sequence[_Run], groups: Sequence[str], key: str) -> str:
    """Sentence on the groups with the shortest and the longest median step; runs of no known group are left out."""
    times: dict[str, list[float]] = {}
    for run, group in zip(runs, groups, strict=True):
        if STEP_TIME in run.values and group != NOT_KNOWN:
            times.setdefault(group, []).append(median(run.values[STEP_TIME]))
    if len(times) < 2:
        return ""
    ordered = sorted(times, key=lambda group: median(times[group]))
    first, last = (f"{group} ({units.duration(median(times[group]))})" for group in (ordered[0], ordered[-1]))
    return f"By {key}, {first} has the shortest median step and {last} the longest, of {len(times)} groups."


def _metric(runs: Sequence[_Run], groups: Sequence[str], metric: str) -> None:
    name = run_metrics.label(metric)
    ordered = charts.sorted_values(groups)
    charted = [
        ChartedRun(run.entry.name, group, run.values[metric])
        for run, group in zip(runs, groups, strict=True)
        if metric in run.values
    ]
    widgets.subheader(widgets.plain(name[:1].upper() + name[1:]))
    if len(charted) < len(runs):
        widgets.caption(f"{len(charted):,} of {len(runs):,} runs have this metric.")
    figure = charts.metric_of_runs(charted, ordered, label=name, unit=run_metrics.unit(metric))
    _openable(widgets.clickable(figure, key=f"runs-{metric}"), runs, key=metric)


def _settings(runs: Sequence[_Run], groups: Sequence[str], keys: Mapping[str, int], key: str) -> None:
    """Draw the settings that differ against the step time, as parallel coordinates."""
    widgets.subheader("Settings and step time")
    timed = [number for number, run in enumerate(runs) if STEP_TIME in run.values]
    options = [name for name in keys if not _is_no_setting(name) or name == key]
    varied = [name for name in options if 1 < keys[name] <= charts.MAX_VALUES]
    default = _most_explaining(varied, [runs[number] for number in timed], first=key)
    names = st.multiselect(
        "Settings", options, key=bind_several("settings", options, default, at_most=MAX_AXES),
        max_selections=MAX_AXES, placeholder="Choose settings",
    )  # fmt: skip
    if not names or not timed:
        what = "Choose at least one setting." if options else "The run.json files of these runs have no settings."
        widgets.info(f"{what} Runs without marked steps have no step time and are left out.")
        return
    axes = [
        Axis(name.removeprefix("arguments."), tuple(runs[number].settings.get(name) for number in timed))
        for name in names
    ]
    times = tuple(str(median(runs[number].values[STEP_TIME])) for number in timed)
    axes.append(Axis("step time", times, run_metrics.unit(STEP_TIME)))
    figure = charts.parallel_coordinates(
        [runs[number].entry.name for number in timed], [groups[number] for number in timed], axes
    )
    _openable(widgets.clickable(figure, key="runs-settings"), runs, key="settings")
    widgets.caption(
        "One line per run, from its settings to its median step time, in the colour of its group. At first these are "
        "the settings of which each alone explains most of the differences in step time; settings that always change "
        "together are shown once."
    )


def _most_explaining(names: Sequence[str], runs: Sequence[_Run], *, first: str) -> list[str]:
    """Return the settings that explain most of the step time, `first` in front; of those that group alike one."""
    times = [median(run.values[STEP_TIME]) for run in runs]
    by_name = {name: [run.settings.get(name, NOT_KNOWN) for run in runs] for name in names}
    explained = {name: run_metrics.explained_ratio(values, times) for name, values in by_name.items()}
    ordered = sorted(names, key=lambda name: (name != first, -explained[name], name))
    distinct: dict[tuple[int, ...], str] = {}
    for name in ordered:
        codes = {value: number for number, value in enumerate(dict.fromkeys(by_name[name]))}
        distinct.setdefault(tuple(codes[value] for value in by_name[name]), name)
    return list(distinct.values())[:DEFAULT_AXES]


def _openable(clicked: tuple[object, ...] | None, runs: Sequence[_Run], *, key: str) -> None:
    """Offer to open the run of a clicked point."""
    name = next((run.entry.name for run in runs if clicked and run.entry.name == clicked[0]), None)
    if name is not None and st.button(f"Open {widgets.plain(escaping.inert(name, 60))}", key=f"open-{key}"):
        widgets.go_to("diagnosis", run=name)
