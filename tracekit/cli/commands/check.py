"""``tracekit check``: judge runs, report, and exit with 1 if a finding or a metric fails the check."""

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, question, run_loading
from tracekit.cli.options import (
    AllowDifferent,
    ConfigFile,
    ExecutorOptions,
    OutputOptions,
    RoleName,
    StepName,
    UseCache,
    expand_options,
)
from tracekit.cli.question import Input, Kind
from tracekit.errors import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.model.source import Executor
    from tracekit.model.trace import TraceFact
    from tracekit.regression.gate import CheckResult
    from tracekit.report.ci.code_locations import Checkout

FINDINGS = 1


class FailOn(StrEnum):
    """The severities from which findings fail a check."""

    NEVER = "never"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Rules, thresholds, the severity that fails a check, and what it compares a run with."""

    fail_on: Annotated[
        FailOn | None,
        typer.Option(help="Exit with 1 if a finding has this severity or a higher one.  [default: error]"),
    ] = None
    select: Annotated[
        list[str] | None, typer.Option(metavar="RULE,…", help="Run only these rules: code, name or family. Repeatable.")
    ] = None
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="CODE.FIELD=VALUE", help="Set a threshold of a rule. Repeatable."),
    ] = None
    config: ConfigFile = None
    strict: Annotated[bool, typer.Option("--strict", help="Also fail on a budget whose verdict is 'inconclusive'.")] = (
        False
    )
    baseline: Annotated[
        str | None,
        typer.Option(metavar="FILE|RUN", help="Fail only on findings and metrics that are worse than in this one."),
    ] = None
    repeat: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="Another recording of the same training; narrows intervals. Repeatable."),
    ] = None
    same_numbers: Annotated[
        bool,
        typer.Option(
            "--same-numbers", help="Also fail if loss or gradient norm differ from the baseline's beyond rounding."
        ),
    ] = False
    allow_different: AllowDifferent = False


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

    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Text: show all findings, their evidence, and the tables.")
    ] = False

    def destinations(self) -> list[tuple[ReportFormat, Path | None]]:
        """Each format with its file, that of `--format` last. Raises ConfigError if an option cannot be used."""
        reports: list[tuple[ReportFormat, Path | None]] = []
        for text in self.also or ():
            name, _, file = text.partition("=")
            if name not in list(ReportFormat) or not file:
                raise ConfigError(f"--also {text}: expected FORMAT=FILE with a format of {', '.join(ReportFormat)}")
            reports.append((ReportFormat(name), Path(file)))
        if self.report_format is ReportFormat.HTML:
            output.require_output_file(self.out, "an HTML report")
        return [*reports, (self.report_format, self.out)]

    def facts(self) -> "tuple[TraceFact, ...]":
        """Return the facts of the reports in addition to findings, measured in one pass with those of the rules."""
        if ReportFormat.JSON not in [report_format for report_format, _ in self.destinations()]:
            return ()
        from tracekit.analysis.host.step_parts import fastest_calls
        from tracekit.regression import baseline
        from tracekit.regression.samples import samples

        return (samples, fastest_calls, *baseline.COMPARED_FACTS)

    def write(self, results: "Sequence[CheckResult]") -> None:
        """Write each report to its file or stdout."""
        checkout = None
        reports = [(result.report, result.report.run) for result in results]
        for report_format, file in self.destinations():
            if report_format is ReportFormat.TEXT:
                from tracekit.report import text

                width, color = output.width(file), output.color(file)
                if any(result.comparison or result.budgets for result in results):
                    written = text.render_gates(results, width=width, color=color, is_detailed=self.verbose)
                elif len(reports) > 1:
                    written = text.render_several(reports, width=width, color=color, is_detailed=self.verbose)
                else:
                    written = text.render(*reports[0], width=width, color=color, is_detailed=self.verbose)
            elif report_format is ReportFormat.HTML:
                from tracekit.report import html

                written = html.render_several(reports, results)
            elif report_format is ReportFormat.JSON:
                from tracekit.report import json  # without html, whose templates take longer to load than JSON to write

                several = len(reports) > 1
                written = json.render_several(reports, results) if several else json.render(*reports[0], results[0])
            else:
                from tracekit.report.ci import code_locations

                checkout = checkout or code_locations.Checkout(code_locations.repository_root(Path.cwd()))
                written = _for_ci(results, report_format, checkout, self.comment_key)
            output.emit(written, file, has_commands=report_format is ReportFormat.GITHUB)
        if checkout is not None and checkout.is_listed:
            sources = Input(Kind.SOURCES, str(checkout.root), code_locations.SKIPPED_FOLDERS)
            question.current.get().reads(sources)


@expand_options
def check(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN…", help="Folders of traces, or single trace files.", show_default=False),
    ] = None,
    *,
    options: CheckOptions,
    executor: ExecutorOptions,
    reports: ReportOptions,
    history: Annotated[Path | None, typer.Option(metavar="FILE", help="Add the results to this history.")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Check the sample run that comes with tracekit.")] = False,
    print_schema: Annotated[bool, typer.Option("--print-schema", help="Print the JSON Schema of reports.")] = False,
    cache: UseCache = True,
    step_name: StepName = None,
    role: RoleName = None,
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
    repeats = options.repeat or []
    if repeats and len(paths) > 1:
        raise InputError("--repeat needs exactly one RUN; check the runs one after the other")
    if options.same_numbers and options.baseline is None:
        raise ConfigError("--same-numbers needs --baseline: a file of tracekit baseline save, or a run")
    reports.destinations()
    if history is not None:
        from tracekit.regression.history import store

        question.current.get().withdraw()
        store.check(history)

    with executor.open([*paths, *repeats]) as opened:
        results = _results(
            paths, options, reports.facts(), cache=cache, step_name=step_name, role=role, executor=opened
        )
        reports.write(results)
    if history is not None:
        from tracekit.cli.commands.history import add_results

        add_results(history, results)
    failures = [(result.report.run.name, name) for result in results for name in result.failures]
    if failures:
        names = ", ".join(f"{run} {name}" if len(results) > 1 else name for run, name in failures)
        sys.stdout.flush()
        output.notify(f"{_failure_kind(results, len(failures))}: {names}")
        raise typer.Exit(FINDINGS)


def _results(
    paths: list[str],
    options: CheckOptions,
    reported: "Sequence[TraceFact]",
    *,
    cache: bool,
    step_name: str | None,
    role: str | None,
    executor: "Executor",
) -> "list[CheckResult]":
    from tracekit.cli import settings as config
    from tracekit.regression import gate as checks
    from tracekit.rules.registry import all_rules

    catalog = all_rules()
    settings = config.resolve(
        options.config,
        catalog,
        fail_on=options.fail_on,
        select=options.select or (),
        assignments=options.assignments or (),
        strict=options.strict,
        step_name=step_name,
    )
    rules = config.configured_rules(settings, catalog)
    facts = checks.facts(settings.budget, with_baseline=options.baseline is not None)
    read = settings.read
    baseline = (
        None
        if options.baseline is None
        else run_loading.open_baseline(
            options.baseline, rules, cache=cache, settings=read, role=role, executor=executor
        )
    )
    repeats = options.repeat or ()
    all_facts = [*facts, *reported]
    checked = run_loading.check_runs(
        paths, rules, facts=all_facts, cache=cache, settings=read, role=role, executor=executor
    )
    if role is None and (baseline is not None or repeats):
        run_loading.require_one_role(run for _, run in checked)
    elif role is None:
        checked = run_loading.check_other_roles(checked, rules, facts=all_facts)
    reports = [config.apply_ignores(report, settings.ignore, catalog) for report, _ in checked]
    recordings = [
        run_loading.open_measured(path, facts, cache=cache, step_name=step_name, role=role, executor=executor)
        for path in repeats
    ]
    return [
        checks.judge(
            report,
            settings.fail_on,
            baseline=baseline,
            thresholds=settings.baseline,
            repeats=recordings,
            budgets=settings.budget,
            allow_different=options.allow_different,
            must_numbers_agree=options.same_numbers,
        )
        for report in reports
    ]


def _for_ci(results: "Sequence[CheckResult]", report_format: ReportFormat, checkout: "Checkout", key: str) -> str:
    from tracekit.report.ci import codequality, comment, github, junit, sarif

    if report_format is ReportFormat.MARKDOWN:
        return comment.render(results, checkout, key=key)
    render = {
        ReportFormat.JUNIT: junit.render,
        ReportFormat.SARIF: sarif.render,
        ReportFormat.GITHUB: github.render,
        ReportFormat.CODEQUALITY: codequality.render,
    }
    return render[report_format](results, checkout)


def _failure_kind(results: "list[CheckResult]", count: int) -> str:
    from tracekit.model import units

    if any(result.comparison or result.budgets for result in results):
        return "the check fails"
    severity = results[0].fail_on
    limit = f" at or above {severity.label}" if severity is not None else ""
    return units.count(count, "finding") + limit
