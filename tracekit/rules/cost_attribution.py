"""The cost of a finding: how much shorter the mean step is in a replay without its cause; and its severity, by it."""

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import polars as pl

from tracekit.analysis.parallelism import late_ranks
from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.replay.graph import causes, representative_ranks, savings
from tracekit.replay.graph.causes.cause import Cause, Pricing
from tracekit.replay.graph.causes.device_time import STRAGGLER
from tracekit.replay.graph.causes.stalls import OCCASIONAL_STRAGGLER, SINGLE_STALL, STALLED_COLLECTIVE, Removal
from tracekit.replay.graph.nodes import WORK
from tracekit.rules import outlier_steps, slow_collectives, straggler_consequences, stragglers
from tracekit.rules.mean_saving import mean_saving
from tracekit.rules.rule import Finding, Report, Severity, WhatIf, sort_findings, warnings
from tracekit.rules.straggler_consequences import UNEVEN, pricing_of

_MIN_LAUNCHED_RATIO = 0.9
"""Share of the launched work whose launch must be known: otherwise the graph lacks the work's dependencies."""
_MIN_ACTIVITIES = 100
"""With less work on each rank, waits cannot be inferred."""
_MIN_PART_RATIO = 0.25
"""Share of what a late rank costs from which the time that its host takes longer for a cause is a reason."""
_MAX_DIFFERENCE_RATIO = 0.1
"""Evidence is of one step and a saving of the mean step: up to this share of the evidence they count as equal."""
_MORE = 2
_OCCASIONAL = "RANK005"
_MIN_EXPLAINED_RATIO = 0.1
"""Share of what a rank costs in some steps that its work in these steps has to explain."""
_MIN_OWN_RATIO = 0.5
"""Share of the waiting for late ranks, or of what a straggler costs, that must remain without other causes for a
fault of its own."""


def attribute_costs(report: Report) -> Report:
    """Return the report with the cost of each finding taken from a replay without its cause, where possible.

    This needs a finding with a `what_if`, and a run that can be replayed: with the launches of 90% of its device work
    (on a CPU run, of its collectives), 100 activities or more on each rank, and a replay within 5% of the recorded
    steps. Work that was queued before the window needs no launch: its start is an input of the replay. The cost is the
    difference of the mean step with and without the cause, in ns, as in `tracekit whatif`; the impact is its share.
    Where it differs from what the rule measured, the message says why.

    So that no time is priced twice, causes are priced in this order:

    1. STEP001: only its single stalls are removed. If it then still warns, they stay in the replays of other causes, as
       do the first uses of STEP002. In a window of one step, it becomes information if the rule of the cause warns.
    2. STEP004: only its stalled collectives are removed. Causes in the time of transfers are priced without them.
    3. Data loading, blocking calls, allocator calls, saves, device stalls and clock drops.
    4. Stragglers, which may be late because of 3: without the causes of 3 that have a warning. If less than half of the
       cost remains, the finding becomes information. Of several, each is priced after the costlier ones. A stall of 1
       that is most of a straggler's price is not in it; smaller ones, and copies, of a straggler alone are information
       if its price contains them.
    5. Ranks that are late in some steps, then late launches: without all of these and without stragglers.

    In a run with many ranks, representative ranks are replayed, and a note names them. The cost of a finding on other
    ranks is the one that its rule measured.

    If a replay saves less than `min_saved_ratio`, the step has another bottleneck after this one. The finding
    becomes information, or is left out if what the rule measured is information, too. In all other cases the cost
    that the rule measured stays. Without a replay, findings on the same ranks that measure the same time become
    information behind the first in that order. Findings are sorted again.
    """
    finding_ranks = tuple(finding.ranks for finding in report.findings if finding.what_if)
    run = representative_ranks.run_of(report.run, finding_ranks) if finding_ranks else report.run
    if not finding_ranks or not can_be_replayed(run):
        costly = filter(_is_costly, report.findings)
        return replace(report, findings=sort_findings(straggler_consequences.of_one_cause(report.run, [*costly])))
    priced = [part for finding in report.findings for part in _price_stalls(report.run, run, finding)]
    stalls = outlier_steps.reported_stalls(report.run, priced)
    stalled = slow_collectives.removal(report.run, priced)
    findings: list[Finding] = []
    removed: list[Removal] = []
    causing: dict[Cause, Finding] = {}
    for finding in _in_order(run, priced):
        if finding.what_if is None or is_single(finding):
            findings.append(finding)
            continue
        cause, pricing = finding.what_if.cause, finding.what_if.cause.pricing
        ranks = finding.ranks if pricing is Pricing.LATE_RANKS else ()
        removal = Removal(cause, ranks, outlier_steps.remaining_spans(report.run, stalls, cause))
        if cause is OCCASIONAL_STRAGGLER:
            removal = _occasional_removal(report.run, run, finding)
        repriced = _price(run, finding, finding.what_if, removal, removed, stalled, causing)
        findings += repriced
        # A replay confirms a warning, or finds that it is the consequence of another one.
        confirmed = repriced if pricing is Pricing.LATE_RANKS else warnings(repriced)
        # Ranks that wait in turn may do so for late launches, whose price has to contain that.
        is_judged = finding.severity > Severity.INFO and pricing is not Pricing.INDEPENDENT and not _is_uneven(finding)
        if is_judged and any(part.is_priced and part.cost_ns > 0 for part in confirmed):
            removed.append(removal)
            causing.setdefault(cause, repriced[0])
    if removed:
        findings = [_beyond(run, finding, removed, causing) for finding in findings]
        findings = [_within_containing(finding, causing) for finding in findings]
        findings = [outlier_steps.downgrade_repeated(finding, findings, stalls) for finding in findings]
        findings = [
            straggler_consequences.within_stragglers(report.run, run, finding, findings) for finding in findings
        ]
    findings = [straggler_consequences.with_pauses_of_each_step(finding, findings) for finding in findings]
    notes = report.notes
    if run is not report.run:
        count = f"{len(run.ranks)} of {len(report.run.ranks):,} ranks"
        notes = (*notes, f"potential savings are from replays of {count}: {units.ranges(run.ranks)}")
    return replace(report, findings=sort_findings(findings), notes=notes)


def over_mean_step(report: Report) -> Report:
    """Return the report with the impact of findings that no replay priced as a share of the mean step.

    Rules measure in the step that their message quotes, which may be shorter: a cost a step has one denominator,
    as replays have it. A share of another time stays: of steps that only a log has, of a window with what is after its
    last step, of training with its saves.
    """
    mean_ns = breakdown.mean_step_ns(report.run)
    if not mean_ns:
        return report
    durations = breakdown.slowest_device_by_step(report.run).drop_nulls("step")["duration_ns"]
    # Costs are whole nanoseconds, shares are not.
    shortest_ns, longest_ns = float(str(durations.min())) * 0.99, float(str(durations.max())) * 1.01

    def of_mean(finding: Finding) -> Finding:
        is_of_step = not (finding.is_priced or finding.is_of_training or finding.is_of_window)
        if not is_of_step or not finding.cost_ns or not finding.impact:
            return finding
        if not shortest_ns <= finding.cost_ns / finding.impact <= longest_ns:
            return finding
        return replace(finding, impact=min(1.0, finding.cost_ns / mean_ns))

    return replace(report, findings=sort_findings(map(of_mean, report.findings)))


def saved_by(report: Report, removals: Sequence[Removal]) -> int:
    """Saving per step of a report's run by the last of some removals, after the others, in ns.

    These are the `removals` of a finding, also of one on another recording of the same job: the single stalls that the
    report states stay if they stayed there, too. 0 without a replay.
    """
    stalls = outlier_steps.reported_stalls(report.run, report.findings)
    here = []
    for removal in removals:
        # Where retries recur, a single one may be no outlier: then it is in the price there, and so has to be here.
        if removal.steps:
            here.append(removal)
            continue
        names = {span.stall for span in removal.stalls}
        spans = outlier_steps.remaining_spans(report.run, stalls, removal.cause)
        here.append(replace(removal, stalls=tuple(span for span in spans if span.stall in names)))
    run = representative_ranks.run_of(report.run, tuple(removal.ranks for removal in removals if removal.ranks))
    first = _stalled_before(here[-1], slow_collectives.removal(report.run, report.findings)) + tuple(here[:-1])
    solo, after = mean_saving(run, here[-1]), mean_saving(run, here[-1], first)
    return max(0, min(saving.saved_ns for saving in (solo, after) if saving)) if solo else 0


def is_single(finding: Finding) -> bool:
    """Whether a finding is on single stalls, which are priced before all other causes."""
    return finding.what_if is not None and finding.what_if.cause in (SINGLE_STALL, STALLED_COLLECTIVE)


def single_removal(run: Run, finding: Finding) -> Removal | None:
    """Removal of the stalls of a finding on single stalls, from a replay of this run; None without such stalls."""
    is_collective = finding.what_if is not None and finding.what_if.cause is STALLED_COLLECTIVE
    return slow_collectives.removal(run, (finding,)) if is_collective else outlier_steps.removal(run, finding)


def can_be_replayed(run: Run) -> bool:
    """Whether graphs have enough work, the launches of most of it, and a replay as long as the recording."""
    for graph in savings.graphs_of(run):
        launched = graph.column("what") == WORK
        work = launched if graph.on_device else launched | graph.matches("kind", "compute")  # on a CPU run, ops
        in_window = launched & ~graph.is_queued_before
        known = graph.launch[: graph.count][in_window] >= 0
        is_too_small = work.sum() < _MIN_ACTIVITIES * graph.frame["rank"].n_unique()
        if is_too_small or known.sum() < _MIN_LAUNCHED_RATIO * in_window.sum():
            return False
    replayed = savings.replayed_steps(run)
    recorded_ns = savings.total_ns(replayed, "duration_ns")
    limit_ns = savings.MAX_ERROR_RATIO * recorded_ns
    return recorded_ns > 0 and abs(savings.total_ns(replayed, "replayed_ns") - recorded_ns) <= limit_ns


def _price_stalls(run: Run, replayed: Run, finding: Finding) -> list[Finding]:
    """The finding, with its cost from a replay of the ranks in `replayed` if it is on single stalls."""
    if finding.what_if is None or not is_single(finding):
        return [finding]
    removal = single_removal(run, finding)
    if removal is None:
        return [finding]
    # The spans of stalls are those of this run alone, so no other run can be replayed without them.
    return [replace(part, removals=()) for part in _price(replayed, finding, finding.what_if, removal, [], None, {})]


def _beyond(run: Run, finding: Finding, removed: list[Removal], causing: Mapping[Cause, Finding]) -> Finding:
    """A finding on waiting for late ranks, with the waiting that remains without the causes in `removed`.

    Of ranks that are late in some steps only, these are causes in which their hosts spend time. If less than half of it
    remains, the finding is a consequence of the costliest of them. Late ranks with a price of
    their own keep it.
    """
    is_uneven = finding.code == UNEVEN and finding.what_if is None
    is_occasional = finding.code == _OCCASIONAL
    is_minor = pricing_of(finding) is Pricing.LATE_RANKS and (finding.severity is Severity.INFO or _is_uneven(finding))
    if not is_uneven and not is_occasional and (not is_minor or finding.consequence_of):
        return finding
    others = [removal for removal in removed if not (is_minor and removal.cause.pricing is Pricing.LATE_RANKS)]
    if is_occasional and finding.severity > Severity.INFO:
        # Late launches, and waits for late ranks, may be its time under another name.
        others = [removal for removal in removed if removal.cause.pricing is Pricing.SOURCE]
    before_ns = savings.waiting_ns(run)
    ratio = min(1.0, savings.waiting_ns(run, others) / before_ns) if before_ns and others else 1.0
    if (is_minor or is_occasional) and ratio >= _MIN_OWN_RATIO:
        return finding
    explained = replace(
        finding,
        severity=Severity.INFO if ratio < _MIN_OWN_RATIO else finding.severity,
        consequence_of=_costliest_of(others, causing) if ratio < _MIN_OWN_RATIO else "",
        message=f"{finding.message} {units.share(1 - ratio)} of the waiting ends with {_codes(others)}.",
    )
    if is_minor or is_occasional:
        return explained
    return replace(explained, cost_ns=int(ratio * finding.cost_ns), impact=ratio * finding.impact)


def _is_uneven(finding: Finding) -> bool:
    """Whether a finding is on ranks that wait in turn, of which it names none as late."""
    return finding.code == UNEVEN and (finding.what_if is None or finding.what_if.cause is not STRAGGLER)


def removals_of_containing(cause: Cause) -> tuple[Removal, ...]:
    """The removals of the causes that contain a part of this one: that part is in their price."""
    return tuple(map(Removal, causes.containing(cause)))


def _within_containing(finding: Finding, causing: Mapping[Cause, Finding]) -> Finding:
    """A finding as a consequence of one whose cause contains its own, if little of its price remains without that."""
    if finding.what_if is None or not finding.is_priced or finding.cost_ns >= _MIN_OWN_RATIO * finding.measured_ns:
        return finding
    consequence_of = _costliest_of(removals_of_containing(finding.what_if.cause), causing)
    return replace(finding, severity=Severity.INFO, consequence_of=consequence_of) if consequence_of else finding


def _in_order(run: Run, findings: Sequence[Finding]) -> list[Finding]:
    """Return findings in the order in which they are priced: of late ranks, those first that alone cost most."""
    # What is lost in some steps is no steady late launch: it is priced before these.
    ordered = sorted(findings, key=lambda finding: (pricing_of(finding), _is_steady(finding)))
    late = [finding for finding in ordered if pricing_of(finding) is Pricing.LATE_RANKS and finding.what_if]
    if len(late) < 2:
        return ordered
    alone_ns = {}
    for finding in late:
        saving = mean_saving(run, Removal(finding.what_if.cause, finding.ranks, ()))  # type: ignore[union-attr]
        alone_ns[id(finding)] = saving.saved_ns if saving else 0
    return sorted(ordered, key=lambda finding: (pricing_of(finding), -alone_ns.get(id(finding), 0)))


def _is_steady(finding: Finding) -> bool:
    return finding.what_if is None or finding.what_if.cause is not OCCASIONAL_STRAGGLER


def _causes_before(run: Run, finding: Finding, removed: list[Removal]) -> tuple[Removal, ...]:
    """The causes with a warning that contain the time of the finding, or make it necessary."""
    if pricing_of(finding) is Pricing.CONSEQUENCE:
        return tuple(removed)
    if pricing_of(finding) is not Pricing.LATE_RANKS:
        return ()
    return tuple(
        replace(removal, ranks=finding.ranks)
        for removal in removed
        if removal.cause.pricing is Pricing.SOURCE and _may_make_late(run, finding, removal.cause)
    )


def _may_make_late(run: Run, finding: Finding, cause: Cause) -> bool:
    """Whether a cause may be why the ranks of a finding are late, by a part of what is lost.

    Their hosts spend longer on it than those of others, or their devices idle for longer meanwhile, or, where hosts
    wait, for longer afterwards: on other ranks the same cause may be hidden behind queued work.
    """
    largest = late_ranks.extra_time(run, finding.ranks).head(1)
    exposed = largest.filter(pl.col("extra_ns") >= _MIN_OWN_RATIO * max(finding.cost_ns, 1))["part"].to_list()
    lost_ns = finding.cost_ns * savings.replayed_steps(run).select("window", "step").n_unique()
    longer_ns = max(_longer_ns(table, finding.ranks) for table in _times_of(run, cause))
    return cause.idle_part in exposed or longer_ns >= _MIN_PART_RATIO * max(lost_ns, 1)


def _times_of(run: Run, cause: Cause) -> tuple[pl.DataFrame, pl.DataFrame]:
    return savings.host_time(run, cause), savings.idle_time(run, cause)


def _longer_ns(times: pl.DataFrame, ranks: Collection[int]) -> float:
    """By how much the median time of some ranks is longer than that of the others; columns rank, and a time in ns."""
    by_rank: dict[int, int] = dict(times.iter_rows())
    late_ns = [ns for rank, ns in by_rank.items() if rank in ranks]
    other_ns = [ns for rank, ns in by_rank.items() if rank not in ranks]
    return statistics.median(late_ns or [0]) - statistics.median(other_ns or [0])


def ends_with(run: Run, straggler: Finding, cause: Cause) -> bool:
    """Whether less than half of the price of late ranks remains without a cause for which they may be late."""
    if not straggler.removals or not _may_make_late(run, straggler, cause):
        return False
    *first, removal = straggler.removals
    rest = mean_saving(run, removal, (*first, Removal(cause, straggler.ranks)))
    return rest is not None and rest.saved_ns < _MIN_OWN_RATIO * straggler.cost_ns


def _stalled_before(removal: Removal, stalled: Removal | None) -> tuple[Removal, ...]:
    """The removal of stalled collectives where a cause is the time of transfers: their excess is not its."""
    return (stalled,) if stalled and removal.cause.is_transfer_time else ()


def _before_late_ranks(run: Run, removal: Removal, late: Sequence[Removal]) -> tuple[Removal, ...]:
    """What is removed before late ranks: costlier ones, and single stalls of theirs that most of the waiting is for.

    Smaller stalls are a part of the waiting, and in those of all ranks nobody waits for them. Late ranks that take no
    time of their own begin so early that their stalls are hidden, too. Empty for other causes.
    """
    if removal.cause.pricing is not Pricing.LATE_RANKS:
        return ()
    others = tuple(late)
    shared = {(span.window, span.stall) for span in removal.stalls if span.rank not in removal.ranks}
    stalls = tuple(span for span in removal.stalls if (span.window, span.stall) not in shared)
    first = (*others, Removal(SINGLE_STALL, (), stalls)) if stalls else ()
    whole, rest = mean_saving(run, removal, others or None), mean_saving(run, removal, first)
    if whole is None or rest is None or rest.saved_ns >= _MIN_OWN_RATIO * whole.saved_ns:
        return others
    return first


def _is_costly(finding: Finding) -> bool:
    """Whether the cost that the rule of a finding measured is enough to report it."""
    return finding.what_if is None or finding.impact >= finding.what_if.min_saved_ratio


def _price(
    run: Run,
    finding: Finding,
    what_if: WhatIf,
    removal: Removal,
    removed: list[Removal],
    stalled: Removal | None,
    causing: Mapping[Cause, Finding],
) -> list[Finding]:
    """The finding, with the cost from a replay if there is one; empty if the cost is too small.

    The causes of which it is a consequence, and stalled collectives, are removed before: only what remains is the
    finding's. `causing` are the findings on causes. If less than half remains, and that is no warning by itself, both
    are one trouble.
    """
    # Ranks that are late at the same collectives hide each other: without the first, the second delays the others.
    late = [earlier for earlier in removed if earlier.cause.pricing is Pricing.LATE_RANKS]
    is_replayed = not finding.ranks or bool(set(finding.ranks) & set(run.ranks))
    others = _before_late_ranks(run, removal, late) if is_replayed else ()
    solo = mean_saving(run, removal, others or None) if is_replayed else None
    if solo is None:
        return [finding] if _is_costly(finding) else []
    before = _causes_before(run, finding, removed)
    first = (*_stalled_before(removal, stalled), *removals_of_containing(removal.cause), *before, *others)
    if what_if.cause is OCCASIONAL_STRAGGLER and solo.saved_ns < _MIN_EXPLAINED_RATIO * finding.cost_ns:
        return [_of_ended_lead(run, finding, removal)]
    hidden_behind = straggler_consequences.hidden_behind(run, removal, late, solo)
    after = mean_saving(run, removal, first)
    mean = min(solo, after, key=lambda saving: saving.saved_ns) if after else solo
    saved_ns = max(0, min(mean.saved_ns, finding.cost_ns) if what_if.is_partial else mean.saved_ns)
    impact = min(1.0, saved_ns / mean.step_ns)
    before_ns = min(saved_ns, mean.before_steps_ns)
    message = finding.message + _difference(finding, saved_ns, first)
    if before_ns >= savings.MIN_BEFORE_RATIO * mean.step_ns:
        message += f" {units.duration(before_ns)} of the saving is before the first device work of the recording."
    other_ranks = _other_ranks(run, finding, what_if.cause)
    if other_ranks:
        message += f" Most of the host's time for it is on {units.numbers('rank', other_ranks)}."
    if hidden_behind:
        message += f" Alone, that saves little: {units.numbers('rank', hidden_behind)} would still be awaited."
    severity, confidence = finding.severity, min(finding.confidence, mean.confidence)
    is_explained = bool(after and before) and mean.saved_ns < _MIN_OWN_RATIO * solo.saved_ns
    consequence_of = _costliest_of(before, causing) if is_explained else ""
    if consequence_of and what_if.cause.pricing is not Pricing.LATE_RANKS:
        consequence_of = "" if grade(impact, confidence) > Severity.INFO else consequence_of
    if consequence_of:
        severity = Severity.INFO
    elif impact < what_if.min_saved_ratio:
        if severity <= Severity.INFO or grade(finding.impact, finding.confidence) <= Severity.INFO:
            return []
        severity = Severity.INFO
    priced = replace(
        finding,
        severity=severity,
        cost_ns=saved_ns,
        measured_ns=finding.cost_ns,
        impact=impact,
        before_steps_ratio=min(impact, before_ns / mean.step_ns),
        is_priced=True,
        is_upper_bound=False,
        confidence=confidence,
        consequence_of=consequence_of,
        message=message,
        claim=finding.claim + straggler_consequences.once_not_late(hidden_behind),
        ranks=tuple(sorted({*finding.ranks, *other_ranks})) if other_ranks else finding.ranks,
        removals=(*before, *others, removal),
    )
    return [priced]


def _occasional_removal(run: Run, replayed: Run, finding: Finding) -> Removal:
    """Removal for a rank that is late in some steps: in these, or where that saves nothing, in the steps before.

    What a rank takes longer for at the end of a step makes it late in the next one, which a replay of the late steps
    leaves as it is.
    """
    removal = stragglers.occasional_removal(run, finding)
    before = stragglers.steps_before(run, removal)
    return before if not _explains(replayed, removal, finding) and _explains(replayed, before, finding) else removal


def _explains(run: Run, removal: Removal, finding: Finding) -> bool:
    saving = mean_saving(run, removal) if removal.steps else None
    return saving is not None and saving.saved_ns >= _MIN_EXPLAINED_RATIO * finding.cost_ns


def _of_ended_lead(run: Run, finding: Finding, removal: Removal) -> Finding:
    """A finding on a rank that is no slower in its late steps, nor in those before: information, if both are replayed.

    Then other ranks were faster or slower: a pause of all ranks ends their lead.
    """
    before = stragglers.steps_before(run, removal)
    if not before.steps or mean_saving(run, before) is None:
        return finding
    no_longer = " It works no longer in these steps, or in those before, than in its others: its lead has ended."
    return replace(finding, severity=Severity.INFO, message=finding.message + no_longer)


def _costliest_of(removals: Iterable[Removal], causing: Mapping[Cause, Finding]) -> str:
    """The id of the costliest finding on one of these causes; "" without one."""
    findings = [causing[removal.cause] for removal in removals if removal.cause in causing]
    return max(findings, key=lambda finding: finding.cost_ns).id if findings else ""


def _difference(finding: Finding, saved_ns: int, first: tuple[Removal, ...]) -> str:
    """Why a replay saves more or less than the rule measured; "" where both agree."""
    measured_ns = finding.cost_ns
    if abs(saved_ns - measured_ns) <= _MAX_DIFFERENCE_RATIO * measured_ns:
        return ""
    if saved_ns > measured_ns:
        return " Removing it saves more than that on average, because delays pass on to later work and other ranks."
    if first:
        return f" Removing it saves less than that, because part of it ends with {_codes(first)}."
    return " Removing it saves less than that on average, because other work or other steps are then the limit."


def _codes(removals: Sequence[Removal]) -> str:
    codes = list(dict.fromkeys(removal.code for removal in removals))
    return " and ".join(filter(None, [", ".join(codes[:-1]), *codes[-1:]]))


def _other_ranks(run: Run, finding: Finding, cause: Cause) -> list[int]:
    """The ranks whose hosts spend more than twice as much on the cause of a finding as those that it names.

    Rules measure where the device is idle directly after; the replay removes the cause on all ranks. A host may pause
    after a wait that found the device almost idle.
    """
    if not cause.is_hidden_elsewhere or not finding.ranks:
        return []
    host_ns: dict[int, int] = dict(savings.host_time(run, cause).iter_rows())
    named_ns = max(host_ns.get(rank, 0) for rank in finding.ranks)
    return [rank for rank, ns in host_ns.items() if ns > _MORE * named_ns]


WARNING_RATIO = 0.02
"""Share of the time times confidence from which a finding warns: 3% of the step at the 70% that most rules reach."""
ERROR_RATIO = 0.45
"""The same for an error: half of the time, at a confidence of 90%."""
MIN_CONFIDENCE = 0.5
"""What is less likely than not is information, however much it would cost."""


def grade(impact: float, confidence: float) -> Severity:
    """Severity of a share of time, 0 to 1, that is lost with some confidence.

    >>> grade(0.03, 0.7).label, grade(0.03, 0.4).label, grade(0.6, 0.8).label
    ('warning', 'info', 'error')
    """
    expected_ratio = impact * confidence
    if expected_ratio < WARNING_RATIO or confidence < MIN_CONFIDENCE:
        return Severity.INFO
    return Severity.ERROR if expected_ratio >= ERROR_RATIO else Severity.WARNING


def grade_by_cost(report: Report) -> Report:
    """Return the report with the severity of each finding that costs time by its cost.

    What its rule, or a replay, says is information stays that: a doubt, or the consequence of another finding. An upper
    bound is information too: it does not show that the time is lost. Only what a replay confirms is an error. A cause
    of which late ranks are a consequence is at least as sure as MIN_CONFIDENCE: two observations agree.
    """
    sources = {finding.consequence_of for finding in report.findings if pricing_of(finding) is Pricing.LATE_RANKS}
    findings = (replace(finding, severity=_severity(finding, sources)) for finding in report.findings)
    return replace(report, findings=sort_findings(findings))


def _severity(finding: Finding, sources: Collection[str]) -> Severity:
    if not finding.impact or finding.severity is Severity.INFO:
        return finding.severity  # memory, data, settings
    if finding.is_upper_bound:
        return Severity.INFO
    confidence = max(finding.confidence, MIN_CONFIDENCE) if finding.id in sources else finding.confidence
    grades = grade(finding.impact, confidence)
    return grades if finding.is_priced else min(grades, Severity.WARNING)
