"""What findings cost: what a replay of the run without their cause would take less."""

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
"""Of a device's work the launch must be known of this share: else nothing says what it waited for."""
_MIN_ACTIVITIES = 100
"""Of less work on each rank no waits can be inferred."""


def attribute_costs(report: Report) -> Report:
    """Return the report with the cost of each finding taken from a replay without its cause, where one can tell.

    That is in runs of devices that tell the launches of 90% of their work, do a hundred pieces of it or more on a rank,
    and are reproduced by the replay within 2%; there, for findings that say `without` what. Cost and impact become
    those of the finding's own steps, per step, and the message says so. What saves less than the finding's
    `least_ratio` of the step is information, since something else would hold it up next, and left out if it was
    information before, or if the rule did not measure more either. Where no replay can tell, what the rule measured
    counts. Findings are sorted again.
    """
    run, asked = report.run, any(found.what_if for found in report.findings)
    can_tell = asked and _can_be_replayed(run)
    findings = [each for found in report.findings for each in _with_replayed_cost(run, found, can_tell=can_tell)]
    return replace(report, findings=sort_findings(findings))


def _can_be_replayed(run: Run) -> bool:
    if not run.table(contention.device_count)["devices"].sum():
        return False
    for graph in savings.graphs_of(run):
        work = graph.column("what") == WORK
        known = graph.launch[: graph.count][work] >= 0
        if (
            work.sum() < _MIN_ACTIVITIES * graph.frame["rank"].n_unique()
            or known.sum() < _MIN_LAUNCHED_RATIO * work.sum()
        ):
            return False
    replayed = savings.replayed(run)
    recorded_ns = steps.total_ns(replayed, "duration_ns")
    limit_ns = savings.MAX_ERROR_RATIO * recorded_ns
    return recorded_ns > 0 and abs(steps.total_ns(replayed, "replayed_ns") - recorded_ns) <= limit_ns


def _with_replayed_cost(run: Run, found: Finding, *, can_tell: bool) -> Iterator[Finding]:
    """Yield the finding, with its price if a replay tells one; nothing where it does not cost enough."""
    if found.what_if is None:
        yield found
        return
    enough = found.impact >= found.what_if.min_saved_ratio
    saved = savings.saving(run, found.what_if.cause) if can_tell else None
    told = saved and _saving_per_step(saved.steps, found.steps)
    if not saved or not told:
        if enough:
            yield found
        return
    better = _reprice(found, found.what_if, *told)
    better = replace(better, confidence=min(found.confidence, saved.confidence))
    if better.impact >= found.what_if.min_saved_ratio:
        yield better
    elif enough and found.severity > Severity.INFO:
        yield replace(better, severity=Severity.INFO)


def _reprice(found: Finding, without: WhatIf, saved_ns: int, step_ns: int) -> Finding:
    saved_ns = max(0, min(saved_ns, found.cost_ns) if without.is_partial else saved_ns)
    share = min(1.0, saved_ns / step_ns)
    message = f"{found.message} Replayed without it, a step takes {units.duration(saved_ns)} less"
    return replace(found, cost_ns=saved_ns, impact=share, message=f"{message} ({units.share(share)}).")


def _saving_per_step(saved: pl.DataFrame, judged: tuple[int, ...]) -> tuple[int, int] | None:
    """Return what the judged steps save on average, of the rank that takes longest, and how long they take."""
    mine = saved.filter(pl.col("step").is_in(judged)) if judged else saved
    if mine.is_empty():
        return None
    each = mine.group_by("window", "step").agg(pl.col("duration_ns", "replayed_ns", "without_ns").max())
    saved_ns = (each["replayed_ns"] - each["without_ns"]).sum() // each.height
    return int(saved_ns), max(1, int(each["duration_ns"].sum()) // each.height)
