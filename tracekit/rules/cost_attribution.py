"""The cost of a finding: how much shorter the steps are in a replay without its cause."""

from collections.abc import Iterator
from dataclasses import replace

import polars as pl

from tracekit.analysis.compute import contention
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.replay.graph import savings, steps
from tracekit.replay.graph.causes import CAUSES
from tracekit.replay.graph.nodes import WORK
from tracekit.rules.rule import Finding, Report, Severity, WhatIf, sort_findings

_MIN_LAUNCHED_RATIO = 0.9
"""Share of a device's work whose launch must be known: otherwise the graph lacks the work's dependencies."""
_MIN_ACTIVITIES = 100
"""With less work on each rank, waits cannot be inferred."""


_DIRECT = ("data-loading", "blocking-sync", "allocator", "checkpoint", "device-stall", "clock-drop")
_CONSEQUENCES = ("straggler", "late-launch")
"""Causes that also contain the time of the causes before them: late ranks and late launches have reasons themselves."""


def attribute_costs(report: Report) -> Report:
    """Return the report with the cost of each finding taken from a replay without its cause, where possible.

    It is possible on runs with devices that have the launches of 90% of their work and 100 activities or more on each
    rank, and whose replay is within 5% of the recorded steps; there, for findings with a `what_if`. Work that was
    queued before the window needs no launch: its start is an input of the replay. Cost and impact become those of the
    finding's own steps, per step, and the message states them. Data loading, blocking calls, allocator calls, saves,
    device stalls and clock drops also make launches and ranks late. A straggler is priced by what it costs without
    those of them that have a warning, and late launches by what remains without these and the straggler: one trouble
    has one price.

    A finding whose replay saves less than its `min_saved_ratio` becomes information, since the step has another
    bottleneck behind this one; it is left out if it was information before, or if the rule did not measure more either.
    Otherwise the cost that the rule measured stays. Findings are sorted again.
    """
    run = report.run
    replayable = any(finding.what_if for finding in report.findings) and _can_be_replayed(run)
    findings: list[Finding] = []
    removed: list[str] = []
    for finding in sorted(report.findings, key=_order):
        cause = finding.what_if.cause if finding.what_if else ""
        first = tuple(removed) if cause in _CONSEQUENCES and replayable else ()
        repriced = list(_with_replayed_cost(run, finding, first, replayable=replayable))
        findings += repriced
        if cause in (*_DIRECT, "straggler") and cause not in removed and _is_confirmed(repriced):
            removed.append(cause)
    return replace(report, findings=sort_findings(findings))


def _order(finding: Finding) -> int:
    """Return 0 for causes that are priced first, then the place among the consequences."""
    cause = finding.what_if.cause if finding.what_if else ""
    return 1 + _CONSEQUENCES.index(cause) if cause in _CONSEQUENCES else 0


def _is_confirmed(repriced: list[Finding]) -> bool:
    """Return whether a replay confirmed a warning."""
    return any(each.severity > Severity.INFO and _SAVING in each.message for each in repriced)


def _can_be_replayed(run: Run) -> bool:
    if not run.table(contention.device_count)["devices"].sum():
        return False
    for graph in savings.graphs_of(run):
        work = graph.column("what") == WORK
        if work.sum() < _MIN_ACTIVITIES * graph.frame["rank"].n_unique():
            return False
        judged = work & ~graph.is_queued_before
        if (graph.launch[: graph.count][judged] >= 0).sum() < _MIN_LAUNCHED_RATIO * judged.sum():
            return False
    replayed = savings.replayed_steps(run)
    recorded_ns = steps.total_ns(replayed, "duration_ns")
    limit_ns = savings.MAX_ERROR_RATIO * recorded_ns
    return recorded_ns > 0 and abs(steps.total_ns(replayed, "replayed_ns") - recorded_ns) <= limit_ns


def _with_replayed_cost(run: Run, finding: Finding, first: tuple[str, ...], *, replayable: bool) -> Iterator[Finding]:
    """Yield the finding, with the cost from a replay if there is one; nothing if the cost is too small.

    The causes in `first` are removed before: only what remains is the finding's.
    """
    if finding.what_if is None:
        yield finding
        return
    is_costly = finding.impact >= finding.what_if.min_saved_ratio
    saving = savings.combined_saving(run, (*first, finding.what_if.cause)) if replayable else None
    per_step = _saving_per_step(_beyond(run, saving.steps, first), finding) if saving else None
    if not saving or not per_step:
        if is_costly:
            yield finding
        return
    saved_ns, step_ns = per_step
    if first:  # without other causes a late rank can matter more than it does now
        alone = _saving_per_step(savings.saving(run, finding.what_if.cause).steps, finding)
        saved_ns = min(saved_ns, alone[0]) if alone else saved_ns
    repriced = _reprice(finding, finding.what_if, first, saved_ns, step_ns)
    repriced = replace(repriced, confidence=min(finding.confidence, saving.confidence))
    if repriced.impact >= finding.what_if.min_saved_ratio:
        yield repriced
    elif is_costly and finding.severity > Severity.INFO:
        yield replace(repriced, severity=Severity.INFO)


def _beyond(run: Run, saved: pl.DataFrame, first: tuple[str, ...]) -> pl.DataFrame:
    """Return the steps of a saving compared with a replay in which the causes in `first` are removed."""
    if not first:
        return saved
    key = ["window", "rank", "step", "device"]
    before = savings.combined_saving(run, first).steps.select(*key, replayed_ns="without_ns")
    return saved.drop("replayed_ns").join(before, on=key, how="inner", nulls_equal=True, maintain_order="left")


_SAVING = "Potential saving by replay"


def _reprice(finding: Finding, what_if: WhatIf, first: tuple[str, ...], saved_ns: int, step_ns: int) -> Finding:
    saved_ns = max(0, min(saved_ns, finding.cost_ns) if what_if.is_partial else saved_ns)
    share = min(1.0, saved_ns / step_ns)
    after = f" after {' and '.join(CAUSES[cause].code for cause in first)}" if first else ""
    per = "in the window" if finding.is_of_window else "per step"
    saving = f"{_SAVING}{after}: {units.duration(saved_ns)} {per} ({units.share(share)})."
    return replace(finding, cost_ns=saved_ns, impact=share, message=f"{finding.message} {saving}")


def _saving_per_step(saved: pl.DataFrame, finding: Finding) -> tuple[int, int] | None:
    """Return the mean saving and the mean duration of the finding's steps, each on the slowest of its ranks.

    Ranks that wait for them save the same, but later: after the next collective, perhaps in another step.
    """
    judged = saved.filter(pl.col("step").is_in(finding.steps)) if finding.steps else saved
    own = judged.filter(pl.col("rank").is_in(finding.ranks))
    judged = own if own.height else judged
    if judged.is_empty():
        return None
    count = judged.select("window", "step").n_unique()
    saved_ns = steps.total_ns(judged, "replayed_ns") - steps.total_ns(judged, "without_ns")
    return saved_ns // count, max(1, steps.total_ns(judged, "duration_ns") // count)
