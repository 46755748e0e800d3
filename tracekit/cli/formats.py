"""The formats of a check's report: for people, for programs, and for CI systems."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, question
from tracekit.cli.options import OutputOptions
from tracekit.cli.question import Input, Kind
from tracekit.errors import ConfigError

if TYPE_CHECKING:
    from tracekit.model.trace import TraceFact
    from tracekit.regression.gate import CheckResult
    from tracekit.report.ci.code_locations import Checkout


class ReportFormat(StrEnum):
    """Formats of a report."""

    TEXT = "text"
    JSON = "json"
    HTML = "html"
    JUNIT = "junit"
    SARIF = "sarif"
    GITHUB = "github"
    MARKDOWN = "markdown"
    CODEQUALITY = "codequality"


@dataclass(frozen=True, kw_only=True)
class ReportOptions(OutputOptions):
    """The formats and destinations of a check's report."""

    report_format: Annotated[ReportFormat, typer.Option("--format", help="Format of the report.")] = ReportFormat.TEXT
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="FORMAT=FILE", help="Write an additional report, e.g. sarif=out.sarif. Repeatable."),
    ] = None
    comment_key: Annotated[str, typer.Option(metavar="NAME", help="Markdown: update the CI comment of this name.")] = (
        "check"
    )

    def require_valid(self) -> None:
        """Raise ConfigError if an option cannot be used, before a run is read."""
        self._additional()
        if self.report_format is ReportFormat.HTML:
            output.require_output_file(self.out, "an HTML report")

    def facts(self) -> "tuple[TraceFact, ...]":
        """Return the facts of the reports in addition to findings, measured in one pass with those of the rules."""
        from tracekit.analysis.time import breakdown
        from tracekit.regression import baseline
        from tracekit.regression.samples import samples

        formats = {self.report_format, *(report_format for report_format, _ in self._additional())}
        of_json: tuple[TraceFact, ...] = (samples, *baseline.COMPARED_FACTS) if ReportFormat.JSON in formats else ()
        return (breakdown.by_rank, breakdown.extent, *of_json)

    def write(self, results: "Sequence[CheckResult]") -> None:
        """Write the report to `out` or stdout, and the additional ones to their files."""
        from tracekit.report.ci import code_locations

        checkout = code_locations.Checkout(code_locations.repository_root(Path.cwd()))
        for report_format, file in self._additional():
            output.emit(self._render(results, report_format, file, checkout), file)
        emit = output.emit_commands if self.report_format is ReportFormat.GITHUB else output.emit
        emit(self._render(results, self.report_format, self.out, checkout), self.out)
        if checkout.is_listed:
            sources = Input(Kind.SOURCES, str(checkout.root), code_locations.SKIPPED_FOLDERS)
            question.current().reads(sources)

    def _additional(self) -> list[tuple[ReportFormat, Path]]:
        reports = []
        for text in self.also or ():
            name, _, file = text.partition("=")
            if name not in list(ReportFormat) or not file:
                raise ConfigError(f"--also {text}: expected FORMAT=FILE with a format of {', '.join(ReportFormat)}")
            reports.append((ReportFormat(name), Path(file)))
        return reports

    def _render(
        self, results: "Sequence[CheckResult]", report_format: ReportFormat, out: Path | None, checkout: "Checkout"
    ) -> str:
        if report_format is ReportFormat.TEXT:
            return _as_text(results, width=output.width(out), color=output.color(out))
        if report_format in (ReportFormat.JSON, ReportFormat.HTML):
            return _as_document(results, report_format)
        from tracekit.report.ci import codequality, comment, github, junit, sarif

        if report_format is ReportFormat.MARKDOWN:
            return comment.render(results, checkout, key=self.comment_key)
        render = {
            ReportFormat.JUNIT: junit.render,
            ReportFormat.SARIF: sarif.render,
            ReportFormat.GITHUB: github.render,
            ReportFormat.CODEQUALITY: codequality.render,
        }
        return render[report_format](results, checkout)


def _as_document(results: "Sequence[CheckResult]", report_format: ReportFormat) -> str:
    reports = [(result.report, result.report.run) for result in results]
    if report_format is ReportFormat.HTML:
        from tracekit.report import html

        return html.render_several(reports, results)
    from tracekit.report import json  # without html, whose templates take longer to load than JSON to write

    return json.render(*reports[0], results[0]) if len(reports) == 1 else json.render_several(reports, results)


def _as_text(results: "Sequence[CheckResult]", *, width: int, color: bool) -> str:
    from tracekit.report import text
    from tracekit.report.render import text as render_text

    if any(result.comparison or result.budgets for result in results):
        documents = map(text.gate_document, results)
        width = min(width, text.MAX_WIDTH)
        return "\n".join(render_text.render(document, width=width, color=color) for document in documents)
    reports = [(result.report, result.report.run) for result in results]
    if len(reports) == 1:
        return text.render(*reports[0], width=width, color=color)
    return text.render_several(reports, width=width, color=color)
