"""What a check comes to: findings and metrics held against a baseline, and budgets."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tracekit.errors import ConfigError, NotComparableError
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import Fact
from tracekit.regression import baseline as baselines
from tracekit.regression import budget_verdicts, cpu_starvation, quantities, recording_test, root_cause
from tracekit.regression.baseline import Baseline, KnownFinding, Recording
from tracekit.regression.budgets import Budgets
from tracekit.regression.change import Change, Values, Verdict
from tracekit.regression.comparison import Comparison, job_samples
from tracekit.regression.cpu_starvation import OF_PROCESSORS
from tracekit.regression.gate import CheckResult, FindingStatus, FixedFinding, JudgedFinding
from tracekit.regression.samples import LOWER_IS_BETTER
from tracekit.regression.thresholds import Thresholds
from tracekit.rules.rule import Finding, Report, Severity

MIN_WORSE_RATIO = 0.03
"""A finding is worse only where it takes at least so much more of the step: what nobody would act on is none."""
MIN_WORSE_GROWTH = 0.25
"""And only where that is at least this share of what it took: impacts wobble with what they are shares of."""
MIN_WORSE_BYTES = 1 << 20
_MIN_BYTES_GROWTH = 0.1
RECORDINGS = 5
"""As many recordings as a baseline gathers by itself."""
_STEP = "step_time_ns"


def facts(budgets: Budgets, *, with_baseline: bool) -> tuple[Fact, ...]:
    """Return what `judge` asks runs for, to be measured in one pass with the facts of the rules."""
    return baselines.FACTS if with_baseline else budget_verdicts.FACTS if budgets.budgets else ()


def judge(
    report: Report,
    fail_on: Severity | None,
    *,
    baseline: Baseline | None = None,
    thresholds: Thresholds | None = None,
    repeats: Sequence[Run] = (),
    budgets: Budgets | None = None,
    allow_different: bool = False,
) -> CheckResult:
    """Return the verdict on a report: which findings, metrics and budgets fail it.

    `again` are further recordings of the same training, which make its comparison with the baseline surer. Raises
    NotComparableError, naming the fields, where what ran is not what ran in the baseline, unless that is allowed.
    """
    budgets = budgets or Budgets()
    budget_results = budget_verdicts.judge(report.run, budgets.budgets)
    if baseline is None:
        findings = tuple(_judged(each, fail_on, FindingStatus.NEW) for each in report.findings)
        return CheckResult(report, fail_on, findings, budgets=budget_results, is_strict=budgets.is_strict)
    thresholds = thresholds or Thresholds()
    candidate = [Recording.of(report.run, report), *(Recording.of(run) for run in repeats)]
    notes = [
        note
        for run in (report.run, *repeats)
        for note in baselines.differences(baseline, run, allow_different=allow_different)
    ]
    comparison = compare(baseline, candidate, notes=notes, min_effect=thresholds.min_change_ratio)
    regressions = tuple(change for change in comparison.changes if _fails(change, thresholds, baseline))
    changes = {change.metric: change for change in comparison.changes}
    return CheckResult(
        report,
        fail_on,
        _held_against(report.findings, fail_on, baseline.known_findings),
        comparison,
        regressions,
        budget_results,
        fixed=_fixed(report, baseline.known_findings),
        causes=root_cause.causes(regressions, changes, baseline.recordings, candidate),
        baseline=_called(baseline),
        is_strict=budgets.is_strict,
    )


def least_severity(fail_on: Severity | None) -> Severity:
    """Return the severity from which a finding keeps a run from becoming the baseline: the bar's, or warning."""
    return Severity.WARNING if fail_on is None else min(fail_on, Severity.WARNING)


def not_accepted(result: CheckResult, accepted: Sequence[str]) -> tuple[str, ...]:
    """Return what fails a check and is not accepted, by rule code, finding id or metric.

    Raises ConfigError where something is accepted that does not fail.
    """
    names = {each.finding.id: {each.finding.id, each.finding.code} for each in result.findings if each.fails}
    names |= {change.metric: {change.metric, quantities.short(change.metric)} for change in result.regressions}
    for name in accepted:
        if not any(name in each for each in names.values()):
            known = ", ".join(names) or "nothing"
            raise ConfigError(f"--accept {name}: that is neither new nor worse; what is: {known}")
    return tuple(name for name, each in names.items() if not each & set(accepted))


def updated(old: Baseline, new: Baseline, result: CheckResult, *, thresholds: Thresholds) -> tuple[Baseline, str]:
    """Return the baseline after a run whose failures were all accepted, and why it is as it is.

    Where nothing changed the new recordings join the old ones, up to RECORDINGS; after that the old ones stay, for a
    baseline that moves along with each run never sees a slow creep.
    """
    changed = [*result.failures]
    changes = result.comparison.changes if result.comparison else ()
    changed += [c.metric for c in changes if c.verdict is Verdict.BETTER and c.metric in thresholds.metrics]
    changed += [gone.id for gone in result.fixed if gone.severity >= Severity.WARNING]
    if result.comparison and new.fingerprint != old.fingerprint:
        changed.append("what ran")
    if changed:
        return new, f"begun anew, for {', '.join(changed)} changed"
    more = [one for one in new.recordings if not any(one.is_same(each) for each in old.recordings)]
    room = RECORDINGS - len(old.recordings)
    if room <= 0 or not more:
        return old, "nothing changed, and it stays as it is"
    return replace(old, recordings=(*old.recordings, *more[:room])), "nothing changed, recordings added"


def compare(
    baseline: Baseline, candidate: Sequence[Recording], *, notes: Sequence[str] = (), min_effect: float
) -> Comparison:
    """Return how each metric that both have differs, by recordings. Raises NotComparableError where they share none."""
    ranks, of_ranks = _common_ranks(baseline, candidate)
    before, after = (_by_metric(each, ranks) for each in (baseline.recordings, candidate))
    step_ns = float(np.mean([np.median(values) for values in before[_STEP]])) if _STEP in before else None
    changes = [
        recording_test.compare_recordings(metric, before[metric], after[metric], step_ns=step_ns, min_effect=min_effect)
        for metric in LOWER_IS_BETTER
        if metric in before and metric in after
    ]
    if not changes:
        raise NotComparableError(
            f"{candidate[0].name} and the baseline {baseline.name} have no metric in common: one of them marks no "
            "steps; call profiler.step() after each optimizer step when recording"
        )
    found = Comparison(
        baseline.name, candidate[0].name, tuple(changes), (*notes, *of_ranks), confidence=recording_test.CONFIDENCE
    )
    return cpu_starvation.without_starved(found, baseline.recordings, candidate) if _is_on_host(baseline) else found


def _by_metric(recordings: Sequence[Recording], ranks: Sequence[int] | None) -> dict[str, list[Values]]:
    found: dict[str, list[Values]] = {}
    for recording in recordings:
        for metric, values in job_samples(recording.samples, ranks).items():
            found.setdefault(metric, []).append(values)
    return found


def _common_ranks(baseline: Baseline, candidate: Sequence[Recording]) -> tuple[list[int] | None, list[str]]:
    sides = [
        [set(recording.samples["rank"].unique().to_list()) for recording in side]
        for side in (baseline.recordings, candidate)
    ]
    common = set.intersection(*sides[0], *sides[1])
    if all(ranks == common for side in sides for ranks in side):
        return None, []
    a, b = (set.union(*side) for side in sides)
    told = f"the baseline has ranks {units.ranges(a)}, the run {units.ranges(b)}"
    if not common:
        return None, [f"{told}: all of each are compared"]
    return sorted(common), [f"{told}: only ranks {units.ranges(common)} are compared"]


def _fails(change: Change, against: Thresholds, baseline: Baseline) -> bool:
    # On a device the host's processors spin where they wait, and their time says nothing.
    asked = change.metric in against.metrics and (_is_on_host(baseline) or change.metric not in OF_PROCESSORS)
    return asked and change.verdict is Verdict.WORSE


def _is_on_host(baseline: Baseline) -> bool:
    return baseline.fingerprint.get("device", "cpu") == "cpu"


def _held_against(
    findings: Sequence[Finding], bar: Severity | None, known: Mapping[str, tuple[KnownFinding, ...]]
) -> tuple[JudgedFinding, ...]:
    found = []
    for each in findings:
        before = known.get(each.id)
        if before is None:
            found.append(_judged(each, bar, FindingStatus.NEW))
        else:
            standing = FindingStatus.WORSE if _is_worse(each, before) else FindingStatus.KNOWN
            found.append(_judged(each, bar, standing, max(one.impact for one in before)))
    return tuple(found)


def _judged(
    finding: Finding, bar: Severity | None, standing: FindingStatus, before: float | None = None
) -> JudgedFinding:
    counts = standing is not FindingStatus.KNOWN and bar is not None and finding.severity >= bar
    return JudgedFinding(finding, standing, counts, before)


def _is_worse(finding: Finding, before: Sequence[KnownFinding]) -> bool:
    """Return whether a finding takes more than in any recording of the baseline, and more than those differ by."""
    impacts = [one.impact for one in before]
    most = max(impacts)
    spread = most - min(impacts)
    sizes = [one.cost_bytes for one in before]
    least_bytes = max(MIN_WORSE_BYTES, _MIN_BYTES_GROWTH * max(sizes), max(sizes) - min(sizes))
    return (
        finding.impact - most >= max(MIN_WORSE_RATIO, MIN_WORSE_GROWTH * most, spread)
        or finding.cost_bytes - max(sizes) > least_bytes
    )


def _fixed(report: Report, known: Mapping[str, tuple[KnownFinding, ...]]) -> tuple[FixedFinding, ...]:
    still = {found.id for found in report.findings} | {aside.finding.id for aside in report.ignored}
    gone = [max(each, key=lambda one: (one.severity, one.impact)) for name, each in known.items() if name not in still]
    gone.sort(key=lambda one: (-one.severity, -one.impact, one.id))
    return tuple(FixedFinding(one.id, one.code, one.severity, one.impact, one.subject) for one in gone)


def _called(baseline: Baseline) -> str:
    count = len(baseline.recordings)
    return f"{baseline.name} ({count} recordings)" if count > 1 else baseline.name
