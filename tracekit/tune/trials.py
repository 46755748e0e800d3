"""Trials: each proposal is recorded in turns with the kept configuration, and the regression gate's test decides."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from signal import Signals

from tracekit.errors import InputError, TracekitError
from tracekit.model.run import Run
from tracekit.regression import comparison, numbers
from tracekit.regression.comparison import RunSamples
from tracekit.regression.thresholds import MIN_CHANGE_RATIO, Change, Thresholds, Verdict
from tracekit.rules.rule import Report
from tracekit.tune import recording, training_time
from tracekit.tune.changes.change import Risk
from tracekit.tune.configuration import Configuration
from tracekit.tune.proposals import Proposal, Proposals, propose
from tracekit.tune.recording import Recording, StopSignal

MIN_PAIRS = 2
"""Recordings of each side before the first decision, in the order A B B A: a drift of the machine cancels."""
_CANDIDATE_TIMES = 3.0
_LEAST_LIMIT_S = 60.0
"""A candidate that takes longer than this and so many times the longest reference hangs."""

_ALL_TRIED = "every proposal was tried"
_NONE_APPLIES = (
    "nothing was run, for no proposal of allowed risk saves 3% and applies to COMMAND by an option, a variable or an "
    "argument that [tune.arguments] of the settings names (docs/tune.md)"
)


class Outcome(StrEnum):
    """Result of a trial."""

    KEPT = "kept"
    NO_GAIN = "no gain"
    WORSE = "worse"
    UNDECIDED = "undecided"
    OTHER_NUMBERS = "other numbers"
    FAILED = "failed"
    STOPPED = "stopped"


_TRIES_OTHER_VALUES = (Outcome.WORSE, Outcome.FAILED)
"""After these, another value of the change may be better: fewer workers, more layers that recompute."""
_OF_VERDICT = {
    Verdict.BETTER: Outcome.KEPT,
    Verdict.WORSE: Outcome.WORSE,
    Verdict.SAME: Outcome.NO_GAIN,
    Verdict.INCONCLUSIVE: Outcome.UNDECIDED,
}


@dataclass(frozen=True, eq=False)
class Trial:
    """A proposal with the recordings of both sides in their order, what they measured, and the result."""

    proposal: Proposal
    outcome: Outcome
    reference: tuple[Recording, ...]
    candidate: tuple[Recording, ...]
    change: Change | None = None
    """Change of the metric that decides; None where it was not measured."""
    note: str = ""

    @property
    def saved_ratio(self) -> float | None:
        """Measured saving, as a share of the reference; None where nothing was measured."""
        return None if self.change is None or self.change.change is None else -self.change.change

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of the measured saving, least first; None where there is none."""
        change = self.change
        return None if change is None or change.low is None or change.high is None else (-change.high, -change.low)

    @property
    def is_of_step_time(self) -> bool:
        """Whether the median step decides, and not the mean of all logged ones."""
        return not self.proposal.setting.change.is_uneven


@dataclass(frozen=True, eq=False)
class Limits:
    """What trials may take: seconds, pairs of recordings each, the highest risk; and which steps are recorded."""

    budget_s: float
    max_pairs: int
    risk: Risk
    steps: str
    thresholds: Thresholds = field(default_factory=Thresholds)


@dataclass(frozen=True, eq=False)
class Tuning:
    """What was tried, the configuration that is kept, what was not tried, and why the trials ended."""

    run: str
    first: Proposals
    """Proposals for the run before any trial."""
    trials: tuple[Trial, ...]
    configuration: Configuration
    left: tuple[Proposal, ...]
    end: str
    stop_signal: int | None = None

    @property
    def kept(self) -> tuple[Trial, ...]:
        """Trials whose change is kept."""
        return tuple(trial for trial in self.trials if trial.outcome is Outcome.KEPT)

    @property
    def saved_ratio(self) -> float:
        """Saving of all kept changes together as a share of the step: each is measured on top of those before."""
        remaining = 1.0
        for trial in self.kept:
            remaining *= 1 - (trial.saved_ratio or 0.0)
        return 1 - remaining


class BudgetExceededError(Exception):
    """The time for trials is over."""


class Tuner:
    """Tries proposals one after the other, and keeps those whose gain is certain."""

    def __init__(
        self,
        report: Report,
        configuration: Configuration,
        out: Path,
        limits: Limits,
        *,
        load: Callable[[str], Run],
        check: Callable[[str], Report],
        notify: Callable[[str], None],
    ) -> None:
        """Prepare trials of a command whose recording the report judges.

        `load` returns a recording with the facts of proposals measured, `check` its report; `notify` gets progress.
        """
        self._report, self._limits, self._out = report, limits, out
        self._load, self._check, self._notify = load, check, notify
        self._configuration = configuration
        self._first = self._propose(report)
        self._left = self._first.proposals
        self._trials: list[Trial] = []
        self._durations_s: list[float] = []
        self._deadline_s = time.monotonic() + limits.budget_s

    def tune(self) -> Tuning:
        """Try proposals until none is left, the budget is spent or a signal comes.

        Raises InputError where the command fails without any change.
        """
        end, number = _ALL_TRIED, None
        try:
            with recording.stop_signals():
                while (proposal := next(self._worth_trying(), None)) is not None:
                    self._try(proposal)
        except BudgetExceededError:
            end = f"the budget of {self._limits.budget_s / 60:g} minutes is spent"
        except StopSignal as stop:
            end, number = f"stopped by {Signals(stop.number).name}", stop.number
        except InputError as error:
            if not any(trial.outcome is not Outcome.STOPPED for trial in self._trials):
                raise
            end = str(error)
        tried = {trial.proposal.setting.title for trial in self._trials}
        left = tuple(proposal for proposal in self._left if proposal.setting.title not in tried)
        trials = tuple(self._trials)
        if not trials and end == _ALL_TRIED:
            end = _NONE_APPLIES
        return Tuning(self._report.run.name, self._first, trials, self._configuration, left, end, number)

    def _propose(self, report: Report) -> Proposals:
        configuration = self._configuration
        return propose(report, configuration, is_of_trainers=configuration.is_of_trainers)

    def _worth_trying(self) -> Iterator[Proposal]:
        """Proposals that are not tried yet and can be: applied by us, of allowed risk, large enough for the test."""
        tried = {trial.proposal.setting.title for trial in self._trials}
        decided = {
            trial.proposal.setting.change.name for trial in self._trials if trial.outcome not in _TRIES_OTHER_VALUES
        }
        for proposal in self._left:
            setting = proposal.setting
            is_allowed = setting.is_applied and setting.change.risk <= self._limits.risk
            is_new = setting.title not in tried and setting.change.name not in decided
            if is_allowed and is_new and proposal.saved_ratio >= MIN_CHANGE_RATIO:
                yield proposal

    def _try(self, proposal: Proposal) -> None:
        """Record both sides in turns until the test decides, and keep the change where it is better."""
        reference: list[Recording] = []
        candidate: list[Recording] = []
        trial = Trial(proposal, Outcome.STOPPED, (), ())
        try:
            for pair in range(self._limits.max_pairs):
                for is_candidate in (False, True) if pair % 2 == 0 else (True, False):
                    side = candidate if is_candidate else reference
                    side.append(
                        self._record(proposal, len(reference) + len(candidate), reference, is_candidate=is_candidate)
                    )
                trial = self._judge(Trial(proposal, Outcome.UNDECIDED, tuple(reference), tuple(candidate)))
                if trial.outcome is not Outcome.UNDECIDED:
                    break
        except (BudgetExceededError, StopSignal, InputError) as error:
            note = "" if isinstance(error, BudgetExceededError | StopSignal) else str(error)
            trial = replace(
                trial, outcome=Outcome.STOPPED, reference=tuple(reference), candidate=tuple(candidate), note=note
            )
            raise
        except _CandidateFailedError as error:
            trial = Trial(proposal, Outcome.FAILED, tuple(reference), tuple(candidate), note=str(error))
        finally:
            self._trials.append(trial)
        self._notify(f"{proposal.setting.title}: {trial.outcome.value}{f' ({trial.note})' if trial.note else ''}")
        if trial.outcome is Outcome.KEPT:
            self._configuration = self._configuration.with_setting(proposal.setting)
            self._left = self._propose(self._check(str(candidate[-1].folder))).proposals

    def _record(
        self, proposal: Proposal, count: int, reference: Sequence[Recording], *, is_candidate: bool
    ) -> Recording:
        """Record one side once. Raises BudgetExceededError, _CandidateFailedError, or InputError for the reference."""
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= max(self._durations_s, default=0.0):
            raise BudgetExceededError
        configuration = self._configuration
        limit_s = remaining_s
        if is_candidate:
            configuration = configuration.with_setting(proposal.setting)
            longest_s = max((entry.duration_s for entry in reference), default=0.0)
            limit_s = min(remaining_s, max(_LEAST_LIMIT_S, _CANDIDATE_TIMES * longest_s))
        folder = self._folder(proposal) / f"{count + 1:02d}-{'candidate' if is_candidate else 'reference'}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._notify(f"{proposal.setting.title}: recording {folder}")
        entry = recording.record(configuration, folder, steps=self._limits.steps, limit_s=limit_s)
        if entry.is_out_of_time and limit_s == remaining_s:
            raise BudgetExceededError
        if entry.problem and is_candidate:
            raise _CandidateFailedError(entry.problem)
        if entry.problem:
            raise InputError(f"the command fails without a change: {entry.problem}; try it by itself, then tune again")
        self._durations_s.append(entry.duration_s)
        return entry

    def _folder(self, proposal: Proposal) -> Path:
        name = proposal.setting.title.replace(" ", "-").replace("/", "-")
        return self._out / f"{len(self._trials) + 1:02d}-{name}"

    def _judge(self, trial: Trial) -> Trial:
        """The trial with the verdict of the test, once there are enough recordings."""
        if len(trial.candidate) < min(MIN_PAIRS, self._limits.max_pairs):
            return trial
        reference = self._load_runs(trial.reference, is_candidate=False)
        candidate = self._load_runs(trial.candidate, is_candidate=True)
        try:
            # A change may be one of the model's description, such as its recomputed layers: it is the same training.
            compared = comparison.compare(
                _samples("kept", reference),
                _samples("candidate", candidate),
                allow_different=True,
                thresholds=self._limits.thresholds,
            )
        except TracekitError as error:
            raise _CandidateFailedError(str(error)) from error
        change = compared.step
        if not trial.is_of_step_time:
            change = training_time.change(reference, candidate, self._limits.thresholds)
        if change is None:
            raise _CandidateFailedError("the recordings have no steps; record others by --steps")
        outcome = _OF_VERDICT[change.verdict]
        note = _difference(reference, candidate)
        if outcome is Outcome.KEPT and note and trial.proposal.setting.change.risk <= Risk.MEMORY:
            outcome = Outcome.OTHER_NUMBERS
        return replace(trial, outcome=outcome, change=change, note=note)

    def _load_runs(self, recordings: Iterable[Recording], *, is_candidate: bool) -> list[Run]:
        """The runs of recordings. Raises _CandidateFailedError or InputError, by the side, where one is no run."""
        try:
            return [self._load(str(entry.folder)) for entry in recordings]
        except TracekitError as error:
            if is_candidate:
                raise _CandidateFailedError(str(error)) from error
            raise InputError(f"the command was not recorded: {error}; take other --steps") from error


class _CandidateFailedError(Exception):
    """The command fails with the change, or its recording cannot be compared."""


def _samples(name: str, runs: Sequence[Run]) -> RunSamples:
    """Recordings of one side of a trial."""
    first, *others = (RunSamples.of(run, name) for run in runs)
    return replace(first, repeats=tuple(side.samples for side in others))


def _difference(reference: Sequence[Run], candidate: Sequence[Run]) -> str:
    """Where loss or gradient norm differ by the change; "" where they agree, or differ without it, too."""
    first_run, last_run, changed_run = map(numbers.run_numbers, (reference[0], reference[-1], candidate[0]))
    repeated = numbers.agreement(first_run, last_run)
    changed = numbers.agreement(first_run, changed_run)
    if repeated is None or repeated.first is not None or changed is None or changed.first is None:
        return ""
    first = changed.first
    return f"{first.metric} differs from step {first.step} on, by {first.ratio:.1g} of its value"
