"""``tracekit history``: the results of checked runs over time."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.options import DocumentOptions, RoleName, StepName, UseCache, expand_options
from tracekit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.regression.gate import CheckResult
    from tracekit.regression.history.entry import Commit, HistoryEntry
    from tracekit.regression.history.store import AddedRuns

history = typer.Typer(no_args_is_help=True, help="Store the results of checked runs; show trends and changes.")

Database = Annotated[Path, typer.Option("--db", metavar="FILE", help="The history: a DuckDB file.")]
CommitName = Annotated[
    str | None, typer.Option("--commit", metavar="SHA", help="Commit of the training.  [default: from CI or git]")
]
Branch = Annotated[
    str | None, typer.Option("--branch", metavar="NAME", help="Branch of the commit.  [default: from CI or git]")
]


@history.command("add", short_help="Add checked runs.")
def add(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Runs, or JSON reports of tracekit check.")],
    *,
    db: Database,
    commit: CommitName = None,
    branch: Branch = None,
    cache: UseCache = True,
    step_name: StepName = None,
    role: RoleName = None,
) -> None:
    """Add runs to a history; it is created if it does not exist. Runs are checked first, saved reports are not.

    Of a job of several programs all roles are added, each as a run of its own, or that of --role.

    A run that the history already has is not added again.
    """
    from tracekit.regression.history import store
    from tracekit.regression.history.entry import Commit
    from tracekit.report import json

    store.check(db)
    trained = _trained_commit(commit, branch)
    entries: list[HistoryEntry] = []
    for path in runs:
        if json.is_report(Path(path)):
            entries += _saved_entries(Path(path), trained)
        else:
            entries += _check_roles(path, trained, cache=cache, step_name=step_name, role=role)
    _report_added(db, store.add(db, entries, commit=Commit(commit, branch=branch)))


@history.command("show", short_help="Show trends and changes.")
@expand_options
def show(
    *,
    db: Database,
    metric: Annotated[
        list[str] | None, typer.Option(metavar="NAME,…", help="Only these metrics, such as step_time. Repeatable.")
    ] = None,
    last: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the N latest runs of each group.")] = None,
    branch: Annotated[str | None, typer.Option(metavar="NAME", help="Only runs of this branch.")] = None,
    table: DocumentOptions,
) -> None:
    """Show each metric over runs with the same hardware, model, strategy and world size, and where it changed.

    For each change it shows the commits before and after, and the findings that are new or resolved.
    """
    from tracekit.regression.history import store, trends
    from tracekit.report import history as report

    metrics = [_metric(name) for names in metric or [] for name in output.split_names(names)]
    groups = trends.groups(store.read(db), metrics=metrics or None, last=last, branch=branch)
    if groups or table.is_json:
        table.write_document(report.document(groups))
    else:
        table.emit(f"{db} has no run{f' of branch {branch}' if branch else ''}.\n")


def _trained_commit(commit: str | None = None, branch: str | None = None) -> "Commit":
    """Return the commit of the training: as given, else from CI or git."""
    from tracekit.regression.history import entry

    return entry.known_commit(os.environ, Path.cwd(), sha=commit, branch=branch)


def _entries(results: "Sequence[CheckResult]", commit: "Commit") -> "list[HistoryEntry]":
    from tracekit.regression.comparison import RunSamples
    from tracekit.regression.history.entry import history_entry
    from tracekit.report import json

    return [
        history_entry(
            json.document(result.report, result.report.run),
            RunSamples.of(result.report.run),
            commit=commit,
            failures=result.failures,
        )
        for result in results
    ]


def add_results(db: Path, results: "Sequence[CheckResult]") -> None:
    """Add the results of a check, and report how many were added."""
    from tracekit.regression.history import store

    sys.stdout.flush()
    _report_added(db, store.add(db, _entries(results, _trained_commit())))


def _report_added(db: Path, added: "AddedRuns") -> None:
    from tracekit.model import units

    parts = [f"{units.count(added.new, 'run')} added"]
    parts += [f"{added.updated} updated"] if added.updated else []
    parts += [f"{added.unchanged} unchanged"] if added.unchanged else []
    output.notify(f"{db}: {', '.join(parts)}")


def _check_roles(
    path: str, commit: "Commit", *, cache: bool, step_name: str | None, role: str | None
) -> "list[HistoryEntry]":
    """Entries of a run and of the other roles of its job, or of the role that is named."""
    from tracekit.regression import gate as checks

    reports, resolved = run_loading.check_by_settings(
        path, cache=cache, step_name=step_name, role=role, with_other_roles=role is None
    )
    return _entries([checks.judge(report, resolved.fail_on, budgets=resolved.budget) for report in reports], commit)


def _saved_entries(path: Path, commit: "Commit") -> "list[HistoryEntry]":
    from tracekit.regression.history.entry import history_entry
    from tracekit.report import json

    with json.report_errors(path):
        return [history_entry(doc, json.comparison_side(doc), commit=commit) for doc in json.read_reports(path)]


def _metric(name: str) -> str:
    from tracekit.regression import metrics

    try:
        return metrics.find(name, metrics.compared_metrics()).key
    except ConfigError as error:
        raise ConfigError(f"--metric: {error}") from None
