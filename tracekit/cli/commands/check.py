"""``tracekit check``: judge runs, report, and exit with 1 if a finding or a metric fails the check."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, question, run_loading
from tracekit.cli.options import BaselineOptions, ExecutorOptions, SettingsOptions, UseCache, expand_options
from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.cli.settings import CheckSettings
    from tracekit.model.executor import Executor
    from tracekit.model.trace import TraceFact
    from tracekit.regression.gate import CheckResult
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

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
        from tracekit.analysis.time import breakdown, summary
        from tracekit.regression import comparability
        from tracekit.regression.samples import samples

        formats = {self.report_format, *(report_format for report_format, _ in self._additional())}
        of_json: tuple[TraceFact, ...] = (samples, *comparability.FACTS) if ReportFormat.JSON in formats else ()
        return (breakdown.by_rank, summary.extent, *of_json)

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


FINDINGS = 1


@expand_options
def check(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN…", help="Folders of traces, or single trace files.", show_default=False),
    ] = None,
    *,
    settings: SettingsOptions,
    baseline: BaselineOptions,
    executor: ExecutorOptions,
    reports: ReportOptions,
    history: Annotated[Path | None, typer.Option(metavar="FILE", help="Add the results to this history.")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Check the sample run that comes with tracekit.")] = False,
    print_schema: Annotated[bool, typer.Option("--print-schema", help="Print the JSON Schema of reports.")] = False,
    cache: UseCache = True,
) -> None:
    """Report why runs are slow, what it costs and what to change.

    Exit codes: 0 nothing fails, 1 a finding reaches --fail-on, 2 a run or an option cannot be used. With --baseline,
    a check fails only on new or worse findings and significantly worse metrics; 4 means that run and baseline cannot
    be compared. Budgets are part of the settings.
    """
    if print_schema:
        from tracekit.report import json

        reports.emit(json.schema())
        return
    paths = [*(runs or []), *([str(run_loading.sample_run())] if sample else [])]
    if not paths:
        raise InputError("no run given: tracekit check RUN…, or --sample to see an example")
    repeats = baseline.repeat or []
    if repeats and len(paths) > 1:
        raise InputError("--repeat needs exactly one RUN; check the runs one after the other")
    reports.require_valid()
    if history is not None:
        from tracekit.regression.history import store

        question.current().withdraw()
        store.check(history)

    with executor.open([*paths, *repeats]) as opened:
        from tracekit.rules.registry import all_rules

        resolved = settings.resolve(all_rules())
        results = _results(paths, resolved, baseline, repeats, reports.facts(), cache=cache, executor=opened)
        reports.write(results)
    if history is not None:
        from tracekit.cli.commands.history import add_results

        add_results(history, results)
    _exit_on_failure(results)


def _results(
    paths: list[str],
    settings: "CheckSettings",
    options: BaselineOptions,
    repeats: list[str],
    reported: "Sequence[TraceFact]",
    *,
    cache: bool,
    executor: "Executor",
) -> "list[CheckResult]":
    from tracekit.cli.settings import apply_ignores, configured_rules
    from tracekit.regression import gate as checks
    from tracekit.rules.registry import all_rules

    catalog = all_rules()
    rules = configured_rules(settings, catalog)
    facts = checks.facts(settings.budget, with_baseline=options.baseline is not None)
    devices = settings.devices
    baseline = (
        None
        if options.baseline is None
        else run_loading.open_baseline(options.baseline, rules, cache=cache, devices=devices, executor=executor)
    )
    all_facts = [*facts, *reported]
    checked = run_loading.check_runs(paths, rules, facts=all_facts, cache=cache, devices=devices, executor=executor)
    reports = [apply_ignores(report, settings.ignore, catalog) for report, _ in checked]
    recordings = [run_loading.open_measured(path, facts, cache=cache, executor=executor) for path in repeats]
    return [
        checks.judge(
            report,
            settings.fail_on,
            baseline=baseline,
            thresholds=settings.baseline,
            repeats=recordings,
            budgets=settings.budget,
            allow_different=options.allow_different,
        )
        for report in reports
    ]


def _exit_on_failure(results: "list[CheckResult]") -> None:
    """Exit with FINDINGS if a result fails, and name what fails."""
    failures = [(result.report.run.name, name) for result in results for name in result.failures]
    if failures:
        names = ", ".join(f"{run} {name}" if len(results) > 1 else name for run, name in failures)
        sys.stdout.flush()
        output.notify(f"{_failure_kind(results, len(failures))}: {names}")
        raise typer.Exit(FINDINGS)


def _failure_kind(results: "list[CheckResult]", count: int) -> str:
    from tracekit.model import units

    if any(result.comparison or result.budgets for result in results):
        return "the check fails"
    severity = results[0].fail_on
    limit = f" at or above {severity.label}" if severity is not None else ""
    return units.count(count, "finding") + limit
