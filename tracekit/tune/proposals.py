"""Proposals: changes that answer findings of a run, each with the step that the replay predicts."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tracekit.errors import InputError
from tracekit.model.trace import TraceFact
from tracekit.regression import comparison
from tracekit.replay.graph import dependency_graph
from tracekit.replay.graph.strategies import Prediction
from tracekit.replay.graph.what_if import Answer, WhatIf
from tracekit.rules import stated_savings
from tracekit.rules.rule import Report
from tracekit.tune import changes, training_time
from tracekit.tune.changes import change as change_module
from tracekit.tune.changes.change import Change, TunedRun
from tracekit.tune.configuration import Configuration, Setting

FACTS: tuple[TraceFact, ...] = (
    *dependency_graph.FACTS, *change_module.FACTS, *comparison.FACTS, training_time.logged_step_times,
)  # fmt: skip
"""Facts that proposals and trials need of runs, to be measured in one pass with those of the rules."""
MIN_SAVED_RATIO = 0.01
"""Smaller savings are no proposal: nobody would change a training for them."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """A change with its value, the finding that it answers, and the predicted step, in ns per step.

    `is_upper_bound` is whether it may save less: the replay removes an ideal, or more than the change does.
    """

    setting: Setting
    step_ns: int
    predicted_ns: int
    confidence: float
    is_upper_bound: bool
    code: str = ""
    """Code of the rule whose finding it answers; "" where the replay played the change itself."""
    claim: str = ""
    """What the finding or the replay says."""
    added_bytes: int | None = 0
    """Additional memory of each device; None where it is unknown."""
    is_of_part: bool = False
    """Whether the change removes a part of what the replay removes, of which nobody knows how large it is."""

    @property
    def saved_ratio(self) -> float:
        """Predicted saving as a share of the step."""
        return 1 - self.predicted_ns / self.step_ns if self.step_ns else 0.0

    @property
    def order(self) -> tuple[float, bool, int]:
        """Key that sorts proposals: the expected saving (half of a part's bound), exact ones first, less risk."""
        expected_ratio = self.saved_ratio / 2 if self.is_of_part else self.saved_ratio
        return -round(expected_ratio, 3), self.is_upper_bound, self.setting.change.risk


@dataclass(frozen=True, eq=False)
class Proposals:
    """Proposals for a run, the one to try first before others, and what they leave open."""

    step_ns: int
    """Mean step of the run."""
    is_reproduced: bool
    """Whether the replay reproduces the run, so that predictions are more than hints."""
    proposals: tuple[Proposal, ...]
    too_large: tuple[Proposal, ...]
    """Those that need more memory than the devices have free."""
    unanswered: tuple[Answer, ...]
    """Savings for which the registry has no change."""


def propose(report: Report, configuration: Configuration, *, is_of_trainers: bool) -> Proposals:
    """Return the changes that answer findings of a run, the largest predicted saving first, then the least risk.

    Raises InputError where no step of the run can be replayed.
    """
    run = TunedRun.of(report.run, is_of_trainers=is_of_trainers)
    savings = stated_savings.answer(report)
    free_bytes, catalog = run.free_bytes, changes.all_changes()
    rows = [row for change in catalog for row in _of_change(change, run, savings, configuration)]
    rows.sort(key=lambda row: row.order)
    fits = [free_bytes is None or (row.added_bytes or 0) <= free_bytes for row in rows]
    known_causes = {cause for row in rows for cause in row.setting.change.causes}
    known_codes = {code for row in rows for code in row.setting.change.codes}
    return Proposals(
        savings.step_ns,
        savings.is_reproduced,
        tuple(row for row, has_room in zip(rows, fits, strict=True) if has_room),
        tuple(row for row, has_room in zip(rows, fits, strict=True) if not has_room),
        tuple(
            answer
            for answer in savings.answers
            if answer.saved_ratio >= MIN_SAVED_RATIO
            and answer.code not in known_codes
            and not known_causes.intersection(answer.causes)
        ),
    )


def _of_change(change: Change, run: TunedRun, savings: WhatIf, configuration: Configuration) -> Iterator[Proposal]:
    """Proposals of a change, one per value whose predicted saving is worth it."""
    answer = _answer(change, savings.answers)
    for value in change.values(run):
        setting = configuration.setting(change, value, is_of_trainers=run.is_of_trainers)
        predicted = _prediction(change, run, value)
        if predicted is not None:
            row = Proposal(
                setting,
                predicted.step_ns,
                predicted.predicted_ns,
                answer.confidence if answer else _PREDICTED_CONFIDENCE,
                is_upper_bound=False,
                code=answer.code if answer else "",
                claim=predicted.name,
                added_bytes=change.added_bytes(run, value),
            )
        elif answer is not None:
            row = _of_answer(setting, answer, change.added_bytes(run, value))
        else:
            continue
        if row.saved_ratio >= MIN_SAVED_RATIO:
            yield row


_PREDICTED_CONFIDENCE = 0.8
"""Of a change that is replayed whole: as of causes, less what the assumptions leave open."""


def _of_answer(setting: Setting, answer: Answer, added_bytes: int | None) -> Proposal:
    change = setting.change
    is_other = bool(change.causes and answer.causes and answer.causes[0] is not change.causes[0])
    is_of_part = (change.is_partial or is_other) and not change.saves_beyond_causes
    is_exact = bool(answer.causes) and all(cause.is_attainable for cause in answer.causes)
    # Of findings on saves the saving is a share of training time, in which a step is longer by its part of the saves.
    ratio = min(1.0, answer.saved_ratio)
    step_ns = round(answer.saved_ns / ratio) if ratio > 0 else answer.step_ns
    divided_ns = answer.saved_ns // int(setting.value) if change.is_divided else 0
    return Proposal(
        setting,
        step_ns,
        max(divided_ns, step_ns - answer.saved_ns),
        answer.confidence,
        is_upper_bound=(is_of_part or not is_exact) and not change.saves_beyond_causes,
        code=answer.code,
        claim=answer.finding.claim if answer.finding else answer.summary,
        added_bytes=added_bytes,
        is_of_part=is_of_part,
    )


def _answer(change: Change, answers: Sequence[Answer]) -> Answer | None:
    """Saving of a change: of its first cause with an answer, else of a finding of its rules.

    A change that removes parts of several causes has the saving of the largest.
    """
    of_cause = {answer.causes[0]: answer for answer in answers if answer.causes}
    of_change = [of_cause[cause] for cause in change.causes if cause in of_cause]
    if of_change:
        return max(of_change, key=lambda answer: answer.saved_ns) if change.is_partial else of_change[0]
    return next((answer for answer in answers if answer.code in change.codes), None)


def _prediction(change: Change, run: TunedRun, value: str) -> Prediction | None:
    """Prediction of a change that a replay plays whole; None where it has none, or the run has nothing to change."""
    with suppress(InputError):
        return change.predict(run, value)
    return None
