"""What if, told: what each cause costs a step, for people and for programs."""

import json
from collections.abc import Iterator

from tracekit import units
from tracekit.whatif.answers import Answer, Answers


def as_text(found: Answers, *, run: str, price: float | None = None) -> str:
    """Return the answers as lines: the run and its replay, a line for each cause, and what cannot be told."""
    return "\n".join(_lines(found, run, price)) + "\n"


def as_json(found: Answers, *, run: str) -> str:
    """Return the answers as one JSON object."""
    told = {
        "run": run,
        "step_ns": found.step_ns,
        "replayed_ns": found.replayed_ns,
        "replay_error_ratio": found.replay_error_ratio,
        "gpus": found.gpus,
        "without": [_as_object(each) for each in found.answers],
        "unknown": [{"cause": each.cause.name, "why": each.why_not} for each in found.unknown],
    }
    return json.dumps(told, indent=2) + "\n"


def _lines(found: Answers, run: str, price: float | None) -> Iterator[str]:
    yield (
        f"{run}: a step takes {units.duration(found.step_ns)}; replayed with nothing changed "
        f"{units.duration(found.replayed_ns)} ({found.replay_error_ratio:+.1%})"
    )
    if not found.answers:
        yield "no cause that can be taken away would make it shorter"
    for each in found.answers:
        yield _line(each)
    if found.answers:
        yield "These overlap: what causes save together is not the sum."
    yield from (f"cannot tell {each.cause.name}: {each.why_not}" for each in found.unknown)
    if found.answers and price is not None:
        yield f"Per day of training on {found.gpus} GPUs, at {price:g} an hour."


def _line(each: Answer) -> str:
    told = (
        f"without {each.cause.name:<22} the step takes {units.duration(each.without_ns)} "
        f"(−{max(0.0, each.saved_ratio):.1%}), {each.gpu_hours_per_day:,.1f} GPU-hours a day"
    )
    return told if each.per_day is None else f"{told}, {each.per_day:,.2f} of money a day"


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
