"""The cost of a finding: how much shorter the mean step is in a replay without its cause."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import polars as pl

from tracekit.analysis.parallelism import late_ranks
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.replay.graph import representative_ranks, savings, steps
from tracekit.replay.graph.causes.cause import Cause, Pricing
from tracekit.replay.graph.causes.stalls import STALLED_COLLECTIVE, Removal
from tracekit.replay.graph.dependency_graph import Graph
from tracekit.replay.graph.nodes import WORK, HostSpan
from tracekit.rules import outlier_steps, slow_collectives
from tracekit.rules.rule import Finding, Report, Severity, WhatIf, sort_findings, warnings

_MIN_LAUNCHED_RATIO = 0.9
"""Share of the launched work whose launch must be known: otherwise the graph lacks the work's dependencies."""
_MIN_ACTIVITIES = 100
"""With less work on each rank, waits cannot be inferred."""
_MIN_PART_RATIO = 0.25
"""Share of what a late rank costs from which the time that its host takes longer for a cause is a reason."""
_MORE = 2
_UNEVEN = "RANK003"
_MIN_OWN_RATIO = 0.5
"""Share of the waiting for late ranks, or of what a straggler costs, that must remain without other causes for a
fault of its own."""


def attribute_costs(report: Report) -> Report:
    """Return the report with the cost of each finding taken from a replay without its cause, where possible.

    This needs a finding with a `what_if`, and a run that can be replayed: with the launches of 90% of its device work
    (on a CPU run, of its collectives), 100 activities or more on each rank, and a replay within 5% of the recorded
    steps. Work that was queued before the window needs no launch: its start is an input of the replay. The cost is the
    difference of the mean step with and without the cause, in ns, as in `tracekit whatif`; the impact is its share. The
    message states both.

    So that no time is priced twice, causes are priced in this order:

    1. STEP001: only its single stalls are removed. If it then still warns, they stay in the replays of other causes, as
       do the first uses of STEP002. In a window of one step, it becomes information if the rule of the cause warns.
    2. STEP004: only its stalled collectives are removed. Causes in the time of transfers are priced without them.
    3. Data loading, blocking calls, allocator calls, saves, device stalls and clock drops.
    4. Stragglers, which may be late because of 3: without the causes of 3 that have a warning. If less than half of the
       cost remains, the finding becomes information.
    5. Late launches: without all of these and without stragglers.

    In a run with many ranks, representative ranks are replayed, and a note names them. The cost of a finding on other
    ranks is the one that its rule measured.

    If a replay saves less than `min_saved_ratio`, the step has another bottleneck after this one. The finding becomes
    information, or is left out if it already was information, or if the rule did not measure more either. In all other
    cases the cost that the rule measured stays. Findings are sorted again.
    """
    finding_ranks = tuple(finding.ranks for finding in report.findings if finding.what_if)
    run = representative_ranks.run_of(report.run, finding_ranks) if finding_ranks else report.run
    replayable = bool(finding_ranks) and _can_be_replayed(run)
    priced = [part for finding in report.findings for part in _priced_stalls(report.run, run, finding, replayable)]
    stalls = outlier_steps.reported_stalls(report.run, priced) if replayable else pl.DataFrame()
    stalled = slow_collectives.removal(report.run, priced) if replayable else None
    findings: list[Finding] = []
    removed: list[Removal] = []
    for finding in sorted(priced, key=_pricing):
        # Removal of a finding's cause, in which single stalls stay; None for a finding without a cause.
        if finding.what_if is None or finding.what_if.cause.is_of_finding:
            removal = None
        else:
            cause = finding.what_if.cause
            ranks = finding.ranks if cause.pricing is Pricing.LATE_RANKS else ()
            removal = Removal(cause, ranks, outlier_steps.remaining_spans(report.run, stalls, cause))
        repriced = list(_with_saving(run, finding, removal, removed, stalled)) if replayable else _if_costly(finding)
        findings += repriced
        if removal and _is_confirmed(finding, repriced):
            removed.append(removal)
    if removed:
        findings = [_beyond(run, finding, removed) if finding.code == _UNEVEN else finding for finding in findings]
        findings = [outlier_steps.downgrade_repeated(finding, findings, stalls) for finding in findings]
    notes = (*report.notes, _replayed_ranks(report.run, run)) if replayable and run is not report.run else report.notes
    return replace(report, findings=sort_findings(findings), notes=notes)


def _replayed_ranks(run: Run, replayed: Run) -> str:
    count = f"{len(replayed.ranks)} of {len(run.ranks):,} ranks"
    return f"potential savings are from replays of {count}: {units.ranges(replayed.ranks)}"


def saved_by(report: Report, removals: Sequence[Removal]) -> int:
    """Saving per step of a report's run by the last of some removals, after the others, in ns.

    These are the `removals` of a finding, also of one on another recording of the same job: the single stalls that the
    report states stay if they stayed there, too. 0 without a replay.
    """
    stalls = outlier_steps.reported_stalls(report.run, report.findings)
    *first, last = (replace(removal, stalls=_staying_in_both(report.run, stalls, removal)) for removal in removals)
    run = representative_ranks.run_of(report.run, tuple(removal.ranks for removal in removals if removal.ranks))
    stalled = slow_collectives.removal(report.run, report.findings)
    solo, after = _savings(run, last, (*_stalled_before(last, stalled), *first))
    return max(0, min(step.saved_ns for step in (solo, after) if step)) if solo else 0


def _staying_in_both(run: Run, stalls: pl.DataFrame, removal: Removal) -> tuple[HostSpan, ...]:
    """Host spans of a run in `stalls` that stay where a cause is removed, and stayed in a removal.

    Where retries recur, a single one may be no outlier: then it is in the price there, and so has to be here.
    """
    names = {span.stall for span in removal.stalls}
    return tuple(span for span in outlier_steps.remaining_spans(run, stalls, removal.cause) if span.stall in names)


def _priced_stalls(run: Run, replayed: Run, finding: Finding, replayable: bool) -> Iterable[Finding]:
    """Return a finding on single stalls with its cost from a replay, if there is one; others as they are.

    `replayed` is the run of the ranks that are replayed.
    """
    if finding.what_if is None or not finding.what_if.cause.is_of_finding or not replayable:
        return (finding,)
    is_collective = finding.what_if.cause is STALLED_COLLECTIVE
    removal = slow_collectives.removal(run, (finding,)) if is_collective else outlier_steps.removal(run, finding)
    if removal is None:
        return (finding,)
    # The spans of stalls are those of this run alone, so no other run can be replayed without them.
    return [replace(part, removals=()) for part in _with_saving(replayed, finding, removal, [], None)]


def _beyond(run: Run, finding: Finding, removed: list[Removal]) -> Finding:
    """Return a finding on waiting for late ranks with the waiting that remains without the causes in `removed`."""
    before_ns = savings.waiting_ns(run)
    ratio = min(1.0, savings.waiting_ns(run, removed) / before_ns) if before_ns else 1.0
    codes = " and ".join(dict.fromkeys(removal.code for removal in removed))
    is_consequence = ratio < _MIN_OWN_RATIO
    return replace(
        finding,
        severity=Severity.INFO if is_consequence else finding.severity,
        cost_ns=int(ratio * finding.cost_ns),
        impact=ratio * finding.impact,
        message=f"{finding.message} {units.share(1 - ratio)} of the waiting ends with {codes}.",
    )


def _pricing(finding: Finding) -> Pricing:
    return finding.what_if.cause.pricing if finding.what_if else Pricing.INDEPENDENT


def _before(run: Run, finding: Finding, removed: list[Removal]) -> tuple[Removal, ...]:
    """Return the causes with a warning that contain the time of the finding, or make it necessary."""
    if _pricing(finding) is Pricing.CONSEQUENCE:
        return tuple(removed)
    if _pricing(finding) is not Pricing.LATE_RANKS:
        return ()
    sources = (removal for removal in removed if removal.cause.pricing is Pricing.SOURCE)
    return tuple(
        replace(removal, ranks=finding.ranks) for removal in sources if _makes_late(run, finding, removal.cause)
    )


def _stalled_before(removal: Removal, stalled: Removal | None) -> tuple[Removal, ...]:
    """Return the removal of stalled collectives where a cause is the time of transfers: their excess is not its."""
    return (stalled,) if stalled and removal.cause.is_transfer_time else ()


def _makes_late(run: Run, finding: Finding, cause: Cause) -> bool:
    """Return whether a cause takes the hosts of late ranks longer than those of others, by a part of what is lost.

    Or leaves their devices idle for longer: on other ranks the same cause may be hidden behind queued work.
    """
    removed_ns: dict[int, int] = dict(savings.host_time(run, cause).iter_rows())
    late = [ns for rank, ns in removed_ns.items() if rank in finding.ranks]
    other_ns = [ns for rank, ns in removed_ns.items() if rank not in finding.ranks]
    longer_ns = statistics.median(late or [0]) - statistics.median(other_ns or [0])
    lost_ns = finding.cost_ns * savings.replayed_steps(run).select("window", "step").n_unique()
    largest = late_ranks.extra_time(run, finding.ranks).head(1).filter(pl.col("part") == cause.idle_part)
    is_exposed = bool((largest["extra_ns"] >= _MIN_OWN_RATIO * max(finding.cost_ns, 1)).any())
    return is_exposed or bool(longer_ns >= _MIN_PART_RATIO * max(lost_ns, 1))


def _is_confirmed(finding: Finding, repriced: list[Finding]) -> bool:
    """Return whether a replay confirmed a warning, or found it to be the consequence of another one."""
    pricing = _pricing(finding)
    if finding.severity == Severity.INFO or pricing is Pricing.INDEPENDENT:
        return False
    confirmed = repriced if pricing is Pricing.LATE_RANKS else warnings(repriced)
    return any(priced.is_priced and priced.cost_ns > 0 for priced in confirmed)


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
    in_window = launched & ~graph.is_queued_before
    return bool((graph.launch[: graph.count][in_window] >= 0).sum() >= _MIN_LAUNCHED_RATIO * in_window.sum())


def _if_costly(finding: Finding) -> list[Finding]:
    """Return the finding with the cost that its rule measured, unless that is too small."""
    is_costly = finding.what_if is None or finding.impact >= finding.what_if.min_saved_ratio
    return [finding] if is_costly else []


def _with_saving(
    run: Run, finding: Finding, removal: Removal | None, removed: list[Removal], stalled: Removal | None
) -> Iterator[Finding]:
    """Yield the finding, with the cost from a replay if there is one; nothing if the cost is too small.

    The causes of which it is a consequence, and stalled collectives, are removed before: only what remains is the
    finding's.
    """
    what_if = finding.what_if
    if what_if is None or removal is None:
        yield finding
        return
    if finding.ranks and not set(finding.ranks) & set(run.ranks):
        yield from _if_costly(finding)
        return
    causing = _before(run, finding, removed)
    first = (*_stalled_before(removal, stalled), *causing)
    solo, after = _savings(run, removal, first)
    if solo is None:
        yield from _if_costly(finding)
        return
    smallest = min(solo, after, key=lambda step: step.saved_ns) if after else solo
    priced = replace(_reprice(finding, what_if, first, smallest), removals=(*causing, removal))
    # Finding with the ranks whose hosts spend more than twice as much on its cause as those that it names. Rules
    # measure where the device is idle directly after; the replay removes the cause on all ranks. A host may pause after
    # a wait that found the device almost idle.
    if not what_if.cause.is_hidden_elsewhere or not priced.ranks:
        repriced = priced
    else:
        removed_ns: dict[int, int] = dict(savings.host_time(run, what_if.cause).iter_rows())
        named_ns = max(removed_ns.get(rank, 0) for rank in priced.ranks)
        other_ranks = [rank for rank, ns in removed_ns.items() if ns > _MORE * named_ns]
        if not other_ranks:
            repriced = priced
        else:
            where = f"Most of the host's time for it is on {units.numbered('rank', other_ranks)}."
            repriced = replace(
                priced, ranks=tuple(sorted({*priced.ranks, *other_ranks})), message=f"{priced.message} {where}"
            )
    if after and what_if.cause.pricing is Pricing.LATE_RANKS and after.saved_ns < _MIN_OWN_RATIO * solo.saved_ns:
        yield replace(repriced, severity=Severity.INFO)  # most of it is the fault that makes the rank late
    elif repriced.impact >= what_if.min_saved_ratio:
        yield repriced
    elif _if_costly(finding) and finding.severity > Severity.INFO:
        yield replace(repriced, severity=Severity.INFO)


@dataclass(frozen=True)
class _MeanStep:
    """What the mean step is shorter without a cause, the mean step, and the confidence of the replay.

    `before_steps_ns` is the part of `saved_ns` before the first device work of the window.
    """

    saved_ns: int
    step_ns: int
    confidence: float
    before_steps_ns: int = 0


def _reprice(finding: Finding, what_if: WhatIf, first: tuple[Removal, ...], mean: _MeanStep) -> Finding:
    saved_ns = max(0, min(mean.saved_ns, finding.cost_ns) if what_if.is_partial else mean.saved_ns)
    share = min(1.0, saved_ns / mean.step_ns)
    after = f" after {' and '.join(dict.fromkeys(removal.code for removal in first))}" if first else ""
    per = "in the window" if finding.is_of_window else "per step"
    before_ns = min(saved_ns, mean.before_steps_ns)
    before = ""
    if before_ns >= savings.MIN_BEFORE_RATIO * mean.step_ns:
        before = f"; {units.duration(before_ns)} of it is before the first device work of the recording"
    saving = f"Potential saving by replay{after}: {units.duration(saved_ns)} {per} ({units.share(share)}){before}."
    return replace(
        finding,
        cost_ns=saved_ns,
        impact=share,
        before_steps_ratio=min(share, before_ns / mean.step_ns),
        is_priced=True,
        is_upper_bound=False,
        confidence=min(finding.confidence, mean.confidence),
        message=f"{finding.message} {saving}",
    )


def _savings(run: Run, removal: Removal, first: tuple[Removal, ...]) -> tuple[_MeanStep | None, _MeanStep | None]:
    """Return the saving of a removal alone, and after those in `first`; None for each without a replay."""
    return _saving_per_step(run, removal), _saving_per_step(run, removal, first=first) if first else None


def _total_saved_ns(table: pl.DataFrame) -> int:
    return steps.total_ns(table, "replayed_ns") - steps.total_ns(table, "without_ns")


def _saving_per_step(run: Run, removal: Removal, *, first: tuple[Removal, ...] = ()) -> _MeanStep | None:
    """Return the mean saving over steps, each on the slowest rank, without a cause, in addition to those in `first`.

    None if there is no replay.
    """
    without = savings.saving_of(run, (*first, removal))
    if without.steps.is_empty():
        return None
    count = without.steps.select("window", "step").n_unique()
    saved_ns, before_steps_ns = _total_saved_ns(without.steps), without.before_steps_ns
    if first:
        by_first = savings.saving_of(run, first)
        saved_ns -= _total_saved_ns(by_first.steps)
        before_steps_ns -= by_first.before_steps_ns
    step_ns = max(1, steps.total_ns(without.steps, "duration_ns") // count)
    return _MeanStep(saved_ns // count, step_ns, without.confidence, max(before_steps_ns, 0))
