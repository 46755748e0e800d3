"""Gate -> HTML: what the report page says above a run's report where it was held against a baseline or budgets."""

from tracekit.model import escaping, units
from tracekit.regression.comparison import Comparison
from tracekit.regression.gate import CheckResult, JudgedFinding
from tracekit.report import comparison, gate_text, phrases

STYLE = """
.tk-gate{border-left:6px solid #009E73;border-radius:6px;padding:14px 18px;margin:0 0 14px;
background:rgba(128,138,150,.1)}.tk-gate.failed{border-color:#D55E00}
.tk-gate b.headline{display:block;font-size:1.25rem;line-height:1.35;font-weight:650}
.tk-gate p{margin:6px 0 0}
"""


def verdict(gate: CheckResult) -> str:
    """Return the verdict with its causes in a coloured box; '' where there is neither baseline nor budget."""
    if gate.comparison is None and not gate.budgets:
        return ""
    causes = "".join(
        f"<p><b>{escaping.escape(cause.name)}</b> {escaping.escape(cause.message, 1000)}</p>" for cause in gate.causes
    )
    headline = f'<b class="headline">{escaping.escape(gate_text.headline(gate), 500)}</b>'
    return f'<div class="tk-gate{" failed" if gate.failures else ""}">{headline}{causes}</div>'


def tables(gate: CheckResult) -> str:
    """Return budgets, and findings and metrics beside the baseline's, as tables; '' where there are none."""
    return _budgets(gate) + (_findings(gate) + _metrics(gate, gate.comparison) if gate.comparison else "")


def _budgets(gate: CheckResult) -> str:
    rows = [
        (
            each.budget,
            escaping.cell(each.metric, each.limit),
            escaping.cell(each.metric, each.measured),
            each.outcome.value + ", fails" * gate.fails_budget(each),
        )
        for each in gate.budgets
    ]
    right = (False, True, True, False)
    return "<h2>Budgets</h2>" + escaping.html_table(("", "limit", "measured", ""), rows, right=right) if rows else ""


def _findings(gate: CheckResult) -> str:
    rows = [_finding(each) for each in gate.findings]
    rows += [
        (gone.severity.label, phrases.rule_name(gone.code), gone.id, f"was {units.share(gone.impact)}", "fixed")
        for gone in gate.fixed
    ]
    if not rows:
        return ""
    table = escaping.html_table(("", "", "", "of step", ""), rows)
    return f"<h2>Findings beside {escaping.escape(gate.baseline)}</h2>{table}"


def _metrics(gate: CheckResult, found: Comparison) -> str:
    failing = {change.metric for change in gate.regressions}
    header, rows = comparison.table_cells(found)
    for row, change in zip(rows, found.changes, strict=True):
        row[-1] += ", fails" if change.metric in failing else ""
    table = escaping.html_table(header, rows, right=(False, True, True, True, True, False))
    remarks = "".join(f"<li>{escaping.escape(remark, 1000)}</li>" for remark in comparison.remarks(found))
    heading = f"<h2>Metrics beside {escaping.escape(gate.baseline)}</h2>"
    return heading + table + (f"<ul>{remarks}</ul>" if remarks else "")


def _finding(judged: JudgedFinding) -> tuple[str, ...]:
    found = judged.finding
    cost = units.share(found.impact) if found.impact or not found.cost_bytes else units.size(found.cost_bytes)
    before = f" (was {units.share(judged.impact_before)})" if judged.impact_before else ""
    standing = judged.status.value + ", fails" * judged.fails
    return found.severity.label, phrases.rule_name(found.code), found.id, f"{cost}{before}", standing
