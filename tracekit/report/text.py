"""A check as text: in a dozen lines the costliest findings with place, fix and address; in detail, all of them."""

from collections.abc import Sequence
from dataclasses import replace

import polars as pl

from tracekit import conventions
from tracekit.analysis.quality import contents
from tracekit.analysis.time import breakdown, log_contents, rank_shares
from tracekit.model import schema, units
from tracekit.model.run import Run
from tracekit.regression.budgets import BudgetOutcome
from tracekit.regression.comparison import Comparison
from tracekit.regression.gate import NUMBERS, CheckResult, FindingStatus
from tracekit.report import comparison, phrases, step_verdict
from tracekit.report.document import (
    Cells,
    Definitions,
    Document,
    Emphasis,
    Line,
    Section,
    Table,
    faint,
    heading,
    items,
    line,
)
from tracekit.report.render import text as render_text
from tracekit.rules import data_quality, unreported_causes
from tracekit.rules.rule import Finding, Report, Severity, cost_order, has_found_iterations, is_data_quality

WIDTH = 100
MAX_RANKS = 16
MAX_EVIDENCE_ROWS = 3
MAX_BRIEF = 2
"""Findings in brief: with the lines on run, time and data about a dozen lines, which are read in ten seconds."""
ADDRESS = f"http://{conventions.DASHBOARD_HOST}:{conventions.DASHBOARD_PORT}"
"""Where `tracekit dashboard` listens, unless it is told another port."""
MAX_WIDTH = 120  # longer lines are hard to read
# The columns of evidence that are dropped on a narrow terminal, in this order.
_DROP_ORDER = ("activity_id", "blocker_id", "lane", "device", "blocking", "name", "phase")
_LEAST_TEXT = 8
"""Texts are cut to so many characters before columns are dropped that are not of _DROP_ORDER, the last one first."""
_ESSENTIAL = ("rank", "step", "name", "op", "kind", "message", "start_ns", "dur_ns", "lost_ns")
_SEVERITIES = {Severity.ERROR: Emphasis.WORSE, Severity.WARNING: Emphasis.WARNING, Severity.INFO: Emphasis.NOTE}
_STATUSES = {
    FindingStatus.NEW: Emphasis.STRONG,
    FindingStatus.WORSE: Emphasis.STRONG,
    FindingStatus.KNOWN: Emphasis.FAINT,
}
_TIME_PARTS = {
    "compute_ratio": "compute",
    "exposed comm_ratio": "exposed communication",
    "exposed copy_ratio": "exposed copies",
    "idle_ratio": "idle",
}
_OUTCOMES = {
    BudgetOutcome.BROKEN: Emphasis.WORSE,
    BudgetOutcome.MET: Emphasis.FAINT,
    BudgetOutcome.INCONCLUSIVE: Emphasis.DOUBTFUL,
}


def render(report: Report, run: Run, *, width: int = WIDTH, color: bool = False, is_detailed: bool = False) -> str:
    """Return the report as text at most `width` columns wide: in brief, or with all findings and their evidence."""
    written = document(report, run) if is_detailed else brief(report, run)
    return render_text.render(written, width=min(width, MAX_WIDTH), color=color)


def render_several(
    reports: Sequence[tuple[Report, Run]], *, width: int = WIDTH, color: bool = False, is_detailed: bool = False
) -> str:
    """Return several reports: a table of their findings, then each report, side by side if the width allows."""
    write = document if is_detailed else brief
    documents = [(run.name, write(report, run)) for report, run in reports]
    # One row per rule and one column per run, the costliest first.
    findings = [finding for report, _ in reports for finding in report.findings]
    codes = dict.fromkeys(finding.code for finding in sorted(findings, key=cost_order, reverse=True))
    rows = [
        (phrases.rule_name(code), code, *(_worst_of_rule(report.findings, code) for report, _ in reports))
        for code in codes
    ]
    rows = rows or [("no rule fired", "", *("" for _ in reports))]
    findings_by_run = Cells(("finding", "", *(run.name for _, run in reports)), tuple(rows))
    return render_text.render_several(findings_by_run, documents, width=width, color=color)


def render_gates(
    gates: Sequence[CheckResult], *, width: int = WIDTH, color: bool = False, is_detailed: bool = False
) -> str:
    """Return the verdicts on runs, each with its report."""
    documents = (gate_document(gate, is_detailed=is_detailed) for gate in gates)
    return "\n".join(render_text.render(verdict, width=min(width, MAX_WIDTH), color=color) for verdict in documents)


def brief(report: Report, run: Run) -> Document:
    """The run, its costliest findings in one sentence each, where the time goes, and trust in the data."""
    return Document(((_run_line(run),), *_brief(report, run, report.findings)))


def document(report: Report, run: Run) -> Document:
    """The verdict, where the time goes, each finding with the first rows of its evidence, and the notes."""
    findings = report.findings
    verdict = _verdict(report)
    if findings:
        worst = max(finding.severity for finding in findings)
        verdict.append(line((phrases.severity_counts(findings), _SEVERITIES[worst])))
    return Document(((*verdict, _run_line(run)), *_body(report, run, findings)))


def gate_document(gate: CheckResult, *, is_detailed: bool = False) -> Document:
    """The verdict on a run with its causes, budgets, and changes since the baseline; then its report."""
    run = gate.report.run
    first = [
        line((headline(gate), Emphasis.WORSE if gate.failures else Emphasis.BETTER)),
        *(comparison.verdict_lines(gate.comparison) if gate.comparison is not None else ()),
        _run_line(run),
        *(line((f"{cause.name}: ", Emphasis.STRONG), cause.message, mark="Why") for cause in gate.causes),
    ]
    sections: list[Section] = [first]
    if gate.budgets:
        lines = [heading("Budgets")]
        for budget in gate.budgets:
            is_strict = gate.is_strict and budget.outcome is BudgetOutcome.INCONCLUSIVE
            outcome = budget.outcome.value + (", which fails: strict" if is_strict else ""), _OUTCOMES[budget.outcome]
            lines.append(line((budget.budget, Emphasis.STRONG), "  ", outcome, "  ", budget.message, mark="·"))
        sections.append(lines)
    if gate.comparison is not None:
        findings = finding_cells(gate)
        title = heading("Findings", f"  compared with {gate.baseline}")
        sections.append([title, findings if findings.rows else faint("none in either run", indent=2)])
        if gate.comparison.contributions:
            sections.append([heading("Change of the step"), step_verdict.contribution_cells(gate.comparison)])
    title = heading("Metrics", "  median over steps, mean over recordings")
    if gate.comparison is not None and is_detailed:
        sections.append([title, metric_cells(gate, gate.comparison), *items(comparison.remarks(gate.comparison))])
    elif gate.comparison is not None and gate.regressions:
        sections.append([title, metric_cells(gate, replace(gate.comparison, changes=gate.regressions))])
    is_first = gate.comparison is None
    new = [verdict.finding for verdict in gate.findings if is_first or verdict.status is not FindingStatus.KNOWN]
    body = _body(gate.report, run, new) if is_detailed else _brief(gate.report, run, new)
    return Document((*sections, *body))


def headline(gate: CheckResult) -> str:
    """Return the verdict in one line: "Failed: 1 new finding, 2 metrics worse than main"."""
    against = f" than {gate.baseline}" if gate.baseline else ""
    failing = [verdict.status for verdict in gate.findings if verdict.fails]
    counts = [
        (failing.count(FindingStatus.NEW) if gate.baseline else 0, "new finding", ""),
        (failing.count(FindingStatus.WORSE), "worse finding", ""),
        (0 if gate.baseline else len(failing), "finding", ""),
        (len(gate.regressions), "metric", f" worse{against}"),
        (sum(gate.fails_budget(item) for item in gate.budgets), "budget", " broken"),
        (gate.failures.count(NUMBERS), "numerical difference", ""),
    ]
    if any(number for number, *_ in counts):
        return f"Failed: {', '.join(units.count(number, noun) + after for number, noun, after in counts if number)}"
    if gate.report.cannot_judge is not None:
        return phrases.headline((), gate.report.cannot_judge)
    return f"Passed: nothing new, nothing worse{against}" if gate.baseline else "Passed"


def finding_cells(gate: CheckResult) -> Cells:
    """A row per finding of the run, then per fixed one: severity, rule, id, cost, status and verdict."""
    rows, emphases = [], []
    for verdict in sorted(gate.findings, key=lambda verdict: list(_STATUSES).index(verdict.status)):
        finding = verdict.finding
        before = f" (was {units.share(verdict.impact_before)})" if verdict.impact_before else ""
        names = finding.severity.label, phrases.rule_name(finding.code), finding.id
        status = verdict.status.value + (", fails" if verdict.fails else "")
        rows.append((*names, phrases.share_or_size(finding) + before, status))
        emphases.append(Emphasis.WORSE if verdict.fails else _STATUSES[verdict.status])
    for fixed in gate.fixed:
        names = fixed.severity.label, phrases.rule_name(fixed.code), fixed.id
        rows.append((*names, f"was {units.share(fixed.impact)}", "fixed"))
        emphases.append(Emphasis.GOOD)
    return Cells(("", "", "", "of time", ""), tuple(rows), emphases=tuple(emphases), indent=2)


def metric_cells(gate: CheckResult, compared: Comparison) -> Cells:
    """The table of the comparison, each verdict with whether it fails the check."""
    return comparison.cells(compared, {change.metric for change in gate.regressions}, indent=2)


def _run_line(run: Run) -> Line:
    """What run it is, and its mean step, of which savings are shares; the median where it differs as printed."""
    mean_ns, median_ns = breakdown.mean_step_ns(run), breakdown.step_time_ns(run)
    parts = [phrases.subtitle(run)]
    if mean_ns is not None and median_ns is not None:
        noun, per = ("iteration", "an iteration") if has_found_iterations(run) else ("step", "a step")
        steps = units.numbers(noun, breakdown.slowest_device_by_step(run)["step"].drop_nulls().unique().sort())
        found = ", found by repetition" if noun == "iteration" else ""
        mean, median = units.duration(mean_ns), units.duration(median_ns)
        times = f"{mean} {per}" + (f", median {median}" if median != mean else "")
        parts.append(times + (f" ({steps}{found})" if steps else ""))
    else:
        parts.append("no steps are marked")
    return line((run.name, Emphasis.STRONG), f"  {' · '.join(filter(None, parts))}")


def _verdict(report: Report) -> list[Line]:
    if report.cannot_judge is not None:
        return [line((phrases.headline(report.findings, report.cannot_judge), Emphasis.WORSE))]
    return [] if report.findings else [line((phrases.no_problems(report), Emphasis.BETTER))]


def _brief(report: Report, run: Run, findings: Sequence[Finding]) -> list[Section]:
    """The first findings, one sentence each with place, fix and address; time, data, and how many more there are."""
    ids = {finding.id for finding in findings}
    of_training = [
        finding for finding in findings if not is_data_quality(finding.code) and finding.consequence_of not in ids
    ]
    # A recording that cannot be trusted comes before what was read from it.
    doubts = sorted((finding for finding in findings if is_data_quality(finding.code)), key=data_quality.cause_order)
    first = [doubt for doubt in doubts if doubt.severity is Severity.ERROR][:1] + of_training
    picked = [finding for finding in first if finding.severity > Severity.INFO][:MAX_BRIEF] or first[:1]
    verdict = _verdict(report)
    if not verdict and not first:
        verdict = [line((phrases.no_problems(report), Emphasis.BETTER))]
    sections: list[Section] = [verdict] if verdict else []
    caused = [_stated_consequences(finding, findings) for finding in picked]
    sections += [_finding_lines(*pair) for pair in zip(picked, caused, strict=True)]
    rows = [
        (line(("time", Emphasis.FAINT)), line(_time(run))),
        (line(("data", Emphasis.FAINT)), line(_trust(run, doubts))),
    ]
    if report.ignored:
        ignored = "; ".join(f"{aside.finding.code} ({aside.reason})" for aside in report.ignored)
        rows.append((line(("ignored", Emphasis.FAINT)), line(ignored)))
    more = len(findings) - len(picked) - sum(map(len, caused))
    more_text = f"shows {units.count(more, 'more finding')} and the evidence" if more else "shows the evidence"
    served = any(map(phrases.has_moment, picked))
    more_text += f"; tracekit dashboard {run.path} serves these addresses" if served else ""
    rows.append((line(("-v", Emphasis.FAINT)), line(more_text)))
    return [*sections, [Definitions(tuple(rows))]]


def _stated_consequences(finding: Finding, findings: Sequence[Finding]) -> list[Finding]:
    """The consequences of a finding that have a place; small losses all over the step add nothing to it."""
    return [caused for caused in phrases.consequences(finding, findings) if caused.subject != unreported_causes.SUBJECT]


def _finding_lines(finding: Finding, consequences: Sequence[Finding]) -> Section:
    severity = finding.severity.label.upper(), _SEVERITIES[finding.severity]
    rows = [("where", phrases.place(finding)), ("also", "; ".join(caused.claim for caused in consequences))]
    fix = finding.fix
    end = fix.find(". ")
    rows.append(("fix", fix if end < 0 else fix[: end + 1]))
    if phrases.has_moment(finding):
        rows.append(("open", f"{ADDRESS}/timeline?finding={finding.id}"))
    lines = tuple((line((name, Emphasis.FAINT)), line(text)) for name, text in rows if text)
    return [line(severity, "  ", (f"{finding.sentence}.", Emphasis.STRONG)), Definitions(lines, indent=2)]


def _time(run: Run) -> str:
    """Where the time goes, over all ranks: shares that add up to 100%."""
    ranks = rank_shares.shares(run)
    if ranks.is_empty():
        return "the traces contain no activities"
    totals = ranks.select(pl.col(name).mean() for name in ranks.columns if name.endswith("_ratio")).row(0, named=True)
    if log_contents.has_collectives_only(run):
        of_ranks = f", mean of {ranks.height:,} ranks" if ranks.height > 1 else ""
        return f"collectives {units.share(1 - totals['idle_ratio'])}; compute was not recorded{of_ranks}"
    if log_contents.has_spans_only(run):
        work, rest = units.share(totals["compute_ratio"]), units.share(1 - totals["compute_ratio"])
        return f"on the host: forward, backward and optimizer {work}, rest {rest}"
    parts = {name: ratio for name, ratio in totals.items() if ratio and name in _TIME_PARTS}
    text = ", ".join(f"{_TIME_PARTS[name]} {units.share(parts[name])}" for name in _TIME_PARTS if name in parts)
    return text + (f", mean of {ranks.height:,} ranks" if ranks.height > 1 else "")


def _trust(run: Run, doubts: Sequence[Finding]) -> str:
    """Whether the recording can be trusted, in one line."""
    problems = [doubt for doubt in doubts if doubt.severity > Severity.INFO]
    if not problems:
        return "complete" + (f", {units.count(len(doubts), 'remark')}" if doubts else "")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    first = problems[0]
    of_ranks = f" ({units.numbers('rank', first.ranks)})" if first.ranks and set(first.ranks) < set(run.ranks) else ""
    return f"doubtful{of_ranks}: {first.sentence}{more}"


def _body(report: Report, run: Run, findings: Sequence[Finding]) -> list[Section]:
    """A report without its verdict."""
    sections: list[Section] = [_breakdown(run)]
    clock = breakdown.run_clock(run) if findings else schema.empty(breakdown.RUN_CLOCK)
    for finding in findings:
        severity = finding.severity.label.upper(), _SEVERITIES[finding.severity]
        rule = f"{phrases.rule_name(finding.code)} {finding.id} · {phrases.scope(finding)}"
        rule += f" · consequence of {finding.consequence_of}" if finding.consequence_of else ""
        details = phrases.details(finding)
        sections.append(
            [
                line(severity, "  ", (f"{finding.sentence}.", Emphasis.STRONG)),
                *([line(details, indent=2)] if details else []),
                *([line(finding.fix, mark="Fix")] if finding.fix else []),
                faint(rule, indent=2),
                *_evidence(finding.evidence, clock),
            ]
        )
    absent = [
        f"{missing}: {consequence} To record: {how_to_record}."
        for missing, consequence, how_to_record in run.table(contents.missing)
        .select("missing", "consequence", "how_to_record")
        .rows()
    ]
    remarks = (("Notes", report.notes), ("Not recorded", absent))
    return [*sections, *([heading(title), *items(texts)] for title, texts in remarks if texts)]


def _breakdown(run: Run) -> Section:
    ranks = rank_shares.shares(run)
    if ranks.is_empty():
        return [faint("The traces contain no activities.")]
    step_ns = breakdown.step_time_ns(run)
    steps = units.ranges(breakdown.slowest_device_by_step(run)["step"].drop_nulls().to_list())
    about = f"  median step {units.duration(step_ns or 0)}, steps {steps}"
    if step_ns is None:
        about = "  no steps in the traces"
    elif has_found_iterations(run):
        about = f"  median iteration {units.duration(step_ns)}, iterations {steps} (found by repetition)"
    is_long = ranks.height > MAX_RANKS
    rows = rank_shares.with_quantiles(ranks) if is_long else ranks
    headings = {name: name.removesuffix("_ns").removesuffix("_ratio") for name in rows.columns}
    more = [faint(f"  of {ranks.height:,} ranks; all of them: tracekit summary {run.path}")] if is_long else []
    return [heading("Where the time goes", about), Table(rows, headings, indent=2), *more]


def _evidence(evidence: pl.DataFrame, clock: pl.DataFrame) -> Section:
    if evidence.is_empty():
        return []
    rows = phrases.from_run_start(evidence.head(MAX_EVIDENCE_ROWS), clock)
    if "window" in rows.columns and rows["window"].n_unique() == 1:
        rows = rows.drop("window")
    early = tuple(name for name in _DROP_ORDER if name != "name" or ("op" in rows.columns and rows["op"].count()))
    optional = tuple(name for name in reversed(rows.columns) if name not in _ESSENTIAL)
    table = Table(rows, drop_order=optional, early_drop=early, least_text=_LEAST_TEXT, indent=4)
    more = evidence.height - rows.height
    return [table, *([faint(f"and {more:,} more rows", indent=4)] if more else [])]


def _worst_of_rule(findings: Sequence[Finding], code: str) -> str:
    rule_findings = [finding for finding in findings if finding.code == code]
    if not rule_findings:
        return "–"
    worst = max(rule_findings, key=lambda finding: (finding.severity, cost_order(finding)))
    number = f" ×{len(rule_findings)}" if len(rule_findings) > 1 else ""
    costs = [phrases.share_or_size(worst)] if worst.impact else []
    costs += [units.duration(worst.cost_ns)] if worst.cost_ns else []
    costs += [units.size(worst.cost_bytes)] if worst.cost_bytes else []
    return f"{worst.severity.label}{number}  {' · '.join(costs)}"
