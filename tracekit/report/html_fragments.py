"""Pieces of HTML that the report page and the dashboard share, so that both show the same in the same words."""

from collections.abc import Mapping, Sequence

import polars as pl

from tracekit.analysis.time import breakdown
from tracekit.model import escaping, units
from tracekit.model.run import Run
from tracekit.regression.comparison import Comparison
from tracekit.regression.gate import CheckResult, FindingStatus
from tracekit.regression.metrics import metric_of
from tracekit.regression.thresholds import Change, Verdict
from tracekit.report import charts, comparison, phrases, step_verdict, text
from tracekit.report.render import html as render_html
from tracekit.rules.rule import Finding, Severity

MAX_EVIDENCE_ROWS = 8

_VERDICT_CLASSES = {Verdict.WORSE: "error", Verdict.BETTER: "good", Verdict.SAME: "good", Verdict.INCONCLUSIVE: "info"}


def style() -> str:
    """Return the style sheet of the pieces."""
    return escaping.asset("fragments.css")


def verdict(findings: Sequence[Finding], cannot_judge: str | None = None) -> str:
    """Return the verdict on a run in a coloured box: the costliest finding, and how many there are of each severity.

    Of a run that rules cannot judge, it is the reason, `phrases.cannot_judge`.
    """
    status, headline = verdict_status(findings, cannot_judge), phrases.headline(findings, cannot_judge)
    return escaping.fragment("verdict", status, headline, phrases.severity_counts(findings))


def verdict_status(findings: Sequence[Finding], cannot_judge: str | None = None) -> str:
    """Return the colour of a verdict: the label of the worst severity, or "good"."""
    worst = max((finding.severity for finding in findings), default=None if cannot_judge is None else Severity.ERROR)
    return worst.label if worst else "good"


def headline(text: str, about: str, status: str, *, is_verdict: bool = False) -> str:
    """Return the headline of a page in a coloured box: one sentence, and one about it or ''.

    `is_verdict`: whether it is the verdict on the run.
    """
    return escaping.fragment("headline", f"{status} tk-verdict" if is_verdict else status, text, about)


def numbers(figures: Mapping[str, tuple[str, str]]) -> str:
    """Return a row of large numbers: label -> (value, colour of its mark or '')."""
    return escaping.fragment("numbers", figures)


def headline_numbers(run: Run) -> dict[str, tuple[str, str]]:
    """Return the numbers to see first, as `numbers` shows them: the step time, and shares over all ranks and steps."""
    steps = run.table(breakdown.by_step)
    table = steps if steps.height else run.table(breakdown.by_rank)
    totals = table.select(pl.col(*charts.PARTS, "duration_ns", "communication_ns", "overlapped_ns").sum().cast(float))
    total = totals.row(0, named=True)
    if not total["duration_ns"]:
        return {}
    step_ns = breakdown.step_time_ns(run)
    texts = (
        {"time traced, longest rank": (units.duration(table.select(pl.col("duration_ns").max()).item()), "")}
        if step_ns is None
        else {"step time, median": (units.duration(step_ns), "")}
    )
    for column, (label, kind) in charts.PARTS.items():
        texts[label] = (units.share(total[column] / total["duration_ns"]), charts.COLOURS[kind])
    if total["communication_ns"]:
        overlapped = total["overlapped_ns"] / total["communication_ns"]
        texts["of communication overlapped"] = (units.share(overlapped), "")
    return texts


def data_quality(findings: Sequence[Finding]) -> str:
    """Return in one line whether the data can be trusted, from the findings about data quality."""
    problems = [finding for finding in findings if finding.severity > Severity.INFO]
    if not problems:
        return escaping.fragment("data_quality", True, f", {phrases.severity_counts(findings)}" if findings else "")
    first = max(problems, key=lambda finding: finding.severity)
    more = f" And {len(problems) - 1} more, below." if len(problems) > 1 else ""
    return escaping.fragment("data_quality", False, f"because {first.message}{more}")


def comparison_verdict(compared: Comparison, gate: CheckResult | None, *, heading: str = "") -> str:
    """Comparison of a run with another in a coloured box: step time, other changes, the likely cause.

    `heading` is in place of the sentence on the step time where that stands above already.
    """
    by_metric = {change.metric: change for change in compared.changes}
    first = by_metric.get("step_time_ns") or next(iter(by_metric.values()))
    change = comparison.change_text(first)
    by_metric_text = f"{compared.candidate}: {comparison.label(first.metric)} {change}: {first.verdict.value}"
    sentence = step_verdict.headline(compared) or by_metric_text
    headline = heading or comparison.with_minus_signs(sentence)
    other_changes = [change for change in compared.changes if change is not first]
    metrics = []
    for verdict in (Verdict.WORSE, Verdict.BETTER):
        labels = [comparison.label(change.metric) for change in other_changes if change.verdict is verdict]
        metrics += [f"{verdict.value}: {', '.join(labels)}"] if labels else []
    advice = step_verdict.advice(compared)
    doubts = [("other programs", step_verdict.doubt(compared).removeprefix("other programs "))]
    lines = [(name, text) for name, text in (*doubts, ("to decide it", advice)) if text]
    if gate is not None:
        lines += [(cause.label, cause.message) for cause in gate.causes]
        new = [verdict.finding.code for verdict in gate.findings if verdict.status is FindingStatus.NEW]
        for name, codes in (("new findings", new), ("resolved findings", [finding.code for finding in gate.fixed])):
            lines += [(name, ", ".join(dict.fromkeys(map(phrases.rule_name, codes))))] if codes else []
    status = change_status(compared, first)
    return escaping.fragment("comparison_verdict", status, headline, " · ".join(metrics), lines)


def change_status(compared: Comparison, change: Change) -> str:
    """Return the colour of a change: green only where both runs do the same work."""
    return _VERDICT_CLASSES[step_verdict.colour_verdict(compared, change.verdict)]


def is_conclusive(change: Change) -> bool:
    """Return whether a metric got better or worse for certain."""
    return change.verdict in (Verdict.BETTER, Verdict.WORSE)


def finding(finding: Finding) -> str:
    """Return a finding without its evidence: severity, sentence, message, fix, name and id of its rule, scope."""
    details, name = phrases.details(finding), phrases.rule_name(finding.code)
    return escaping.fragment("finding", finding, details, name, phrases.scope(finding))


def evidence(finding: Finding, clock: pl.DataFrame) -> str:
    """Return the first rows of a finding's evidence as an HTML table, starts counted from the run's.

    `clock` is that of `extents.run_clock`. '' where there is no evidence.
    """
    if finding.evidence.is_empty():
        return ""
    rows = escaping.frame(phrases.from_run_start(finding.evidence.head(MAX_EVIDENCE_ROWS), clock))
    return escaping.fragment("evidence", rows, finding.evidence.height - MAX_EVIDENCE_ROWS)


def gate_verdict(gate: CheckResult) -> str:
    """Return the verdict of a check with its causes in a coloured box; '' without a baseline and budgets."""
    if gate.comparison is None and not gate.budgets:
        return ""
    return escaping.fragment("gate_verdict", bool(gate.failures), text.headline(gate), gate.causes)


def gate_tables(gate: CheckResult) -> str:
    """Return budgets, and findings and metrics compared with the baseline's, as tables; '' where there are none."""
    budgets = []
    for budget in gate.budgets:
        limit, measured = (metric_of(budget.metric).text(value) for value in (budget.limit, budget.measured))
        outcome = f"{budget.outcome.value}, fails" if gate.fails_budget(budget) else budget.outcome.value
        budgets.append((budget.budget, limit, measured, outcome))
    table = budgets and escaping.html_table(("", "limit", "measured", ""), budgets, right=(False, True, True, False))
    if gate.comparison is None:
        return escaping.fragment("gate_tables", gate.baseline, table, "", "", ())
    finding_cells, metrics = text.finding_cells(gate), render_html.table(text.metric_cells(gate, gate.comparison))
    findings = render_html.table(finding_cells) if finding_cells.rows else ""
    return escaping.fragment(
        "gate_tables", gate.baseline, table, findings, metrics, comparison.remarks(gate.comparison)
    )
