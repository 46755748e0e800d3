"""What-if answers: the replay of a run, and the cost of each cause in time, GPU-hours and money."""

from dataclasses import dataclass

import polars as pl

from tracekit.analysis.compute import contention
from tracekit.errors import InputError
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.replay.graph import causes, savings
from tracekit.replay.graph.causes.cause import Cause
from tracekit.replay.graph.savings import Saving
from tracekit.sync import collective_matching

MIN_SAVED_RATIO = 0.001
"""Smaller savings are reported only for causes requested by name."""
_HOURS = 24.0


@dataclass(frozen=True)
class StatedSaving:
    """A saving that `check` states in a finding: the answer repeats it, so that one cause has one number."""

    code: str
    rule: str
    claim: str


@dataclass(frozen=True)
class Answer:
    """The cost of one cause, or of several together: per step in ns and as a share, per day in GPU-hours and money.

    `gpu_hours_per_day` is null for runs on CPUs, `per_day` also without a price. `confidence` is from 0 to 1; `caveat`
    says what limits the answer, `unavailable_reason` why there is none.
    """

    causes: tuple[Cause, ...]
    saved_ns: int
    saved_ratio: float
    step_ns: int
    gpu_hours_per_day: float | None
    per_day: float | None
    confidence: float
    caveat: str = ""
    unavailable_reason: str = ""
    finding: "StatedSaving | None" = None
    """The finding, or findings, that state this saving."""

    @property
    def name(self) -> str:
        """Name of the cause, or those of all; of a finding that no replay prices, the name of its rule."""
        if self.finding is not None and not self.causes:
            return self.finding.rule
        return savings.AND.join(cause.name for cause in self.causes)

    @property
    def code(self) -> str:
        """Code of the rule that speaks of the cause; '' for several."""
        if self.finding is not None:
            return self.finding.code
        return self.causes[0].code() if len(self.causes) == 1 else ""

    @property
    def summary(self) -> str:
        """What the replay removes, or what the finding states."""
        return "; ".join(cause.summary for cause in self.causes) or (self.finding.claim if self.finding else "")

    @property
    def basis(self) -> str:
        """What the answer rests on."""
        return "; ".join(cause.basis for cause in self.causes) or "what the rule measures"

    @property
    def without_ns(self) -> int:
        """Return the step time without the cause."""
        return self.step_ns - self.saved_ns


@dataclass(frozen=True, eq=False)
class WhatIf:
    """The answers for a run, largest saving first, the causes without an answer, and the replay."""

    answers: tuple[Answer, ...]
    unavailable: tuple[Answer, ...]
    step_ns: int
    replayed_ns: int
    replay: pl.DataFrame
    gpus: int
    """Of the job; 0 where it ran on CPUs."""
    infers_waits: bool
    """Whether event waits of streams are inferred, because the traces do not record them."""
    ranks: int = 0
    """How many ranks the run has; `replay` has those that are replayed."""

    @property
    def replay_error_ratio(self) -> float:
        """Return the relative difference of the unchanged replay from the recorded steps."""
        return self.replayed_ns / self.step_ns - 1 if self.step_ns else 0.0

    @property
    def is_reproduced(self) -> bool:
        """Return whether the unchanged replay is close enough to the recorded steps to price findings."""
        return abs(self.replay_error_ratio) <= savings.MAX_ERROR_RATIO


def answer(
    run: Run, names: tuple[str, ...] = (), *, gpu_hour_price: float | None = None, with_causes: bool = True
) -> WhatIf:
    """Return the potential saving without each named cause; without names, of all that save anything.

    With `with_causes` false, only the unchanged replay is returned. Raises InputError for an unknown cause, a price
    below 0, or a run that cannot be replayed.
    """
    if gpu_hour_price is not None and not gpu_hour_price >= 0:
        raise InputError(f"--gpu-hour-price is {gpu_hour_price}; it must be 0 or more")
    requested = ([causes.find(name) for name in names] or causes.run_causes()) if with_causes else ()
    replay = savings.replayed_steps(run)
    if replay.is_empty():
        raise InputError(
            f"{run.path}: no step can be replayed: the trace has no device work, and no ops of a CPU run; "
            "record with activities=[CPU, CUDA]"
        )
    gpus = gpus_of(run)
    all_answers = [_answer((cause,), savings.saving(run, cause.name), gpus, gpu_hour_price) for cause in requested]
    available = [candidate for candidate in all_answers if not candidate.unavailable_reason]
    answers = [candidate for candidate in available if names or candidate.saved_ratio >= MIN_SAVED_RATIO]
    per = replay.select("window", "step").n_unique()
    return WhatIf(
        tuple(sorted(answers, key=lambda candidate: -candidate.saved_ns)),
        tuple(candidate for candidate in all_answers if candidate.unavailable_reason),
        savings.total_ns(replay, "duration_ns") // per,
        savings.total_ns(replay, "replayed_ns") // per,
        replay,
        gpus,
        savings.infers_waits(run),
        len(run.ranks),
    )


def answer_combined(run: Run, names: tuple[str, ...], *, gpu_hour_price: float | None = None) -> Answer:
    """Return the potential saving without several causes at once, as one answer.

    Where one of them has no answer, `unavailable_reason` says so. Raises InputError for an unknown cause, and for fewer
    than two.
    """
    several = causes.in_order(causes.find(name) for name in names)
    if len(several) < 2:
        raise InputError("--together needs two or more causes, each given by --without")
    return _answer(several, savings.combined_saving(run, names), gpus_of(run), gpu_hour_price)


def gpus_of(run: Run) -> int:
    """Return the number of GPUs of the job, 0 if it ran on CPUs.

    One per rank: from the manifest, else from its traces and its largest process group.
    """
    if not run.table(contention.device_count)["devices"].sum():
        return 0
    if world_size := Manifest.of(run.manifest).world_size:
        return world_size
    sizes = run.table(collective_matching.calls)["group_size"].drop_nulls().to_list()
    return int(max(max(run.ranks, default=0) + 1, *sizes, 0))


def hours_per_day(saved_ratio: float, gpus: int) -> float | None:
    """Return the GPU-hours saved per day of training; None without GPUs."""
    return gpus * _HOURS * saved_ratio if gpus else None


def _answer(removed: tuple[Cause, ...], saving: Saving, gpus: int, price: float | None) -> Answer:
    hours = hours_per_day(saving.saved_ratio, gpus)
    return Answer(
        removed,
        saving.saved_ns,
        saving.saved_ratio,
        saving.step_ns,
        hours,
        None if price is None or hours is None else hours * price,
        saving.confidence,
        saving.caveat,
        saving.unavailable_reason,
    )
