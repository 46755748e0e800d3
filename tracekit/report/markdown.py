"""Gates -> one comment in Markdown, for GitHub, GitLab and job summaries: the verdict, small tables, bars.

It begins with a hidden line, ``<!-- tracekit:KEY -->``, by which the next post finds the comment and updates it.
It never exceeds GitHub's limit of 65,536 characters, counted here in bytes: details are dropped first, then runs that
pass. Names from traces are text: they are no markup, mention, reference or link.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from tracekit.errors import ConfigError
from tracekit.regression.change import Change, Verdict
from tracekit.regression.comparison import Comparison
from tracekit.regression.gate import CheckResult, FindingStatus, JudgedFinding
from tracekit.regression.metrics import metric_of
from tracekit.report import ci_results, comparison, phrases, text_charts
from tracekit.report.code_locations import Checkout, LocationKind
from tracekit.report.gate_text import headline
from tracekit.report.markdown_escaping import code, escaped, table
from tracekit.rules.rule import Finding

MAX_BYTES = 65_536
DEFAULT_KEY = "check"
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_ROWS = 10
_RESERVE_BYTES = 1000
_LEAST_BYTES = 200  # with less room than this, details are not worth showing
_PICKED = (Verdict.WORSE, Verdict.BETTER)


def render(gates: Sequence[CheckResult], checkout: Checkout, *, key: str = DEFAULT_KEY) -> str:
    """Return the comment on all runs, failing runs first. Raises ConfigError where `key` cannot name a comment."""
    text = f"{marker(key)}\n### {_title(gates)}\n"
    named = sorted(ci_results.named(gates), key=lambda each: not each[1].failures)
    version = escaped(gates[0].report.tool_version) if gates else ""
    footer = f"\n<sub>tracekit {version} · `tracekit explain CODE` explains a finding and its fix</sub>\n"
    room = MAX_BYTES - _RESERVE_BYTES - _size(text) - _size(footer)
    # All heads come before any details; passing runs leave room for the details of failing ones.
    heads: list[str] = []
    least = room // 3
    for name, gate in named:
        head = _head(name, gate, several=len(gates) > 1)
        if room - _size(head) < least:
            break
        room -= _size(head)
        heads.append(head)
    for head, (_, gate) in zip(heads, named, strict=False):
        folded, room = _folded(_details(gate, checkout), room)
        text += head + folded
    omitted = named[len(heads) :]
    if omitted:
        failing = sum(bool(gate.failures) for _, gate in omitted)
        text += f"\nand {len(omitted):,} more runs, {failing:,} of which fail: see the job's log\n"
    return text + footer


def marker(key: str) -> str:
    """Return the hidden line that identifies the comment. Raises ConfigError where `key` is no name."""
    if not _KEY.fullmatch(key) or "--" in key:
        raise ConfigError(f"{key!r} cannot name a comment: letters, digits, '.', '_' and single '-', 100 at most")
    return f"<!-- tracekit:{key} -->"


def _title(gates: Sequence[CheckResult]) -> str:
    failing = [gate for gate in gates if gate.failures]
    mark = "❌" if failing else "✅"
    if len(gates) == 1:
        return f"{mark} {escaped(headline(gates[0]))}"
    if not failing:
        return f"{mark} Passed: {len(gates)} runs"
    return f"{mark} Failed: {ci_results.failure_counts(gates)} in {len(failing)} of {len(gates)} runs"


def _head(name: str, gate: CheckResult, *, several: bool) -> str:
    """Return the visible part of a run: its name, causes, metrics, budgets, findings and bars."""
    mark = ("❌ " if gate.failures else "✅ ") if several else ""
    against = f" · against {code(gate.baseline)}" if gate.baseline else ""
    parts = [f"{mark}**{code(name) or 'run'}** · {escaped(phrases.subtitle(gate.report.run), 200)}{against}"]
    parts += [f"**{escaped(cause.name)}** {escaped(cause.message)}" for cause in gate.causes[:_MAX_ROWS]]
    picture = (gate.comparison and text_charts.before_and_now(gate.comparison)) or text_charts.by_rank(gate.report.run)
    parts += [_metrics(gate), _budgets(gate), _findings(gate), f"```text\n{picture}\n```" if picture else ""]
    return "\n" + "\n\n".join(part for part in parts if part) + "\n"


def _metrics(gate: CheckResult) -> str:
    if gate.comparison is None:
        return ""
    failing = {change.metric for change in gate.regressions}
    shown = [each for each in gate.comparison.changes if each.metric in failing or each.verdict in _PICKED]
    rest = len(gate.comparison.changes) - len(shown)
    if not shown:
        return "No metric changed significantly." if rest else ""
    return _changes(gate.comparison, shown, failing)


def _changes(compared: Comparison, changes: Iterable[Change], failing: Collection[str] = ()) -> str:
    rows = []
    for change in changes:
        metric = metric_of(change.metric)
        before, now = metric.text(change.reference), metric.text(change.candidate)
        verdict = f"❌ {change.verdict}" if change.metric in failing else change.verdict.value
        rows.append((metric.label, before, now, comparison.change_text(change), verdict))
    header = ("metric", "before", "now", f"change ({compared.confidence:.0%} interval)", "verdict")
    return table(header, rows, right=(1, 2, 3))


def _budgets(gate: CheckResult) -> str:
    rows = [
        (
            code(each.budget),
            metric_of(each.metric).text(each.limit),
            metric_of(each.metric).text(each.measured),
            f"❌ {each.outcome}" if gate.fails_budget(each) else each.outcome.value,
        )
        for each in gate.budgets[:_MAX_ROWS]
    ]
    return table(("budget", "limit", "measured", "verdict"), rows, right=(1, 2)) if rows else ""


def _findings(gate: CheckResult) -> str:
    if not gate.findings and not gate.fixed:
        return "No rule fired."
    has_baseline = bool(gate.baseline) or gate.comparison is not None
    # Failing findings first, otherwise in the order of the report.
    ordered = sorted(gate.findings, key=lambda each: not each.fails)
    rows = [_row(each, has_baseline=has_baseline) for each in ordered[:_MAX_ROWS]]
    rows += [
        (code(gone.id), escaped(phrases.rule_name(gone.code)), "", "fixed ✔")
        for gone in gate.fixed[: _MAX_ROWS - len(rows)]
    ]
    more = len(gate.findings) + len(gate.fixed) - len(rows)
    return table(("finding", "rule", "cost", "verdict"), rows) + (f"\n\nand {more:,} more" if more > 0 else "")


def _row(judged: JudgedFinding, *, has_baseline: bool) -> tuple[str, ...]:
    found = judged.finding
    cost = phrases.cost(found)
    if judged.status is FindingStatus.WORSE and judged.impact_before is not None:
        cost += f", {100 * judged.impact_before:.1f}% before"
    status = f"{found.severity.label}, {judged.status}" if has_baseline else found.severity.label
    return code(found.id), escaped(phrases.rule_name(found.code)), cost, f"❌ {status}" if judged.fails else status


def _details(gate: CheckResult, checkout: Checkout) -> Iterator[str]:
    """Yield the folded details, the most important part first."""
    for each in sorted(gate.findings, key=lambda each: not each.fails):
        yield _finding(each.finding, gate, checkout)
    yield from (f"**budget {code(each.budget)}** {escaped(each.message)}" for each in gate.budgets)
    notes = list(gate.report.notes)
    if gate.comparison is not None:
        yield _changes(gate.comparison, gate.comparison.changes)
        notes = [*comparison.remarks(gate.comparison), *notes]
    if notes:
        yield "\n".join(f"- {escaped(note)}" for note in notes)


def _finding(found: Finding, gate: CheckResult, checkout: Checkout) -> str:
    location = checkout.locate(gate.report.run, found)
    where = f"{code(f'{location.path}:{location.line}')} · " if location.kind is not LocationKind.TRACE else ""
    fix = f"<br>**Fix** {escaped(found.fix)}" if found.fix else ""
    return (
        f"**{escaped(phrases.rule_name(found.code))}** {code(found.id)} {escaped(found.message)}{fix}"
        f"<br>{where}{escaped(phrases.scope(found), 300)}"
    )


def _folded(parts: Iterable[str], room: int) -> tuple[str, int]:
    """Return as many parts as there is room for, folded, and the room that is available."""
    before, after, more = "\n<details><summary>Details</summary>\n\n", "\n</details>\n", "and more: see the job's log"
    available = room - _size(before) - _size(after) - _size(more) - 2
    shown: list[str] = []
    for part in parts if available > _LEAST_BYTES else ():
        if _size(part) + 2 > available:
            shown += [more] if shown else []
            break
        available -= _size(part) + 2
        shown.append(part)
    if not shown:
        return "", room
    folded = before + "\n\n".join(shown) + "\n" + after
    return folded, room - _size(folded)


def _size(text: str) -> int:
    return len(text.encode())
