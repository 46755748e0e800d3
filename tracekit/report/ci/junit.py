"""Gates -> JUnit XML, which Jenkins, GitLab, Azure and others show as tests: one suite per run.

The form is that of Jenkins' own schema, junit-10.xsd of its xunit plugin, which Surefire's reports obey as well. Test
cases keep their names from run to run, so that CI can distinguish new failures from old ones:
rules are named by code and name, metrics and budgets by their name.
"""

import datetime
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from tracekit.model import escaping
from tracekit.model.manifest import Manifest
from tracekit.regression.budgets import BudgetOutcome, BudgetResult
from tracekit.regression.gate import NUMBERS, CheckResult, JudgedFinding
from tracekit.regression.metrics import metric_of
from tracekit.regression.thresholds import Change, Verdict
from tracekit.report import comparison, phrases, step_verdict
from tracekit.report.ci import results
from tracekit.report.ci.code_locations import Checkout

_MAX_TEXT = 4000
_MAX_NAME = 200


def render(gates: Sequence[CheckResult], checkout: Checkout) -> str:
    """Return the XML: a case per rule (skipped if it cannot judge or its findings are ignored), metric and budget."""
    root = ET.Element("testsuites", name="tracekit")
    for name, gate in results.gates_by_name(gates):
        root.append(_suite(escaping.inert(name, _MAX_NAME), gate, checkout))
    for count in ("tests", "failures", "errors"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(name: str, gate: CheckResult, checkout: Checkout) -> ET.Element:
    suite = ET.Element("testsuite", name=name)
    properties = ET.SubElement(suite, "properties")
    values = {"tracekit": gate.report.tool_version, "run": phrases.subtitle(gate.report.run), "baseline": gate.baseline}
    for key, value in values.items():
        if value:
            ET.SubElement(properties, "property", name=key, value=escaping.inert(value, _MAX_NAME))
    codes = dict.fromkeys([*gate.report.rules, *(verdict.finding.code for verdict in gate.findings)])
    cases = [_rule(name, code, gate, checkout) for code in codes]
    cases += [_metric(name, change, gate) for change in (gate.comparison.changes if gate.comparison else ())]
    cases += [_budget(name, budget, gate) for budget in gate.budgets]
    cases += _numbers(name, gate)
    suite.extend(cases)
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    suite.set("errors", "0")
    suite.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
    began_ns = Manifest.of(gate.report.run.manifest).created_ns
    if began_ns is not None:
        when = datetime.datetime.fromtimestamp(began_ns / 1e9, datetime.UTC)
        suite.set("timestamp", when.isoformat(timespec="seconds").removesuffix("+00:00"))
    return suite


def _rule(run: str, code: str, gate: CheckResult, checkout: Checkout) -> ET.Element:
    case = _case(f"{run}.rules", f"{code} {phrases.rule_name(code)}")
    findings = [verdict for verdict in gate.findings if verdict.finding.code == code]
    failing = [verdict for verdict in findings if verdict.fails]
    ignored = [f"ignored: {aside.reason}" for aside in gate.report.ignored if aside.finding.code == code]
    skipped = [*ignored, gate.report.blind_spots.get(code)][0]
    if failing:
        texts = [_finding_text(verdict, gate, checkout) for verdict in failing]
        _add(case, "failure", failing[0].finding.sentence, texts, "finding")
    elif not findings and skipped:
        _add(case, "skipped", skipped)
    passing = [verdict for verdict in findings if not verdict.fails]
    if passing:
        _add_output(case, [_finding_text(verdict, gate, checkout) for verdict in passing])
    return case


def _metric(run: str, change: Change, gate: CheckResult) -> ET.Element:
    case = _case(f"{run}.metrics", change.metric)
    before, now = (metric_of(change.metric).text(value) for value in (change.reference, change.candidate))
    summary = f"{before} before, {now} now, {comparison.change_text(change)}: {step_verdict.VERDICTS[change.verdict]}"
    causes = [cause.message for cause in gate.causes if change.metric in cause.metrics]
    if any(change.metric == worse.metric for worse in gate.regressions):
        _add(case, "failure", summary, [summary, *causes], "regression")
    elif change.verdict is Verdict.INCONCLUSIVE:
        more = f"; about {change.more_samples:,} more samples per side would be conclusive"
        _add(case, "skipped", summary + (more if change.more_samples else ""))
    else:
        _add_output(case, [summary])
    return case


def _budget(run: str, budget: BudgetResult, gate: CheckResult) -> ET.Element:
    case = _case(f"{run}.budgets", budget.budget)
    if gate.fails_budget(budget):
        _add(case, "failure", budget.message, [budget.message], "budget")
    elif budget.outcome is BudgetOutcome.INCONCLUSIVE:
        _add(case, "skipped", budget.message)
    else:
        _add_output(case, [budget.message])
    return case


def _numbers(run: str, gate: CheckResult) -> list[ET.Element]:
    numbers = gate.comparison.numbers if gate.comparison else None
    if numbers is None:
        return []
    case, sentence = _case(f"{run}.numbers", NUMBERS), comparison.number_sentence(numbers)
    if NUMBERS in gate.failures:
        _add(case, "failure", sentence, [sentence], NUMBERS)
    else:
        _add_output(case, [sentence])
    return [case]


def _finding_text(verdict: JudgedFinding, gate: CheckResult, checkout: Checkout) -> str:
    finding = verdict.finding
    location = checkout.locate(gate.report.run, finding)
    lines = [
        f"{finding.severity.label} {finding.id}: {finding.sentence}.",
        phrases.details(finding),
        f"Fix: {finding.fix}" if finding.fix else "",
        phrases.scope(finding),
        f"{location.path}:{location.line}",
    ]
    return "\n".join(escaping.inert(line, _MAX_TEXT) for line in lines if line)


def _case(group: str, name: str) -> ET.Element:
    return ET.Element("testcase", classname=group, name=escaping.inert(name, _MAX_NAME))


def _add(case: ET.Element, tag: str, message: str, texts: Sequence[str] = (), kind: str = "") -> None:
    element = ET.SubElement(case, tag, message=escaping.inert(message, _MAX_TEXT))
    if kind:
        element.set("type", kind)
    element.text = _block(texts)


def _add_output(case: ET.Element, texts: Sequence[str]) -> None:
    ET.SubElement(case, "system-out").text = _block(texts)


def _block(texts: Sequence[str]) -> str:
    return "\n\n".join("\n".join(escaping.inert(line, _MAX_TEXT) for line in text.splitlines()) for text in texts)
