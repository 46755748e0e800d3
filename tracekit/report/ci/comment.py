"""Gates -> one comment in Markdown, for GitHub, GitLab and job summaries: the verdict, small tables, bars.

It begins with a hidden line, ``<!-- tracekit:KEY -->``, by which the next post finds the comment and updates it.
It never exceeds GitHub's limit of 65,536 characters, counted here in bytes: details are dropped first, then runs that
pass. Names from traces are text: they are no markup, mention, reference or link.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

import polars as pl

from tracekit.analysis.time import breakdown, rank_shares
from tracekit.errors import ConfigError
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.regression.comparison import Comparison
from tracekit.regression.gate import CheckResult, FindingStatus, JudgedFinding
from tracekit.regression.metrics import metric_of
from tracekit.regression.thresholds import Change, Verdict
from tracekit.report import comparison, phrases, step_verdict
from tracekit.report.ci import results
from tracekit.report.ci.code_locations import Checkout, LocationKind
from tracekit.report.render.markdown import code, escape, table
from tracekit.report.text import headline
from tracekit.rules.rule import Finding, Severity

WIDTH = 36
MAX_RANKS = 8
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_PARTS = {"compute_ns": "█", "exposed_communication_ns": "▓", "exposed_copy_ns": "▒", "idle_ns": "░"}
_PART_LABELS = dict(zip(_PARTS, ("compute", "exposed communication", "copy", "idle"), strict=True))

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
    named_gates = sorted(results.gates_by_name(gates), key=lambda named_gate: not named_gate[1].failures)
    version = escape(gates[0].report.tool_version) if gates else ""
    footer = f"\n<sub>tracekit {version} · `tracekit explain CODE` explains a finding and its fix</sub>\n"
    room = MAX_BYTES - _RESERVE_BYTES - _size(text) - _size(footer)
    # All heads come before any details; passing runs leave room for the details of failing ones.
    heads: list[str] = []
    min_room = room // 3
    for name, gate in named_gates:
        head = _head(name, gate, several=len(gates) > 1)
        if room - _size(head) < min_room:
            break
        room -= _size(head)
        heads.append(head)
    for head, (_, gate) in zip(heads, named_gates, strict=False):
        folded, room = _fold_details(_details(gate, checkout), room)
        text += head + folded
    omitted = named_gates[len(heads) :]
    if omitted:
        failing = sum(bool(gate.failures) for _, gate in omitted)
        text += f"\nand {len(omitted):,} more runs, {failing:,} of which fail: see the job's log\n"
    return text + footer


def marker(key: str) -> str:
    """Return the hidden line that identifies the comment. Raises ConfigError where `key` is no name."""
    if not _KEY.fullmatch(key) or "--" in key:
        raise ConfigError(f"{key!r} cannot name a comment: letters, digits, '.', '_' and single '-', 100 at most")
    return f"<!-- tracekit:{key} -->"


def before_and_now(compared: Comparison) -> str:
    """Return two bars per time, before and now, on one scale; '' where no time is compared."""
    changes = [change for change in compared.changes if metric_of(change.metric).is_drawn]
    longest_ns = max((max(change.reference, change.candidate) for change in changes), default=0.0)
    if longest_ns <= 0:
        return ""
    width = max(len(metric_of(change.metric).label) for change in changes)
    return "\n".join(line for change in changes for line in _pair(change, longest_ns, width))


def by_rank(run: Run) -> str:
    """Return a bar per rank: its steps, divided into compute, exposed communication, copy and idle; '' without work.

    Where no trace marks steps, a bar is the profiled window.
    """
    ranks = breakdown.slowest_device_in_steps(run)
    ranks = ranks.filter(ranks["duration_ns"] > 0)
    if ranks.is_empty():
        return ""
    labels = (
        dict.fromkeys(ranks["rank"], "") if ranks.height <= MAX_RANKS else rank_shares.notable(rank_shares.shares(run))
    )
    rows = ranks.filter(pl.col("rank").is_in(list(labels))).to_dicts()
    names = [f"rank {row['rank']} {labels[row['rank']]}".rstrip() for row in rows]
    width = max(map(len, names))
    lines = [
        f"{name:<{width}} {_stacked_bar([row[part] / row['duration_ns'] for part in _PARTS])}"
        for name, row in zip(names, rows, strict=True)
    ]
    totals_ns = ranks.select(pl.col("duration_ns", *_PARTS).sum()).row(0, named=True)
    shares = {part: totals_ns[part] / totals_ns["duration_ns"] for part in _PARTS if totals_ns[part]}
    legend = "  ".join(f"{_PARTS[part]} {_PART_LABELS[part]} {units.share(shares[part])}" for part in shares)
    more = [f"of {ranks.height:,} ranks"] if ranks.height > MAX_RANKS else []
    return "\n".join([*lines, *more, legend])


_MARKS = ("❌", "⚠️", "✅")


def _mark(gate: CheckResult) -> str:
    """The mark of a run that fails, of one that passes with a warning, of one without."""
    if gate.failures:
        return _MARKS[0]
    has_warning = any(verdict.finding.severity > Severity.INFO for verdict in gate.findings)
    return _MARKS[1 if has_warning else 2]


def _title(gates: Sequence[CheckResult]) -> str:
    failing = [gate for gate in gates if gate.failures]
    mark = min(map(_mark, gates), key=_MARKS.index, default=_MARKS[-1])
    if len(gates) == 1:
        return f"{mark} {escape(headline(gates[0]))}"
    if not failing:
        return f"{mark} Passed: {len(gates)} runs"
    return f"{mark} Failed: {results.failure_counts(gates)} in {len(failing)} of {len(gates)} runs"


def _head(name: str, gate: CheckResult, *, several: bool) -> str:
    """Return the visible part of a run: its name, causes, metrics, budgets, findings and bars."""
    mark = f"{_mark(gate)} " if several else ""
    against = f" · against {code(gate.baseline)}" if gate.baseline else ""
    parts = [f"{mark}**{code(name) or 'run'}** · {escape(phrases.subtitle(gate.report.run), 200)}{against}"]
    if gate.comparison is not None:
        sentence = comparison.with_minus_signs(step_verdict.headline(gate.comparison))
        parts += [f"**{escape(sentence)}**"] if sentence else []
        numbers = gate.comparison.numbers
        parts += [] if numbers is None else [escape(f"{comparison.number_sentence(numbers)}.")]
    parts += [f"**{escape(cause.name)}** {escape(cause.message)}" for cause in gate.causes[:_MAX_ROWS]]
    picture = (gate.comparison and before_and_now(gate.comparison)) or by_rank(gate.report.run)
    rows = [
        (
            code(budget.budget),
            metric_of(budget.metric).text(budget.limit),
            metric_of(budget.metric).text(budget.measured),
            f"❌ {budget.outcome}" if gate.fails_budget(budget) else budget.outcome.value,
        )
        for budget in gate.budgets[:_MAX_ROWS]
    ]
    budgets = table(("budget", "limit", "measured", "verdict"), rows, right=(1, 2)) if rows else ""
    parts += [_metrics(gate), budgets, _findings(gate), f"```text\n{picture}\n```" if picture else ""]
    return "\n" + "\n\n".join(part for part in parts if part) + "\n"


def _metrics(gate: CheckResult) -> str:
    if gate.comparison is None:
        return ""
    failing = {change.metric for change in gate.regressions}
    picked = [change for change in gate.comparison.changes if change.metric in failing or change.verdict in _PICKED]
    rest = len(gate.comparison.changes) - len(picked)
    if not picked:
        return "No metric changed significantly." if rest else ""
    return _changes(gate.comparison, picked, failing)


def _changes(compared: Comparison, changes: Iterable[Change], failing: Collection[str] = ()) -> str:
    rows = []
    for change in changes:
        metric = metric_of(change.metric)
        before, now = metric.text(change.reference), metric.text(change.candidate)
        verdict = step_verdict.VERDICTS[change.verdict]
        verdict = f"❌ {verdict}" if change.metric in failing else verdict
        rows.append((metric.label, before, now, comparison.change_text(change), verdict))
    header = ("metric", "before", "now", f"change ({compared.confidence:.0%} interval)", "verdict")
    return table(header, rows, right=(1, 2, 3))


def _findings(gate: CheckResult) -> str:
    if not gate.findings and not gate.fixed:
        return "No rule fired."
    has_baseline = bool(gate.baseline) or gate.comparison is not None
    # Failing findings first, otherwise in the order of the report.
    ordered = sorted(gate.findings, key=lambda verdict: not verdict.fails)
    rows = [_row(verdict, has_baseline=has_baseline) for verdict in ordered[:_MAX_ROWS]]
    rows += [
        (escape(phrases.rule_name(gone.code)), code(gone.id), "fixed ✔") for gone in gate.fixed[: _MAX_ROWS - len(rows)]
    ]
    more = len(gate.findings) + len(gate.fixed) - len(rows)
    return table(("finding", "id", "verdict"), rows) + (f"\n\nand {more:,} more" if more > 0 else "")


def _row(verdict: JudgedFinding, *, has_baseline: bool) -> tuple[str, ...]:
    finding = verdict.finding
    sentence = finding.sentence
    if verdict.status is FindingStatus.WORSE and verdict.impact_before is not None:
        sentence += f", {100 * verdict.impact_before:.1f}% before"
    status = f"{finding.severity.label}, {verdict.status}" if has_baseline else finding.severity.label
    return escape(sentence, 160), code(finding.id), f"❌ {status}" if verdict.fails else status


def _details(gate: CheckResult, checkout: Checkout) -> Iterator[str]:
    """Yield the folded details, the most important part first."""
    for verdict in sorted(gate.findings, key=lambda verdict: not verdict.fails):
        yield _finding(verdict.finding, gate, checkout)
    yield from (f"**budget {code(budget.budget)}** {escape(budget.message)}" for budget in gate.budgets)
    notes = list(gate.report.notes)
    if gate.comparison is not None:
        yield _changes(gate.comparison, gate.comparison.changes)
        notes = [*comparison.remarks(gate.comparison), *notes]
    if notes:
        yield "\n".join(f"- {escape(note)}" for note in notes)


def _finding(finding: Finding, gate: CheckResult, checkout: Checkout) -> str:
    location = checkout.locate(gate.report.run, finding)
    where = f"{code(f'{location.path}:{location.line}')} · " if location.kind is not LocationKind.TRACE else ""
    fix = f"<br>**Fix** {escape(finding.fix)}" if finding.fix else ""
    return (
        f"**{escape(finding.sentence)}.** {escape(phrases.details(finding))}{fix}<br>{where}"
        f"{escape(phrases.rule_name(finding.code))} {code(finding.id)} · {escape(phrases.scope(finding), 300)}"
    )


def _fold_details(parts: Iterable[str], room: int) -> tuple[str, int]:
    """Return as many parts as there is room for, folded, and the room that is available."""
    before, after, more = "\n<details><summary>Details</summary>\n\n", "\n</details>\n", "and more: see the job's log"
    available = room - _size(before) - _size(after) - _size(more) - 2
    fitting: list[str] = []
    for part in parts if available > _LEAST_BYTES else ():
        if _size(part) + 2 > available:
            fitting += [more] if fitting else []
            break
        available -= _size(part) + 2
        fitting.append(part)
    if not fitting:
        return "", room
    folded = before + "\n\n".join(fitting) + "\n" + after
    return folded, room - _size(folded)


def _size(text: str) -> int:
    return len(text.encode())


def _pair(change: Change, longest_ns: float, width: int) -> Sequence[str]:
    metric, before, now = metric_of(change.metric), change.reference, change.candidate
    return (
        f"{metric.label:<{width}}  before {_bar(before / longest_ns)} {metric.text(before)}",
        f"{'':<{width}}  now    {_bar(now / longest_ns)} {metric.text(now)}",
    )


def _bar(ratio: float) -> str:
    """Return a bar with a resolution of an eighth of a character.

    >>> _bar(0.5)
    '██████████████████'
    """
    full, eighths = divmod(round(8 * WIDTH * ratio), 8)
    return "█" * full + _EIGHTHS[eighths].strip() or "▏"


def _stacked_bar(ratios: Sequence[float]) -> str:
    """Return a bar in parts; each end is rounded separately, so that errors don't add up."""
    ends = [round(WIDTH * sum(ratios[: number + 1])) for number in range(len(ratios))]
    starts = [0, *ends[:-1]]
    letters = zip(_PARTS.values(), starts, ends, strict=True)
    return "".join(letter * max(end - start, 0) for letter, start, end in letters).ljust(WIDTH)
