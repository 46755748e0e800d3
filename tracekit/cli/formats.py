"""What a check is written as, once or several times: for people, for programs, for what CI shows."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output
from tracekit.errors import ConfigError

if TYPE_CHECKING:
    from tracekit.regression.gate import CheckResult
    from tracekit.report.code_locations import Checkout


class ReportFormat(StrEnum):
    """What a report can be written as."""

    TEXT = "text"
    JSON = "json"
    HTML = "html"
    JUNIT = "junit"
    SARIF = "sarif"
    GITHUB = "github"
    MARKDOWN = "markdown"
    CODEQUALITY = "codequality"


Also = Annotated[
    list[str] | None,
    typer.Option(
        "--also", metavar="FORMAT=FILE", help="Write another report besides, such as sarif=tracekit.sarif. Repeatable."
    ),
]
CommentKey = Annotated[
    str, typer.Option("--comment-key", metavar="NAME", help="Which comment the Markdown is: one per name is updated.")
]


def parse_also(also: Sequence[str]) -> list[tuple[ReportFormat, Path]]:
    """Return the further reports that options such as ``sarif=tracekit.sarif`` ask for. Raises ConfigError."""
    found = []
    for text in also:
        name, has_file, file = text.partition("=")
        if name not in list(ReportFormat) or not has_file or not file:
            raise ConfigError(f"--also {text}: expected FORMAT=FILE, the format one of {', '.join(ReportFormat)}")
        found.append((ReportFormat(name), Path(file)))
    return found


def write_reports(
    gates: "Sequence[CheckResult]",
    report_format: ReportFormat,
    out: Path | None,
    *,
    also: Sequence[tuple[ReportFormat, Path]] = (),
    comment_key: str,
) -> None:
    """Write the reports on runs: one to `out`, or stdout, and those that are wanted besides."""
    from tracekit.report import code_locations

    checkout = code_locations.Checkout(code_locations.repository_root(Path.cwd()))
    for each, file in also:
        output.emit(_render(gates, each, file, checkout, comment_key), file)
    emit = output.emit_commands if report_format is ReportFormat.GITHUB else output.emit
    emit(_render(gates, report_format, out, checkout, comment_key), out)


def _render(
    gates: "Sequence[CheckResult]",
    report_format: ReportFormat,
    out: Path | None,
    checkout: "Checkout",
    comment_key: str,
) -> str:
    if report_format in (ReportFormat.TEXT, ReportFormat.JSON, ReportFormat.HTML):
        return _report(gates, report_format, out)
    from tracekit.report import codequality, github, junit, markdown, sarif

    if report_format is ReportFormat.MARKDOWN:
        return markdown.render(gates, checkout, key=comment_key)
    written = {
        ReportFormat.JUNIT: junit.render,
        ReportFormat.SARIF: sarif.render,
        ReportFormat.GITHUB: github.render,
        ReportFormat.CODEQUALITY: codequality.render,
    }
    return written[report_format](gates, checkout)


def _report(gates: "Sequence[CheckResult]", report_format: ReportFormat, out: Path | None) -> str:
    told = [(gate.report, gate.report.run) for gate in gates]
    if report_format is ReportFormat.HTML:
        from tracekit.report import html

        return html.render_several(told, gates)
    if report_format is ReportFormat.JSON:
        from tracekit.report import json

        return json.render(*told[0], gates[0]) if len(told) == 1 else json.render_several(told, gates)
    from tracekit.report import gate_text as verdicts
    from tracekit.report import text

    width, color = output.width(out), output.color(out)
    if any(gate.comparison or gate.budgets for gate in gates):
        return "\n".join(verdicts.render(gate, width=width, color=color) for gate in gates)
    if len(told) == 1:
        return text.render(*told[0], width=width, color=color)
    return text.render_several(told, width=width, color=color)
