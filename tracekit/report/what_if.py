"""What-if results as a document or a table: the potential saving per step of each cause."""

from collections.abc import Iterator, Sequence

import polars as pl

from tracekit.model import units
from tracekit.replay.graph import savings, what_if
from tracekit.replay.graph.critical_path.path import CriticalPath
from tracekit.replay.graph.strategies import Prediction
from tracekit.replay.graph.what_if import Answer, WhatIf
from tracekit.report.document import Cells, Document, Emphasis, Line, Section, Table, faint, heading, line

COLUMNS = {
    "cause": pl.String, "code": pl.String, "saved_ns": pl.Int64, "saved_ratio": pl.Float64, "without_ns": pl.Int64,
    "gpu_hours_per_day": pl.Float64, "money_per_day": pl.Float64, "confidence": pl.Float64, "summary": pl.String,
    "basis": pl.String, "caveat": pl.String,
}  # fmt: skip

_HEADINGS = {"step_ratio": "share", "count": "parts", "slack_ns": "least\nslack", "state": "host\nstate"}
_OWNERS_DROPPED = ("state", "count", "unit", "dur_ns")
_SLACK_DROPPED = ("count", "unit", "module")


def document(
    answers: WhatIf,
    predictions: Sequence[Prediction],
    together: Answer | None = None,
    *,
    run: str,
    price: float | None = None,
    explains: bool = False,
) -> Document:
    """The run and its replay, a row per cause with its saving, the causes without an answer, and predictions.

    `together` is the answer for several causes at once. `explains`: say of each cause without an answer why.
    """
    values = {
        "run": run,
        "step_ns": answers.step_ns,
        "replayed_ns": answers.replayed_ns,
        "replay_error_ratio": answers.replay_error_ratio,
        "gpus": answers.gpus,
        "without": [_as_object(answer) for answer in answers.answers],
        "unknown": [{"cause": a.name, "reason": a.unavailable_reason} for a in answers.unavailable],
        "together": None if together is None else _of_several(together),
        "predictions": [_as_prediction(prediction, answers.gpus, price) for prediction in predictions],
    }
    first = [
        line(
            (f"{run}: mean step {units.duration(answers.step_ns)}", Emphasis.STRONG),
            f"; replayed without changes {units.duration(answers.replayed_ns)} ({answers.replay_error_ratio:+.1%})",
        )
    ]
    if text := caveat(answers):
        first.append(line((text, Emphasis.WARNING)))
    asked = [*answers.answers, *answers.unavailable, *([together] if together is not None else [])]
    answered = [answer for answer in asked if not answer.unavailable_reason]
    by_cause: Section = [savings_cells(answered), *_doubts(answered, answers.step_ns)] if answered else []
    if not answered and not predictions:
        by_cause = [line("Removing a cause does not make the step shorter.")]
    sections = (
        first,
        by_cause,
        _unavailable([answer for answer in asked if answer.unavailable_reason], explains=explains),
        [part for prediction in predictions for part in _of_prediction(prediction, answers.gpus, price)],
    )
    notes = ["Savings overlap: their total is less than their sum."] if len(answers.answers) > 1 else []
    if price is not None and answers.gpus:
        notes.append(f"Savings per day of training on {answers.gpus} GPUs, at {price:g} an hour each.")
    elif price is not None:
        notes.append("No device activity was recorded, so there is no cost in GPU-hours or money.")
    return Document(tuple(filter(None, sections)), notes=tuple(notes), values=values)


def as_table(answers: WhatIf) -> pl.DataFrame:
    """Return the answers as a table with the columns COLUMNS; one row per cause, what saves most first."""
    return pl.DataFrame([_as_object(answer) for answer in answers.answers], schema=COLUMNS)


def savings_cells(answers: Sequence[Answer]) -> Cells:
    """A row per answer: what is removed and what that means, the mean step without it, the saving, its confidence."""
    rows = [
        (
            answer.name,
            answer.summary,
            units.duration(answer.without_ns),
            units.duration(answer.saved_ns),
            units.share(max(0.0, answer.saved_ratio)),
            f"{answer.confidence:.0%}",
            *worth(answer).values(),
        )
        for answer in answers
    ]
    per_day = worth(answers[0]) if answers else {}
    header = ("without", "meaning", "mean step", "saved", "of the step", "confidence", *per_day)
    return Cells(header, tuple(rows), numbers=tuple(range(2, len(header))), early_drop=(1, 5), cuts_first=False)


def worth(answer: Answer) -> dict[str, str]:
    """GPU-hours and money that a saving is worth per day of training, by label; {} on CPUs."""
    values = {"GPU-hours per day": answer.gpu_hours_per_day, "worth per day": answer.per_day}
    return {label: f"{value:,.{row + 1}f}" for row, (label, value) in enumerate(values.items()) if value is not None}


def caveat(answers: WhatIf) -> str:
    """Limits of all answers: ranks that are not replayed, a replay that does not reproduce the run; or ''."""
    replayed = answers.replay["rank"].n_unique()
    sentences = []
    if replayed < answers.ranks:
        sentences.append(f"Replays {replayed} of {answers.ranks:,} ranks, which represent the others.")
    if not answers.is_reproduced:
        sentences.append(
            f"The replay does not reproduce this run: without changes it is {abs(answers.replay_error_ratio):.1%} off, "
            f"more than {savings.MAX_ERROR_RATIO:.0%}. Read the answers as hints; findings do not use them as costs."
        )
    return " ".join(sentences)


def path_document(path: CriticalPath, *, run: str, top: int) -> Document:
    """Owners by rank and kind, the first `top` owners, and the work next to the path: see docs/critical_path.md."""
    values = {
        "run": run,
        "window": path.window,
        "step": path.step,
        "rank": path.rank,
        "start_ns": path.start_ns,
        "step_ns": path.step_ns,
        "parts": path.parts.to_dicts(),
        "compact": path.compact.to_dicts(),
        "owners": path.shares.to_dicts(),
        "by_kind": path.shares_by("kind").to_dicts(),
        "by_rank": path.shares_by("rank").to_dicts(),
        "by_module": path.shares_by("module").to_dicts() if path.has_modules else [],
        "slack": path.slack.to_dicts(),
        "doubts": list(path.doubts),
    }
    return Document(([line(path_summary(path, run))], *_sections(path, top)), notes=path.doubts, values=values)


def path_summary(path: CriticalPath, run: str) -> str:
    """Return one sentence: which step of which rank, how long, and what owns most of it."""
    what = "the window" if path.step is None else f"step {path.step}"
    main = path.shares_by("rank", "kind").row(0, named=True)
    return (
        f"{run}: {what} takes {units.duration(path.step_ns)} on rank {path.rank}; "
        f"{units.share(main['step_ratio'])} of its critical path is {main['kind']} on rank {main['rank']}."
    )


def _doubts(answers: Sequence[Answer], run_step_ns: float) -> Iterator[Line]:
    """What makes an answer less certain, and where its step begins before the first device work of the recording."""
    for answer in answers:
        before_ns = answer.step_ns - run_step_ns
        if before_ns >= savings.MIN_BEFORE_RATIO * run_step_ns:
            of_step = f"of {units.duration(answer.step_ns)} are before the first device work of the recording"
            yield line(f"{answer.name}: {units.duration(before_ns)} {of_step}", mark="·")
        if answer.caveat:
            yield line(f"{answer.name} is less certain: {answer.caveat}", mark="·")


def _unavailable(answers: Sequence[Answer], *, explains: bool) -> Section:
    if explains:
        return [line(f"{answer.name}: no estimate: {answer.unavailable_reason}") for answer in answers]
    names = ", ".join(answer.name for answer in answers)
    return [faint(f"No estimate: {names}; --without CAUSE says why.")] if answers else []


def _of_prediction(prediction: Prediction, gpus: int, price: float | None) -> Iterator[Line]:
    change = f"mean step {units.duration(prediction.predicted_ns)} ({-prediction.saved_ratio:+.1%})"
    per_day = _per_day(what_if.hours_per_day(prediction.saved_ratio, gpus), price)
    if prediction.throughput_ratio is None:
        yield line((f"Prediction for {prediction.name}: ", Emphasis.STRONG), change + per_day)
    else:  # another job: no time of this one is saved
        yield line((f"Prediction for {prediction.name}: ", Emphasis.STRONG), _of_size(prediction))
    yield from (line(f"assumes: {assumption}", mark="·") for assumption in prediction.assumptions)


def _of_size(prediction: Prediction) -> str:
    """Step, range and throughput of a job on other GPUs."""
    assert prediction.throughput_ratio is not None
    low, high = (units.duration(ns) for ns in prediction.range_ns or (prediction.predicted_ns,) * 2)
    return (
        f"mean step {units.duration(prediction.predicted_ns)} ({low} to {high}), {prediction.throughput_ratio:.2f} "
        f"times the throughput: each rank does {units.share(prediction.gpu_ratio)} of its recorded work"
    )


def _per_day(hours: float | None, price: float | None) -> str:
    if hours is None:
        return ""
    return f", {hours:,.1f} GPU-hours a day" + ("" if price is None else f", {hours * price:,.2f} a day")


def _as_prediction(prediction: Prediction, gpus: int, price: float | None) -> dict[str, object]:
    hours = what_if.hours_per_day(prediction.saved_ratio, gpus)
    return {
        "name": prediction.name,
        "predicted_ns": prediction.predicted_ns,
        "saved_ratio": prediction.saved_ratio,
        "range_ns": None if prediction.range_ns is None else list(prediction.range_ns),
        "throughput_ratio": prediction.throughput_ratio,
        "gpu_hours_per_day": hours,
        "money_per_day": None if hours is None or price is None else hours * price,
        "assumptions": list(prediction.assumptions),
    }


def _as_object(answer: Answer) -> dict[str, object]:
    return {
        "cause": answer.name,
        "code": answer.code,
        "saved_ns": answer.saved_ns,
        "saved_ratio": answer.saved_ratio,
        "without_ns": answer.without_ns,
        "gpu_hours_per_day": answer.gpu_hours_per_day,
        "money_per_day": answer.per_day,
        "confidence": answer.confidence,
        "summary": answer.summary,
        "basis": answer.basis,
        "caveat": answer.caveat,
    }


def _of_several(answer: Answer) -> dict[str, object]:
    names = [cause.name for cause in answer.causes]
    if answer.unavailable_reason:
        return {"causes": names, "reason": answer.unavailable_reason}
    fields = _as_object(answer)
    return {"causes": names} | {key: value for key, value in fields.items() if key not in ("cause", "code")}


def _sections(path: CriticalPath, top: int) -> Iterator[Section]:
    order = ("step_ratio", "dur_ns", "rank", "kind")
    yield [heading("By rank and kind"), Table(path.shares_by("rank", "kind").select(order), _HEADINGS)]
    if path.has_modules:
        by_module = path.shares_by("module", "kind").head(top).select(*order[:2], "module", "kind")
        yield [heading("By module"), Table(by_module, _HEADINGS)]
    owners = path.shares.head(top).select("step_ratio", "dur_ns", "rank", "kind", "name", "unit", "state", "count")
    yield [heading("Owners of the path"), Table(owners, _HEADINGS, _OWNERS_DROPPED), *_other_owners(path, top)]
    if path.slack.height:
        modules = ["module"] if path.slack["module"].count() else []
        near = path.slack.head(top).select("slack_ns", "dur_ns", "rank", "kind", "name", *modules, "unit", "count")
        yield [heading("Not on the path, least slack first"), Table(near, _HEADINGS, _SLACK_DROPPED)]


def _other_owners(path: CriticalPath, top: int) -> list[Line]:
    rest = path.shares.slice(top)
    if rest.is_empty():
        return []
    share = units.share(float(rest["step_ratio"].sum()))
    return [faint(f"and {rest.height:,} more owners, {share} together: --top {path.shares.height}")]
