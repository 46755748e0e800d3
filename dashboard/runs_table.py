"""A catalog as a table: what a person looks for in it, in which order."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import polars as pl

from dashboard.run_catalog import RunEntry
from tracekit.model import escaping
from tracekit.rules.rule import Severity

UNCHECKED, GOOD, BROKEN, QUALITY_ISSUES = "not checked", "good", "cannot be opened", "doubtful data"
NO_TRACE_YET = "no trace yet"
VERDICTS = (
    *(severity.label for severity in sorted(Severity)[::-1]),
    GOOD,
    QUALITY_ISSUES,
    UNCHECKED,
    NO_TRACE_YET,
    BROKEN,
)
"""What a run can come to: the gravest of its findings that are not of the data, or why there is none."""
UNKNOWN = "not said"
DAY_S = 86_400
PERIODS = {"any time": None, "last day": DAY_S, "last week": 7 * DAY_S, "last month": 30 * DAY_S}
ORDERS: Mapping[str, tuple[Callable[[RunEntry], Any], bool]] = {
    "name": (lambda entry: entry.name, False),
    "newest first": (lambda entry: entry.created_ns, True),
    "slowest step first": (lambda entry: entry.summary and entry.summary.step_time_ns, True),
    "worst verdict first": (lambda entry: _weight(entry), True),
    "most to gain first": (lambda entry: entry.summary and entry.summary.impact, True),
    "most exposed communication first": (
        lambda entry: entry.summary and entry.summary.exposed_communication_ratio,
        True,
    ),
    "strategy": (lambda entry: entry.strategy or None, False),
    "model": (lambda entry: entry.model or None, False),
    "largest first": (lambda entry: entry.size_bytes, True),
}
"""Orders of a list: what it goes by, and whether the largest comes first. "name" is how the catalog comes."""


@dataclass(frozen=True)
class RunFilter:
    """What a person looks for; empty means all."""

    text: str = ""
    strategies: Sequence[str] = ()
    models: Sequence[str] = ()
    verdicts: Sequence[str] = ()
    since_s: float | None = None
    step_ms: tuple[float, float] | None = None
    order: str = "name"


def verdict(entry: RunEntry) -> str:
    """Return one of VERDICTS."""
    if entry.problem:
        return NO_TRACE_YET if entry.is_live and not entry.files else BROKEN
    if entry.summary is None:
        return UNCHECKED
    worst = next((label for label in VERDICTS[: len(Severity)] if entry.summary.findings.get(label)), None)
    if worst in (None, Severity.INFO.label) and entry.summary.quality_issues:
        return QUALITY_ISSUES
    return worst or GOOD


def chips(entry: RunEntry) -> list[str]:
    """Return the verdict as its counts: "1 error", "3 warnings", or in a word."""
    summary = entry.summary
    if entry.problem or summary is None:
        return [verdict(entry)]
    counts = {label: number for label in VERDICTS[: len(Severity)] if (number := summary.findings.get(label, 0))}
    told = [f"{number} {label}{'s' * (number > 1 and label != 'info')}" for label, number in counts.items()]
    if not counts.get("error") and not counts.get("warning"):
        told = [GOOD, *told]
    return told + [QUALITY_ISSUES] * bool(summary.quality_issues)


def filter_runs(listed: Sequence[RunEntry], wanted: RunFilter) -> list[RunEntry]:
    """Return the runs that are looked for, in the order wanted; what the order cannot tell comes last."""
    kept = [entry for entry in listed if _is_wanted(entry, wanted)]
    by, largest_first = ORDERS[wanted.order]
    if wanted.order == "name":
        return kept
    known = [entry for entry in kept if by(entry) is not None]
    rest = [entry for entry in kept if by(entry) is None]
    return sorted(known, key=by, reverse=largest_first) + rest


def table(listed: Sequence[RunEntry]) -> pl.DataFrame:
    """Return the runs as a page shows them, one row each; a column that says nothing of any is left out."""
    summaries = [entry.summary for entry in listed]
    frame = pl.DataFrame(
        {
            "run": [escaping.inert(entry.name) for entry in listed],
            "verdict": pl.Series([chips(entry) for entry in listed], dtype=pl.List(pl.String)),
            "now": ["live" if entry.is_live else None for entry in listed],
            "step_ms": pl.Series(
                [s.step_time_ns / 1e6 if s and s.step_time_ns else None for s in summaries], dtype=pl.Float64
            ),
            "steps": pl.Series(
                [[ns / 1e6 for ns in s.steps_ns] if s and s.steps_ns else None for s in summaries],
                dtype=pl.List(pl.Float64),
            ),
            "exposed": pl.Series([s.exposed_communication_ratio if s else None for s in summaries], dtype=pl.Float64),
            "gain": pl.Series([s.impact if s else None for s in summaries], dtype=pl.Float64),
            "recorded": pl.Series(
                [datetime.fromtimestamp(e.created_ns / 1e9, UTC) if _is_date(e.created_ns) else None for e in listed],
                dtype=pl.Datetime("us", "UTC"),
            ),
            "strategy": pl.Series([_text(entry.strategy) for entry in listed], dtype=pl.String),
            "model": pl.Series([_text(entry.model) for entry in listed], dtype=pl.String),
            "ranks": pl.Series([_ranks(entry) for entry in listed], dtype=pl.Int64),
            "size": [entry.size_bytes / 2**20 for entry in listed],
            "problem": pl.Series([_text(entry.problem, 300) for entry in listed], dtype=pl.String),
        }
    )
    return frame.select(name for name in frame.columns if name not in ("now", "problem") or frame[name].count())


def _is_wanted(entry: RunEntry, wanted: RunFilter) -> bool:
    words = wanted.text.casefold().split()
    told = f"{entry.name} {entry.strategy} {entry.model} {verdict(entry)} {entry.problem}".casefold()
    step_ns = entry.summary.step_time_ns if entry.summary else None
    left_ns, right_ns = (ms * 1e6 for ms in wanted.step_ms or (0.0, 0.0))
    return (
        all(word in told for word in words)
        and (not wanted.strategies or (entry.strategy or UNKNOWN) in wanted.strategies)
        and (not wanted.models or (entry.model or UNKNOWN) in wanted.models)
        and (not wanted.verdicts or verdict(entry) in wanted.verdicts)
        and (wanted.since_s is None or time.time() - (entry.created_ns or 0) / 1e9 <= wanted.since_s)
        and (wanted.step_ms is None or (step_ns is not None and left_ns <= step_ns <= right_ns))
    )


def _weight(entry: RunEntry) -> tuple[int, ...] | None:
    if entry.summary is None:
        return None
    return tuple(entry.summary.findings.get(label, 0) for label in VERDICTS[: len(Severity)])


def _ranks(entry: RunEntry) -> int | None:
    return entry.world_size if entry.world_size is not None else (entry.summary.ranks if entry.summary else None)


def _text(text: str, limit: int = escaping.MAX_TEXT) -> str | None:
    return escaping.inert(text, limit) or None


def _is_date(ns: int | None) -> bool:
    return ns is not None and 0 < ns < 4_102_444_800 * 10**9  # until 2100: a manifest can say anything
