"""Gate -> text: passed or failed and why first, then what changed, then the run's own report."""

from collections.abc import Sequence

from rich.console import RenderableType

from tracekit.model import units
from tracekit.regression.gate import BudgetOutcome, BudgetResult, CheckResult, FindingStatus, JudgedFinding
from tracekit.report import comparison, phrases, text, text_layout

_ORDER = (FindingStatus.NEW, FindingStatus.WORSE, FindingStatus.KNOWN)
_FIXED = "fixed"
_BAD, _UNSURE, _QUIET = "bold red", "yellow", "dim"
_STYLES = {
    FindingStatus.NEW.value: "bold",
    FindingStatus.WORSE.value: "bold",
    FindingStatus.KNOWN.value: _QUIET,
    _FIXED: text_layout.GOOD,
}
_OUTCOME_STYLES = {BudgetOutcome.BROKEN: _BAD, BudgetOutcome.KEPT: _QUIET, BudgetOutcome.CANNOT_TELL: _UNSURE}
_NARROW = 100


def render(gate: CheckResult, *, width: int = text.WIDTH, color: bool = False) -> str:
    """Return the verdict on a run, and its report, as text at most `width` columns wide."""
    width = min(width, text.MAX_WIDTH)
    return text_layout.print_to_string(parts(gate, width), width=width, color=color)


def parts(gate: CheckResult, width: int) -> list[RenderableType]:
    """Return what `render` prints, from the verdict down."""
    run = gate.report.run
    made: list[RenderableType] = [
        _verdict(gate),
        text_layout.line((f"{run.name}  {phrases.subtitle(run)}", text_layout.DIM)),
    ]
    for cause in gate.causes:
        made += [text_layout.hanging("Why", text_layout.line((f"{cause.name}: ", text_layout.BOLD), cause.message))]
    if gate.budgets:
        made += ["", text_layout.line(("Budgets", text_layout.BOLD)), *(_budget(each, gate) for each in gate.budgets)]
    if gate.comparison is not None:
        made += ["", *_findings(gate), "", *_metrics(gate, width)]
    shown = [
        each.finding for each in gate.findings if each.status is not FindingStatus.KNOWN or gate.comparison is None
    ]
    return made + text.body(gate.report, run, shown, width)


def headline(gate: CheckResult) -> str:
    """Return the verdict in one line: "Failed: 1 new finding, 2 metrics worse than main"."""
    against = f" than {gate.baseline}" if gate.baseline else ""
    told = _finding_count(gate, FindingStatus.NEW, "new finding") if gate.baseline else []
    told += _finding_count(gate, FindingStatus.WORSE, "worse finding")
    if not gate.baseline:
        told += _count(sum(each.fails for each in gate.findings), "finding")
    told += _count(len(gate.regressions), "metric", f" worse{against}")
    told += _count(sum(gate.fails_budget(each) for each in gate.budgets), "budget", " broken")
    if told:
        return f"Failed: {', '.join(told)}"
    return f"Passed: nothing new, nothing worse{against}" if gate.baseline else "Passed"


def _verdict(gate: CheckResult) -> RenderableType:
    return text_layout.line((headline(gate), _BAD if gate.failures else f"{text_layout.BOLD} {text_layout.GOOD}"))


def _finding_count(gate: CheckResult, standing: FindingStatus, noun: str) -> list[str]:
    return _count(sum(each.fails and each.status is standing for each in gate.findings), noun)


def _count(number: int, noun: str, after: str = "") -> list[str]:
    return [f"{number} {noun}{'s' * (number > 1)}{after}"] if number else []


def _budget(budgeted: BudgetResult, gate: CheckResult) -> RenderableType:
    told = f"{budgeted.outcome.value}{', which fails: strict' * (gate.is_strict and _is_unsure(budgeted))}"
    line = text_layout.line(
        (budgeted.budget, text_layout.BOLD), "  ", (told, _OUTCOME_STYLES[budgeted.outcome]), "  ", budgeted.message
    )
    return text_layout.hanging("·", line)


def _is_unsure(budgeted: BudgetResult) -> bool:
    return budgeted.outcome is BudgetOutcome.CANNOT_TELL


def _findings(gate: CheckResult) -> list[RenderableType]:
    heading = text_layout.line(("Findings", text_layout.BOLD), (f"  beside {gate.baseline}", text_layout.DIM))
    ordered = sorted(gate.findings, key=lambda each: _ORDER.index(each.status))
    rows = [_finding_row(each) for each in ordered]
    rows += [
        [gone.severity.label, phrases.rule_name(gone.code), gone.id, f"was {units.share(gone.impact)}", "", _FIXED]
        for gone in gate.fixed
    ]
    if not rows:
        return [heading, text_layout.indented(text_layout.line(("none, then and now", text_layout.DIM)))]
    styles = [_BAD if row[4] else _STYLES[row[5]] for row in rows]
    return [heading, text_layout.indented(text_layout.table(["", "", "", "of step", "", ""], rows, last_styles=styles))]


def _finding_row(judged: JudgedFinding) -> list[str]:
    found = judged.finding
    cost = units.share(found.impact) if found.impact or not found.cost_bytes else units.size(found.cost_bytes)
    before = f" (was {units.share(judged.impact_before)})" if judged.impact_before else ""
    fails = "fails" if judged.fails else ""
    return [
        found.severity.label,
        phrases.rule_name(found.code),
        found.id,
        f"{cost}{before}",
        fails,
        judged.status.value,
    ]


def _metrics(gate: CheckResult, width: int) -> Sequence[RenderableType]:
    assert gate.comparison is not None
    found = gate.comparison
    failed = {change.metric for change in gate.regressions}
    header, rows = comparison.table_cells(found)
    for row, change in zip(rows, found.changes, strict=True):
        row[-1] += ", fails" if change.metric in failed else ""
    styles = [_BAD if change.metric in failed else comparison.STYLES[change.verdict] for change in found.changes]
    right = [False, True, True, True, True, False]
    made = text_layout.table(header, rows, right=right, gap=1 if width < _NARROW else 2, last_styles=styles)
    made.columns[0].no_wrap = True
    remarks = [text_layout.hanging("·", text_layout.line(remark)) for remark in comparison.remarks(found)]
    heading = text_layout.line(
        ("Metrics", text_layout.BOLD), ("  medians over steps, mean over recordings", text_layout.DIM)
    )
    return [heading, text_layout.indented(made), *remarks]
