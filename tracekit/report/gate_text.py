"""Gate -> text: the verdict and its causes, then what changed, then the run's own report."""

from collections.abc import Sequence

from rich.console import RenderableType

from tracekit.model import units
from tracekit.regression.budgets import BudgetOutcome, BudgetResult
from tracekit.regression.comparison import Comparison
from tracekit.regression.gate import CheckResult, FindingStatus
from tracekit.report import comparison, phrases, text
from tracekit.report.render import layout

_ORDER = (FindingStatus.NEW, FindingStatus.WORSE, FindingStatus.KNOWN)
_FIXED, _FAILS = "fixed", ", fails"
_BAD, _UNSURE, _QUIET = "bold red", "yellow", "dim"
_STYLES = {
    FindingStatus.NEW.value: "bold",
    FindingStatus.WORSE.value: "bold",
    FindingStatus.KNOWN.value: _QUIET,
    _FIXED: layout.GOOD,
}
_OUTCOME_STYLES = {BudgetOutcome.BROKEN: _BAD, BudgetOutcome.MET: _QUIET, BudgetOutcome.INCONCLUSIVE: _UNSURE}


def render(gate: CheckResult, *, width: int = text.WIDTH, color: bool = False) -> str:
    """Return the verdict on a run, and its report, as text at most `width` columns wide."""
    width = min(width, text.MAX_WIDTH)
    return layout.print_to_string(parts(gate, width), width=width, color=color)


def parts(gate: CheckResult, width: int) -> list[RenderableType]:
    """Parts of the text of `render`, from the verdict down."""
    run = gate.report.run
    style = _BAD if gate.failures else f"{layout.BOLD} {layout.GOOD}"
    blocks: list[RenderableType] = [
        layout.line((headline(gate), style)),
        layout.dim(f"{run.name}  {phrases.subtitle(run)}"),
    ]
    for cause in gate.causes:
        blocks += [layout.hanging("Why", layout.line((f"{cause.name}: ", layout.BOLD), cause.message))]
    if gate.budgets:
        blocks += ["", layout.title("Budgets"), *(_budget(budget, gate) for budget in gate.budgets)]
    if gate.comparison is not None:
        blocks += ["", *_findings(gate), "", *_metrics(gate, gate.comparison, width)]
    is_first = gate.comparison is None
    findings = [verdict.finding for verdict in gate.findings if is_first or verdict.status is not FindingStatus.KNOWN]
    return blocks + text.body(gate.report, run, findings, width)


def headline(gate: CheckResult) -> str:
    """Return the verdict in one line: "Failed: 1 new finding, 2 metrics worse than main"."""
    against = f" than {gate.baseline}" if gate.baseline else ""
    failing = [verdict.status for verdict in gate.findings if verdict.fails]
    counts = _count(failing.count(FindingStatus.NEW), "new finding") if gate.baseline else []
    counts += _count(failing.count(FindingStatus.WORSE), "worse finding")
    counts += [] if gate.baseline else _count(len(failing), "finding")
    counts += _count(len(gate.regressions), "metric", f" worse{against}")
    counts += _count(sum(gate.fails_budget(item) for item in gate.budgets), "budget", " broken")
    if counts:
        return f"Failed: {', '.join(counts)}"
    if gate.report.cannot_judge is not None:
        return phrases.headline((), gate.report.cannot_judge)
    return f"Passed: nothing new, nothing worse{against}" if gate.baseline else "Passed"


def _count(number: int, noun: str, after: str = "") -> list[str]:
    return [units.count(number, noun) + after] if number else []


def _budget(budgeted: BudgetResult, gate: CheckResult) -> RenderableType:
    is_strict = gate.is_strict and budgeted.outcome is BudgetOutcome.INCONCLUSIVE
    outcome = budgeted.outcome.value + (", which fails: strict" if is_strict else "")
    styled = (outcome, _OUTCOME_STYLES[budgeted.outcome])
    line = layout.line((budgeted.budget, layout.BOLD), "  ", styled, "  ", budgeted.message)
    return layout.hanging("·", line)


def finding_rows(gate: CheckResult) -> list[list[str]]:
    """Return a row per finding of the run, then per fixed one: severity, rule, id, cost, status and verdict."""
    rows = [
        [
            verdict.finding.severity.label,
            phrases.rule_name(verdict.finding.code),
            verdict.finding.id,
            phrases.share_or_size(verdict.finding)
            + (f" (was {units.share(verdict.impact_before)})" if verdict.impact_before else ""),
            verdict.status.value + (_FAILS if verdict.fails else ""),
        ]
        for verdict in sorted(gate.findings, key=lambda verdict: _ORDER.index(verdict.status))
    ]
    return rows + [
        [fixed.severity.label, phrases.rule_name(fixed.code), fixed.id, f"was {units.share(fixed.impact)}", _FIXED]
        for fixed in gate.fixed
    ]


def metric_rows(gate: CheckResult, compared: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the comparison's table, each verdict with whether it fails the check."""
    failed = {change.metric for change in gate.regressions}
    header, rows = comparison.table_cells(compared)
    for row, change in zip(rows, compared.changes, strict=True):
        row[-1] += _FAILS if change.metric in failed else ""
    return header, rows


def _findings(gate: CheckResult) -> list[RenderableType]:
    heading = layout.title("Findings", f"  compared with {gate.baseline}")
    rows = finding_rows(gate)
    if not rows:
        return [heading, layout.indent(layout.dim("none in either run"))]
    styles = [_BAD if row[-1].endswith(_FAILS) else _STYLES[row[-1]] for row in rows]
    return [heading, layout.indent(layout.table(["", "", "", "of time", ""], rows, last_styles=styles))]


def _metrics(gate: CheckResult, compared: Comparison, width: int) -> Sequence[RenderableType]:
    header, rows = metric_rows(gate, compared)
    styles = [
        _BAD if row[-1].endswith(_FAILS) else comparison.STYLES[change.verdict]
        for row, change in zip(rows, compared.changes, strict=True)
    ]
    return [
        layout.title("Metrics", "  median over steps, mean over recordings"),
        layout.indent(comparison.as_rich_table(header, rows, styles, width)),
        *layout.bullets(comparison.remarks(compared)),
    ]
