"""History as a document: each metric over runs, its changes with the commits between which they happened."""

import datetime
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from tracekit.model import escaping, units
from tracekit.regression.history.change_points import LEAST_RUNS, Drift
from tracekit.regression.history.trends import Group, MetricShift, Series, latest_first
from tracekit.regression.metrics import metric_of
from tracekit.report import phrases
from tracekit.report.comparison import label
from tracekit.report.document import Document, Emphasis, Line, Section, Trend, Trends, Words, faint, heading, line
from tracekit.report.render.json import to_json_value

SCHEMA = "tracekit.history/1"
MAX_CHANGES = 12
_SPREAD_RUNS = 2

_SHORT_SHA = 10
_MAX_SUBJECT = 60


def document(groups: Sequence[Group]) -> Document:
    """Each group of runs: its identity, each metric over its runs, then the changes, the latest first.

    For programs runs, and of each metric its values, changes and drifts in its own unit.
    """
    sections = tuple(section for group in groups for section in _sections(group))
    values = {"schema": SCHEMA, "groups": [_group_values(group) for group in groups]}
    return Document(sections, values=values)


def identity_text(group: Group) -> str:
    """Return the identity of a group of runs: "trainer · fsdp2 · model tiny · 2 ranks · NVIDIA H200"."""
    identity = group.identity
    count = int(identity["world_size"]) if identity.get("world_size", "").isdigit() else None
    ranks = "" if count is None else units.count(count, "rank")
    model = identity.get("model.name") or identity.get("model", "")
    simulated = "simulated" if identity.get("simulated") else ""
    parts = (
        identity.get("role", ""),
        identity.get("strategy", ""),
        model and f"model {model}",
        ranks,
        identity.get("device_name", ""),
        simulated,
    )
    return " · ".join(part for part in parts if part) or "runs without a manifest"


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
    """Return the context of a change as (title, text): the commits, the runs, findings, versions."""
    rows = [("between", commit_range(group, shift))]
    for title, index in (("last before", shift.last), ("first after", shift.first)):
        when = utc_minute(int(group.runs["at_ns"][index]))
        rows.append((title, f"run {index + 1}, {when}, {run_text(group.runs, index)}"))
    for title, ids in (("new findings", shift.appeared), ("resolved findings", shift.disappeared)):
        names = [f"{finding} {phrases.rule_name(finding.partition('-')[0])}" for finding in ids]
        rows += [(title, ", ".join(names))] if names else []
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


def _sections(group: Group) -> Iterator[Section]:
    latest = ((f"{units.count(group.runs.height, 'run')}, the latest ", Emphasis.FAINT), *_latest(group))
    yield [heading(identity_text(group), f"  {group.fingerprint}"), line(*latest)]
    yield [Trends(tuple(_trend(group, series) for series in group.series))] if group.series else []
    moments = changes_by_run(group)
    for shifts in moments[:MAX_CHANGES]:
        yield _change(group, shifts)
    if len(moments) > MAX_CHANGES:
        yield [faint(f"and {len(moments) - MAX_CHANGES} earlier changes: --format json")]
    for series in group.series:
        yield from ([_drift(series, drift)] for drift in series.drifts)


def _latest(group: Group) -> list[Words]:
    row = group.runs.row(-1, named=True)
    parts: list[Words] = [(f"{utc_minute(row['at_ns'])}  ", Emphasis.FAINT), run_text(group.runs, -1)]
    parts += [(f" on {row['branch']}", Emphasis.FAINT)] if row["branch"] else []
    if row["passed"] is not None:
        failed = ", ".join(row["failures"] or ())
        parts.append(("  passed", Emphasis.GOOD) if row["passed"] else (f"  failed: {failed}", Emphasis.WORSE))
    return parts


def _trend(group: Group, series: Series) -> Trend:
    finite = [value for value in series.values.tolist() if math.isfinite(value)]
    return Trend(
        label(series.metric),
        metric_of(series.metric).text(finite[0] if finite else None),
        metric_of(series.metric).text(finite[-1] if finite else None),
        _interval(group, series),
        tuple(series.values.tolist()),
        verdict(series),
        _emphasis(series),
    )


def _interval(group: Group, series: Series) -> str:
    rows = group.metrics.filter((pl.col("metric") == series.metric) & (pl.col("run") == group.runs["run"][-1]))
    if rows.is_empty() or rows["low"][0] is None:
        return "—"
    return " to ".join(metric_of(series.metric).text(rows[end][0]) for end in ("low", "high"))


def _emphasis(series: Series) -> Emphasis:
    if series.shifts:
        return Emphasis.WORSE if series.shifts[-1].is_worse else Emphasis.BETTER
    return Emphasis.DOUBTFUL if series.drifts else Emphasis.FAINT


def _direction(shift: MetricShift) -> str:
    return "worse" if shift.is_worse else "better"


def _change(group: Group, shifts: Sequence[MetricShift]) -> Section:
    """Changes between two runs: each metric, the commits, and other differences."""
    changes = [
        line(
            (_direction(shift).upper(), Emphasis.WORSE if shift.is_worse else Emphasis.BETTER),
            "  ",
            (label(shift.metric), Emphasis.STRONG),
            f"  {before_and_after(shift)}",
            (f"  from run {shift.first + 1} on" if shift.first != shifts[0].first else "", Emphasis.FAINT),
        )
        for shift in shifts
    ]
    more = context(group, shifts[0])
    return [*changes, *(Line(((f"{word} ", Emphasis.FAINT), text), indent=2) for word, text in more)]


def _drift(series: Series, drift: Drift) -> Line:
    before, after = (metric_of(series.metric).text(value) for value in (drift.before, drift.after))
    return line(
        ("DRIFT", Emphasis.DOUBTFUL),
        "  ",
        (label(series.metric), Emphasis.STRONG),
        f"  {before} → {after}, {change_text(series.metric, drift.before, drift.after)}",
        (f"  gradually over runs {drift.first + 1} to {drift.past}: no single commit", Emphasis.FAINT),
    )


def _group_values(group: Group) -> dict[str, Any]:
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
