"""A verification: one process first, whose steps are the reference, then each strategy, in fp64 and as the model is."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from instrumented_trainers.verification import processes
from instrumented_trainers.verification.case import FP64, NATIVE, ONE_PROCESS, QUANTITIES, Case

SCHEMA = "tracekit.verify-training/1"


@dataclass(frozen=True)
class Settings:
    """What to verify: `strategies` by name over so many ranks, for so many steps; the time limit is of each case."""

    target: str
    strategies: Sequence[str]
    ranks: int = 2
    steps: int = 3
    timeout_s: float = 120.0


def verify(settings: Settings) -> dict[str, Any]:
    """What was verified, as `tracekit verify-training` reads it. `error` is set where nothing can be verified."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        references = {precision: _reference(settings, precision, folder) for precision in (FP64, NATIVE)}
        usable = _usable_precisions(references)
        results = [
            _result(settings, strategy, precision, folder) for strategy in settings.strategies for precision in usable
        ]
    native = references[NATIVE]
    return {
        "schema": SCHEMA,
        "target": settings.target,
        "ranks": settings.ranks,
        "steps": settings.steps,
        "model": native.get("model"),
        "error": None if usable else _unusable(settings.target, references),
        "fp64_error": references[FP64].get("error"),
        "notes": native.get("notes", []),
        "results": results,
    }


def _reference(settings: Settings, precision: str, folder: str) -> dict[str, Any]:
    return processes.answers(_case(settings, ONE_PROCESS, precision, folder, ranks=1))[0]


def _usable_precisions(references: Mapping[str, dict[str, Any]]) -> list[str]:
    """Precisions that one process trained in; none where the function returned no training in one of them."""
    if any(reference.get("is_unusable") for reference in references.values()):
        return []
    return [precision for precision, reference in references.items() if reference["error"] is None]


def _unusable(target: str, references: Mapping[str, dict[str, Any]]) -> str:
    """Why nothing can be verified: what the function returned, or what one process raised. It names the target."""
    for reference in references.values():
        if reference.get("is_unusable"):
            error = str(reference["error"])
            return error if error.startswith(target.rpartition(":")[0] or target) else f"{target}: {error}"
    return f"{target}: in one process: {references[NATIVE]['error']}"


def _case(settings: Settings, strategy: str, precision: str, folder: str, *, ranks: int) -> Case:
    return Case(settings.target, strategy, precision, ranks, settings.ranks, settings.steps, folder, settings.timeout_s)


def _result(settings: Settings, strategy: str, precision: str, folder: str) -> dict[str, Any]:
    """Result of a strategy in a precision: the error that explains the others, and all ranks' differences."""
    answers = processes.answers(_case(settings, strategy, precision, folder, ranks=settings.ranks))
    failing = [(rank, answer) for rank, answer in enumerate(answers) if answer["error"] is not None]
    # A rank that exited without a word lets the others fail in a collective; else those that can say why come first.
    failing.sort(key=lambda item: (not item[1].get("has_exited", False), not item[1].get("phase")))
    rank, first_error = failing[0] if failing else (None, {})
    answered = [answer for answer in answers if answer.get("phase")]
    differences = [difference for answer in answered for difference in answer["differences"]]
    return {
        "strategy": strategy,
        "precision": precision,
        "error": first_error.get("error"),
        "error_rank": rank,
        "phase": first_error.get("phase"),
        "is_refused": first_error.get("is_refused", False),
        "differences": _largest_by_place(differences),
        "difference_count": max((answer["difference_count"] for answer in answered), default=0),
        "compared_count": max((answer["compared_count"] for answer in answered), default=0),
        "largest": max((answer["largest"] for answer in answered), default=0.0),
        "notes": list(dict.fromkeys(note for answer in answered for note in answer["notes"])),
    }


def _largest_by_place(differences: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Differences of all ranks in the order of computation: of equal places that of the rank that is furthest off."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for difference in differences:
        place = tuple(difference[key] for key in ("step", "quantity", "name"))
        if place not in merged or _size(difference) > _size(merged[place]):
            merged[place] = difference
    return sorted(
        merged.values(), key=lambda difference: (difference["step"], QUANTITIES.index(difference["quantity"]))
    )


def _size(difference: dict[str, Any]) -> float:
    relative: float | None = difference["relative"]
    return float("inf") if relative is None else relative
