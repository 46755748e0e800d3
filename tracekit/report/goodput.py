"""Measured goodput of a job as a document: what its time went to, each attempt, and how often to save."""

import dataclasses
import math
from collections.abc import Sequence

from tracekit.analysis.checkpoint.goodput import (
    CLASSES,
    PRODUCTIVE,
    AttemptAccount,
    Goodput,
    SaveInterval,
    TimeClass,
)
from tracekit.errors import ConfigError
from tracekit.model import units
from tracekit.model.attempt import Attempt
from tracekit.report.checkpoint_plan import NEAR_RATIO
from tracekit.report.document import Cells, Document, Line, Section, heading, line

_NS_PER_H = 3_600_000_000_000
_ATTEMPT_HEADER = ("attempt", "from", "GPUs", "time", "steps", "lost", "productive", "idle before", "end")


def document(job: Goodput, *, gpu_hour_price: float | None = None, notes: Sequence[str] = ()) -> Document:
    """Headline, advice, classes of time and attempts. Raises ConfigError for a price below 0."""
    if gpu_hour_price is not None and not (math.isfinite(gpu_hour_price) and gpu_hour_price >= 0):
        raise ConfigError(f"--gpu-hour-price {gpu_hour_price:g} is not possible: it must be 0 or more")
    left_out = f"{units.count(job.left_out, 'earlier attempt')} at another job left out: a later one began anew."
    sections: tuple[Section, ...] = (
        [line(headline(job)), *_advice_lines(job.save_interval)],
        [heading("Time", f"  of {units.long_duration(job.whole_ns / 1e9)}"), class_table(job, gpu_hour_price)],
        [heading("Attempts"), attempt_table(job)],
    )
    return Document(sections, (*notes, *([left_out] if job.left_out else [])), values=values(job, gpu_hour_price))


def headline(job: Goodput) -> str:
    """Effective training time and the largest loss."""
    losses = {kind: time_ns for kind, time_ns in job.times.items() if kind is not PRODUCTIVE}
    largest = max(losses, key=lambda kind: losses[kind])
    failures = job.save_interval.failures
    text = (
        f"{units.share(job.productive_ratio)} of {units.long_duration(job.whole_ns / 1e9)} was productive, in "
        f"{units.count(len(job.attempts), 'attempt')}, of which {failures} failed"
    )
    if not losses[largest]:
        return f"{text}."
    lost = units.share(losses[largest] / job.whole_ns)
    return f"{text}. The largest loss: {largest.title}, {units.long_duration(losses[largest] / 1e9)} ({lost})."


def advice(saves: SaveInterval) -> str:
    """How often to save, for the failures and saves that there were; "" where these are not known."""
    best_s, interval_s = saves.best_interval_seconds, saves.interval_seconds
    if best_s is None or saves.best_goodput_ratio is None or saves.mtbf_seconds is None:
        return ""
    failing = f"a failure every {units.long_duration(saves.mtbf_seconds)}"
    best = f"every {units.long_duration(best_s)}"
    then = f"{units.share(saves.best_goodput_ratio)} is expected to train"
    if interval_s is None or saves.goodput_ratio is None:
        return f"Save {best}: with {failing}, {then}."
    current = f"every {units.long_duration(interval_s)}"
    if saves.best_goodput_ratio - saves.goodput_ratio <= NEAR_RATIO:
        return f"A save {current} was right for {failing}."
    return f"Save {best} instead of {current}: with {failing}, {then}, instead of {units.share(saves.goodput_ratio)}."


def cause(attempt: Attempt) -> str:
    """Why an attempt ended, by the dumps of a hang, the exit of its command or the end of its loop."""
    if attempt.hang is not None:
        return attempt.hang
    if attempt.exit_reason is not None:
        return attempt.exit_reason
    if attempt.error is not None:
        return attempt.error
    if attempt.exit_code:
        return f"exit code {attempt.exit_code}"
    if attempt.has_failed:
        return "no record of its end: killed, or still running"
    return "ended"


def values(job: Goodput, gpu_hour_price: float | None) -> dict[str, object]:
    """Numbers of a job for programs."""
    return {
        "whole_ns": job.whole_ns,
        "productive_ratio": job.productive_ratio,
        "classes": [_class_values(kind, job, gpu_hour_price) for kind in CLASSES],
        "attempts": [_attempt_values(account) for account in job.attempts],
        "step_ns": job.step_ns,
        "saves": dataclasses.asdict(job.save_interval),
        "gpu_hour_price": gpu_hour_price,
    }


def class_table(job: Goodput, price: float | None = None) -> Cells:
    """Time, share and GPU-hours of each class that has time, productive steps first, and their cost at a price."""
    header = ["", "time", "share", "GPU-hours", *([] if price is None else ["cost"]), "what it is"]
    shown = [kind for kind in CLASSES if job.times[kind] or kind is PRODUCTIVE]
    shown.sort(key=lambda kind: (kind is not PRODUCTIVE, -job.times[kind]))
    rows = []
    for kind in shown:
        gpu_hours = job.gpu_ns[kind] / _NS_PER_H
        cost = [] if price is None else [f"{gpu_hours * price:,.2f}"]
        ratio = job.times[kind] / job.whole_ns if job.whole_ns else 0.0
        time = units.long_duration(job.times[kind] / 1e9)
        rows.append((kind.title, time, units.share(ratio), f"{gpu_hours:,.4g}", *cost, kind.content))
    numbers = tuple(range(1, len(header) - 1))
    return Cells(tuple(header), tuple(rows), numbers, drop_order=(len(header) - 1,))


def attempt_table(job: Goodput) -> Cells:
    """What each attempt did, and why it ended."""
    first_ns = job.attempts[0].start_ns
    rows = tuple(_attempt_row(number, account, first_ns) for number, account in enumerate(job.attempts, start=1))
    return Cells(_ATTEMPT_HEADER, rows, numbers=tuple(range(len(_ATTEMPT_HEADER) - 1)), drop_order=(2, 7))


def _advice_lines(saves: SaveInterval) -> list[Line]:
    text = advice(saves)
    return [line(text)] if text else []


def _class_values(kind: TimeClass, job: Goodput, price: float | None) -> dict[str, object]:
    gpu_hours = job.gpu_ns[kind] / _NS_PER_H
    return {
        "class": kind.key,
        "time_ns": job.times[kind],
        "ratio": job.times[kind] / job.whole_ns if job.whole_ns else 0.0,
        "gpu_hours": gpu_hours,
        "cost": None if price is None else gpu_hours * price,
    }


def _attempt_values(account: AttemptAccount) -> dict[str, object]:
    attempt = account.attempt
    return {
        "run": attempt.folder,
        "start_ns": account.start_ns,
        "end_ns": account.end_ns,
        "world_size": attempt.world_size,
        "first_step": account.first_step,
        "end_step": account.end_step,
        "lost_steps": account.lost_steps,
        "idle_before_ns": account.idle_before_ns,
        "times_ns": {kind.key: time_ns for kind, time_ns in account.times.items()},
        "failed": attempt.has_failed,
        "exit_code": attempt.exit_code,
        "cause": cause(attempt),
    }


def _attempt_row(number: int, account: AttemptAccount, first_ns: int) -> tuple[str, ...]:
    time_ns = account.end_ns - account.start_ns
    steps = f"{account.first_step}–{account.end_step - 1}" if account.end_step > account.first_step else "none"
    return (
        str(number),
        units.long_duration((account.start_ns - first_ns) / 1e9),
        f"{account.attempt.world_size:,}",
        units.long_duration(time_ns / 1e9),
        steps,
        str(account.lost_steps),
        units.share(account.times[PRODUCTIVE] / time_ns if time_ns else 0.0),
        units.long_duration(account.idle_before_ns / 1e9),
        cause(account.attempt),
    )
