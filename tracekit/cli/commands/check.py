"""``tracekit check``: judge runs, report, and exit with 1 if a finding or a metric fails the check."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, question, run_loading
from tracekit.cli.formats import ReportOptions
from tracekit.cli.options import BaselineOptions, ExecutorOptions, SettingsOptions, UseCache, expand_options
from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.cli.settings import CheckSettings
    from tracekit.model.source import Executor
    from tracekit.model.trace import TraceFact
    from tracekit.regression.gate import CheckResult

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
