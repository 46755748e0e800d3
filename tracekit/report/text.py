"""Report -> text for a terminal or a log: the verdict, then where the time goes, then what to change."""

from collections.abc import Sequence

import polars as pl
from rich.console import RenderableType
from rich.table import Table

from tracekit.analysis.time import breakdown
from tracekit.model import schema, units
from tracekit.model.run import Run
from tracekit.report import phrases, rank_rows
from tracekit.report.render import layout
from tracekit.rules.rule import Finding, Report, cost_order, costliest, has_found_iterations

WIDTH = 100
MAX_RANKS = 16
MAX_EVIDENCE_ROWS = 3
_MIN_SIDE_WIDTH = 76
MAX_WIDTH = 120  # longer lines are hard to read
_GAP = 4
_EVIDENCE_INDENT = 4
# The columns of evidence that are dropped on a narrow terminal, in this order.
_DROP_ORDER = ("activity_id", "blocker_id", "lane", "device", "blocking", "name", "phase")
_LEAST_TEXT = 8
"""Texts are cut to so many characters before columns are dropped that are not of _DROP_ORDER, the last one first."""
_ESSENTIAL = ("rank", "step", "name", "op", "kind", "message", "start_ns", "dur_ns", "lost_ns")


def render(report: Report, run: Run, *, width: int = WIDTH, color: bool = False) -> str:
    """Return the report as text at most `width` columns wide."""
    width = min(width, MAX_WIDTH)
    return layout.print_to_string(_report(report, run, width), width=width, color=color)


def body(report: Report, run: Run, findings: Sequence[Finding], width: int) -> list[RenderableType]:
    """Return a report without its verdict: where the time goes, `findings`, the notes."""
    parts: list[RenderableType] = ["", *_breakdown(run)]
    clock = breakdown.run_clock(run) if findings else schema.empty(breakdown.RUN_CLOCK)
    for finding in findings:
        parts += ["", *_finding(finding, clock, width)]
    if report.notes:
        parts += ["", layout.title("Notes"), *layout.bullets(report.notes)]
    return parts


def render_several(reports: Sequence[tuple[Report, Run]], *, width: int = WIDTH, color: bool = False) -> str:
    """Return several reports: a table of their findings, then each report, side by side if the width allows."""
    parts: list[RenderableType] = [_side_by_side(reports), ""]
    side = (width - _GAP * (len(reports) - 1)) // len(reports)
    if side >= _MIN_SIDE_WIDTH:
        grid = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
        for _ in reports:
            grid.add_column(width=side)
        grid.add_row(*(_stack(_report(report, run, side)) for report, run in reports))
        parts.append(grid)
    else:
        for report, run in reports:
            ruler = f"── {run.name} ".ljust(min(width, WIDTH), "─")
            parts += [layout.dim(ruler), *_report(report, run, width), ""]
    return layout.print_to_string(parts, width=width, color=color)


def _report(report: Report, run: Run, width: int) -> list[RenderableType]:
    return [
        *_verdict(report),
        layout.dim(f"{run.name}  {phrases.subtitle(run)}"),
        *body(report, run, report.findings, width),
    ]


def _verdict(report: Report) -> list[RenderableType]:
    findings, cannot_judge = report.findings, report.cannot_judge
    if cannot_judge is not None:
        style = f"{layout.BOLD} {layout.SEVERITY_STYLES['error']}"
        unjudged: list[RenderableType] = [layout.line((phrases.headline(findings, cannot_judge), style))]
        return [*unjudged, _counts(findings)] if findings else unjudged
    if not findings:
        return [layout.line((phrases.no_problems(report), f"{layout.BOLD} {layout.GOOD}"))]
    return [_counts(findings)]


def _counts(findings: Sequence[Finding]) -> RenderableType:
    worst = max(finding.severity for finding in findings).label
    top, cost = costliest(findings), ""
    if top is not None and top.impact:
        share = f"{units.share(top.impact)} of {phrases.time_noun(top)}"
        cost = f"  costliest: {phrases.rule_name(top.code)}, {share}"
    counts = (phrases.severity_counts(findings), layout.SEVERITY_STYLES[worst])
    return layout.line(counts, (cost, layout.BOLD))


def _breakdown(run: Run) -> list[RenderableType]:
    ranks = rank_rows.shares(run)
    if ranks.is_empty():
        return [layout.dim("The traces contain no activities.")]
    rows = ranks if ranks.height <= MAX_RANKS else rank_rows.with_quantiles(ranks)
    headings = {name: name.removesuffix("_ns").removesuffix("_ratio") for name in rows.columns}
    parts: list[RenderableType] = [
        layout.title("Where the time goes", _steps(run)),
        layout.indent(layout.frame(rows, headings)),
    ]
    if ranks.height > MAX_RANKS:
        parts.append(layout.dim(f"  of {ranks.height:,} ranks; all of them: tracekit summary {run.path}"))
    return parts


def _steps(run: Run) -> str:
    step_ns = breakdown.step_time_ns(run)
    if step_ns is None:
        return "  no steps in the traces"
    steps = units.ranges(breakdown.slowest_device_by_step(run)["step"].drop_nulls().to_list())
    if has_found_iterations(run):
        return f"  median iteration {units.duration(step_ns)}, iterations {steps} (found by repetition)"
    return f"  median step {units.duration(step_ns)}, steps {steps}"


def _finding(finding: Finding, clock: pl.DataFrame, width: int) -> list[RenderableType]:
    label = finding.severity.label
    heading = Table.grid(expand=True, padding=(0, 2, 0, 0), pad_edge=False)
    heading.add_column()
    heading.add_column(justify="right", no_wrap=True)
    name = layout.line(
        (label.upper(), layout.SEVERITY_STYLES[label]),
        "  ",
        (phrases.rule_name(finding.code), layout.BOLD),
        ("  " + finding.id, layout.DIM),
    )
    heading.add_row(name, layout.title(phrases.cost(finding)))
    parts: list[RenderableType] = [heading, layout.indent(layout.line(finding.message))]
    if finding.fix:
        parts.append(layout.hanging("Fix", layout.line(finding.fix)))
    parts.append(layout.indent(layout.dim(phrases.scope(finding))))
    return parts + _evidence(finding, clock, width - _EVIDENCE_INDENT)


def _evidence(finding: Finding, clock: pl.DataFrame, width: int) -> list[RenderableType]:
    rows = finding.evidence
    if rows.is_empty():
        return []
    fitting = _fit_evidence(phrases.from_run_start(rows.head(MAX_EVIDENCE_ROWS), clock), width)
    table = layout.frame(fitting)
    if layout.natural_width(table) > width:
        table = layout.frame(fitting, gap=layout.gap(width))
    parts: list[RenderableType] = [table]
    more = rows.height - fitting.height
    parts += [layout.dim(f"and {more:,} more rows")] if more else []
    return [layout.indent(part, _EVIDENCE_INDENT) for part in parts]


def _fit_evidence(rows: pl.DataFrame, width: int) -> pl.DataFrame:
    """Return rows without empty columns, and without others as far as the width requires: of _DROP_ORDER, then any."""
    columns = layout.without_empty_columns(rows)
    if "window" in columns.columns and columns["window"].n_unique() == 1:
        columns = columns.drop("window")
    for name in _DROP_ORDER:
        if layout.natural_width(layout.frame(columns)) <= width:
            break
        if name in columns.columns and (name != "name" or "op" in columns.columns):
            columns = columns.drop(name)
    optional = [name for name in reversed(columns.columns) if name not in _ESSENTIAL]
    return layout.fit_columns(columns, {}, optional, width=width, least_text=_LEAST_TEXT)


def _side_by_side(reports: Sequence[tuple[Report, Run]]) -> Table:
    """Return one row per rule and one column per run, the costliest first."""
    worst: dict[str, tuple[float, ...]] = {}
    for report, _ in reports:
        for finding in report.findings:
            weight = cost_order(finding)
            worst[finding.code] = max(weight, worst.get(finding.code, weight))
    codes = sorted(worst, key=lambda code: worst[code], reverse=True)
    rows = [[phrases.rule_name(code), code, *(_cell(report.findings, code) for report, _ in reports)] for code in codes]
    rows = rows or [["no rule fired", "", *("" for _ in reports)]]
    return layout.table(["finding", "", *(run.name for _, run in reports)], rows)


def _cell(findings: Sequence[Finding], code: str) -> str:
    own_findings = [finding for finding in findings if finding.code == code]
    if not own_findings:
        return "–"
    worst = max(own_findings, key=lambda finding: (finding.severity, cost_order(finding)))
    number = f" ×{len(own_findings)}" if len(own_findings) > 1 else ""
    costs = [phrases.share_or_size(worst)] if worst.impact else []
    costs += [units.duration(worst.cost_ns)] if worst.cost_ns else []
    costs += [units.size(worst.cost_bytes)] if worst.cost_bytes else []
    return f"{worst.severity.label}{number}  {' · '.join(costs)}"


def _stack(parts: Sequence[RenderableType]) -> Table:
    grid = Table.grid()
    for part in parts:
        grid.add_row(part)
    return grid
