"""``tracekit check``: judge runs, tell, and fail where findings reach the bar."""

import datetime
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import formats, output, run_loading
from tracekit.cli.formats import Also, CommentKey, ReportFormat
from tracekit.cli.output import Output
from tracekit.cli.run_loading import UseCache
from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.regression.gate import CheckResult

FINDINGS = 1


class FailOn(StrEnum):
    """The severities from which findings fail a check."""

    NEVER = "never"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def check(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Folders of traces, or single trace files.", show_default=False),
    ] = None,
    *,
    report_format: Annotated[
        ReportFormat, typer.Option("--format", help="How to write the report.")
    ] = ReportFormat.TEXT,
    fail_on: Annotated[
        FailOn | None, typer.Option("--fail-on", help="Exit with 1 on a finding this bad or worse.  [default: error]")
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select", metavar="RULE,…", help="Only these rules, by code, name or family (COMM). Repeatable."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="CODE.field=value", help="Set a rule's threshold. Repeatable."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="Settings; by default the nearest tracekit.toml or pyproject.toml."
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", metavar="FILE|RUN", help="Fail only on what is new or worse than in this baseline or run."
        ),
    ] = None,
    again: Annotated[
        list[str] | None,
        typer.Option(
            "--again", metavar="RUN", help="A further recording of the same as RUN: surer of metrics. Repeatable."
        ),
    ] = None,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Go on where the baseline is of something else.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on budgets that cannot be told, too.")] = False,
    history: Annotated[
        Path | None, typer.Option("--history", metavar="FILE", help="Add what this comes to to a history.")
    ] = None,
    also: Also = None,
    comment_key: CommentKey = "check",
    sample: Annotated[bool, typer.Option("--sample", help="Check the sample run that comes with tracekit.")] = False,
    print_schema: Annotated[bool, typer.Option("--print-schema", help="Print the JSON Schema of reports.")] = False,
    cache: UseCache = True,
    out: Output = None,
) -> None:
    """Say why runs are slow, what it costs and what to change.

    Exits with 0 where all is well, 1 on findings at or above the bar, 2 where a run or an option cannot be used. With a
    baseline, findings that it has do not count, and metrics that are worse for certain do; 4 where it is of something
    else. Budgets stand in the settings.
    """
    if print_schema:
        from tracekit.report import json

        output.emit(json.schema(), out)
        return
    paths = [*(runs or []), *([str(run_loading.sample_run())] if sample else [])]
    if not paths:
        raise InputError("no run is named: tracekit check RUN…, or --sample to see one")
    besides = formats.parse_also(also or [])
    if report_format is ReportFormat.HTML:
        output.require_output_file(out, "an HTML report")
    if again and len(paths) > 1:
        raise InputError("--again: is for a single RUN; check one after the other")

    from tracekit.cli import settings as settings_of
    from tracekit.cli.commands.history import add_gates, require_history
    from tracekit.regression import judgement
    from tracekit.rules import all_rules

    if history is not None:
        require_history(history)
    catalog = all_rules()
    settled = settings_of.resolve(config, catalog, fail_on=fail_on, select=select or [], assignments=settings or [])
    if strict:
        settled = settings_of.with_strict_budgets(settled)
    rules = settings_of.configured_rules(settled, catalog)
    today = datetime.datetime.now(datetime.UTC).date()
    facts = judgement.facts(settled.budget, with_baseline=baseline is not None)
    held = run_loading.open_baseline(baseline, rules, cache=cache) if baseline is not None else None
    told = [
        settings_of.apply_ignores(report, settled.ignore, catalog, today=today)
        for report, _ in run_loading.check_runs(paths, rules, facts=facts, cache=cache)
    ]
    further = [run_loading.open_measured(path, facts, cache=cache) for path in again or []]
    gates = [
        judgement.judge(
            report,
            settled.fail_on,
            baseline=held,
            thresholds=settled.baseline,
            repeats=further,
            budgets=settled.budget,
            allow_different=allow_different,
        )
        for report in told
    ]
    formats.write_reports(gates, report_format, out, also=besides, comment_key=comment_key)
    if history is not None:
        add_gates(history, gates)
    _fail(gates)


def _fail(gates: "list[CheckResult]") -> None:
    """Exit with FINDINGS where a gate fails, naming what fails it."""
    past = [(gate.report.run.name, name) for gate in gates for name in gate.failures]
    if past:
        names = ", ".join(f"{run} {name}" if len(gates) > 1 else name for run, name in past)
        sys.stdout.flush()
        output.notify(f"{_what(gates, len(past))}: {names}")
        raise typer.Exit(FINDINGS)


def _what(gates: "list[CheckResult]", count: int) -> str:
    if any(gate.comparison or gate.budgets for gate in gates):
        return "this fails"
    bar = gates[0].fail_on
    above = f" at or above {bar.label}" if bar is not None else ""
    return f"{count} finding{'s' * (count > 1)}{above}"
