"""Gates on the drawn run of `tests.support.sample_report`, for what shows them in CI. Not a test."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.support import sample_report
from tracekit.regression import gate
from tracekit.regression.baseline import KnownFinding
from tracekit.regression.comparison import Comparison
from tracekit.regression.gate import (
    BudgetOutcome,
    BudgetResult,
    Cause,
    CheckResult,
    FindingStatus,
    JudgedFinding,
)
from tracekit.regression.metrics import metric_of
from tracekit.regression.significance import compare_recordings
from tracekit.regression.thresholds import Change
from tracekit.rules.rule import Finding, IgnoredFinding, Report, Severity

HOSTILE = (
    "@octocat/team #1 !2 GH-3 ~bug $x$ :tada: https://evil.example www.evil.example a|b `c` **d** _e_ <img src=x> "
    "</details> --> [f](javascript:g) ```\n::error file=h::i\r\n# j\x1b[31m\u202e\x00%0Ak,l]]>&amp;"
)


def change(
    metric: str, before: float, now: float, *, samples: int = 12, spread: float = 0.01, recordings: int = 5
) -> Change:
    """Return how a metric differs between recordings a side, whose samples lie around these two numbers."""
    random = np.random.default_rng(int(hashlib.sha256(metric.encode()).hexdigest()[:8], 16))
    a, b = (value * (1 + spread * random.standard_normal((recordings, samples))) for value in (before, now))
    return compare_recordings(metric_of(metric), list(a), list(b), total=10e6)


def findings_only(
    path: str = "runs/today", *, found: Sequence[Finding] | None = None, bar: Severity | None = None
) -> CheckResult:
    """Return the gate of a run by its findings alone."""
    run = sample_report.run(path)
    given = None if found is None else tuple(found)
    report = dataclasses.replace(
        sample_report.report(run, found=given),
        rules=("COMM001", "STREAM001", "HOST003", "MEM001", "DATA001", "CKPT001"),
        blind_spots={"STREAM001": "it needs device lanes"},
    )
    return gate.result_of_findings(report, bar)


def with_baseline(path: str = "runs/today") -> CheckResult:
    """Return the gate of a run that has all there is: each standing and outcome, a regression, what is gone."""
    base = findings_only(path, bar=Severity.WARNING)
    exposed, churn, doubt = base.report.findings
    slow = Finding("CKPT001", Severity.WARNING, "A save blocks.", "Save in the background.", impact=0.03)
    report: Report = dataclasses.replace(
        base.report, findings=(exposed, churn, doubt), ignored=(IgnoredFinding(slow, "moves in May"),)
    )
    judged = (
        JudgedFinding(exposed, FindingStatus.WORSE, fails=True, impact_before=0.1),
        JudgedFinding(churn, FindingStatus.NEW, fails=True),
        JudgedFinding(doubt, FindingStatus.KNOWN, fails=False, impact_before=0.0),
    )
    worse = change("step_time_ns", 10e6, 13e6)
    changes = (
        worse,
        change("compute_ns", 6e6, 6e6),
        change("exposed_communication_ns", 2e6, 5e6, samples=2, recordings=1),
        change("idle_ns", 2e6, 1.5e6),
    )
    return CheckResult(
        report,
        Severity.WARNING,
        judged,
        comparison=Comparison("main", "today", changes, ("versions.torch differs: 2.12 in main, 2.13 in today",)),
        regressions=(worse,),
        budgets=(
            BudgetResult("step_time", "step_time_ns", 12e6, 13e6, BudgetOutcome.BROKEN, "13 ms of 12 ms a step."),
            BudgetResult("idle", "idle_ns", 3e6, 1.5e6, BudgetOutcome.MET, "1.5 ms of 3 ms a step."),
            BudgetResult(
                "tokens", "tokens_per_second", 100.0, None, BudgetOutcome.INCONCLUSIVE, "The run logs no tokens."
            ),
        ),
        fixed=(KnownFinding("HOST003", "HOST003", Severity.WARNING, 0.07, 0, 0, ""),),
        causes=(Cause("communication", "3 ms more a step are exposed communication.", ("step_time_ns",)),),
        baseline="main",
    )


def hostile() -> CheckResult:
    """Return the gate of a run whose every name is out to do harm."""
    found = [
        Finding("COMM001", Severity.WARNING, f"bad {HOSTILE}", HOSTILE, impact=0.1, subject=HOSTILE),
        Finding(HOSTILE, Severity.ERROR, HOSTILE, HOSTILE, cost_bytes=1),
    ]
    made = findings_only(f"runs/{HOSTILE}".replace("/", "∕").replace("∕", "/", 1), found=found, bar=Severity.WARNING)
    broken = BudgetResult(HOSTILE, "step_time_ns", 1.0, 2.0, BudgetOutcome.BROKEN, HOSTILE)
    cause = Cause(HOSTILE, HOSTILE, ("step_time_ns",))
    worse = change("step_time_ns", 10e6, 13e6)
    compared = Comparison(HOSTILE, HOSTILE, (worse,), (HOSTILE,))
    return dataclasses.replace(
        made, comparison=compared, regressions=(worse,), budgets=(broken,), causes=(cause,), baseline=HOSTILE
    )


def repository(folder: Path, **files: str) -> Path:
    """Return a folder made a repository with these files: their names with '__' for '/' and without '.py'."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / ".git").mkdir(exist_ok=True)
    return folder
