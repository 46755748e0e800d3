"""The list of runs as a table: filters, orders and columns."""

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeGuard
from urllib.parse import quote

import polars as pl

from dashboard.run_entry import RunEntry
from tracekit.model import escaping, units
from tracekit.model.schema import ColumnTypes
from tracekit.rules.report_entry import Summary
from tracekit.rules.rule import Severity

UNCHECKED, GOOD, BROKEN, QUALITY_ISSUES = "not checked", "good", "unreadable", "data issues"
FAILED = "check failed"
CANNOT_JUDGE = "cannot judge"
SNAPSHOT = "snapshot"
NO_TRACE_YET = "no trace yet"
SEVERITIES = tuple(severity.label for severity in sorted(Severity)[::-1])
# Each fits into the column: of longer ones a window of 800 pixels shows the first part.
VERDICTS = (*SEVERITIES, GOOD, CANNOT_JUDGE, QUALITY_ISSUES, UNCHECKED, FAILED, SNAPSHOT, NO_TRACE_YET, BROKEN)
"""The verdict of a run: the severity of its worst finding, data quality aside, or why there is none."""
UNKNOWN = "unknown"
DAY_S = 86_400
PERIODS = {"any time": None, "last day": DAY_S, "last week": 7 * DAY_S, "last month": 30 * DAY_S}
COLUMNS: ColumnTypes = {
    "run": pl.String, "verdict": pl.List(pl.String), "costliest finding": pl.String, "saving": pl.Float64,
    "step_ns": pl.Float64, "open": pl.String, "recorded": pl.Datetime("us", "UTC"), "now": pl.String,
    "steps": pl.List(pl.Float64), "exposed": pl.Float64, "role": pl.String, "strategy": pl.String, "model": pl.String,
    "ranks": pl.Int64, "size": pl.Float64, "problem": pl.String,
}  # fmt: skip
"""The columns from the left: those that answer the page's question are visible in a narrow window."""
_LEFT_OUT_IF_EMPTY = ("now", "role", "problem")
_CLAIM_CHARACTERS = 62
"""What four lines of the column of claims show."""
_WORTH_SHOWING = 0.03
"""Share of the time from which a finding of information is no good verdict: from there on findings may be warnings."""
LARGEST_SAVING = "largest potential saving first"
ORDERS: Mapping[str, tuple[Callable[[RunEntry], Any], bool]] = {
    LARGEST_SAVING: (lambda entry: entry.summary and largest_saving(entry.summary), True),
    "name": (lambda entry: entry.name, False),
    "newest first": (lambda entry: entry.created_ns, True),
    "slowest step first": (lambda entry: entry.summary and entry.summary.step_time_ns, True),
    "worst verdict first": (lambda entry: _weight(entry), True),
    "most exposed communication first": (lambda run: run.summary and run.summary.exposed_communication_ratio, True),
    "strategy": (lambda entry: entry.strategy or None, False),
    "model": (lambda entry: entry.model or None, False),
    "largest first": (lambda entry: entry.size_bytes, True),
}
"""Orders of the list, the usual one first: the sort key, and whether the largest comes first."""


def largest_saving(summary: Summary) -> tuple[object, ...]:
    """Sort key: a warning's saving is above one that is less likely than not, as in the report of each run."""
    counts = tuple(summary.findings.get(label, 0) for label in SEVERITIES)
    has_warning = any(summary.findings.get(severity.label) for severity in (Severity.ERROR, Severity.WARNING))
    return has_warning and summary.impact > 0, summary.impact, counts


@dataclass(frozen=True)
class RunFilter:
    """What to list, in which order; an empty filter means all."""

    text: str = ""
    strategies: Sequence[str] = ()
    models: Sequence[str] = ()
    verdicts: Sequence[str] = ()
    since_s: float | None = None
    step_ns: tuple[float, float] | None = None
    order: str = "name"


def verdict(entry: RunEntry) -> str:
    """Return one of VERDICTS."""
    if entry.snapshots:
        return SNAPSHOT
    if entry.problem:
        return NO_TRACE_YET if entry.is_live and not entry.files else BROKEN
    if entry.summary is None:
        return FAILED if entry.check_error else UNCHECKED
    worst = next((label for label in SEVERITIES if entry.summary.findings.get(label)), None)
    if entry.summary.is_doubtful:
        return CANNOT_JUDGE
    if worst in (None, Severity.INFO.label) and entry.summary.quality_issues:
        return QUALITY_ISSUES
    return worst or GOOD


def chip(entry: RunEntry) -> str:
    """Return the verdict in a few words: how many findings have the worst severity, or why there is none."""
    word = verdict(entry)
    if word == Severity.INFO.label and entry.summary and entry.summary.impact < _WORTH_SHOWING:
        return GOOD
    count = entry.summary.findings.get(word, 0) if entry.summary else 0
    if word == Severity.INFO.label:
        return f"{count} {word}"
    return units.count(count, word) if count else word


def filter_runs(entries: Sequence[RunEntry], run_filter: RunFilter) -> list[RunEntry]:
    """Return the matching runs in the order chosen; runs without its sort key come last."""
    matching = [entry for entry in entries if _matches(entry, run_filter)]
    by, largest_first = ORDERS[run_filter.order]
    if run_filter.order == "name":
        return matching
    with_key = [entry for entry in matching if by(entry) is not None]
    rest = [entry for entry in matching if by(entry) is None]
    return sorted(with_key, key=by, reverse=largest_first) + rest


def table(entries: Sequence[RunEntry]) -> pl.DataFrame:
    """Return the runs with columns COLUMNS, one row each, without those of `_LEFT_OUT_IF_EMPTY` that are."""
    frame = pl.DataFrame([_row(entry) for entry in entries], schema=COLUMNS, orient="row")
    return frame.select(name for name in COLUMNS if name not in _LEFT_OUT_IF_EMPTY or frame[name].count())


def page_of(entry: RunEntry) -> str | None:
    """Return the address of the page that opens a run, '' for the first one; None where nothing can open it."""
    if entry.snapshots:
        return "memory"
    return None if entry.problem else ""


def _row(entry: RunEntry) -> tuple[Any, ...]:
    summary, page = entry.summary, page_of(entry)
    return (
        escaping.inert(entry.name),
        [chip(entry)],
        _claim(summary.first_finding) if summary else None,
        _percent(summary.impact if summary else None),
        summary.step_time_ns if summary and summary.step_time_ns else None,
        f"./{page}?run={quote(entry.name, safe='')}" if page is not None else None,
        datetime.fromtimestamp(entry.created_ns / 1e9, UTC) if _is_date(entry.created_ns) else None,
        "live" if entry.is_live else None,
        [ns / 1e6 for ns in summary.steps_ns] if summary and summary.steps_ns else None,
        _percent(summary.exposed_communication_ratio if summary else None),
        _text(_role(entry)),
        _text(entry.strategy),
        _text(entry.model),
        _ranks(entry),
        entry.size_bytes / 2**20,
        None if entry.snapshots else _text(entry.problem or entry.check_error, 300),
    )


def _claim(first_finding: str) -> str | None:
    """Claim of the finding to read first: without its rule's code and its cost, which has a column of its own.

    As many words as a cell shows.

    >>> _claim("COMM001: Ranks take turns; it costs up to 71 ms of 101 ms a step (70.8%)")
    'Ranks take turns'
    """
    claim, _, cost = first_finding.partition(": ")[2].rpartition("; ")
    return textwrap.shorten(claim or cost, _CLAIM_CHARACTERS, placeholder=" …") or None


def _matches(entry: RunEntry, run_filter: RunFilter) -> bool:
    words = run_filter.text.casefold().split()
    text = f"{entry.name} {_role(entry)} {entry.strategy} {entry.model} {verdict(entry)} {entry.problem}".casefold()
    step_ns = entry.summary.step_time_ns if entry.summary else None
    left_ns, right_ns = run_filter.step_ns or (0.0, 0.0)
    return (
        all(word in text for word in words)
        and (not run_filter.strategies or (entry.strategy or UNKNOWN) in run_filter.strategies)
        and (not run_filter.models or (entry.model or UNKNOWN) in run_filter.models)
        and (not run_filter.verdicts or verdict(entry) in run_filter.verdicts)
        and (run_filter.since_s is None or time.time() - (entry.created_ns or 0) / 1e9 <= run_filter.since_s)
        and (run_filter.step_ns is None or (step_ns is not None and left_ns <= step_ns <= right_ns))
    )


def _weight(entry: RunEntry) -> tuple[int, ...] | None:
    if entry.summary is None:
        return None
    return tuple(entry.summary.findings.get(label, 0) for label in SEVERITIES)


def _role(entry: RunEntry) -> str:
    """Role of a run in a job of several programs, and how many roles its folder has; '' in other jobs."""
    role = entry.role or (entry.summary.role if entry.summary else "")
    count = entry.summary.roles if entry.summary else 0
    return f"{role} (1 of {count} roles)" if count > 1 else role


def _ranks(entry: RunEntry) -> int | None:
    from_summary = entry.summary.ranks if entry.summary else None
    return from_summary if entry.world_size is None else entry.world_size


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else 100 * ratio


def _text(text: str, limit: int = escaping.MAX_TEXT) -> str | None:
    return escaping.inert(text, limit) or None


def _is_date(ns: int | None) -> TypeGuard[int]:
    return ns is not None and 0 < ns < 4_102_444_800 * 10**9  # until 2100: a manifest can say anything
