"""Tuning as a document: what a run's findings propose, and what trials measured and kept."""

from collections.abc import Mapping, Sequence

from tracekit import conventions
from tracekit.model import units
from tracekit.replay.graph import savings
from tracekit.report.document import Cells, Document, Emphasis, Line, Section, faint, heading, items, line
from tracekit.tune import training_time
from tracekit.tune.configuration import Setting, Way
from tracekit.tune.proposals import Proposal, Proposals
from tracekit.tune.trials import Outcome, Trial, Tuning

SCHEMA = "tracekit.tune/1"
_PROPOSAL_HEADER = ("change", "answers", "mean step", "saves", "confidence", "risk", "how")
_TRIAL_HEADER = ("change", "answers", "predicted", "measured", "99% interval", "recordings", "result")
_EMPHASES = {
    Outcome.KEPT: Emphasis.BETTER,
    Outcome.WORSE: Emphasis.WORSE,
    Outcome.OTHER_NUMBERS: Emphasis.WARNING,
    Outcome.FAILED: Emphasis.WARNING,
}
_UNREPRODUCED = (
    f"The replay does not reproduce this run within {savings.MAX_ERROR_RATIO:.0%}: predictions are hints, "
    "and only trials decide."
)


def proposal_document(proposals: Proposals, *, run: str, command: str, patches: Mapping[str, str]) -> Document:
    """What would be tried: a row per change and value, what has no change, and how to try them.

    `command` is the recorded command line, "" where it is unknown; `patches` are files by `Setting.title`.
    """
    count = units.count(len({row.setting.change.name for row in proposals.proposals}), "change")
    first = [line((f"{run}: mean step {units.duration(proposals.step_ns)}; {count} to try", Emphasis.STRONG))]
    if not proposals.is_reproduced:
        first.append(line((_UNREPRODUCED, Emphasis.WARNING)))
    rows: Section = [proposal_cells(proposals.proposals, patches), *_explanations(proposals.proposals)]
    sections = (first, rows if proposals.proposals else [], _open_savings(proposals))
    notes = [f"Recorded command: {command}"] if command else []
    if proposals.proposals:
        notes.append("Try them: tracekit tune RUN --run -- COMMAND. Nothing was run.")
    return Document(tuple(filter(None, sections)), tuple(notes), _proposal_values(proposals, run, command))


def document(tuning: Tuning, patches: Mapping[str, str]) -> Document:
    """What was tried, predicted, measured and kept, the command line that is kept, and what was not tried."""
    values = {
        "schema": SCHEMA,
        "run": tuning.run,
        "saved_ratio": tuning.saved_ratio,
        "command": list(tuning.configuration.command),
        "kept_command": list(tuning.configuration.words),
        "kept_variables": tuning.configuration.variables,
        "end": tuning.end,
        "trials": [_trial_values(trial) for trial in tuning.trials],
        "proposals": [_as_object(row) for row in tuning.first.proposals],
        "left": [_as_object(row) for row in tuning.left],
    }
    trials: Section = (
        [heading("Trials"), trial_cells(tuning.trials), *_trial_notes(tuning.trials)] if tuning.trials else []
    )
    final: Section = [heading("Command line"), Line((tuning.configuration.line,), indent=2)] if tuning.kept else []
    left: Section = [heading("Not tried"), proposal_cells(tuning.left, patches)] if tuning.left else []
    sections = ([line((headline(tuning), Emphasis.STRONG))], trials, final, left, _open_savings(tuning.first))
    return Document(tuple(filter(None, sections)), (f"Trials ended: {tuning.end}.",), values)


def headline(tuning: Tuning) -> str:
    """How many changes are kept, and what they save together."""
    tried = [trial for trial in tuning.trials if trial.outcome is not Outcome.STOPPED]
    text = f"{tuning.run}: {len(tuning.kept)} of {units.count(len(tried), 'change')} kept"
    return f"{text}, the step is {units.share(tuning.saved_ratio)} shorter" if tuning.saved_ratio > 0 else text


def proposal_cells(proposals: Sequence[Proposal], patches: Mapping[str, str]) -> Cells:
    """A row per proposal: change, the rule that it answers, the predicted step, saving, confidence, risk, how."""
    rows = tuple(
        (
            row.setting.title,
            row.code or "replay",
            units.duration(row.predicted_ns),
            f"{'≤ ' if row.is_upper_bound else ''}{units.share(row.saved_ratio)}",
            f"{row.confidence:.0%}",
            row.setting.change.risk.label,
            _how(row.setting, patches),
        )
        for row in proposals
    )
    return Cells(_PROPOSAL_HEADER, rows, numbers=(2, 3, 4), drop_order=(4, 5), cuts_first=False)


def trial_cells(trials: Sequence[Trial]) -> Cells:
    """A row per trial: the change, what was predicted and measured, the interval, and the result."""
    rows = tuple(
        (
            trial.proposal.setting.title,
            trial.proposal.code or "replay",
            f"{'≤ ' if trial.proposal.is_upper_bound else ''}{units.share(trial.proposal.saved_ratio)}",
            "—" if trial.saved_ratio is None else _signed_share(trial.saved_ratio),
            "—" if trial.interval is None else " to ".join(map(_signed_share, trial.interval)),
            str(len(trial.reference) + len(trial.candidate)),
            trial.outcome.value,
        )
        for trial in trials
    )
    emphases = tuple(_EMPHASES.get(trial.outcome) for trial in trials)
    return Cells(_TRIAL_HEADER, rows, numbers=(2, 3, 4, 5), emphases=emphases, drop_order=(5,), cuts_first=False)


def _explanations(proposals: Sequence[Proposal]) -> tuple[Line, ...]:
    """What each change does, once, and what else it may change."""
    by_change = {row.setting.change.name: row.setting.change for row in proposals}
    return items([f"{change.name}: {change.summary}; {change.risk.sentence}" for change in by_change.values()])


def _trial_notes(trials: Sequence[Trial]) -> tuple[Line, ...]:
    """Notes of trials; of those that the step time does not decide, what does."""
    texts = []
    for trial in trials:
        title = trial.proposal.setting.title
        if not trial.is_of_step_time:
            texts.append(f"{title}: measured by {training_time.METRIC.label}, saves included")
        if trial.note:
            texts.append(f"{title}: {trial.note}")
    return items(texts)


def _how(setting: Setting, patches: Mapping[str, str]) -> str:
    if setting.way is Way.PATCH:
        return f"patch {patches[setting.title]}" if setting.title in patches else setting.text
    if setting.way is Way.HAND:
        return f"tune.arguments.{setting.change.key}"
    return setting.text


def _open_savings(proposals: Proposals) -> Section:
    """Changes that do not fit into memory, and savings that no change answers."""
    texts = [
        f"{row.setting.title} needs {units.size(row.added_bytes or 0)} more on a device than is free"
        for row in proposals.too_large
    ]
    texts += [
        f"{answer.name} ({answer.code}, {units.share(answer.saved_ratio)}): tracekit check says what to do"
        for answer in proposals.unanswered
    ]
    return [faint("Without a change:"), *items(texts)] if texts else []


def _signed_share(ratio: float) -> str:
    return f"{'−' if ratio < 0 else ''}{units.share(abs(ratio))}"


def _proposal_values(proposals: Proposals, run: str, command: str) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "run": run,
        "step_ns": proposals.step_ns,
        "is_reproduced": proposals.is_reproduced,
        "recorded_command": command,
        "proposals": [_as_object(row) for row in proposals.proposals],
        "too_large": [_as_object(row) for row in proposals.too_large],
        "unanswered": [
            {"cause": answer.name, "code": answer.code, "saved_ratio": answer.saved_ratio}
            for answer in proposals.unanswered
        ],
    }


def _as_object(row: Proposal) -> dict[str, object]:
    setting = row.setting
    return {
        "change": setting.change.name,
        "value": setting.value,
        "way": setting.way.value,
        "text": setting.text,
        "code": row.code,
        "claim": row.claim,
        "step_ns": row.step_ns,
        "predicted_ns": row.predicted_ns,
        "saved_ratio": row.saved_ratio,
        "is_upper_bound": row.is_upper_bound,
        "confidence": row.confidence,
        "risk": setting.change.risk.label,
        "added_bytes": row.added_bytes,
    }


def _trial_values(trial: Trial) -> dict[str, object]:
    change = trial.change
    return {
        **_as_object(trial.proposal),
        "outcome": trial.outcome.value,
        "metric": conventions.STEP_TIME_METRIC if trial.is_of_step_time else training_time.METRIC.key,
        "reference": None if change is None else change.reference,
        "candidate": None if change is None else change.candidate,
        "measured_ratio": trial.saved_ratio,
        "interval": None if trial.interval is None else list(trial.interval),
        "reference_runs": [str(entry.folder) for entry in trial.reference],
        "candidate_runs": [str(entry.folder) for entry in trial.candidate],
        "note": trial.note,
    }
