"""What if, told: what each cause costs a step, for people and for programs."""

import json
from collections.abc import Iterator, Sequence

from tracekit import units
from tracekit.whatif.answers import Answer, Answers
from tracekit.whatif.strategies import Prediction


def as_text(found: Answers, predictions: Sequence[Prediction], *, run: str, price: float | None = None) -> str:
    """Return the answers as lines: the run and its replay, a line for each cause, and what cannot be told."""
    return "\n".join(_lines(found, predictions, run, price)) + "\n"


def as_json(found: Answers, predictions: Sequence[Prediction], *, run: str) -> str:
    """Return the answers as one JSON object."""
    told = {
        "run": run,
        "step_ns": found.step_ns,
        "replayed_ns": found.replayed_ns,
        "replay_error_ratio": found.replay_error_ratio,
        "gpus": found.gpus,
        "without": [_as_object(each) for each in found.answers],
        "unknown": [{"cause": each.cause.name, "why": each.why_not} for each in found.unknown],
        "predictions": [_as_prediction(each) for each in predictions],
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
        yield _line(each)
    if len(found.answers) > 1:
        yield "These overlap: what causes save together is not their sum."
    yield from (f"cannot tell {each.cause.name}: {each.why_not}" for each in found.unknown)
    if found.answers and price is not None:
        yield f"Per day of training on {found.gpus} GPUs, at {price:g} an hour each."
    for prediction in predictions:
        yield (
            f"prediction, {prediction.name}: the step takes {units.duration(prediction.predicted_ns)} "
            f"({-prediction.saved_ratio:+.1%})"
        )
        yield from (f"  rests on: {each}" for each in prediction.assumed)


def _line(each: Answer) -> str:
    told = (
        f"without {each.cause.name:<22} the step takes {units.duration(each.without_ns)} "
        f"(−{max(0.0, each.saved_ratio):.1%}), {each.gpu_hours_per_day:,.1f} GPU-hours a day"
    )
    return told if each.per_day is None else f"{told}, {each.per_day:,.2f} a day"


def _as_prediction(each: Prediction) -> dict[str, object]:
    return {
        "name": each.name,
        "predicted_ns": each.predicted_ns,
        "saved_ratio": each.saved_ratio,
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
        "basis": each.note,
    }
