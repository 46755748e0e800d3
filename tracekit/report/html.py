"""Report -> one HTML page with its scripts and figures inside, so that it can be mailed or archived."""

import base64
import functools
import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import plotly.io
import polars as pl

from tracekit.analysis.time import breakdown
from tracekit.model import escaping, schema, units
from tracekit.model.run import Run
from tracekit.regression.gate import CheckResult
from tracekit.report import charts, figures, html_fragments, phrases, plotly_script, quoted_moment
from tracekit.report.ci import results
from tracekit.report.figures import RunFigure
from tracekit.rules.rule import Finding, Report, is_data_quality


def render(report: Report, run: Run) -> str:
    """Return the report as an HTML page: verdict, numbers, findings with evidence, figures, tables, inputs.

    The page holds its scripts, fetches nothing, and forbids the browser to run any script but its own.
    """
    return render_several([(report, run)])


def render_several(reports: Sequence[tuple[Report, Run]], gates: Sequence[CheckResult] = ()) -> str:
    """Return several reports as one page, one below the other, with a figure of their mean steps on top.

    With the check results of the runs, each report begins with its verdict.
    """
    several = len(reports) > 1
    sections = [
        {
            "prefix": f"run{number}-" if several else "",
            "figures": dict(figures.of_report(report, run)),
            **_section(report, run, gates[number] if gates else None),
        }
        for number, (report, run) in enumerate(reports)
    ]
    names = results.unique_names([run.name for _, run in reports])
    return _report_page(
        title=", ".join(run.name for _, run in reports),
        links=[(f"run{number}-top", name) for number, name in enumerate(names)] if several else [],
        top_figures=_mean_steps(names, [run for _, run in reports]) if several else {},
        sections=sections,
        version=reports[0][0].tool_version,
    )


def as_fragment(report: Report, run: Run) -> str:
    """Return the report without its figures as a piece of HTML, for a notebook."""
    return escaping.fragment("report", _section(report, run))


def render_figure(figure: go.Figure, title: str) -> str:
    """Return one figure as an HTML page of its own, which holds its scripts and fetches nothing."""
    figure = figure if figure.layout.title.text else charts.with_title(figure, title)
    return _report_page(
        title=title, links=[], top_figures={"only": RunFigure(title, "", figure)}, sections=[], version=""
    )


def page(
    template: str,
    *,
    title: str,
    figures: Mapping[str, go.Figure],
    modules: Sequence[str] = (),
    packed: Mapping[str, bytes] | None = None,
    styles: Sequence[str] = (),
    version: str = "",
    **values: object,
) -> str:
    """Return a page from a template that extends base.html.j2.

    `figures` are drawn in the elements ``figure-NAME``. `modules` are scripts that run as modules; `packed` is gzip
    data that they find as text in base64 by the id of its element. `styles` are assets added to the style sheet.
    """
    # Base64 has no character that could end a script element.
    texts = {name: base64.b64encode(data).decode() for name, data in (packed or {}).items()}
    scripts = [escaping.asset("inflate.js") + escaping.asset("page.js")] if figures else []
    hashes = [_hash(script) for script in (*scripts, *modules)]
    if figures:
        kinds = frozenset(trace.type for figure in figures.values() for trace in figure.data)
        texts["plotly"], plotly_hash = _packed_plotly(kinds)
        hashes.append(plotly_hash)
    return escaping.page(
        template,
        policy=f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
        style=html_fragments.style() + escaping.asset("page.css") + "".join(map(escaping.asset, styles)),
        title=title,
        figures={name: json.loads(plotly.io.to_json(figure)) for name, figure in figures.items()},
        config=charts.CONFIG,
        packed=texts,
        scripts=scripts,
        modules=modules,
        version=version,
        **values,
    )


def figure_bytes(figures: Iterable[go.Figure]) -> list[int]:
    """Size of each figure on a page, in bytes."""
    return [len(plotly.io.to_json(figure).encode()) for figure in figures]


def _report_page(
    *, title: str, top_figures: Mapping[str, RunFigure], sections: list[dict[str, Any]], **values: Any
) -> str:
    figures_by_id = {name: top_figure.figure for name, top_figure in top_figures.items()}
    for section in sections:
        for name, section_figure in section["figures"].items():
            figure = charts.with_title(section_figure.figure, f"{section['name']} · {section_figure.heading}")
            figures_by_id[f"{section['prefix']}{name}"] = figure
    return page(
        "page.html.j2",
        title=f"{title} · tracekit report",
        figures=figures_by_id,
        top_figures=top_figures,
        sections=sections,
        **values,
    )


def _mean_steps(names: Sequence[str], runs: Sequence[Run]) -> Mapping[str, RunFigure]:
    steps = {name: run.table(breakdown.by_step) for name, run in zip(names, runs, strict=True)}
    tables = {name: table for name, table in steps.items() if table.height}
    caption = "Mean time of a step over all ranks and steps of a run."
    figure = charts.with_title(charts.comparison(tables), f"{', '.join(tables)} · Mean step")
    return {"comparison": RunFigure("Mean step", caption, figure)} if len(tables) > 1 else {}


def _section(report: Report, run: Run, gate: CheckResult | None = None) -> dict[str, Any]:
    """Values of one run for the macro `report` and page.html.j2, without figures."""
    clock = breakdown.run_clock(run) if report.findings else schema.empty(breakdown.RUN_CLOCK)
    doubts = [finding for finding in report.findings if is_data_quality(finding.code)]
    performance = [finding for finding in report.findings if finding not in doubts]
    inputs = [(file.path, units.size(file.size_bytes), file.sha256) for file in report.inputs]
    return {
        "name": run.name,
        "subtitle": phrases.subtitle(run),
        "gate_verdict": html_fragments.gate_verdict(gate) if gate else "",
        "verdict": html_fragments.verdict(performance, phrases.cannot_judge(report)),
        "trust": html_fragments.data_quality(doubts),
        "numbers": html_fragments.numbers(html_fragments.headline_numbers(run)),
        "gate_tables": html_fragments.gate_tables(gate) if gate else "",
        "findings": [
            (finding, _card(finding, run, clock), html_fragments.evidence(finding, clock))
            for finding in (*performance, *doubts)
        ],
        "notes": report.notes,
        "inputs": escaping.html_table(("file", "size", "SHA-256"), inputs, right=(False, True, False)),
    }


def _card(finding: Finding, run: Run, clock: pl.DataFrame) -> str:
    """Finding with the picture of the moment that it quotes, as the page Diagnosis shows it."""
    card = html_fragments.finding(finding)
    if not phrases.has_moment(finding):
        return card
    return card + quoted_moment.picture(finding, run.table(breakdown.by_step), clock)


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@functools.cache
def _packed_plotly(kinds: frozenset[str]) -> tuple[str, str]:
    """Plotly's script for these kinds of traces, compressed, in base64, and the hash of its text."""
    script = plotly_script.script(kinds)
    return base64.b64encode(gzip.compress(script.encode(), 9, mtime=0)).decode(), _hash(script)
