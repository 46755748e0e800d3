"""Report -> one HTML page that needs nothing else: scripts and figures are inside, so it can be mailed or archived."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from tracekit.analysis.time import breakdown, slices
from tracekit.model import escaping, units
from tracekit.model.run import Run
from tracekit.regression.gate import CheckResult
from tracekit.report import (
    charts,
    checkpoint_figures,
    communication_figures,
    html_fragments,
    html_gate,
    memory_figures,
    phrases,
)
from tracekit.rules.rule import Finding, Report

SUMMARY_COLUMNS = (
    "rank",
    "duration_ns",
    "compute_ns",
    "communication_ns",
    "overlapped_ns",
    "exposed_communication_ns",
    "exposed_copy_ns",
    "idle_ns",
)


def render(report: Report, run: Run) -> str:
    """Return the report as an HTML page: verdict, numbers, findings with evidence, figures, tables, inputs.

    The page holds its scripts, fetches nothing, and forbids the browser to run any script but its own.
    """
    return render_several([(report, run)])


def render_several(reports: Sequence[tuple[Report, Run]], gates: Sequence[CheckResult] = ()) -> str:
    """Return several reports as one page, one below the other, with their mean steps beside each other on top.

    With the gates of the runs, each begins with the verdict on it.
    """
    figures: dict[str, go.Figure] = {}
    body = _contents(reports, figures) if len(reports) > 1 else []
    for number, (report, run) in enumerate(reports):
        held = gates[number] if gates else None
        body += _body(report, run, figures, f"run{number}-" if len(reports) > 1 else "", held)
    scripts = (get_plotlyjs(), _BOOT)
    return _PAGE.format(
        title=escaping.escape(", ".join(run.name for _, run in reports)),
        policy=_policy(scripts),
        style=_STYLE + html_fragments.STYLE + html_gate.STYLE,
        body="\n".join([*body, f"<footer>tracekit {escaping.escape(reports[0][0].tool_version)}</footer>"]),
        figures=_json({name: json.loads(plotly.io.to_json(figure)) for name, figure in figures.items()}),
        config=_json(charts.CONFIG),
        scripts="".join(f"<script>{script}</script>" for script in scripts),
    )


def render_figure(figure: go.Figure, title: str) -> str:
    """Return one figure as an HTML page of its own, which holds its scripts and fetches nothing."""
    scripts = (get_plotlyjs(), _BOOT)
    return _PAGE.format(
        title=escaping.escape(title),
        policy=_policy(scripts),
        style=_STYLE,
        body=_figure("only", title, ""),
        figures=_json({"only": json.loads(plotly.io.to_json(figure))}),
        config=_json(charts.CONFIG),
        scripts="".join(f"<script>{script}</script>" for script in scripts),
    )


def _contents(reports: Sequence[tuple[Report, Run]], figures: dict[str, go.Figure]) -> list[str]:
    """Return links to each report and, where there are steps, a figure of the mean steps; it goes into `figures`."""
    names = [run.name for _, run in reports]
    # Runs of one name are told apart by their place.
    names = [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, 1)]
    links = [f'<a href="#run{number}-top">{escaping.escape(name)}</a>' for number, name in enumerate(names)]
    steps = {name: run.table(breakdown.by_step) for name, (_, run) in zip(names, reports, strict=True)}
    drawn = {name: table for name, table in steps.items() if table.height}
    parts = [f"<header><p>tracekit reports</p><p>{' · '.join(links)}</p></header>"]
    if len(drawn) > 1:
        figures["comparison"] = charts.comparison(drawn)
        parts.append(_figure("comparison", "The mean step", ""))
    return parts


def _timeline(run: Run, report: Report, typical: Mapping[str, int | None]) -> go.Figure:
    rank, window = int(typical["rank"] or 0), int(typical["window"] or 0)
    start_ns = int(typical["start_ns"] or 0)
    span = (start_ns, start_ns + int(typical["duration_ns"] or 0))
    marks = html_fragments.evidence_spans(report.findings, rank=rank, window=window)
    return charts.timeline(run.trace(rank, window), span, evidence=marks)


def _body(report: Report, run: Run, figures: dict[str, go.Figure], place: str, gate: CheckResult | None) -> list[str]:
    """Return one run's part of the page; its figures go into `figures`, their names beginning with `place`."""
    by_step, by_rank = run.table(breakdown.by_step), run.table(breakdown.by_rank)
    parts = [
        f'<header id="{place}top"><p>tracekit report</p><h1>{escaping.escape(run.name)}</h1>'
        f'<p class="subtitle">{escaping.escape(phrases.subtitle(run))}</p></header>',
        html_gate.verdict(gate) if gate else "",
        html_fragments.verdict(report.findings),
        html_fragments.numbers(html_fragments.headline_numbers(run)),
        html_gate.tables(gate) if gate else "",
    ]
    parts += ["<h2>Findings</h2>", *_findings(report, run, place)]
    if by_rank.height:
        figures[f"{place}breakdown"] = charts.breakdown(by_rank)
        caption = "Each rank from its first activity to its last."
        parts += [_figure(f"{place}breakdown", "Where the time goes", caption)]
        parts += [_details("The same in numbers", escaping.frame(by_rank.select(SUMMARY_COLUMNS)))]
    if by_step.height > by_rank.height:
        figures[f"{place}steps"] = charts.step_times(by_step)
        parts += [_figure(f"{place}steps", "Step time", "")]
    typical = slices.representative_step(by_step if by_step.height else by_rank)
    if typical:
        figures[f"{place}timeline"] = _timeline(run, report, typical)
        parts += [_figure(f"{place}timeline", "A typical step", _timeline_caption(typical))]
    pictures = (*communication_figures.of_run(run), *memory_figures.of_run(run), *checkpoint_figures.of_run(run))
    for picture in pictures:
        figures[f"{place}{picture.name}"] = picture.figure
        parts += [_figure(f"{place}{picture.name}", picture.heading, picture.caption)]
    return [*parts, *_notes(report), "<h2>Inputs</h2>", _inputs(report)]


def _findings(report: Report, run: Run, place: str) -> list[str]:
    if not report.findings:
        return ["<p>No rule fired on this run.</p>"]
    origins_ns = phrases.trace_starts(run)
    return [_card(found, origins_ns, place) for found in report.findings]


def _card(found: Finding, origins_ns: Mapping[tuple[int, int], int], place: str) -> str:
    rows = html_fragments.evidence(found, origins_ns)
    more = _details(f"Evidence, {found.evidence.height:,} rows", rows) if rows else ""
    return (
        f'<section class="card" id="{place}{escaping.escape(found.id)}">{html_fragments.finding(found)}{more}</section>'
    )


def _figure(name: str, heading: str, caption: str) -> str:
    text = f'<p class="caption">{escaping.escape(caption)}</p>' if caption else ""
    return f'<h2>{escaping.escape(heading)}</h2>{text}<div class="figure" id="figure-{name}"></div>'


def _timeline_caption(typical: Mapping[str, int | None]) -> str:
    step = "The whole window" if typical["step"] is None else f"Step {typical['step']}"
    return (
        f"{step} of rank {typical['rank']}, the slowest; the step nearest that rank's median. "
        "Drag across to zoom, double-click to see all, point at a slice for its name."
    )


def _details(summary: str, content: str) -> str:
    return f'<details><summary>{escaping.escape(summary)}</summary><div class="scroll">{content}</div></details>'


def _notes(report: Report) -> list[str]:
    if not report.notes:
        return []
    return [
        "<h2>Notes</h2><ul>" + "".join(f"<li>{escaping.escape(note, 1000)}</li>" for note in report.notes) + "</ul>"
    ]


def _inputs(report: Report) -> str:
    rows = [(entry.path, units.size(entry.size_bytes), entry.sha256) for entry in report.inputs]
    return f'<div class="scroll">{escaping.html_table(("file", "size", "SHA-256"), rows, right=(False, True, False))}</div>'


def _policy(scripts: tuple[str, ...]) -> str:
    """Return the page's content security policy: these very scripts, no other, and no connection anywhere."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


def _json(value: object) -> str:
    """Return JSON that is safe inside a script element: no '<' can end it, whatever the names in a trace say."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · tracekit report</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="figures">{figures}</script>
<script type="application/json" id="config">{config}</script>
{scripts}
</body>
</html>
"""

_STYLE = """
:root{--ink:#1b2330;--page:#ffffff;--line:#d9dee5;--link:#0072B2}
@media (prefers-color-scheme:dark){:root{--ink:#dfe5ee;--page:#12161c;--line:#323b47;--link:#56B4E9}}
@media print{:root{--ink:#000;--page:#fff;--line:#bbb}body{font-size:11pt}.card,.figure{break-inside:avoid}
details>*{display:block}main{max-width:none;padding:0}.modebar{display:none}h2{break-after:avoid}
table.tracekit{font-size:8.5pt}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,"Segoe UI","Liberation Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 28px 48px}
header p{margin:0;opacity:.75}header>p:first-child{font-size:.8rem;letter-spacing:.06em;text-transform:uppercase}
h1{margin:2px 0;font-size:1.8rem;line-height:1.25;overflow-wrap:anywhere}
h2{margin:34px 0 8px;font-size:1.2rem}
.subtitle{margin-bottom:18px}.caption{margin:0 0 4px;opacity:.8}
.card{border:1px solid var(--line);border-radius:8px;padding:14px 18px;margin:12px 0}
.figure{width:100%}
details{margin:8px 0 0}summary{cursor:pointer;color:var(--link)}
.scroll{overflow-x:auto;padding-top:8px}
.meta{font-size:.82rem;opacity:.75}
footer{margin-top:40px;padding-top:12px;border-top:1px solid var(--line);font-size:.82rem;opacity:.75}
"""

# Figures take the page's ink, also when it turns dark, and the paper's when it is printed.
_BOOT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = JSON.parse(document.getElementById("config").textContent);
const ink = () => getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
const plots = [];
for (const [name, figure] of Object.entries(figures)) {
  const place = document.getElementById("figure-" + name);
  figure.layout.font = {...figure.layout.font, color: ink()};
  plots.push(place);
  Plotly.newPlot(place, figure.data, figure.layout, config);
}
const repaint = (colour, width) => plots.map(
  (place) => Plotly.relayout(place, {"font.color": colour, width, autosize: !width}));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => repaint(ink(), null));
addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  repaint("#000000", 680);
});
addEventListener("afterprint", () => repaint(ink(), null));
"""
