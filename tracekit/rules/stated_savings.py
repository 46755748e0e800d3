"""What-if answers that say what the findings of a report say: one cause, one number."""

from collections import defaultdict
from dataclasses import replace

from tracekit.replay.graph import what_if
from tracekit.replay.graph.causes.cause import Cause
from tracekit.replay.graph.what_if import Answer, StatedSaving, WhatIf
from tracekit.rules.registry import all_rules
from tracekit.rules.rule import Finding, Report, is_data_quality


def answer(report: Report, names: tuple[str, ...] = (), *, gpu_hour_price: float | None = None) -> WhatIf:
    """Return the answers of `what_if.answer`, first those on the causes of findings, with the savings that these state.

    Findings that no replay prices are answers, too, with what their rules measured, unless causes are named.
    """
    answers = what_if.answer(report.run, names, gpu_hour_price=gpu_hour_price)
    findings = [finding for finding in report.findings if _has_saving(finding)]
    by_cause: dict[Cause | None, list[Finding]] = defaultdict(list)
    replayed = {given.causes[0]: given for given in answers.answers}
    for finding in findings:
        cause = finding.what_if.cause if finding.what_if is not None else None
        by_cause[cause if cause in replayed else None].append(finding)
    stated = [
        _answer_of_findings(replayed[cause], alike, answers.gpus)
        for cause, alike in by_cause.items()
        if cause in replayed
    ]
    if not names:
        blank = Answer((), 0, 0.0, answers.step_ns, None, None, 1.0)
        stated += [_answer_of_findings(blank, [finding], answers.gpus) for finding in by_cause[None]]
    others = [given for given in answers.answers if given.causes[0] not in by_cause]
    priced = [_at_price(given, gpu_hour_price) for given in sorted(stated, key=lambda given: -given.saved_ns)]
    return replace(answers, answers=(*priced, *others))


def _has_saving(finding: Finding) -> bool:
    return bool(finding.cost_ns and finding.impact) and not finding.is_upper_bound and not is_data_quality(finding.code)


def _answer_of_findings(given: Answer, findings: list[Finding], gpus: int) -> Answer:
    """An answer with the saving of the findings on its cause; several are on different ranks, or stalls."""
    first = findings[0]
    names = {rule.code: rule.name() for rule in all_rules()}
    ratio = min(1.0, sum(finding.impact for finding in findings))
    return replace(
        given,
        saved_ns=sum(finding.cost_ns for finding in findings),
        saved_ratio=ratio,
        gpu_hours_per_day=what_if.hours_per_day(ratio, gpus),
        confidence=min(finding.confidence for finding in findings),
        finding=StatedSaving(first.code, names.get(first.code, first.code), first.claim),
    )


def _at_price(given: Answer, price: float | None) -> Answer:
    hours = given.gpu_hours_per_day
    return replace(given, per_day=None if price is None or hours is None else hours * price)
