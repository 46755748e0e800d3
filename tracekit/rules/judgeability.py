"""Which rules cannot judge a run at all, and which findings rest on an incomplete recording."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import polars as pl

from tracekit.analysis.quality import trace_quality
from tracekit.analysis.time import breakdown
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.rules.rule import TIMED_FAMILIES, Finding, Rule, Severity, family

_WITHOUT_DEVICE = "no device activity was recorded, so times are of the host and were not judged (see DATA001)."
_WITHOUT_HOST = "CPU activity was not recorded, so the host was not judged (see DATA001)."
_WITHOUT_WORK = "no work was recorded, so nothing was judged (see DATA001)."
_WITHOUT_OPERATORS = "no operator was recorded, so compute is not known and was not judged (see DATA001)."
_REASONS = (
    ("no_work", TIMED_FAMILIES, _WITHOUT_WORK),
    ("no_device_activity", TIMED_FAMILIES, _WITHOUT_DEVICE),
    ("no_host_activity", ("HOST",), _WITHOUT_HOST),
    ("no_operators", tuple(name for name in TIMED_FAMILIES if name != "RANK"), _WITHOUT_OPERATORS),
)
"""Issue of a trace, and the families of rules that cannot judge a run all of whose traces have it."""

_LOST = (
    ("truncated", "The file is truncated, so idle time may be work that was lost."),
    ("sampled", "Most ops are missing, so idle time may be work that was not recorded."),
)
"""Issue of a trace in which idle time is no evidence, and what to say of findings that rest on it."""
_CUT = "Only a part of the step was recorded, so its share of a whole step is not known."
_IDLE_FAMILIES = (*TIMED_FAMILIES, "STEP")
_IDLE_CODES = ("MEM001", "MEM002")
_UNCERTAIN = 0.3

FACTS: tuple[TraceFact, ...] = (trace_quality.data_quality, trace_quality.cut_steps, breakdown.by_step)


def blind_spots(run: Run, rules: Iterable[Rule]) -> dict[str, str]:
    """Return why rules cannot judge a run, by code; rules that can are left out."""
    reasons = list(_reasons(run))
    return {rule.code: reason for rule in rules for families, reason in reasons if family(rule.code) in families}


def limit_findings(run: Run, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings; those on time that rest on lost events, or on cut steps alone, as information that says so.

    A finding on some ranks rests on lost events if one of these ranks has lost some, others if any rank has.
    """
    lost = dict(_lost(run))
    cut = set(run.table(trace_quality.cut_steps).select("rank", "step").iter_rows())
    uncut = set(run.table(breakdown.by_step).select("rank", "step").iter_rows()) - cut
    for finding in findings:
        is_on_time = family(finding.code) in _IDLE_FAMILIES or finding.code in _IDLE_CODES
        if finding.severity == Severity.INFO or not is_on_time:
            yield finding
            continue
        reason = next((lost[rank] for rank in _ranks(finding, lost) if rank in lost), None)
        of_steps = {(rank, step) for rank in finding.ranks or run.ranks for step in finding.steps or (None,)}
        if reason is None and of_steps & cut and not of_steps & uncut:
            reason = _CUT
        yield finding if reason is None else _as_information(finding, reason)


def _as_information(finding: Finding, reason: str) -> Finding:
    return replace(
        finding,
        severity=Severity.INFO,
        confidence=min(finding.confidence, _UNCERTAIN),
        message=f"{finding.message} {reason}",
        what_if=None,
    )


def _ranks(finding: Finding, lost: Iterable[int]) -> Iterable[int]:
    """Return the ranks whose events a finding rests on: all, if it compares ranks."""
    return lost if family(finding.code) == "RANK" or not finding.ranks else finding.ranks


def _lost(run: Run) -> Iterator[tuple[int, str]]:
    """Yield the ranks that have lost events, and what to say of findings on them."""
    issues = run.table(trace_quality.data_quality)
    for kind, reason in _LOST:
        for rank in issues.filter(pl.col("kind") == kind)["rank"].drop_nulls().unique().sort().to_list():
            yield rank, reason


def _reasons(run: Run) -> Iterator[tuple[tuple[str, ...], str]]:
    issues = run.table(trace_quality.data_quality)
    for kind, families, reason in _REASONS:
        affected = issues.filter(pl.col("kind") == kind).select("window", "rank").unique().height
        if run.sources and affected == len(run.sources):
            yield families, reason
