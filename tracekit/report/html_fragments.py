"""Pieces of HTML that the report page and the dashboard share, so that both say the same in the same words.

All text is escaped here. Colours are inherited or translucent, so that a piece fits a light page and a dark one.
"""

from collections.abc import Mapping, Sequence

import polars as pl

from tracekit.analysis.time import breakdown, summary
from tracekit.model import escaping, units
from tracekit.model.run import Run
from tracekit.regression.change import Change, Verdict
from tracekit.regression.comparison import Comparison
from tracekit.regression.gate import CheckResult, FindingStatus
from tracekit.report import charts, comparison, phrases
from tracekit.rules.rule import Finding, Severity

MAX_EVIDENCE_ROWS = 8
MAX_SAVINGS = 8

STYLE = """
.tk-verdict{border-left:6px solid #009E73;border-radius:6px;padding:14px 18px;background:rgba(128,138,150,.1)}
.tk-verdict.info{border-color:#56B4E9}.tk-verdict.warning{border-color:#E69F00}.tk-verdict.error{border-color:#D55E00}
.tk-verdict b{display:block;font-size:1.25rem;line-height:1.35;font-weight:650}
.tk-verdict span{display:block;margin-top:4px;opacity:.8}
.tk-numbers{display:flex;flex-wrap:wrap;gap:12px;margin:14px 0 4px}
.tk-numbers div{flex:1 1 130px;max-width:18rem;padding:10px 14px;border:1px solid rgba(128,138,150,.3);
border-radius:6px}
.tk-numbers b{display:block;font-size:1.35rem;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
.tk-numbers span{font-size:.82rem;opacity:.75}
.tk-numbers i{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:6px}
.tk-finding h3{font-size:1.02rem;font-weight:600;margin:0 0 6px;padding:0;display:flex;flex-wrap:wrap;gap:8px;
align-items:baseline}
.tk-finding h3 span.cost{margin-left:auto;font-variant-numeric:tabular-nums}
.tk-finding p{margin:4px 0;overflow-wrap:anywhere;max-width:110ch}
.tk-finding p.fix::before{content:"Fix  ";font-weight:650}
.tk-finding p.meta{font-size:.82rem;opacity:.75}
table.tracekit{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
table.tracekit th,table.tracekit td{padding:4px 14px 4px 0;border-bottom:1px solid rgba(128,138,150,.3);text-align:left;
vertical-align:top}table.tracekit td,table.tracekit th{overflow-wrap:anywhere}
table.tracekit td:first-child{min-width:6em}
table.tracekit th{font-weight:600;vertical-align:bottom}
table.tracekit td.number{text-align:right;white-space:nowrap}table.tracekit th.number{text-align:right}
.tk-pill{font-size:.72rem;font-weight:650;letter-spacing:.02em;border-radius:99px;padding:2px 9px;color:#10151c;
background:#56B4E9}
.tk-pill.warning{background:#E69F00}.tk-pill.error{background:#D55E00;color:#fff}
.tk-trust{margin:10px 0 0;padding-left:14px;border-left:6px solid #009E73;overflow-wrap:anywhere;max-width:120ch}
.tk-trust.doubtful{border-color:#D55E00}
.tk-verdict p{margin:6px 0 0}.tk-verdict p b{display:inline;font-size:inherit;margin-right:.5em}
.tk-gains p{font-size:.82rem;opacity:.75;margin:8px 0 0}
.tk-gain{display:grid;grid-template-columns:1fr auto;gap:2px 12px;margin:0 0 10px;font-variant-numeric:tabular-nums}
.tk-gain>i{grid-column:1/-1;height:8px;border-radius:4px;background:rgba(128,138,150,.2);overflow:hidden}
.tk-gain>i>i{display:block;height:100%;background:#56B4E9}
.tk-gain>i.warning>i{background:#E69F00}.tk-gain>i.error>i{background:#D55E00}
table.tracekit td.better{color:#009E73;font-weight:600}table.tracekit td.worse{color:#D55E00;font-weight:650}
table.tracekit td.same,table.tracekit td.cannot-tell{opacity:.7}
.tk-code{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.85rem;opacity:.75}
"""

_OF_VERDICT = {Verdict.WORSE: "error", Verdict.BETTER: "good", Verdict.SAME: "good", Verdict.CANNOT_TELL: "info"}


def verdict(findings: Sequence[Finding]) -> str:
    """Return the verdict on a run in a coloured box: the costliest finding, and how many there are of each severity."""
    worst = max((finding.severity for finding in findings), default=None)
    headline = escaping.escape(phrases.headline(findings), 500)
    return (
        f'<div class="tk-verdict {worst.label if worst else "good"}"><b>{headline}</b>'
        f"<span>{escaping.escape(phrases.severity_counts(findings))}</span></div>"
    )


def numbers(figures: Mapping[str, tuple[str, str]]) -> str:
    """Return a row of big numbers: label -> (value, colour of its mark or '')."""
    cells = "".join(
        f"<div><b>{escaping.escape(value)}</b>{_mark(colour)}<span>{escaping.escape(label)}</span></div>"
        for label, (value, colour) in figures.items()
    )
    return f'<div class="tk-numbers">{cells}</div>'


def headline_numbers(run: Run) -> dict[str, tuple[str, str]]:
    """Return the numbers to see first, as `numbers` shows them: the step time, and shares over all ranks and steps."""
    steps = run.table(breakdown.by_step)
    table = steps if steps.height else run.table(breakdown.by_rank)
    totals = table.select(pl.col(*charts.PARTS, "duration_ns", "communication_ns", "overlapped_ns").sum().cast(float))
    total = totals.row(0, named=True)
    if not total["duration_ns"]:
        return {}
    step_ns = summary.step_time_ns(run)
    shown = (
        {"time traced, longest rank": (units.duration(table.select(pl.col("duration_ns").max()).item()), "")}
        if step_ns is None
        else {"step time, median": (units.duration(step_ns), "")}
    )
    for column, (label, kind) in charts.PARTS.items():
        shown[label] = (units.share(total[column] / total["duration_ns"]), charts.COLOURS[kind])
    if total["communication_ns"]:
        hidden = total["overlapped_ns"] / total["communication_ns"]
        shown["of communication hidden"] = (units.share(hidden), "")
    return shown


def data_quality(doubts: Sequence[Finding]) -> str:
    """Return in one line how far the data can be trusted, from the findings that are of the data."""
    grave = [found for found in doubts if found.severity > Severity.INFO]
    if not grave:
        more = f", {phrases.severity_counts(doubts)}" if doubts else ""
        return f'<p class="tk-trust good"><b>Data: good</b>{escaping.escape(more)}</p>'
    first = max(grave, key=lambda found: found.severity)
    more = f" And {len(grave) - 1} more, below." if len(grave) > 1 else ""
    because = escaping.escape(f"because {first.message}{more}", 600)
    return f'<p class="tk-trust doubtful"><b>Data: doubtful</b> {because}</p>'


def potential_savings(findings: Sequence[Finding], step_ns: float | None) -> str:
    """Return what each finding costs a step as bars, the most first; '' where none costs time.

    What two findings cost may be the same time, so the bars are not added up. `step_ns` is the step that they are of.
    """
    costly = sorted((found for found in findings if found.cost_ns), key=lambda found: -found.cost_ns)[:MAX_SAVINGS]
    if not costly:
        return ""
    whole_ns = max(step_ns or 0, costly[0].cost_ns)
    rows = "".join(
        f'<div class="tk-gain"><span>{escaping.escape(phrases.rule_name(found.code))} '
        f'<span class="tk-code">{escaping.escape(found.id)}</span></span>'
        f"<b>{escaping.escape(units.duration(found.cost_ns))}</b>"
        f'<i class="{found.severity.label}"><i style="width:{100 * found.cost_ns / whole_ns:.1f}%"></i></i></div>'
        for found in costly
    )
    of = f" of {units.duration(step_ns)}" if step_ns else ""
    note = f"Time a step{of} that would be saved without each; they may overlap, so do not add them up."
    return f'<div class="tk-gains">{rows}<p>{escaping.escape(note)}</p></div>'


def comparison_verdict(found: Comparison, gate: CheckResult | None) -> str:
    """Return what one run is to another in a coloured box: its step time, what else changed, the likely cause."""
    by_metric = {change.metric: change for change in found.changes}
    first = by_metric.get("step_time_ns") or next(iter(by_metric.values()))
    headline = f"{found.candidate}: {comparison.label(first.metric)} {comparison.change_text(first)}"
    decided = [change for change in found.changes if is_conclusive(change) and change is not first]
    told = [
        f"{word}: {', '.join(comparison.label(change.metric) for change in decided if change.verdict is verdict)}"
        for verdict, word in ((Verdict.WORSE, "worse"), (Verdict.BETTER, "better"))
        if any(change.verdict is verdict for change in decided)
    ]
    causes = [(cause.name, cause.message) for cause in (gate.causes if gate else ())]
    standing = gate.findings if gate else ()
    new = [phrases.rule_name(each.finding.code) for each in standing if each.status is FindingStatus.NEW]
    gone = [phrases.rule_name(each.code) for each in (gate.fixed if gate else ())]
    lines = [("likely cause, " + name, text) for name, text in causes]
    lines += [("new findings", ", ".join(dict.fromkeys(new)))] if new else []
    lines += [("gone findings", ", ".join(dict.fromkeys(gone)))] if gone else []
    body = "".join(f"<p><b>{escaping.escape(name)}</b> {escaping.escape(text, 1000)}</p>" for name, text in lines)
    return (
        f'<div class="tk-verdict {_OF_VERDICT[first.verdict]}"><b>{escaping.escape(headline, 500)}: '
        f"{escaping.escape(first.verdict.value)}</b><span>{escaping.escape(' · '.join(told), 1000)}</span>{body}</div>"
    )


def is_conclusive(change: Change) -> bool:
    """Return whether a metric got better or worse for certain."""
    return change.verdict in (Verdict.BETTER, Verdict.WORSE)


def coloured_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[Sequence[str]], *, right: Sequence[bool]
) -> str:
    """Return an HTML table of plain strings, all escaped here; a cell's class is better, worse, same or cannot-tell."""
    sides = ["number" if side else "" for side in right]
    head = "".join(f'<th class="{side}">{escaping.escape(name)}</th>' for side, name in zip(sides, header, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{side} {escaping.escape(kind)}">{escaping.escape(cell)}</td>'
            for side, cell, kind in zip(sides, row, kinds, strict=True)
        )
        + "</tr>"
        for row, kinds in zip(rows, classes, strict=True)
    )
    return f'<table class="tracekit"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def evidence_spans(findings: Sequence[Finding], *, rank: int, window: int) -> pl.DataFrame:
    """Return the evidence of all findings that can be shown on one trace's timeline: name, start_ns, dur_ns."""
    parts = [pl.DataFrame(schema={"name": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64})]
    for found in findings:
        rows = found.evidence
        if not {"rank", "start_ns", "dur_ns"} <= set(rows.columns):
            continue
        here = pl.col("rank") == rank
        if "window" in rows.columns:
            here &= pl.col("window").fill_null(0) == window
        parts.append(rows.filter(here).select(pl.lit(found.code).alias("name"), "start_ns", "dur_ns"))
    return pl.concat(parts)


def finding(found: Finding) -> str:
    """Return a finding without its evidence: severity, code and name of its rule, cost, message, fix, where."""
    severity, name = found.severity.label, escaping.escape(phrases.rule_name(found.code))
    return (
        '<div class="tk-finding">'
        f'<h3><span class="tk-pill {severity}">{severity}</span><span>{name}</span>'
        f'<span class="tk-code">{escaping.escape(found.id)}</span>'
        f'<span class="cost">{escaping.escape(phrases.cost(found))}</span></h3>'
        f"<p>{escaping.escape(found.message, 1000)}</p>"
        + (f'<p class="fix">{escaping.escape(found.fix, 1000)}</p>' if found.fix else "")
        + f'<p class="meta">{escaping.escape(phrases.scope(found))}</p></div>'
    )


def evidence(found: Finding, origins_ns: Mapping[tuple[int, int], int]) -> str:
    """Return the first rows of a finding's evidence as an HTML table, starts counted from the trace's origin.

    `origins_ns` maps (window, rank) to the time that counts as 0. '' where there is no evidence.
    """
    table = found.evidence
    if table.is_empty():
        return ""
    shown = escaping.frame(phrases.from_trace_start(table.head(MAX_EVIDENCE_ROWS), origins_ns))
    more = table.height - MAX_EVIDENCE_ROWS
    return shown + (f'<p class="meta">and {more:,} more rows, in the JSON report</p>' if more > 0 else "")


def _mark(colour: str) -> str:
    return f'<i style="background:{escaping.escape(colour)}"></i>' if colour else ""
