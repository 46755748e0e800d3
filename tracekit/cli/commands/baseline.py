"""``tracekit baseline``: save, update and show the baseline that later runs are compared with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.options import AllowDifferent, ConfigFile, OutputOptions, RoleName, StepName, UseCache, expand_options
from tracekit.errors import ConfigError, InputError

if TYPE_CHECKING:
    from tracekit.cli.settings import CheckSettings
    from tracekit.model.run import Run
    from tracekit.regression.baseline import Baseline
    from tracekit.rules.rule import Report

REFUSED = 1

baseline = typer.Typer(
    help="Save the results of a run as a baseline for later runs.",
    short_help="Save, update or show the baseline of later runs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Runs = Annotated[
    list[str], typer.Argument(metavar="RUN…", help="Recordings of the same training; several show their spread.")
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The baseline file.", show_default=False)]


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """How to check recordings for a baseline."""

    config: ConfigFile = None
    allow_different: AllowDifferent = False
    cache: UseCache = True
    step_name: StepName = None
    role: RoleName = None

    def settings(self) -> "CheckSettings":
        """Return the settings of the check. Raises ConfigError."""
        from tracekit.cli import settings
        from tracekit.rules.registry import all_rules

        return settings.resolve(self.config, all_rules(), step_name=self.step_name)

    def check(self, runs: Sequence[str]) -> "list[tuple[Report, Run]]":
        """Return each run with its report. Raises ConfigError for more runs than a baseline can have."""
        from tracekit.cli import settings
        from tracekit.regression import baseline as baselines
        from tracekit.rules.registry import all_rules

        if len(runs) > baselines.MAX_RECORDINGS:
            raise ConfigError(f"a baseline has at most {baselines.MAX_RECORDINGS} recordings, not {len(runs)}")
        resolved = self.settings()
        rules = settings.configured_rules(resolved, all_rules())
        checked = run_loading.check_runs(
            runs, rules, facts=baselines.FACTS, cache=self.cache, settings=resolved.read, role=self.role
        )
        if self.role is None:
            run_loading.require_one_role(run for _, run in checked)
        return checked


@baseline.command(short_help="Save recordings as a baseline.")
@expand_options
def save(
    runs: Runs,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Baseline file to write.")],
    options: RecordingOptions,
) -> None:
    """Save samples, findings and fingerprint of a run, a few kilobytes, for tracekit check --baseline.

    Several recordings of the same training show the spread between recordings, so that the check finds smaller
    regressions. Record three to five.
    """
    from tracekit.regression import baseline as baselines

    saved = baselines.of_reports(options.check(runs), allow_different=options.allow_different)
    _write(saved, out)
    output.notify(f"{out}: {_recording_count(saved)} of {saved.name}, {out.stat().st_size:,} bytes{_advice(saved)}")


@baseline.command(short_help="Update a baseline with newer runs.")
@expand_options
def update(
    file: File,
    runs: Runs,
    *,
    accept: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE,…", help="Accept these regressions: rules, finding ids or metrics. Repeatable."),
    ] = None,
    options: RecordingOptions,
) -> None:
    """Update a baseline with runs that are no worse, or whose regressions are accepted by name.

    If nothing changed, the recordings are added, up to five in total; after that the file does not change, so that a
    slow drift is detected. If something was accepted, fixed or improved, they replace the old recordings. If something
    is new or worse and not accepted, the file does not change and the exit code is 1.
    """
    from tracekit.regression import baseline as baselines
    from tracekit.regression import gate as checks

    settings = options.settings()
    old = _read(file)
    reports = options.check(runs)
    result = checks.judge(
        reports[0][0],
        checks.least_severity(settings.fail_on),
        baseline=old,
        thresholds=settings.baseline,
        repeats=[run for _, run in reports[1:]],
        allow_different=options.allow_different,
    )
    accepted = [name for names in accept or [] for name in output.split_names(names)]
    regressions = checks.not_accepted(result, accepted)
    if regressions:
        output.notify(
            f"{file} is unchanged: {', '.join(regressions)} got worse; fix it, or --accept {','.join(regressions)}"
        )
        raise typer.Exit(REFUSED)
    new = baselines.of_reports(reports, allow_different=options.allow_different)
    updated, reason = checks.update(old, new, result, thresholds=settings.baseline)
    if updated is not old:
        _write(updated, file)
    output.notify(f"{file}: {reason}; {_recording_count(updated)}{_advice(updated)}")


@baseline.command(short_help="Show a baseline.")
def show(file: File) -> None:
    """Show the fingerprint, the findings and the median metrics of a baseline."""
    from tracekit.report import baseline_json

    OutputOptions().write_in(baseline_json.document(_read(file)))


@baseline.command(short_help="Print the JSON Schema of baselines.")
def schema() -> None:
    """Print the JSON Schema of baseline files."""
    from tracekit.report import baseline_json

    output.emit(baseline_json.schema())


def _read(file: Path) -> "Baseline":
    from tracekit.report import baseline_json

    if not file.is_file():
        raise InputError(f"{file}: there is no such file; tracekit baseline save creates one")
    return baseline_json.read(file)


def _write(saved: "Baseline", path: Path) -> None:
    from tracekit.report import baseline_json

    output.emit(baseline_json.render(saved), path)


def _recording_count(saved: "Baseline") -> str:
    from tracekit.model import units

    return units.count(len(saved.recordings), "recording")


def _advice(saved: "Baseline") -> str:
    enough = len(saved.recordings) >= 3
    return "" if enough else "; three or more show the spread between recordings, and find smaller regressions"
