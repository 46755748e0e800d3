"""``tracekit history``: what checked runs came to over time."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.output import Output, TextOrJson
from tracekit.cli.run_loading import UseCache
from tracekit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.regression.gate import CheckResult
    from tracekit.regression.history.commits import Commit
    from tracekit.regression.history.entry import HistoryEntry
    from tracekit.regression.history.store import AddedRuns

history = typer.Typer(no_args_is_help=True, help="Keep what checked runs came to, and show trends and changes.")

Database = Annotated[Path, typer.Option("--db", metavar="FILE", help="The history, a DuckDB file.")]
CommitName = Annotated[
    str | None,
    typer.Option("--commit", metavar="SHA", help="Commit that was trained; by default what CI or git says."),
]
Branch = Annotated[
    str | None, typer.Option("--branch", metavar="NAME", help="Its branch; by default what CI or git says.")
]


@history.command("add", short_help="Add checked runs.")
def add(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Runs, or JSON reports of tracekit check.")],
    *,
    db: Database,
    commit: CommitName = None,
    branch: Branch = None,
    cache: UseCache = True,
) -> None:
    """Add runs to a history, which is made if it is not there. A run is checked, a saved report is taken as it is.

    A run that is in the history already is not added a second time.
    """
    from tracekit.regression.history import store
    from tracekit.regression.history.commits import Commit
    from tracekit.report import json

    store.check(db)
    trained = trained_commit(commit, branch)
    entries: list[HistoryEntry] = []
    for path in runs:
        if json.is_report(Path(path)):
            entries += _saved(Path(path), trained)
        else:
            entries.append(_checked(path, trained, cache=cache))
    report_added(db, store.add(db, entries, commit=Commit(commit, branch=branch)))


@history.command("show", short_help="Show trends and what changed.")
def show(
    *,
    db: Database,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME,…", help="Only these, such as step_time. Repeatable.")
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", metavar="N", min=1, help="Only the N latest runs of each kind.")
    ] = None,
    branch: Annotated[str | None, typer.Option("--branch", metavar="NAME", help="Only runs of this branch.")] = None,
    history_format: TextOrJson = output.Format.TEXT,
    out: Output = None,
) -> None:
    """Show each metric over the runs that agree in hardware, model, strategy and world size, and where it changed.

    A change is told with the commits it lies between, and with the findings that came or went with it.
    """
    from tracekit.regression.history import store, trends
    from tracekit.report import history as told

    wanted = [_metric(name) for each in metric or [] for name in output.split_names(each)]
    found = trends.groups(store.read(db), metrics=wanted or None, last=last, branch=branch)
    if history_format is output.Format.JSON:
        output.emit(told.as_json(found), out)
    elif found:
        output.emit(told.as_text(found, width=output.width(out), color=output.color(out)), out)
    else:
        output.emit(f"No run{f' of branch {branch}' if branch else ''} is in {db}.\n", out)


def trained_commit(commit: str | None = None, branch: str | None = None) -> "Commit":
    """Return the commit that is trained here: as told, else as CI or git says."""
    from tracekit.regression.history import commits

    return commits.known_commit(os.environ, Path.cwd(), sha=commit, branch=branch)


def entries_of(gates: "Sequence[CheckResult]", commit: "Commit") -> "list[HistoryEntry]":
    """Return what a history keeps of runs that were checked."""
    from tracekit.regression.comparison import RunSamples
    from tracekit.regression.history.entry import history_entry
    from tracekit.report import json

    return [
        history_entry(
            json.document(gate.report, gate.report.run),
            RunSamples.of(gate.report.run),
            commit=commit,
            failures=gate.failures,
        )
        for gate in gates
    ]


def require_history(db: Path) -> None:
    """Raise InputError where a file is there and is no history: better now than after the check."""
    from tracekit.regression.history import store

    store.check(db)


def add_gates(db: Path, gates: "Sequence[CheckResult]") -> None:
    """Add what a check came to, and say so."""
    from tracekit.regression.history import store

    sys.stdout.flush()
    report_added(db, store.add(db, entries_of(gates, trained_commit())))


def report_added(db: Path, added: "AddedRuns") -> None:
    """Say what became of the runs that were to be added."""
    parts = [f"{added.new} run{'s' * (added.new != 1)} added"]
    parts += [f"{added.updated} told anew"] if added.updated else []
    parts += [f"{added.unchanged} there already"] if added.unchanged else []
    output.notify(f"{db}: {', '.join(parts)}")


def _checked(path: str, commit: "Commit", *, cache: bool) -> "HistoryEntry":
    import datetime

    from tracekit.cli import settings
    from tracekit.regression import judgement
    from tracekit.rules import all_rules

    catalog = all_rules()
    settled = settings.resolve(None, catalog)
    today = datetime.datetime.now(datetime.UTC).date()
    ((report, _),) = run_loading.check_runs([path], settings.configured_rules(settled, catalog), cache=cache)
    report = settings.apply_ignores(report, settled.ignore, catalog, today=today)
    return entries_of([judgement.judge(report, settled.fail_on, budgets=settled.budget)], commit)[0]


def _saved(path: Path, commit: "Commit") -> "list[HistoryEntry]":
    from tracekit.regression.history.entry import history_entry
    from tracekit.report import json

    with json.report_errors(path):
        return [history_entry(each, json.comparison_side(each), commit=commit) for each in json.read_reports(path)]


def _metric(name: str) -> str:
    from tracekit.regression import quantities
    from tracekit.regression.samples import LOWER_IS_BETTER

    try:
        return quantities.metric_named(name, LOWER_IS_BETTER)
    except ConfigError as error:
        raise ConfigError(f"--metric: {error}") from None
