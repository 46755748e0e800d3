"""``tracekit baseline``: what later runs are held against, saved, renewed and shown."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.run_loading import UseCache
from tracekit.errors import ConfigError, InputError

if TYPE_CHECKING:
    from tracekit.cli.settings import CheckSettings
    from tracekit.model.run import Run
    from tracekit.regression.baseline import Baseline
    from tracekit.rules.rule import Report

REFUSED = 1

baseline = typer.Typer(
    help="Save what a run measures, to hold later runs against it.",
    short_help="Save, renew or show what later runs are held against.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Runs = Annotated[
    list[str], typer.Argument(metavar="RUN…", help="Recordings of one training; with several, how much they differ.")
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The baseline.", show_default=False)]
AllowDifferent = Annotated[
    bool, typer.Option("--allow-different", help="Go on where model, strategy, device or versions differ.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings; by default the nearest tracekit.toml or pyproject.toml."),
]


@baseline.command(short_help="Save recordings as a baseline.")
def save(
    runs: Runs,
    *,
    out: Annotated[Path, typer.Option("--output", "--out", "-o", metavar="FILE", help="Where to.")],
    config: ConfigFile = None,
    allow_different: AllowDifferent = False,
    cache: UseCache = True,
) -> None:
    """Save samples, findings and fingerprint of a run, in kilobytes, for tracekit check --baseline.

    Several recordings of the same training tell by how much such recordings differ, and make the check sharper: three
    to five are well spent.
    """
    from tracekit.regression import baseline as baselines

    made = baselines.of_reports(_checked(runs, _settled(config), cache=cache), allow_different=allow_different)
    _write(made, out)
    output.notify(f"{out}: {_counted(made)} of {made.name}, {out.stat().st_size:,} bytes{_advice(made)}")


@baseline.command(short_help="Renew a baseline by a newer run.")
def update(
    file: File,
    runs: Runs,
    *,
    accept: Annotated[
        list[str] | None,
        typer.Option("--accept", metavar="CODE,…", help="What may be new or worse: rules, ids, metrics. Repeatable."),
    ] = None,
    config: ConfigFile = None,
    allow_different: AllowDifferent = False,
    cache: UseCache = True,
) -> None:
    """Renew a baseline by runs that are no worse, or whose regressions are accepted by name.

    Where nothing changed the recordings are added, up to five; further ones change nothing, so that a slow creep is
    seen. Where something was accepted, mended or got better they take the place of all there were. Exits with 1, and
    leaves the file as it is, where something is new or worse and not accepted.
    """
    from tracekit.regression import baseline as baselines
    from tracekit.regression import judgement

    settled = _settled(config)
    held = _read(file)
    told = _checked(runs, settled, cache=cache)
    gate = judgement.judge(
        told[0][0],
        judgement.least_severity(settled.fail_on),
        baseline=held,
        thresholds=settled.baseline,
        repeats=[run for _, run in told[1:]],
        allow_different=allow_different,
    )
    accepted = [name for each in accept or [] for name in output.split_names(each)]
    left = judgement.not_accepted(gate, accepted)
    if left:
        output.notify(f"{file} stays as it is: {', '.join(left)} got worse; mend that, or --accept {','.join(left)}")
        raise typer.Exit(REFUSED)
    fresh = baselines.of_reports(told, allow_different=allow_different)
    renewed, why = judgement.updated(held, fresh, gate, thresholds=settled.baseline)
    if renewed is not held:
        _write(renewed, file)
    output.notify(f"{file}: {why}; {_counted(renewed)}{_advice(renewed)}")


@baseline.command(short_help="Show what a baseline holds.")
def show(file: File) -> None:
    """Show the fingerprint, the findings and the typical metrics of a baseline."""
    from tracekit.report import baseline_text

    output.emit(baseline_text.render(_read(file), width=output.width(), color=output.color()))


@baseline.command(short_help="Print the JSON Schema of baselines.")
def schema() -> None:
    """Print the JSON Schema that the files obey."""
    from tracekit.report import baseline_json

    output.emit(baseline_json.schema())


def _read(file: Path) -> "Baseline":
    from tracekit.report import baseline_json

    if not file.is_file():
        raise InputError(f"{file}: there is no such file")
    return baseline_json.read(file)


def _settled(path: Path | None) -> "CheckSettings":
    from tracekit.cli import settings
    from tracekit.rules import all_rules

    return settings.resolve(path, all_rules())


def _checked(runs: Sequence[str], settled: "CheckSettings", *, cache: bool) -> "list[tuple[Report, Run]]":
    from tracekit.cli import settings
    from tracekit.regression import baseline as baselines
    from tracekit.rules import all_rules

    if len(runs) > baselines.MAX_RECORDINGS:
        raise ConfigError(f"a baseline holds {baselines.MAX_RECORDINGS} recordings at most, not {len(runs)}")
    rules = settings.configured_rules(settled, all_rules())
    return run_loading.check_runs(runs, rules, facts=baselines.FACTS, cache=cache)


def _write(made: "Baseline", path: Path) -> None:
    from tracekit.report import baseline_json

    output.emit(baseline_json.render(made), path)


def _counted(made: "Baseline") -> str:
    count = len(made.recordings)
    return f"{count} recording{'s' * (count > 1)}"


def _advice(made: "Baseline") -> str:
    enough = len(made.recordings) >= 3
    return "" if enough else "; three or more would tell how much recordings differ, and catch smaller regressions"
