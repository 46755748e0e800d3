"""The cost of a finding: how much shorter the steps are in a replay without its cause."""

from collections.abc import Iterator
from dataclasses import replace

import polars as pl

from tracekit.analysis.compute import contention
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.replay.graph import savings, steps
from tracekit.replay.graph.nodes import WORK
from tracekit.rules.rule import Finding, Report, Severity, WhatIf, sort_findings

_MIN_LAUNCHED_RATIO = 0.9
"""Share of a device's work whose launch must be known: otherwise the graph lacks the work's dependencies."""
_MIN_ACTIVITIES = 100
"""With less work on each rank, waits cannot be inferred."""


def attribute_costs(report: Report) -> Report:
    """Return the report with the cost of each finding taken from a replay without its cause, where possible.

    It is possible on runs with devices that have the launches of 90% of their work and 100 activities or more on each
    rank, and whose replay is within 2% of the recorded steps; there, for findings with a `what_if`. Work that was
    queued before the window needs no launch: its start is an input of the replay. Cost and impact
    become those of the finding's own steps, per step, and the message states them. A finding whose replay saves less
    than its `min_saved_ratio` becomes information, since the step has another bottleneck behind this one; it is left
    out if it was information before, or if the rule did not measure more either. Otherwise the cost that the rule
    measured stays. Findings are sorted again.
    """
    run = report.run
    replayable = any(finding.what_if for finding in report.findings) and _can_be_replayed(run)
    findings = [new for old in report.findings for new in _with_replayed_cost(run, old, replayable=replayable)]
    return replace(report, findings=sort_findings(findings))


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


def _with_replayed_cost(run: Run, finding: Finding, *, replayable: bool) -> Iterator[Finding]:
    """Yield the finding, with the cost from a replay if there is one; nothing if the cost is too small."""
    if finding.what_if is None:
        yield finding
        return
    is_costly = finding.impact >= finding.what_if.min_saved_ratio
    saving = savings.saving(run, finding.what_if.cause) if replayable else None
    per_step = _saving_per_step(saving.steps, finding.steps) if saving else None
    if not saving or not per_step:
        if is_costly:
            yield finding
        return
    repriced = _reprice(finding, finding.what_if, *per_step)
    repriced = replace(repriced, confidence=min(finding.confidence, saving.confidence))
    if repriced.impact >= finding.what_if.min_saved_ratio:
        yield repriced
    elif is_costly and finding.severity > Severity.INFO:
        yield replace(repriced, severity=Severity.INFO)


def _reprice(finding: Finding, what_if: WhatIf, saved_ns: int, step_ns: int) -> Finding:
    saved_ns = max(0, min(saved_ns, finding.cost_ns) if what_if.is_partial else saved_ns)
    share = min(1.0, saved_ns / step_ns)
    per = "in the window" if finding.is_of_window else "per step"
    saving = f"Potential saving by replay: {units.duration(saved_ns)} {per} ({units.share(share)})."
    return replace(finding, cost_ns=saved_ns, impact=share, message=f"{finding.message} {saving}")


def _saving_per_step(saved: pl.DataFrame, judged_steps: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the mean saving and the mean duration of the judged steps, on the slowest rank, as in `savings.Saving`.

    Not on the slowest rank of each step: without a cause, ranks move to other times, and single steps with them.
    """
    judged = saved.filter(pl.col("step").is_in(judged_steps)) if judged_steps else saved
    if judged.is_empty():
        return None
    count = judged.select("window", "step").n_unique()
    saved_ns = (steps.total_ns(judged, "replayed_ns") - steps.total_ns(judged, "without_ns")) // count
    return saved_ns, max(1, steps.total_ns(judged, "duration_ns") // count)
