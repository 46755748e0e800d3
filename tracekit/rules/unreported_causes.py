"""Findings on causes that cost time by replay although no rule reports them: `check` names what what-if lists."""

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence

import polars as pl

from tracekit.model import units
from tracekit.model.run import Run
from tracekit.replay.graph import causes, savings, what_if
from tracekit.replay.graph.causes.cause import Cause, Kind, Pricing
from tracekit.replay.graph.causes.stalls import Removal
from tracekit.rules import cost_attribution, recurrence, straggler_consequences
from tracekit.rules.rule import Finding, Report, Rule, Severity, WhatIf, cost_order, largest_first, warnings

MIN_SAVED_RATIO = 0.03
"""Share of the step from which a cause is reported: the cost from which a finding with good confidence warns."""
SUBJECT = "spread"
"""Subject of these findings: the thresholds of their rules are not met."""
_MIN_OWN_RATIO = 0.5
"""Share of the saving that remains without the causes of warnings; below it, both are one trouble."""
_NEARLY_ALL = 0.9
_EVIDENCE_ROWS = 40
_HOW_TO_FIX = re.compile(r"^How to fix: (.*?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)


def findings(report: Report, rules: Iterable[Rule]) -> Iterator[Finding]:
    """Yield a finding on each cause that saves 3% of the step by replay, and has none in the report.

    The rules of these causes ran, but a threshold of theirs is not met, or the time is spread over many places. A cause
    that a fix removes in full is graded by cost and confidence like all others. Information is an ideal, an answer with
    a caveat, and a cause whose rule has thresholds that the user set. Where most of the saving ends without the causes
    of warnings, single stalls included, the finding is information and a consequence of that which ends most of it.
    """
    judging = {rule.code: rule for rule in rules if rule.code not in report.blind_spots}
    unreported = [cause for cause in causes.run_causes() if cause.code() in judging and not _names(report, cause)]
    if unreported and cost_attribution.can_be_replayed(report.run):
        for cause in unreported:
            yield from _findings(report, cause, judging[cause.code()])


def _names(report: Report, cause: Cause) -> bool:
    """Whether a finding is about this cause: it prices by it, or its rule is one of those that speak of it."""
    return any(
        finding.code in cause.codes or (finding.what_if is not None and finding.what_if.cause is cause)
        for finding in report.findings
    )


def _findings(report: Report, cause: Cause, rule: Rule) -> Iterator[Finding]:
    alone = savings.saving(report.run, cause.name)
    if alone.saved_ratio < MIN_SAVED_RATIO:
        return
    sources = [
        finding
        for finding in warnings(report.findings)
        if finding.is_priced and _removals(report.run, finding) and not _is_consequence(report.run, finding, cause)
    ]
    remaining_ns = _remaining_ns(report, cause, sources, alone.saved_ns)
    if remaining_ns < what_if.MIN_SAVED_RATIO * alone.step_ns:
        remaining_ns = 0
    source: Finding | None = None
    if remaining_ns < _MIN_OWN_RATIO * alone.saved_ns and not sources:
        return  # waits for copies, of which the cause of copies speaks
    if remaining_ns < _MIN_OWN_RATIO * alone.saved_ns:  # of the finding without which the least of it remains
        source = min(
            sorted(sources, key=cost_order, reverse=True),
            key=lambda finding: _remaining_ns(report, cause, [finding], alone.saved_ns),
        )
    single = _single_step(alone.steps)
    message = f"A replay in which {cause.summary} is {units.duration(alone.saved_ns)} a step shorter"
    message += single or f", although no single place reaches the thresholds of {cause.code()}."
    if remaining_ns < alone.saved_ns:
        codes = " and ".join(dict.fromkeys(finding.code for finding in sources))
        message += f" {units.share(1 - remaining_ns / alone.saved_ns)} of that ends with {codes}."
    saved = alone.steps.filter(pl.col("saved_ns") > 0).sort("saved_ns", "rank", "step", descending=[True, False, False])
    impact = min(1.0, remaining_ns / max(alone.step_ns, 1))
    is_judged = cause.is_attainable and source is None and not alone.caveat and rule == type(rule)()
    ranks = _most_affected_ranks(report.run, cause, alone.saved_ns)
    on_ranks = f" on {units.numbers('rank', ranks)}" if ranks else ""
    severity = cost_attribution.grade(impact, alone.confidence) if is_judged else Severity.INFO
    yield Finding(
        cause.code(),
        min(severity, Severity.WARNING) if single else severity,  # what happens once need not happen again
        message + (f" The answer is limited: {alone.caveat}." if alone.caveat else ""),
        _fix(rule),
        impact=impact,
        cost_ns=remaining_ns,
        confidence=alone.confidence,
        evidence=saved.head(_EVIDENCE_ROWS).select("window", "rank", "step", "duration_ns", "saved_ns"),
        ranks=ranks,
        claim=f"Part of the step is lost to {cause.loss_in_words}{on_ranks}",
        what_if=WhatIf(cause, MIN_SAVED_RATIO),
        removals=(*(removal for finding in sources for removal in finding.removals), Removal(cause)),
        is_priced=True,
        consequence_of=source.id if source else "",
        subject=SUBJECT,
    )


def _single_step(steps: pl.DataFrame) -> str:
    """Which one of several steps has nearly all of a saving, as with an evaluation, and how much; "" if none has."""
    by_step = steps.drop_nulls("step").group_by("window", "step").agg(pl.col("saved_ns").max())
    if by_step.height < 2:
        return ""
    longest = largest_first(by_step, "saved_ns", "window", "step").row(0, named=True)
    if longest["saved_ns"] < _NEARLY_ALL * int(by_step["saved_ns"].clip(0).sum()):
        return ""
    often = recurrence.sentence(1, by_step.height)
    return f", nearly all of it in step {longest['step']} ({units.duration(longest['saved_ns'])}). {often}."


def _most_affected_ranks(run: Run, cause: Cause, saved_ns: int) -> tuple[int, ...]:
    """The ranks, at most half, on which a host cause has nearly all of its saving; () where it is on more of them."""
    if cause.kind is not Kind.HOST:
        return ()
    idle = savings.idle_time(run, cause)
    times = savings.host_time(run, cause) if idle.is_empty() else idle
    lost_ns: dict[int, int] = dict(times.iter_rows())
    longest_ns = max(lost_ns.values(), default=0)
    ranks = tuple(rank for rank, ns in lost_ns.items() if ns >= _MIN_OWN_RATIO * max(longest_ns, 1))
    if not ranks or 2 * len(ranks) > len(lost_ns):
        return ()
    on_ranks = savings.saving_of(run, (Removal(cause, ranks),))
    return ranks if on_ranks.saved_ns >= _NEARLY_ALL * saved_ns else ()


def _is_consequence(run: Run, finding: Finding, cause: Cause) -> bool:
    """Whether a finding contains the time of what it follows from: late launches, and ranks late for a source."""
    if cause.pricing is not Pricing.SOURCE:
        return False
    pricing = straggler_consequences.pricing_of(finding)
    if pricing is Pricing.LATE_RANKS:
        return cost_attribution.ends_with(run, finding, cause)
    return pricing is Pricing.CONSEQUENCE


def _removals(run: Run, finding: Finding) -> tuple[Removal, ...]:
    """Removals of a finding; of one on single stalls, whose spans no finding carries, its stalls."""
    if finding.removals or not cost_attribution.is_single(finding):
        return finding.removals
    stalls = cost_attribution.single_removal(run, finding)
    return (stalls,) if stalls else ()


def _remaining_ns(report: Report, cause: Cause, sources: Sequence[Finding], alone_ns: int) -> int:
    """The saving without a cause after those of warnings, at most that of the cause alone."""
    of_sources = (removal for finding in sources for removal in _removals(report.run, finding))
    first = (*cost_attribution.removals_of_containing(cause), *of_sources)
    if not first:
        return alone_ns
    both, before = (savings.saving_of(report.run, removals) for removals in ((*first, Removal(cause)), first))
    if both.steps.is_empty() or before.steps.is_empty():
        return alone_ns
    return max(0, min(alone_ns, both.saved_ns - before.saved_ns))


def _fix(rule: Rule) -> str:
    section = _HOW_TO_FIX.search(inspect.cleandoc(rule.__doc__ or ""))
    text = section[1].replace("\n", " ") if section else ""
    return text[:1].upper() + text[1:]
