"""What-if results -> text or JSON: the potential saving per step of each cause."""

import json
from collections.abc import Iterator, Sequence

import polars as pl

from tracekit.model import units
from tracekit.replay.graph import savings, what_if
from tracekit.replay.graph.strategies import Prediction
from tracekit.replay.graph.what_if import Answer, WhatIf

COLUMNS = {
    "cause": pl.String, "code": pl.String, "saved_ns": pl.Int64, "saved_ratio": pl.Float64, "without_ns": pl.Int64,
    "gpu_hours_per_day": pl.Float64, "money_per_day": pl.Float64, "confidence": pl.Float64, "summary": pl.String,
    "basis": pl.String, "caveat": pl.String,
}  # fmt: skip


def as_text(
    found: WhatIf,
    predictions: Sequence[Prediction],
    together: Answer | None = None,
    *,
    run: str,
    price: float | None = None,
) -> str:
    """Return the answers as lines: the run and its replay, a line per cause, then the causes without an answer.

    `together` is the answer for several causes at once.
    """
    lines = [
        f"{run}: mean step {units.duration(found.step_ns)}; replayed without changes "
        f"{units.duration(found.replayed_ns)} ({found.replay_error_ratio:+.1%})"
    ]
    lines += [text for text in (caveat(found),) if text]
    if not found.answers and not predictions:
        lines.append("removing a cause does not make the step shorter")
    for each in found.answers:
        lines += _of_answer(each, found, price)
    if len(found.answers) > 1:
        lines.append("Savings overlap: their total is less than their sum.")
    if together is not None:
        lines += _of_answer(together, found, price)
    lines += [f"{each.cause.name}: no estimate: {each.unavailable_reason}" for each in found.unavailable]
    for prediction in predictions:
        lines += _of_prediction(prediction, found.gpus, price)
    if price is not None and found.gpus:
        lines.append(f"Savings per day of training on {found.gpus} GPUs, at {price:g} an hour each.")
    elif price is not None:
        lines.append("No device activity was recorded, so there is no cost in GPU-hours or money.")
    return "\n".join(lines) + "\n"


def as_json(
    found: WhatIf,
    predictions: Sequence[Prediction],
    together: Answer | None = None,
    *,
    run: str,
    price: float | None = None,
) -> str:
    """Return the answers as one JSON object."""
    document = {
        "run": run,
        "step_ns": found.step_ns,
        "replayed_ns": found.replayed_ns,
        "replay_error_ratio": found.replay_error_ratio,
        "gpus": found.gpus,
        "without": [_as_object(each) for each in found.answers],
        "unknown": [{"cause": each.cause.name, "reason": each.unavailable_reason} for each in found.unavailable],
        "together": None if together is None else _of_several(together),
        "predictions": [_as_prediction(each, found.gpus, price) for each in predictions],
    }
    return json.dumps(document, indent=2) + "\n"


def as_table(found: WhatIf) -> pl.DataFrame:
    """Return the answers as a table with the columns COLUMNS; one row per cause, what saves most first."""
    return pl.DataFrame([_as_object(each) for each in found.answers], schema=COLUMNS)


def caveat(found: WhatIf) -> str:
    """Return what limits all answers: ranks that are not replayed, a replay that does not reproduce the run; or ''."""
    replayed = found.replay["rank"].n_unique()
    sentences = []
    if replayed < found.ranks:
        sentences.append(f"Replays {replayed} of {found.ranks:,} ranks, which represent the others.")
    if not found.is_reproduced:
        sentences.append(
            f"The replay does not reproduce this run: without changes it is {abs(found.replay_error_ratio):.1%} off, "
            f"more than {savings.MAX_ERROR_RATIO:.0%}. Read the answers as hints; findings do not use them as costs."
        )
    return " ".join(sentences)


def _of_answer(each: Answer, found: WhatIf, price: float | None) -> Iterator[str]:
    if each.unavailable_reason:
        yield f"{each.cause.name}: no estimate: {each.unavailable_reason}"
        return
    before_ns = each.step_ns - found.step_ns
    of = f" of {units.duration(each.step_ns)}" if before_ns >= savings.MIN_BEFORE_RATIO * found.step_ns else ""
    yield (
        f"without {each.cause.name:<22} mean step {units.duration(each.without_ns)} "
        f"(−{max(0.0, each.saved_ratio):.1%}{of}){_per_day(each.gpu_hours_per_day, price)}"
    )
    if of:
        yield f"  {units.duration(before_ns)}{of} are before the first device work of the recording"
    if each.caveat:
        yield f"  less certain: {each.caveat}"


def _of_prediction(prediction: Prediction, gpus: int, price: float | None) -> Iterator[str]:
    hours = what_if.hours_per_day(prediction.saved_ratio, gpus)
    yield (
        f"prediction for {prediction.name}: mean step {units.duration(prediction.predicted_ns)} "
        f"({-prediction.saved_ratio:+.1%}){_per_day(hours, price)}"
    )
    yield from (f"  assumes: {each}" for each in prediction.assumptions)


def _per_day(hours: float | None, price: float | None) -> str:
    if hours is None:
        return ""
    return f", {hours:,.1f} GPU-hours a day" + ("" if price is None else f", {hours * price:,.2f} a day")


def _as_prediction(each: Prediction, gpus: int, price: float | None) -> dict[str, object]:
    hours = what_if.hours_per_day(each.saved_ratio, gpus)
    return {
        "name": each.name,
        "predicted_ns": each.predicted_ns,
        "saved_ratio": each.saved_ratio,
        "gpu_hours_per_day": hours,
        "money_per_day": None if hours is None or price is None else hours * price,
        "assumptions": list(each.assumptions),
    }


def _as_object(each: Answer) -> dict[str, object]:
    return {
        "cause": each.cause.name,
        "code": each.cause.code,
        "saved_ns": each.saved_ns,
        "saved_ratio": each.saved_ratio,
        "without_ns": each.without_ns,
        "gpu_hours_per_day": each.gpu_hours_per_day,
        "money_per_day": each.per_day,
        "confidence": each.confidence,
        "summary": each.cause.summary,
        "basis": each.basis,
        "caveat": each.caveat,
    }


def _of_several(each: Answer) -> dict[str, object]:
    names = each.cause.name.split(savings.AND)
    if each.unavailable_reason:
        return {"causes": names, "reason": each.unavailable_reason}
    fields = _as_object(each)
    return {"causes": names} | {key: value for key, value in fields.items() if key not in ("cause", "code")}
