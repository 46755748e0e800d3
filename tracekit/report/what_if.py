"""What-if results as a document or a table: the potential saving per step of each cause."""

from collections.abc import Iterator, Sequence

import polars as pl

from tracekit.model import escaping, units
from tracekit.replay.graph import savings, what_if
from tracekit.replay.graph.critical_path.path import CriticalPath
from tracekit.replay.graph.strategies import Prediction
from tracekit.replay.graph.what_if import Answer, WhatIf
from tracekit.report.document import Document, Line, Section, Table, faint, heading, line

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
) -> Document:
    """The run and its replay, then each cause with its saving, the causes without an answer, and predictions.

    `together` is the answer for several causes at once.
    """
    texts = _lines(answers, predictions, together, run=run, price=price)
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
    return Document(
        (tuple(line(text.lstrip(), indent=len(text) - len(text.lstrip())) for text in texts),), values=values
    )


def as_table(answers: WhatIf) -> pl.DataFrame:
    """Return the answers as a table with the columns COLUMNS; one row per cause, what saves most first."""
    return pl.DataFrame([_as_object(answer) for answer in answers.answers], schema=COLUMNS)


def as_html(answers: WhatIf) -> str:
    """Return the answers as an HTML table; '' where no cause has one."""
    if not answers.answers:
        return ""
    header = ["without", "meaning", "mean step", "saved", "of the step", "confidence", *worth(answers.answers[0])]
    rows = []
    for answer in answers.answers:
        numbers = (units.duration(answer.without_ns), units.duration(answer.saved_ns), units.share(answer.saved_ratio))
        cause = (answer.name, answer.summary)
        rows.append([*cause, *numbers, f"{answer.confidence:.0%}", *worth(answer).values()])
    return escaping.html_table(header, rows, right=[column > 1 for column in range(len(header))])


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


def _lines(
    answers: WhatIf, predictions: Sequence[Prediction], together: Answer | None, *, run: str, price: float | None
) -> Iterator[str]:
    yield (
        f"{run}: mean step {units.duration(answers.step_ns)}; replayed without changes "
        f"{units.duration(answers.replayed_ns)} ({answers.replay_error_ratio:+.1%})"
    )
    if text := caveat(answers):
        yield text
    if not answers.answers and not predictions:
        yield "removing a cause does not make the step shorter"
    for answer in answers.answers:
        yield from _of_answer(answer, answers, price)
    if len(answers.answers) > 1:
        yield "Savings overlap: their total is less than their sum."
    if together is not None:
        yield from _of_answer(together, answers, price)
    yield from (f"{answer.name}: no estimate: {answer.unavailable_reason}" for answer in answers.unavailable)
    for prediction in predictions:
        hours = what_if.hours_per_day(prediction.saved_ratio, answers.gpus)
        yield (
            f"prediction for {prediction.name}: mean step {units.duration(prediction.predicted_ns)} "
            f"({-prediction.saved_ratio:+.1%}){_per_day(hours, price)}"
        )
        yield from (f"  assumes: {assumption}" for assumption in prediction.assumptions)
    if price is not None and answers.gpus:
        yield f"Savings per day of training on {answers.gpus} GPUs, at {price:g} an hour each."
    elif price is not None:
        yield "No device activity was recorded, so there is no cost in GPU-hours or money."


def _of_answer(answer: Answer, answers: WhatIf, price: float | None) -> Iterator[str]:
    if answer.unavailable_reason:
        yield f"{answer.name}: no estimate: {answer.unavailable_reason}"
        return
    before_ns = answer.step_ns - answers.step_ns
    starts_late = before_ns >= savings.MIN_BEFORE_RATIO * answers.step_ns
    of_step = f" of {units.duration(answer.step_ns)}" if starts_late else ""
    yield (
        f"without {answer.name:<22} mean step {units.duration(answer.without_ns)} "
        f"(−{max(0.0, answer.saved_ratio):.1%}{of_step}){_per_day(answer.gpu_hours_per_day, price)}"
    )
    if starts_late:
        yield f"  {units.duration(before_ns)}{of_step} are before the first device work of the recording"
    if answer.caveat:
        yield f"  less certain: {answer.caveat}"


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
