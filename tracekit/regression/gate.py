"""What a check of one run comes to: which findings count, what got worse, which budgets are broken, what fails."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import polars as pl

from tracekit.errors import ConfigError, InputError
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.regression import baseline as baselines
from tracekit.regression import budgets as budget_checks
from tracekit.regression import numbers, root_cause, significance
from tracekit.regression.baseline import Baseline, KnownFinding, Recording
from tracekit.regression.budgets import BudgetOutcome, BudgetResult, Budgets
from tracekit.regression.comparison import Comparison, compare_groups
from tracekit.regression.contributions import PartPlaces
from tracekit.regression.disturbance import Disturbance
from tracekit.regression.metric_sources import DEVICE_PARTS
from tracekit.regression.metrics import STEP_TIME, metric_of
from tracekit.regression.root_cause import Cause
from tracekit.regression.samples import job_samples, places_of_parts
from tracekit.regression.thresholds import CONFIDENCE, Change, Thresholds, Verdict
from tracekit.rules.rule import Finding, Report, Severity

MIN_WORSE_GROWTH = 0.25
"""A known finding is worse only where it costs at least this share of its cost more: costs vary with the host."""
_VISIBLE_SHARE = 0.5
NUMBERS = "numbers"
"""The name under which numbers that differ fail a check."""


@dataclass(frozen=True)
class StepGrowth:
    """By how much the steps of a run take longer than those of its baseline, relative to the baseline's."""

    growth_ratio: float
    """Of the median step, or of the mean step where that is more: a single stall is in the mean only."""
    mean_growth_ratio: float
    noise_ratio: float
    """Smaller costs may be the machine's: 0 on a device, which no other program shares."""

    @classmethod
    def of(
        cls, reference: Sequence[pl.DataFrame], candidate: Sequence[pl.DataFrame], confidence: float = CONFIDENCE
    ) -> "StepGrowth | None":
        """Return the growth between the samples of two sides' recordings; None where one has no step time."""
        sides = [[job_samples(table).get(STEP_TIME) for table in tables] for tables in (reference, candidate)]
        a, b = ([ns for ns in side if ns is not None and len(ns) and ns.min() > 0] for side in sides)
        if not a or not b:
            return None
        medians = (math.exp(float(np.mean([np.log(np.median(values)) for values in side]))) for side in (a, b))
        means = (float(np.mean([values.mean() for values in side])) for side in (a, b))
        of_median, of_mean = (after / before - 1 for before, after in (tuple(medians), tuple(means)))
        noise_ratio = 0.0
        if not all(table["metric"].str.starts_with(DEVICE_PARTS).any() for table in (*reference, *candidate)):
            # By how much step times of recordings of the same training differ at most, by the shared test.
            before_after = significance.observations(a, b, is_logarithmic=True)
            spread = significance.Spread.of(*before_after, metric_of(STEP_TIME).usual_spread)
            noise_ratio = math.expm1(float(spread.margin(confidence)))
        return cls(max(of_median, of_mean), of_mean, noise_ratio)

    def is_certain(
        self,
        finding: Finding,
        findings: Iterable[Finding],
        known_findings: Mapping[str, tuple[KnownFinding, ...]],
        min_cost_ratio: float,
    ) -> bool:
        """Return whether a finding, one of `findings`, costs so much more of the step than in the baseline.

        `known_findings` are the baseline's by id, one for each recording that has it. Beyond the baseline a finding
        costs no more than all `findings` of its code together.
        """
        before = {name: max(f.impact for f in recorded) for name, recorded in known_findings.items() if recorded}
        of_code = sum(self._share(other) for other in findings if other.code == finding.code)
        before_of_code = sum(impact for name, impact in before.items() if known_findings[name][0].code == finding.code)
        more = min(self._share(finding) - before.get(finding.id, 0.0), of_code - before_of_code)
        in_steps = max(more - finding.before_steps_ratio, 0.0)
        is_visible = self.growth_ratio >= min(_VISIBLE_SHARE * in_steps, min_cost_ratio)
        min_growth = max(min_cost_ratio, self.noise_ratio, MIN_WORSE_GROWTH * before.get(finding.id, 0.0))
        return (more if is_visible else more - in_steps) >= min_growth

    def _share(self, finding: Finding) -> float:
        """Return the cost of a finding as a share of the baseline's mean step."""
        return finding.impact * (1 + self.mean_growth_ratio)


MIN_WORSE_RATIO = 0.03
"""A finding is worse only where it takes at least so much more of the step: nobody would act on less."""
MIN_WORSE_BYTES = 1 << 20
_MIN_BYTES_GROWTH = 0.1
RECORDINGS = 5
"""As many recordings as a baseline collects by itself."""


class FindingStatus(StrEnum):
    """How a finding compares with the baseline. Without a baseline every finding is new."""

    NEW = "new"
    WORSE = "worse"
    KNOWN = "known"


@dataclass(frozen=True, eq=False)
class JudgedFinding:
    """A finding, how it compares with the baseline, and whether it fails the check."""

    finding: Finding
    status: FindingStatus
    fails: bool
    impact_before: float | None = None
    """The share of the step that it took in the baseline; None where the baseline has no such finding."""


@dataclass(frozen=True, eq=False)
class CheckResult:
    """A report with its verdict: what every format for CI renders, and what the exit code follows."""

    report: Report
    fail_on: Severity | None
    """The severity from which a finding fails; None where none does."""
    findings: tuple[JudgedFinding, ...]
    comparison: Comparison | None = None
    regressions: tuple[Change, ...] = ()
    """The changes of `comparison` that fail the check."""
    budgets: tuple[BudgetResult, ...] = ()
    fixed: tuple[KnownFinding, ...] = ()
    """The findings of the baseline that the run does not have any more."""
    causes: tuple[Cause, ...] = ()
    """Why metrics regressed, the likeliest first; empty where none did."""
    baseline: str = ""
    """The name of the baseline; empty where there is none."""
    is_strict: bool = False
    must_numbers_agree: bool = False
    """Whether loss or gradient norm that differ from the baseline's beyond rounding fail the check."""

    @property
    def do_numbers_differ(self) -> bool:
        """Whether loss, gradient norm or checksums differ from the baseline's beyond rounding."""
        numbers = self.comparison.numbers if self.comparison else None
        return numbers is not None and numbers.first is not None

    @property
    def failures(self) -> tuple[str, ...]:
        """Return the names of all that fails: ids of findings, metrics, budgets. Empty where the check passes."""
        return (
            *(entry.finding.id for entry in self.findings if entry.fails),
            *(change.metric for change in self.regressions),
            *(result.budget for result in self.budgets if self.fails_budget(result)),
            *((NUMBERS,) if self.must_numbers_agree and self.do_numbers_differ else ()),
        )

    def fails_budget(self, result: BudgetResult) -> bool:
        """Return whether a budget fails the check."""
        is_inconclusive = result.outcome is BudgetOutcome.INCONCLUSIVE
        return result.outcome is BudgetOutcome.BROKEN or (self.is_strict and is_inconclusive)


def facts(budgets: Budgets, *, with_baseline: bool) -> tuple[TraceFact, ...]:
    """Return the facts that `judge` needs of runs, to be measured in one pass with those of the rules."""
    if with_baseline:
        return baselines.FACTS
    return budget_checks.FACTS if budgets.budgets else ()


def result_of_findings(report: Report, fail_on: Severity | None) -> CheckResult:
    """Return the verdict on a report by its findings alone: those at or above `fail_on` fail."""
    return CheckResult(report, fail_on, _judge_findings(report.findings, fail_on, {}))


def judge(
    report: Report,
    fail_on: Severity | None,
    *,
    baseline: Baseline | None = None,
    thresholds: Thresholds | None = None,
    repeats: Sequence[Run] = (),
    budgets: Budgets | None = None,
    allow_different: bool = False,
    must_numbers_agree: bool = False,
) -> CheckResult:
    """Return the verdict on a report: which findings, metrics and budgets fail it, and whether its numbers agree.

    `repeats` are further recordings of the same training, which make its comparison with the baseline surer. Raises
    NotComparableError, naming the fields, where what ran is not what ran in the baseline, unless that is allowed; and
    InputError where numbers must agree, and run and baseline logged none of a common step.
    """
    budgets = budgets or Budgets()
    result = replace(
        result_of_findings(report, fail_on),
        budgets=budget_checks.check(report.run, budgets.budgets),
        is_strict=budgets.is_strict,
    )
    if baseline is None:
        return result
    thresholds = thresholds or Thresholds()
    candidate = [Recording.of(report.run, report), *(Recording.of(run) for run in repeats)]
    notes = [
        note
        for run in (report.run, *repeats)
        for note in baselines.differences(baseline, run, allow_different=allow_different)
    ]
    work = baselines.work_difference(baseline.recordings[0].shares, candidate[0].shares)
    notes = [*([work] if work else []), *notes]
    places: tuple[PartPlaces, PartPlaces] = ({}, places_of_parts(report.run))
    comparison = compare(baseline, candidate, notes=notes, thresholds=thresholds, places=places)
    logged = [recording.numbers for recording in baseline.recordings]
    comparison = replace(comparison, numbers=numbers.agreement_with_any(logged, candidate[0].numbers))
    if must_numbers_agree and comparison.numbers is None:
        raise InputError(
            f"{report.run.path}: it and the baseline {baseline.name} logged no loss or gradient norm of a common step: "
            "record both with tracekit record, and save the baseline again"
        )
    regressions = tuple(
        change
        for change in comparison.changes
        if thresholds.is_failing(change.metric)
        and change.verdict is Verdict.WORSE
        # On a GPU the host's threads spin while they wait, and their CPU time says nothing.
        and (_is_on_host(baseline) or not metric_of(change.metric).is_cpu_time)
    )
    changes = {change.metric: change for change in comparison.changes}
    known_findings = baseline.known_findings
    is_certain_growth = _is_certain_growth(report, baseline, candidate, thresholds)
    present = {finding.id for finding in report.findings} | {ignored.finding.id for ignored in report.ignored}
    fixed = [
        max(recorded, key=lambda f: (f.severity, f.impact))
        for name, recorded in known_findings.items()
        if name not in present
    ]
    fixed.sort(key=lambda f: (-f.severity, -f.impact, f.id))
    count = len(baseline.recordings)
    return replace(
        result,
        findings=_judge_findings(report.findings, fail_on, known_findings, is_certain_growth),
        comparison=comparison,
        regressions=regressions,
        fixed=tuple(fixed),
        causes=root_cause.causes(regressions, changes, baseline.recordings, candidate),
        baseline=f"{baseline.name} ({count} recordings)" if count > 1 else baseline.name,
        must_numbers_agree=must_numbers_agree,
    )


def compare(
    baseline: Baseline,
    candidate: Sequence[Recording],
    *,
    notes: Sequence[str] = (),
    thresholds: Thresholds | None = None,
    places: tuple[PartPlaces, PartPlaces] = ({}, {}),
) -> Comparison:
    """Compare each metric that both have. Raises NotComparableError where they share none."""
    return compare_groups(
        {baseline.name: [recording.samples for recording in baseline.recordings]},
        {candidate[0].name: [recording.samples for recording in candidate]},
        notes=notes,
        on_host=_is_on_host(baseline),
        thresholds=thresholds,
        places=places,
    )


def least_severity(fail_on: Severity | None) -> Severity:
    """Return the severity from which a finding keeps a run from becoming the baseline: `fail_on`, or warning."""
    return Severity.WARNING if fail_on is None else min(fail_on, Severity.WARNING)


def not_accepted(result: CheckResult, accepted: Sequence[str]) -> tuple[str, ...]:
    """Return the names of all that fails a check and is not accepted, by rule code, finding id or metric.

    Raises ConfigError where something is accepted that does not fail.
    """
    names = {entry.finding.id: {entry.finding.id, entry.finding.code} for entry in result.findings if entry.fails}
    names |= {change.metric: {change.metric, metric_of(change.metric).short} for change in result.regressions}
    for name in accepted:
        if not any(name in aliases for aliases in names.values()):
            failing = ", ".join(names) or "nothing"
            raise ConfigError(f"--accept {name}: it is neither new nor worse; new or worse: {failing}")
    return tuple(name for name, aliases in names.items() if not aliases & set(accepted))


def update(old: Baseline, new: Baseline, result: CheckResult, *, thresholds: Thresholds) -> tuple[Baseline, str]:
    """Return the baseline after a run whose failures were all accepted, and the reason.

    Where nothing changed the new recordings join the old ones, up to RECORDINGS; after that the old ones stay, for a
    baseline that moves along with each run never shows a slow drift.
    """
    changed = [*result.failures]
    changes = result.comparison.changes if result.comparison else ()
    changed += [c.metric for c in changes if c.verdict is Verdict.BETTER and thresholds.is_failing(c.metric)]
    changed += [fixed.id for fixed in result.fixed if fixed.severity >= Severity.WARNING]
    if result.comparison and new.fingerprint != old.fingerprint:
        changed.append("what ran")
    if changed:
        return new, f"replaced, because {', '.join(changed)} changed"
    more = [recording for recording in new.recordings if not any(recording.is_same(other) for other in old.recordings)]
    room = RECORDINGS - len(old.recordings)
    if room <= 0 or not more:
        return old, "nothing changed, and it stays as it is"
    return replace(old, recordings=(*old.recordings, *more[:room])), "nothing changed, recordings added"


def _is_on_host(baseline: Baseline) -> bool:
    return baseline.fingerprint.get("device", "cpu") == "cpu"


def _is_certain_growth(
    report: Report, baseline: Baseline, candidate: Sequence[Recording], thresholds: Thresholds
) -> Callable[[Finding], bool]:
    """Return a predicate: a finding costs enough more than in the baseline to fail at any severity."""
    before, after = ([recording.samples for recording in side] for side in (baseline.recordings, candidate))
    # Too few recordings on shared processors do not show by how much costs of findings differ.
    is_few = _is_on_host(baseline) and len(before) < thresholds.min_cpu_recordings
    is_unknown = is_few and Disturbance.of(before, after, thresholds).is_disturbed
    growth = None if is_unknown else StepGrowth.of(before, after, thresholds.confidence)
    known_findings, min_ratio = baseline.known_findings, thresholds.min_new_cost_ratio
    return lambda finding: growth is not None and growth.is_certain(finding, report.findings, known_findings, min_ratio)


def _judge_findings(
    findings: Sequence[Finding],
    fail_on: Severity | None,
    known_findings: Mapping[str, tuple[KnownFinding, ...]],
    is_certain_growth: Callable[[Finding], bool] = lambda _: False,
) -> tuple[JudgedFinding, ...]:
    outcomes = []
    for finding in findings:
        before = known_findings.get(finding.id, ())
        is_certain = is_certain_growth(finding)
        status = FindingStatus.NEW
        if before:
            is_worse = is_certain or _is_worse(finding, before)
            status = FindingStatus.WORSE if is_worse else FindingStatus.KNOWN
        is_judged = status is not FindingStatus.KNOWN and fail_on is not None
        fails = is_judged and (finding.severity >= (fail_on or Severity.ERROR) or is_certain)
        outcomes.append(JudgedFinding(finding, status, fails, max((entry.impact for entry in before), default=None)))
    return tuple(outcomes)


def _is_worse(finding: Finding, before: Sequence[KnownFinding]) -> bool:
    """Return whether a finding takes more than in any recording of the baseline, and more than those differ by."""
    impacts = [entry.impact for entry in before]
    max_impact = max(impacts)
    spread = max_impact - min(impacts)
    sizes = [entry.cost_bytes for entry in before]
    least_bytes = max(MIN_WORSE_BYTES, _MIN_BYTES_GROWTH * max(sizes), max(sizes) - min(sizes))
    return (
        finding.impact - max_impact >= max(MIN_WORSE_RATIO, MIN_WORSE_GROWTH * max_impact, spread)
        or finding.cost_bytes - max(sizes) > least_bytes
    )
