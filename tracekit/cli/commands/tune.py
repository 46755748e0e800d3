"""``tracekit tune``: proposes changes of a training, tries them in turns, and keeps what is certainly faster."""

import math
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.options import ConfigFile, Format, OutputOptions, RunOptions, expand_options
from tracekit.errors import ConfigError, InputError

if TYPE_CHECKING:
    from tracekit.cli.settings import CheckSettings
    from tracekit.report.document import Document
    from tracekit.rules.rule import Report
    from tracekit.tune.configuration import Configuration
    from tracekit.tune.proposals import Proposal
    from tracekit.tune.trials import Limits

_MOST_MINUTES = 60.0 * 24 * 30
_OF_SIGNAL = 128
_MOST_WORDS, _MOST_CHARACTERS = 200, 1000
_STEPS = re.compile(r"(\d{1,9}):(\d{1,9})")


class HighestRisk(StrEnum):
    """What else changes that are tried may change, least first."""

    SAME = "same"
    MEMORY = "memory"
    ROUNDING = "rounding"
    TRAINING = "training"


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """Whether and how proposals are tried."""

    is_run: Annotated[
        bool, typer.Option("--run", help="Run COMMAND, once per recording, with and without each change.")
    ] = False
    budget: Annotated[float, typer.Option(metavar="MINUTES", help="Time for all recordings.")] = 30.0
    pairs: Annotated[int, typer.Option(metavar="N", min=1, max=20, help="Most recordings of each side of a trial.")] = 4
    risk: Annotated[
        HighestRisk, typer.Option(help="Try changes up to this risk; training: also those that change the training.")
    ] = HighestRisk.ROUNDING
    steps: Annotated[
        str, typer.Option(metavar="FIRST:END", help="Optimizer steps that each recording profiles, as record does.")
    ] = "10:15"
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FOLDER", help="Folder for recordings, reports and patches.  [default: tune-TIME]"
        ),
    ] = None

    def limits(self, settings: "CheckSettings") -> "Limits":
        """Limits of the trials. Raises ConfigError for what cannot be used."""
        from tracekit.tune.changes.change import Risk
        from tracekit.tune.trials import Limits

        if not (math.isfinite(self.budget) and 0 < self.budget <= _MOST_MINUTES):
            raise ConfigError(f"--budget {self.budget:g}: expected minutes, more than 0")
        steps = _STEPS.fullmatch(self.steps)
        if steps is None or int(steps[1]) >= int(steps[2]):
            raise ConfigError(f"--steps {self.steps}: expected FIRST:END, such as 10:15")
        return Limits(60 * self.budget, self.pairs, Risk[self.risk.name], self.steps, settings.baseline)

    def folder(self) -> Path:
        """New or empty folder for the results. Raises InputError where it has content or cannot be made."""
        folder = self.out or Path(time.strftime("tune-%Y%m%d-%H%M%S"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            is_empty = not any(folder.iterdir())
        except OSError as error:
            raise InputError(f"--out {folder}: {error.strerror}; name another folder") from None
        if not is_empty:
            raise InputError(f"--out {folder}: is not empty; name another folder")
        return folder


@expand_options
def tune(
    *,
    source: RunOptions,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND…]", help="The command that starts the training which RUN is a recording of."
        ),
    ] = None,
    trials: TrialOptions,
    config: ConfigFile = None,
    document_format: Annotated[
        Format, typer.Option("--format", help="Text, Markdown or an HTML page for people, JSON for programs.")
    ] = Format.TEXT,
) -> None:
    """Propose changes that answer a run's findings; with --run, try them and keep what is certainly faster.

    Each proposal has the step that the replay predicts. A trial records COMMAND without and with the change in turns
    (A B B A …) until the test of the gate decides; a change that is kept is part of COMMAND in later trials. Changes
    apply to our trainers by options, to other commands by environment variables and by arguments that the settings'
    table tune.arguments names; others are patches to review. No file of yours is changed.

    COMMAND runs only with --run; a command that a recording states never does. Exit codes: 0 done, 2 input cannot be
    used or COMMAND fails without a change, 128 + N ended by signal N, after the report.
    """
    from tracekit.tune import proposals as proposing
    from tracekit.tune.changes.change import TunedRun
    from tracekit.tune.configuration import Configuration

    settings = _settings(config, source)
    limits = trials.limits(settings)
    if trials.is_run and not command:
        raise InputError(f"--run needs a command: tracekit tune {source.run} --run -- COMMAND…")
    report = _check(source.run, settings, cache=source.cache, role=source.role)
    configuration = Configuration(tuple(command or ()), settings.tune_arguments)
    if trials.is_run:
        _try(report, configuration, settings, limits, trials.folder(), document_format, role=source.role)
        return
    is_of_trainers = configuration.is_of_trainers if command else TunedRun.of(report.run).is_of_trainers
    proposals = proposing.propose(report, configuration, is_of_trainers=is_of_trainers)
    patches = _write_patches(trials.folder(), configuration, proposals.proposals) if trials.out and command else {}
    from tracekit.report import tune as tune_report

    recorded = _recorded_command(TunedRun.of(report.run).manifest.command)
    document = tune_report.proposal_document(proposals, run=report.run.name, command=recorded, patches=patches)
    OutputOptions().write_in(document, document_format)


def _recorded_command(words: Sequence[object]) -> str:
    """Command line that a manifest states, as text to show: it may be anybody's, and anything."""
    from tracekit.model import escaping

    return escaping.inert(shlex.join(str(word) for word in words[:_MOST_WORDS]), _MOST_CHARACTERS)


def _try(
    report: "Report",
    configuration: "Configuration",
    settings: "CheckSettings",
    limits: "Limits",
    folder: Path,
    document_format: Format,
    *,
    role: str | None,
) -> None:
    """Run the trials, write their report, and exit by the signal that ended them."""
    from tracekit.report import tune as tune_report
    from tracekit.tune.proposals import FACTS
    from tracekit.tune.trials import Tuner

    tuner = Tuner(
        report,
        configuration,
        folder,
        limits,
        load=lambda path: run_loading.open_measured(path, FACTS, role=role),
        check=lambda path: _check(path, settings, role=role),
        notify=output.notify,
    )
    tuning = tuner.tune()
    patches = _write_patches(folder, configuration, (*tuning.first.proposals, *tuning.left))
    document = tune_report.document(tuning, patches)
    _write_reports(folder, document)
    OutputOptions().write_in(document, document_format)
    if tuning.stop_signal is not None:
        raise typer.Exit(_OF_SIGNAL + tuning.stop_signal)


def _settings(config: Path | None, source: RunOptions) -> "CheckSettings":
    from tracekit.cli import settings
    from tracekit.rules.registry import all_rules

    return settings.resolve(config, all_rules(), step_name=source.step_name)


def _check(path: str, settings: "CheckSettings", *, cache: bool = True, role: str | None = None) -> "Report":
    """Report of a run by the settings, with the facts of proposals and trials measured."""
    from tracekit.cli.settings import apply_ignores, configured_rules
    from tracekit.rules.registry import all_rules
    from tracekit.tune.proposals import FACTS

    catalog = all_rules()
    rules = configured_rules(settings, catalog)
    ((report, _),) = run_loading.check_runs([path], rules, facts=FACTS, cache=cache, settings=settings.read, role=role)
    return apply_ignores(report, settings.ignore, catalog)


def _write_patches(folder: Path, configuration: "Configuration", proposals: "tuple[Proposal, ...]") -> dict[str, str]:
    """Write a patch for each proposal that needs one; return the files by the title of the setting."""
    from tracekit.tune import patches
    from tracekit.tune.configuration import Way

    written = {}
    for setting in {row.setting.title: row.setting for row in proposals if row.setting.way is Way.PATCH}.values():
        assert setting.change.keyword is not None
        if text := patches.patch(configuration.command, setting.change.keyword, setting.value):
            file = folder / f"{setting.title.replace(' ', '-')}.patch"
            output.emit(text, file)
            written[setting.title] = str(file)
    return written


def _write_reports(folder: Path, document: "Document") -> None:
    names = {
        Format.JSON: "tune.json",
        Format.HTML: "report.html",
        Format.MARKDOWN: "report.md",
        Format.TEXT: "report.txt",
    }
    for document_format, name in names.items():
        OutputOptions(out=folder / name).write_in(document, document_format)
