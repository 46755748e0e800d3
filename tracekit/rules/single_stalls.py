"""The single stalls of findings on outlier steps, as a replay removes them or lets them stay."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import polars as pl

from tracekit.analysis.host import host_stalls
from tracekit.analysis.parallelism import outlier_steps
from tracekit.model.run import Run
from tracekit.replay.graph.causes import CAUSES
from tracekit.replay.graph.transforms import HostSpan
from tracekit.rules.outlier_steps import ColdStart, OutlierStep, is_cold, is_warm_up
from tracekit.rules.rule import Finding, Severity, warnings

CODE = OutlierStep.code
_DATA, _LATE_LAUNCH = "data-loading", "late-launch"
_REMOVED_BY = {
    host_stalls.RETRY: "allocator",
    host_stalls.ALLOCATION: "allocator",
    host_stalls.DATA: _DATA,
    host_stalls.SYNC: "blocking-sync",
    host_stalls.SAVE: "checkpoint",
}
"""The cause that removes a stall, by what the host does in it (`host_stalls.CAUSES`); late launches for the rest."""

_APART = ("allocator", _DATA, "checkpoint")
"""Causes of stalls in which the host is in a state of its own, neither synchronizing nor pausing after it."""


def of_finding(run: Run, finding: Finding) -> Iterator[HostSpan]:
    """Yield when the hosts are in the stalls of a finding on outlier steps."""
    rows = run.table(outlier_steps.outlier_steps)
    return _spans(run, rows.filter(_is_of(finding)))


def reported_stalls(run: Run, findings: Iterable[Finding]) -> pl.DataFrame:
    """Return the single stalls that are reported by a warning of STEP001, or as first uses.

    Columns of `outlier_steps.outlier_steps`, and removed_by, the cause whose replay removes them.
    """
    stalls = run.table(outlier_steps.outlier_steps)
    is_reported = is_warm_up() & pl.lit(any(finding.code == ColdStart.code for finding in findings))
    for finding in (warning for warning in warnings(findings) if warning.code == CODE):
        is_reported |= _is_of(finding)
    removed_by = pl.col("cause").replace_strict(_REMOVED_BY, default=_LATE_LAUNCH, return_dtype=pl.String)
    return stalls.filter(is_reported).with_columns(removed_by.alias("removed_by"))


def staying(run: Run, stalls: pl.DataFrame, cause: str) -> tuple[HostSpan, ...]:
    """Host spans in `reported_stalls` that stay where a cause is removed.

    None in a window of one step, whose stalls may be steady or single. A blocking call in a stall of the allocator,
    say, is not part of it: the host is in another state then.
    """
    if stalls.is_empty():
        return ()
    is_apart = pl.col("removed_by").is_in(_APART) & pl.lit(cause == "blocking-sync")
    return tuple(_spans(run, stalls.filter(pl.col("steps") > 1, ~is_apart)))


def once(finding: Finding, findings: Iterable[Finding], stalls: pl.DataFrame) -> Finding:
    """Return a finding on outlier steps as information if the rule of its cause warns of the same of some `stalls`.

    That is so in a window of one step, whose stalls may be steady or single. Other findings are returned as they are.
    """
    if finding.code != CODE or finding.severity <= Severity.INFO:
        return finding
    matching = stalls.filter(_is_of(finding))
    codes = {CAUSES[cause].code for cause in matching["removed_by"].unique()}
    is_only_step = bool((matching["steps"] <= 1).all()) and matching.height > 0
    is_reported = codes <= {warning.code for warning in warnings(findings)}
    return replace(finding, severity=Severity.INFO) if is_only_step and is_reported else finding


def _spans(run: Run, stalls: pl.DataFrame) -> Iterator[HostSpan]:
    """Yield when the hosts are in these stalls.

    A rank whose device still has work while all others stall has no stall of its own: its host pauses as theirs do.
    """
    pieces = run.table(outlier_steps.outlier_stalls).with_columns(end_ns=pl.col("run_start_ns") + pl.col("dur_ns"))
    for stall in stalls.iter_rows(named=True):
        events = pieces.filter(pl.col("event").is_in(stall["events"]), pl.col("window") == stall["window"])
        all_spans = events.select("run_start_ns", "end_ns").rows()
        by_rank: dict[int, list[tuple[int, int]]] = {}
        for rank, span in zip(events["rank"].to_list(), all_spans, strict=True):
            by_rank.setdefault(rank, []).append(span)
        for rank in run.ranks if stall["is_everyone"] else dict.fromkeys(stall["ranks"]):
            for start_ns, end_ns in by_rank.get(rank, all_spans):
                yield HostSpan(stall["window"], rank, start_ns, end_ns, f"{stall['cause']} in step {stall['step']}")


def _is_of(outliers: Finding) -> pl.Expr:
    """Return whether a row of `outlier_steps.outlier_steps` belongs to a finding on outlier steps."""
    differing = pl.col("ranks").list.set_symmetric_difference(list(outliers.ranks)).list.len()
    same_ranks = (differing == 0) & ~pl.col("is_everyone") if outliers.ranks else pl.col("is_everyone")
    in_steps = pl.col("step").is_in(outliers.steps) if outliers.steps else pl.col("step").is_null()
    return in_steps & (pl.col("cause") == outliers.subject.split(" ")[0]) & same_ranks & ~is_cold()
