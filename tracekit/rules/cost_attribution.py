"""The cost of a finding: how much shorter the mean step is in a replay without its cause."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import polars as pl

from tracekit.analysis.host import host_stalls
from tracekit.analysis.parallelism import outlier_steps
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.replay.graph import savings, steps
from tracekit.replay.graph.causes import CAUSES
from tracekit.replay.graph.dependency_graph import Graph
from tracekit.replay.graph.nodes import WORK
from tracekit.replay.graph.savings import Removal
from tracekit.rules.rule import Finding, Report, Severity, WhatIf, sort_findings

_MIN_LAUNCHED_RATIO = 0.9
"""Share of the launched work whose launch must be known: otherwise the graph lacks the work's dependencies."""
_MIN_ACTIVITIES = 100
"""With less work on each rank, waits cannot be inferred."""
_DATA, _STRAGGLER, _LATE_LAUNCH = "data-loading", "straggler", "late-launch"
_DIRECT = (_DATA, "blocking-sync", "allocator", "checkpoint", "device-stall", "clock-drop")
_CONSEQUENCES = (_STRAGGLER, _LATE_LAUNCH)
"""Causes that also contain the time of the causes before them: late ranks and late launches have reasons themselves."""
_MIN_PART_RATIO = 0.25
"""Share of what a late rank costs from which the time that its host takes longer for a cause is a reason."""
_CAUSE_OF_STALL = {
    host_stalls.RETRY: "allocator",
    host_stalls.ALLOCATION: "allocator",
    host_stalls.DATA: _DATA,
    host_stalls.SYNC: "blocking-sync",
    host_stalls.SAVE: "checkpoint",
}
"""The cause that removes a stall, by what the host does in it (`host_stalls.CAUSES`); late launches for the rest."""
_OUTLIERS, _UNEVEN = "STEP001", "RANK003"
_MIN_OWN_RATIO = 0.5
"""Share of the waiting for late ranks, or of what a straggler costs, that must remain without other causes for a
trouble of its own."""


def attribute_costs(report: Report) -> Report:
    """Return the report with the cost of each finding taken from a replay without its cause, where possible.

    It is possible on runs that have the launches of 90% of their device work (on a CPU run: of their collectives) and
    100 activities or more on each rank, and whose replay is within 5% of the recorded steps; there, for findings with a
    `what_if`. Work that was queued before the window needs no launch: its start is an input of the replay. The cost is
    what the mean step of the window is shorter without the cause, as `tracekit whatif` says, and the impact its share;
    the message states them.

    One trouble has one price. What STEP001 warns of is left out of other prices: steps in which all ranks stall, and
    the time lost to stalls of some ranks. In a window of one step, STEP001 is information where the rule of the cause
    warns. Data loading, blocking calls, allocator calls, saves, device stalls and clock drops of a late rank are what
    makes it late: a straggler is priced by what it costs without those that have a warning, and is information if that
    is less than half of it. Late launches are priced by what remains without all these and without stragglers.

    A finding whose replay saves less than its `min_saved_ratio` becomes information, since the step has another
    bottleneck behind this one; it is left out if it was information before, or if the rule did not measure more either.
    Otherwise the cost that the rule measured stays. Findings are sorted again.
    """
    run = report.run
    replayable = any(finding.what_if for finding in report.findings) and _can_be_replayed(run)
    stalls = _stalls(report) if replayable else pl.DataFrame()
    findings: list[Finding] = []
    removed: list[Removal] = []
    for finding in sorted(report.findings, key=_order):
        repriced = list(_with_replayed_cost(run, finding, removed, stalls)) if replayable else _measured(finding)
        findings += repriced
        if finding.what_if and _is_confirmed(finding, repriced):
            removed.append(_removal(finding, finding.what_if))
    if removed:
        findings = [_beyond(run, each, removed) if each.code == _UNEVEN else each for each in findings]
        findings = [_once(each, findings, stalls) for each in findings]
    return replace(report, findings=sort_findings(findings))


def _beyond(run: Run, finding: Finding, removed: list[Removal]) -> Finding:
    """Return a finding on waiting for late ranks with the waiting that remains without the causes in `removed`."""
    before_ns = savings.waiting_ns(run)
    ratio = min(1.0, savings.waiting_ns(run, removed) / before_ns) if before_ns else 1.0
    codes = " and ".join(dict.fromkeys(CAUSES[each.cause].code for each in removed))
    is_consequence = ratio < _MIN_OWN_RATIO
    return replace(
        finding,
        severity=Severity.INFO if is_consequence else finding.severity,
        cost_ns=int(ratio * finding.cost_ns),
        impact=ratio * finding.impact,
        message=f"{finding.message} {units.share(1 - ratio)} of the waiting ends with {codes}.",
    )


def _removal(finding: Finding, what_if: WhatIf) -> Removal:
    return Removal(what_if.cause, finding.ranks if what_if.cause == _STRAGGLER else ())


def _before(run: Run, finding: Finding, removed: list[Removal]) -> tuple[Removal, ...]:
    """Return the causes with a warning that contain the time of the finding, or make it necessary."""
    cause = finding.what_if.cause if finding.what_if else ""
    if cause == _LATE_LAUNCH:
        return tuple(removed)
    if cause != _STRAGGLER:
        return ()
    direct = (each for each in removed if each.cause != _STRAGGLER)
    return tuple(Removal(each.cause, finding.ranks) for each in direct if _makes_late(run, finding, each.cause))


def _makes_late(run: Run, finding: Finding, cause: str) -> bool:
    """Return whether a cause takes the hosts of late ranks longer than those of others, by a part of what is lost."""
    removed_ns: dict[int, int] = dict(savings.host_time(run, cause).iter_rows())
    late = [ns for rank, ns in removed_ns.items() if rank in finding.ranks]
    others = [ns for rank, ns in removed_ns.items() if rank not in finding.ranks]
    longer_ns = statistics.median(late or [0]) - statistics.median(others or [0])
    lost_ns = finding.cost_ns * savings.replayed_steps(run).select("window", "step").n_unique()
    return bool(longer_ns >= _MIN_PART_RATIO * max(lost_ns, 1))


def _stalls(report: Report) -> pl.DataFrame:
    """Return the single stalls that have a warning: rows of `outlier_steps.outlier_steps`, with the replay's cause."""
    stalls = report.run.run_table(outlier_steps.outlier_steps)
    is_warned = pl.lit(value=False)
    for finding in (each for each in _warnings(report.findings) if each.code == _OUTLIERS):
        is_warned |= _is_of(finding)
    cause = pl.col("cause").replace_strict(_CAUSE_OF_STALL, default=_LATE_LAUNCH, return_dtype=pl.String)
    return stalls.filter(is_warned).with_columns(cause.alias("cause"))


def _is_of(outliers: Finding) -> pl.Expr:
    """Return whether a row of `outlier_steps.outlier_steps` belongs to a finding on outlier steps."""
    others = pl.col("ranks").list.set_symmetric_difference(list(outliers.ranks)).list.len()
    of = (others == 0) & ~pl.col("is_everyone") if outliers.ranks else pl.col("is_everyone")
    return pl.col("step").is_in(outliers.steps) & of


def _once(finding: Finding, findings: Iterable[Finding], stalls: pl.DataFrame) -> Finding:
    """Return a finding on outlier steps as information if the rule of its cause warns of the same stall.

    That is so in a window of one step, whose stalls may be steady or single. Other findings are returned as they are.
    """
    if finding.code != _OUTLIERS or finding.severity <= Severity.INFO:
        return finding
    own = stalls.filter(_is_of(finding))
    codes = {CAUSES[cause].code for cause in own["cause"].unique()}
    is_only_step = bool((own["steps"] <= 1).all()) and own.height > 0
    is_reported = codes <= {each.code for each in _warnings(findings)}
    return replace(finding, severity=Severity.INFO) if is_only_step and is_reported else finding


def _warnings(findings: Iterable[Finding]) -> Iterator[Finding]:
    return (each for each in findings if each.severity > Severity.INFO)


def _order(finding: Finding) -> int:
    """Return 0 for causes that are priced first, then the place among the consequences."""
    cause = finding.what_if.cause if finding.what_if else ""
    return 1 + _CONSEQUENCES.index(cause) if cause in _CONSEQUENCES else 0


def _is_confirmed(finding: Finding, repriced: list[Finding]) -> bool:
    """Return whether a replay confirmed a warning, or found it to be the consequence of another one."""
    cause = finding.what_if.cause if finding.what_if else ""
    if finding.severity == Severity.INFO or cause not in (*_DIRECT, *_CONSEQUENCES):
        return False
    confirmed = repriced if cause == _STRAGGLER else _warnings(repriced)
    return any(_SAVING in each.message and each.cost_ns > 0 for each in confirmed)


def _can_be_replayed(run: Run) -> bool:
    if not all(_has_dependencies(graph) for graph in savings.graphs_of(run)):
        return False
    replayed = savings.replayed_steps(run)
    recorded_ns = steps.total_ns(replayed, "duration_ns")
    limit_ns = savings.MAX_ERROR_RATIO * recorded_ns
    return recorded_ns > 0 and abs(steps.total_ns(replayed, "replayed_ns") - recorded_ns) <= limit_ns


def _has_dependencies(graph: Graph) -> bool:
    """Return whether a graph has enough work, and the launches of most of it; on a CPU run, ops are work."""
    launched = graph.column("what") == WORK
    work = launched if graph.on_device else launched | graph.matches("kind", "compute")
    if work.sum() < _MIN_ACTIVITIES * graph.frame["rank"].n_unique():
        return False
    judged = launched & ~graph.is_queued_before
    return bool((graph.launch[: graph.count][judged] >= 0).sum() >= _MIN_LAUNCHED_RATIO * judged.sum())


def _measured(finding: Finding) -> list[Finding]:
    """Return the finding with the cost that its rule measured, unless that is too small."""
    is_costly = finding.what_if is None or finding.impact >= finding.what_if.min_saved_ratio
    return [finding] if is_costly else []


def _with_replayed_cost(run: Run, finding: Finding, removed: list[Removal], stalls: pl.DataFrame) -> Iterator[Finding]:
    """Yield the finding, with the cost from a replay if there is one; nothing if the cost is too small.

    The causes of which it is a consequence are removed before: only what remains is the finding's.
    """
    what_if = finding.what_if
    if what_if is None:
        yield finding
        return
    own, first = _removal(finding, what_if), _before(run, finding, removed)
    alone = _saving_per_step(run, own, stalls)
    if alone is None:
        yield from _measured(finding)
        return
    after = _saving_per_step(run, own, stalls, first=first) if first else None
    least = min(alone, after, key=lambda each: each.saved_ns) if after else alone
    repriced = _reprice(finding, what_if, first, least)
    if after and what_if.cause == _STRAGGLER and after.saved_ns < _MIN_OWN_RATIO * alone.saved_ns:
        yield replace(repriced, severity=Severity.INFO)  # most of it is the trouble that makes the rank late
    elif repriced.impact >= what_if.min_saved_ratio:
        yield repriced
    elif _measured(finding) and finding.severity > Severity.INFO:
        yield replace(repriced, severity=Severity.INFO)


_SAVING = "Potential saving by replay"


@dataclass(frozen=True)
class _MeanStep:
    """What the mean step is shorter without a cause, the mean step, and the confidence of the replay.

    `before_steps_ns` is the part of `saved_ns` that step times do not contain.
    """

    saved_ns: int
    step_ns: int
    confidence: float
    before_steps_ns: int = 0


def _reprice(finding: Finding, what_if: WhatIf, first: tuple[Removal, ...], mean: _MeanStep) -> Finding:
    saved_ns = max(0, min(mean.saved_ns, finding.cost_ns) if what_if.is_partial else mean.saved_ns)
    share = min(1.0, saved_ns / mean.step_ns)
    after = f" after {' and '.join(dict.fromkeys(CAUSES[each.cause].code for each in first))}" if first else ""
    per = "in the window" if finding.is_of_window else "per step"
    saving = f"{_SAVING}{after}: {units.duration(saved_ns)} {per} ({units.share(share)})."
    return replace(
        finding,
        cost_ns=saved_ns,
        impact=share,
        before_steps_ratio=min(share, mean.before_steps_ns / mean.step_ns),
        confidence=min(finding.confidence, mean.confidence),
        message=f"{finding.message} {saving}",
    )


def _saving_per_step(
    run: Run, own: Removal, stalls: pl.DataFrame, *, first: tuple[Removal, ...] = ()
) -> _MeanStep | None:
    """Return the mean saving over steps, each on the slowest rank, without a cause besides those in `first`.

    Single stalls of the same cause do not count: neither those of some ranks nor steps in which all ranks have one, if
    others remain. None if there is no replay.
    """
    without = savings.saving_of(run, (*first, own))
    same = stalls.filter(pl.col("cause") == own.cause)
    of_all = same.filter("is_everyone")["step"].to_list()
    judged_steps = without.steps.filter(~_in(of_all))
    judged_steps = judged_steps if judged_steps.height else without.steps
    if judged_steps.is_empty():
        return None
    count = judged_steps.select("window", "step").n_unique()
    before_ns = steps.total_ns(judged_steps, "replayed_ns")
    if first:
        before = savings.saving_of(run, first).steps.join(judged_steps, on=_KEY, how="semi", nulls_equal=True)
        before_ns = steps.total_ns(before, "without_ns")
    stalled_ns = int(_of_ranks(stalls, own).filter(~_in(of_all))["lost_ns"].sum())
    saved_ns = before_ns - steps.total_ns(judged_steps, "without_ns") - stalled_ns
    step_ns = max(1, steps.total_ns(judged_steps, "duration_ns") // count)
    return _MeanStep(saved_ns // count, step_ns, without.confidence, without.before_steps_ns)


def _in(numbers: list[int]) -> pl.Expr:
    """Return whether a step is one of some numbers; a window without steps is none."""
    return pl.col("step").is_in(numbers).fill_null(value=False)


def _of_ranks(stalls: pl.DataFrame, own: Removal) -> pl.DataFrame:
    """Return the stalls of some ranks that are in a cause: those of the same cause, or of the late ranks."""
    of_some = stalls.filter(~pl.col("is_everyone"))
    if own.cause != _STRAGGLER:
        return of_some.filter(pl.col("cause") == own.cause)
    return of_some.filter(pl.col("ranks").list.set_difference(list(own.ranks)).list.len() == 0)


_KEY = ["window", "rank", "step", "device"]
