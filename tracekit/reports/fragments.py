"""Pieces of HTML that the report page and the dashboard share, so that both say the same in the same words.

All text is escaped here. Colours are inherited or translucent, so that a piece fits a light page and a dark one.
"""

from collections.abc import Mapping, Sequence

import polars as pl

from tracekit import charts, markup, units
from tracekit.analysis import breakdown, summary
from tracekit.reports import words
from tracekit.rule import Finding
from tracekit.trace import Run

MAX_EVIDENCE_ROWS = 8

STYLE = """
.tk-verdict{border-left:6px solid #009E73;border-radius:6px;padding:14px 18px;background:rgba(128,138,150,.1)}
.tk-verdict.info{border-color:#56B4E9}.tk-verdict.warning{border-color:#E69F00}.tk-verdict.error{border-color:#D55E00}
.tk-verdict b{display:block;font-size:1.25rem;line-height:1.35;font-weight:650}
.tk-verdict span{display:block;margin-top:4px;opacity:.8}
.tk-numbers{display:flex;flex-wrap:wrap;gap:12px;margin:14px 0 4px}
.tk-numbers div{flex:1 1 130px;border:1px solid rgba(128,138,150,.3);border-radius:6px;padding:10px 14px}
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
vertical-align:top}table.tracekit td{overflow-wrap:anywhere}
table.tracekit th{font-weight:600;vertical-align:bottom}
table.tracekit td.number{text-align:right;white-space:nowrap}table.tracekit th.number{text-align:right}
.tk-pill{font-size:.72rem;font-weight:650;letter-spacing:.02em;border-radius:99px;padding:2px 9px;color:#10151c;
background:#56B4E9}
.tk-pill.warning{background:#E69F00}.tk-pill.error{background:#D55E00;color:#fff}
.tk-code{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.85rem;opacity:.75}
"""


def verdict(findings: Sequence[Finding]) -> str:
    """Return the verdict on a run in a coloured box: the costliest finding, and how many there are of each severity."""
    worst = max((finding.severity for finding in findings), default=None)
    headline = markup.escape(words.headline(findings), 500)
    return (
        f'<div class="tk-verdict {worst.label if worst else "good"}"><b>{headline}</b>'
        f"<span>{markup.escape(words.counted(findings))}</span></div>"
    )


def numbers(figures: Mapping[str, tuple[str, str]]) -> str:
    """Return a row of big numbers: label -> (value, colour of its mark or '')."""
    cells = "".join(
        f"<div><b>{markup.escape(value)}</b><span>{_mark(colour)}{markup.escape(label)}</span></div>"
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


def moments(findings: Sequence[Finding], *, rank: int, window: int) -> pl.DataFrame:
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
    severity, name = found.severity.label, markup.escape(words.rule_name(found.code))
    return (
        '<div class="tk-finding">'
        f'<h3><span class="tk-pill {severity}">{severity}</span><span>{name}</span>'
        f'<span class="tk-code">{markup.escape(found.id)}</span>'
        f'<span class="cost">{markup.escape(words.cost(found))}</span></h3>'
        f"<p>{markup.escape(found.message, 1000)}</p>"
        + (f'<p class="fix">{markup.escape(found.fix, 1000)}</p>' if found.fix else "")
        + f'<p class="meta">{markup.escape(words.place(found))}</p></div>'
    )


def evidence(found: Finding, origins_ns: Mapping[tuple[int, int], int]) -> str:
    """Return the first rows of a finding's evidence as an HTML table, starts counted from the trace's origin.

    `origins_ns` maps (window, rank) to the time that counts as 0. '' where there is no evidence.
    """
    table = found.evidence
    if table.is_empty():
        return ""
    shown = markup.frame(words.readable(table.head(MAX_EVIDENCE_ROWS), origins_ns))
    more = table.height - MAX_EVIDENCE_ROWS
    return shown + (f'<p class="meta">and {more:,} more rows, in the JSON report</p>' if more > 0 else "")


def _mark(colour: str) -> str:
    return f'<i style="background:{markup.escape(colour)}"></i>' if colour else ""
