"""History -> text or JSON: each metric as a sparkline, its changes with the commits between which they happened."""

import datetime
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import polars as pl
from rich.console import RenderableType

from tracekit.model import escaping, units
from tracekit.regression.history.change_points import LEAST_RUNS, Drift
from tracekit.regression.history.trends import Group, MetricShift, Series, latest_first
from tracekit.regression.metrics import metric_of
from tracekit.report import phrases, text_layout
from tracekit.report.comparison import label
from tracekit.report.json_values import to_json_value

SCHEMA = "tracekit.history/1"
MAX_CHANGES = 12
_SPREAD_RUNS = 2

_BARS = "▁▂▃▄▅▆▇█"
_MOST_BARS, _LEAST_BARS = 40, 10
_WIDE, _OTHER_COLUMNS_WIDE, _OTHER_COLUMNS = 110, 90, 66  # characters, and those of the columns without bars
_SHORT_SHA = 10
_MAX_SUBJECT = 60
_WORSE, _BETTER, _DRIFTS = "bold red", "bold green", "yellow"


def as_text(groups: Sequence[Group], *, width: int, color: bool = False) -> str:
    """Return each group of runs: its identity, each metric as a sparkline, then the changes, the latest first."""
    parts: list[RenderableType] = []
    for group in groups:
        parts += [*_group(group, width), ""]
    return text_layout.print_to_string(parts[:-1], width=width, color=color)


def as_json(groups: Sequence[Group]) -> str:
    """Return the groups as strict JSON: runs, and of each metric its values, changes and drifts in its own unit."""
    document = {"schema": SCHEMA, "groups": [_document(group) for group in groups]}
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def identity_text(group: Group) -> str:
    """Return the identity of a group of runs: "fsdp2 · model tiny · 2 ranks · NVIDIA H200"."""
    identity = group.identity
    count = int(identity["world_size"]) if identity.get("world_size", "").isdigit() else None
    ranks = "" if count is None else units.count(count, "rank")
    model = identity.get("model.name") or identity.get("model", "")
    simulated = "simulated" if identity.get("simulated") else ""
    parts = (
        identity.get("strategy", ""),
        model and f"model {model}",
        ranks,
        identity.get("device_name", ""),
        simulated,
    )
    return " · ".join(part for part in parts if part) or "runs without a manifest"


def sparkline(values: Sequence[float]) -> str:
    """Return numbers as a line of bars from the smallest to the largest; a space where there is none.

    >>> sparkline([1.0, 2.0, float("nan"), 8.0])
    '▁▂ █'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    # A range of less than one percent is drawn flat, so that noise is not enlarged.
    span = max(high - low, abs(high) * 0.01) or 1.0
    levels = [None if not math.isfinite(value) else round((value - low) / span * (len(_BARS) - 1)) for value in values]
    return "".join(" " if level is None else _BARS[level] for level in levels)


def changes_by_run(group: Group) -> list[list[MetricShift]]:
    """Return the changes of all metrics grouped by run, the latest first, regressions first.

    A change point is known to about one run: neighbouring changes form one group at their most common run.
    """
    near: list[list[MetricShift]] = []
    for shift in latest_first(group):
        if near and near[-1][-1].first - shift.first <= 1 and near[-1][0].first - shift.first <= _SPREAD_RUNS:
            near[-1].append(shift)
        else:
            near.append([shift])
    counts = Counter((number, shift.first) for number, shifts in enumerate(near) for shift in shifts)
    return [sorted(shifts, key=lambda s: (-counts[number, s.first], s.first)) for number, shifts in enumerate(near)]


def before_and_after(shift: MetricShift) -> str:
    """Return a change in words: "10.1 ms → 12.2 ms, +21%"."""
    before, after = (metric_of(shift.metric).text(value) for value in (shift.before, shift.after))
    return f"{before} → {after}, {change_text(shift.metric, shift.before, shift.after)}"


def context(group: Group, shift: MetricShift) -> list[tuple[str, str]]:
    """Return the context of a change as (heading, text): the commits, the runs, findings, versions."""
    rows = [("between", commit_range(group, shift))]
    for heading, index in (("last before", shift.last), ("first after", shift.first)):
        when = utc_minute(int(group.runs["at_ns"][index]))
        rows.append((heading, f"run {index + 1}, {when}, {run_text(group.runs, index)}"))
    for heading, ids in (("new findings", shift.appeared), ("resolved findings", shift.disappeared)):
        names = [f"{finding} {phrases.rule_name(finding.partition('-')[0])}" for finding in ids]
        rows += [(heading, ", ".join(names))] if names else []
    differing = ", ".join(f"{field} {a or 'none'} → {b or 'none'}" for field, a, b in shift.changed_facts)
    return [*rows, *([("other differences", differing)] if differing else [])]


def verdict(series: Series) -> str:
    """Return the verdict on a metric in a few words: "worse +23% at run 7", "drifts +9%" or "steady"."""
    if series.shifts:
        shift = series.shifts[-1]
        more = f", {len(series.shifts) - 1} before" if len(series.shifts) > 1 else ""
        return (
            f"{_direction(shift)} {change_text(shift.metric, shift.before, shift.after)} at run {shift.first + 1}{more}"
        )
    if series.drifts:
        drift = series.drifts[-1]
        return f"drifts {change_text(series.metric, drift.before, drift.after)} since run {drift.first + 1}"
    finite_count = sum(math.isfinite(value) for value in series.values.tolist())
    return "steady" if finite_count >= LEAST_RUNS else "too few runs"


def change_text(metric: str, before: float, after: float) -> str:
    """Return a change: "+23%", or of a share "+4.0 pt"."""
    if metric_of(metric).is_share:
        return f"{100 * (after - before):+.1f} pt"
    if not before:
        return "from 0"
    percent = 100 * (after - before) / before
    return f"{percent:+.1f}%" if abs(percent) < 10 else f"{percent:+.0f}%"


def run_text(runs: pl.DataFrame, index: int) -> str:
    """Return a run's commit and the first line of its message, or the run's name if no commit is known."""
    row = runs.row(index, named=True)
    if row["commit"] is None:
        return escaping.inert(str(row["name"]))
    subject = (row["commit_text"] or "").strip().partition("\n")[0]
    return escaping.inert(str(row["commit"])[:_SHORT_SHA]) + (
        f" {escaping.inert(subject, _MAX_SUBJECT)}" if subject else ""
    )


def commit_range(group: Group, shift: MetricShift) -> str:
    """Return the commits of a change as a git range, or the names of the runs if no commits are known."""
    last, first = (group.runs["commit"][index] for index in (shift.last, shift.first))
    if last and first and last != first:
        return escaping.inert(f"{last[:_SHORT_SHA]}..{first[:_SHORT_SHA]}")
    if last and last == first:
        return f"two runs of {escaping.inert(last[:_SHORT_SHA])}: not caused by the commit"
    return " .. ".join(escaping.inert(str(group.runs["name"][index])) for index in (shift.last, shift.first))


def utc_minute(at_ns: int) -> str:
    """Return a Unix time in UTC to the minute."""
    return datetime.datetime.fromtimestamp(at_ns / 1e9, datetime.UTC).strftime("%Y-%m-%d %H:%M")


def _group(group: Group, width: int) -> list[RenderableType]:
    count = group.runs.height
    parts: list[RenderableType] = [
        text_layout.title(identity_text(group), f"  {group.fingerprint}"),
        text_layout.line((f"{units.count(count, 'run')}, the latest ", text_layout.DIM), *_latest(group)),
        "",
    ]
    parts += [_table(group, width)] if group.series else []
    moments = changes_by_run(group)
    for shifts in moments[:MAX_CHANGES]:
        parts += ["", *_change(group, shifts)]
    if len(moments) > MAX_CHANGES:
        parts += ["", text_layout.dim(f"and {len(moments) - MAX_CHANGES} earlier changes: --format json")]
    for series in group.series:
        for drift in series.drifts:
            parts += ["", _drift(series, drift)]
    return parts


def _table(group: Group, width: int) -> RenderableType:
    wide = width >= _WIDE
    bar_count = max(_LEAST_BARS, min(_MOST_BARS, width - (_OTHER_COLUMNS_WIDE if wide else _OTHER_COLUMNS)))
    rows = [_row(group, series, bar_count, wide) for series in group.series]
    header = ["", "first", "latest", *(["95% interval"] if wide else []), "runs", ""]
    right = [False, True, True, *([True] if wide else []), False, False]
    table = text_layout.table(header, rows, right=right, last_styles=[_style(series) for series in group.series])
    table.columns[0].no_wrap = table.columns[-2].no_wrap = True
    table.columns[0].min_width = max(len(row[0]) for row in rows)
    table.columns[-2].min_width = max(len(row[-2]) for row in rows)
    return table


def _latest(group: Group) -> list[tuple[str, str] | str]:
    row = group.runs.row(-1, named=True)
    parts: list[tuple[str, str] | str] = [(f"{utc_minute(row['at_ns'])}  ", text_layout.DIM), run_text(group.runs, -1)]
    parts += [(f" on {row['branch']}", text_layout.DIM)] if row["branch"] else []
    if row["passed"] is not None:
        failed = ", ".join(row["failures"] or ())
        parts.append(("  passed", text_layout.GOOD) if row["passed"] else (f"  failed: {failed}", "bold red"))
    return parts


def _row(group: Group, series: Series, bar_count: int, wide: bool) -> list[str]:
    finite = [value for value in series.values.tolist() if math.isfinite(value)]
    return [
        label(series.metric),
        metric_of(series.metric).text(finite[0] if finite else None),
        metric_of(series.metric).text(finite[-1] if finite else None),
        *([_interval(group, series)] if wide else []),
        sparkline(series.values.tolist()[-bar_count:]),
        verdict(series),
    ]


def _interval(group: Group, series: Series) -> str:
    rows = group.metrics.filter((pl.col("metric") == series.metric) & (pl.col("run") == group.runs["run"][-1]))
    if rows.is_empty() or rows["low"][0] is None:
        return "—"
    return " to ".join(metric_of(series.metric).text(rows[end][0]) for end in ("low", "high"))


def _style(series: Series) -> str:
    if series.shifts:
        return _WORSE if series.shifts[-1].is_worse else _BETTER
    return _DRIFTS if series.drifts else text_layout.DIM


def _direction(shift: MetricShift) -> str:
    return "worse" if shift.is_worse else "better"


def _change(group: Group, shifts: Sequence[MetricShift]) -> list[RenderableType]:
    """Changes between two runs: each metric, the commits, and other differences."""
    parts: list[RenderableType] = [
        text_layout.line(
            (_direction(shift).upper(), _WORSE if shift.is_worse else _BETTER),
            "  ",
            (label(shift.metric), text_layout.BOLD),
            f"  {before_and_after(shift)}",
            (f"  from run {shift.first + 1} on" if shift.first != shifts[0].first else "", text_layout.DIM),
        )
        for shift in shifts
    ]
    parts += [
        text_layout.indent(text_layout.line((f"{word} ", text_layout.DIM), text))
        for word, text in context(group, shifts[0])
    ]
    return parts


def _drift(series: Series, drift: Drift) -> RenderableType:
    before, after = (metric_of(series.metric).text(value) for value in (drift.before, drift.after))
    return text_layout.line(
        ("DRIFT", _DRIFTS),
        "  ",
        (label(series.metric), text_layout.BOLD),
        f"  {before} → {after}, {change_text(series.metric, drift.before, drift.after)}",
        (f"  gradually over runs {drift.first + 1} to {drift.past}: no single commit", text_layout.DIM),
    )


def _document(group: Group) -> dict[str, Any]:
    columns = ("run", "name", "at_ns", "commit", "branch", "passed", "failures")
    names = group.runs["run"].to_list()
    return {
        "fingerprint": group.fingerprint,
        "identity": dict(group.identity),
        "runs": to_json_value(group.runs.select(columns).to_dicts()),
        "metrics": [
            {
                "metric": series.metric,
                "medians": to_json_value(series.values.tolist()),
                "verdict": verdict(series),
                "changes": [_shift_document(shift, names) for shift in series.shifts],
                "drifts": [
                    {"first_run": names[d.first], "last_run": names[d.past - 1], "before": d.before, "after": d.after}
                    for d in series.drifts
                ],
            }
            for series in group.series
        ],
    }


def _shift_document(shift: MetricShift, names: Sequence[str]) -> dict[str, Any]:
    return {
        "last_run_before": names[shift.last],
        "first_run_after": names[shift.first],
        "before": shift.before,
        "after": shift.after,
        "is_worse": shift.is_worse,
        "findings_appeared": list(shift.appeared),
        "findings_gone": list(shift.disappeared),
        "differs": [{"field": field, "before": before, "after": after} for field, before, after in shift.changed_facts],
    }
