"""What if, told: what each cause costs a step, for people and for programs."""

import json
from collections.abc import Iterator, Sequence

from tracekit import units
from tracekit.whatif import answers
from tracekit.whatif.answers import Answer, Answers
from tracekit.whatif.strategies import Prediction


def as_text(found: Answers, predictions: Sequence[Prediction], *, run: str, price: float | None = None) -> str:
    """Return the answers as lines: the run and its replay, a line for each cause, and what cannot be told."""
    return "\n".join(_lines(found, predictions, run, price)) + "\n"


def as_json(found: Answers, predictions: Sequence[Prediction], *, run: str, price: float | None = None) -> str:
    """Return the answers as one JSON object."""
    told = {
        "run": run,
        "step_ns": found.step_ns,
        "replayed_ns": found.replayed_ns,
        "replay_error_ratio": found.replay_error_ratio,
        "gpus": found.gpus,
        "without": [_as_object(each) for each in found.answers],
        "unknown": [{"cause": each.cause.name, "why": each.why_not} for each in found.unknown],
        "predictions": [_as_prediction(each, found.gpus, price) for each in predictions],
    }
    return json.dumps(told, indent=2) + "\n"


def _lines(found: Answers, predictions: Sequence[Prediction], run: str, price: float | None) -> Iterator[str]:
    yield (
        f"{run}: a step takes {units.duration(found.step_ns)}; replayed with nothing changed "
        f"{units.duration(found.replayed_ns)} ({found.replay_error_ratio:+.1%})"
    )
    if not found.answers and not predictions:
        yield "no cause that can be taken away would make it shorter"
    for each in found.answers:
        yield (
            f"without {each.cause.name:<22} the step takes {units.duration(each.without_ns)} "
            f"({_less(each.saved_ratio)}){_per_day(each.gpu_hours_per_day, price)}"
        )
        if each.doubt:
            yield f"  less sure: {each.doubt}"
    if len(found.answers) > 1:
        yield "These overlap: what causes save together is not their sum."
    yield from (f"cannot tell {each.cause.name}: {each.why_not}" for each in found.unknown)
    for prediction in predictions:
        hours = answers.hours_per_day(prediction.saved_ratio, found.gpus)
        yield (
            f"prediction, {prediction.name}: the step takes {units.duration(prediction.predicted_ns)} "
            f"({-prediction.saved_ratio:+.1%}){_per_day(hours, price)}"
        )
        yield from (f"  rests on: {each}" for each in prediction.assumed)
    if price is not None:
        yield (
            f"Less per day of training on {found.gpus} GPUs, at {price:g} an hour each."
            if found.gpus
            else "The run was on CPUs, so no GPU-hours and no money are told."
        )


def _less(saved_ratio: float) -> str:
    return f"−{max(0.0, saved_ratio):.1%}"


def _per_day(hours: float | None, price: float | None) -> str:
    if hours is None:
        return ""
    return f", {hours:,.1f} GPU-hours a day" + ("" if price is None else f", {hours * price:,.2f} a day")


def _as_prediction(each: Prediction, gpus: int, price: float | None) -> dict[str, object]:
    hours = answers.hours_per_day(each.saved_ratio, gpus)
    return {
        "name": each.name,
        "predicted_ns": each.predicted_ns,
        "saved_ratio": each.saved_ratio,
        "gpu_hours_per_day": hours,
        "money_per_day": None if hours is None or price is None else hours * price,
        "rests_on": list(each.assumed),
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
        "doubt": each.doubt,
    }
