"""What findings cost: what a replay of the run without their cause would take less."""

from collections.abc import Mapping
from dataclasses import replace

import polars as pl

from tracekit import units
from tracekit.analysis import contention
from tracekit.rule import Finding, Report, Severity, in_order
from tracekit.trace import Run
from tracekit.whatif import saving, steps
from tracekit.whatif.nodes import WORK

_CAUSES: Mapping[str, str] = {
    "COMM001": "communication",
    "COMM002": "small-collectives",
    "COMM003": "micro-batch-reductions",
    "COMM004": "preparation",
    "HOST001": "late-launch",
    "HOST002": "blocking-sync",
    "HOST003": "data-loading",
    "MEM002": "recomputation",
    "RANK001": "straggler",
    "RANK002": "slow-link",
    "MEM001 device calls": "allocator",
}
"""By code, or by code and subject where a rule speaks of several things. Others cost what their rule says.

Rules of streams replay by themselves, to know whether to speak; these need no replay before something is found.
"""
_LEAST_RATIO = 0.005
_AT_MOST = ("MEM002",)
"""Whose own cost bounds it: memory can spare only a part of what the replay takes away."""
_MAX_ERROR = 0.02
"""How far the replay of the unchanged steps may be off the recorded ones, if it is to price anything."""

_LAUNCHED = 0.9
"""Of a device's work the launch must be known of this share: else nothing says what it waited for."""
_LEAST_WORK = 100
"""Of less work on each rank no waits can be inferred."""


def can_price(code: str) -> bool:
    """Return whether findings of a code can be priced by a replay."""
    return any(named.split()[0] == code for named in _CAUSES)


def priced(report: Report) -> Report:
    """Return the report with the cost of each finding taken from a replay without its cause, where one can tell.

    That is for warnings of time lost on devices, in runs that tell the launches of 90% of their work, do a hundred
    pieces of it or more on a rank, and are reproduced by the replay within 2%. Cost and impact become those of the
    finding's own steps, per step, and the message says so; what saves less than 0.5% of the step is information, since
    something else would hold it up next. Findings are sorted again. All others stay as they are.
    """
    if not any(_is_wanted(found) for found in report.findings) or not _can_be_replayed(report.run):
        return report
    findings = [_priced(report.run, found) if _is_wanted(found) else found for found in report.findings]
    return replace(report, findings=in_order(findings))


def _is_wanted(found: Finding) -> bool:
    return can_price(found.code) and found.severity >= Severity.WARNING and found.cost_ns > 0


def _can_be_replayed(run: Run) -> bool:
    if not run.table(contention.device_count)["devices"].sum():
        return False
    for graph in saving.graphs_of(run):
        work = graph.column("what") == WORK
        known = graph.launch[: graph.count][work] >= 0
        if work.sum() < _LEAST_WORK * graph.frame["rank"].n_unique() or known.sum() < _LAUNCHED * work.sum():
            return False
    replayed = saving.replayed(run)
    recorded_ns = steps.total_ns(replayed, "duration_ns")
    return recorded_ns > 0 and abs(steps.total_ns(replayed, "replayed_ns") - recorded_ns) <= _MAX_ERROR * recorded_ns


def _priced(run: Run, found: Finding) -> Finding:
    cause = _CAUSES.get(f"{found.code} {found.subject}", _CAUSES.get(found.code))
    if cause is None:
        return found
    told = _of_steps(saving.saving(run, cause).steps, found.steps)
    if told is None:
        return found
    saved_ns, step_ns = told
    saved_ns = max(0, min(saved_ns, found.cost_ns) if found.code in _AT_MOST else saved_ns)
    share = min(1.0, saved_ns / step_ns)
    return replace(
        found,
        severity=found.severity if share >= _LEAST_RATIO else Severity.INFO,
        cost_ns=saved_ns,
        impact=share,
        message=f"{found.message} Replayed without it, a step takes {units.duration(saved_ns)} less "
        f"({units.share(share)}).",
    )


def _of_steps(saved: pl.DataFrame, judged: tuple[int, ...]) -> tuple[int, int] | None:
    """Return what the judged steps save on average, of the rank that takes longest, and how long they take."""
    mine = saved.filter(pl.col("step").is_in(judged)) if judged else saved
    if mine.is_empty():
        return None
    each = mine.group_by("window", "step").agg(pl.col("duration_ns", "replayed_ns", "without_ns").max())
    saved_ns = (each["replayed_ns"] - each["without_ns"]).sum() // each.height
    return int(saved_ns), max(1, int(each["duration_ns"].sum()) // each.height)
