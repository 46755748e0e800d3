"""The answer to what if: a run as it is replayed, and what each cause costs it, with GPU-hours and money."""

from dataclasses import dataclass

import polars as pl

from tracekit.analysis.compute import contention
from tracekit.errors import InputError
from tracekit.model.run import Run
from tracekit.replay.graph import causes, savings, steps
from tracekit.replay.graph.causes import Cause
from tracekit.replay.graph.savings import Saving
from tracekit.replay.graph.transforms import in_order
from tracekit.sync import collective_matching

MIN_SAVED_RATIO = 0.001
"""What saves less of a step is told only where it is asked for by name."""
_HOURS = 24.0


@dataclass(frozen=True)
class Answer:
    """What one cause costs: of a step in ns and as a share, and of a day of training in GPU-hours and money.

    `gpu_hours_per_day` is null for runs on CPUs, `per_day` also without a price. `confidence` runs from 0 to 1; `basis`
    says what the answer rests on, `caveat` what makes it less sure, `why_not` why there is none.
    """

    cause: Cause
    saved_ns: int
    saved_ratio: float
    step_ns: int
    gpu_hours_per_day: float | None
    per_day: float | None
    confidence: float
    basis: str
    caveat: str = ""
    unavailable_reason: str = ""

    @property
    def without_ns(self) -> int:
        """Return what a step takes without the cause."""
        return self.step_ns - self.saved_ns


@dataclass(frozen=True, eq=False)
class WhatIf:
    """What a run would be without causes: the answers that save most first, those it cannot give, and the replay."""

    answers: tuple[Answer, ...]
    unavailable: tuple[Answer, ...]
    step_ns: int
    replayed_ns: int
    replay: pl.DataFrame
    gpus: int
    """Of the job; 0 where it ran on CPUs."""
    infers_waits: bool
    """Whether waits of streams are inferred, since the traces do not tell them."""

    @property
    def replay_error_ratio(self) -> float:
        """Return by how much the replay with nothing changed differs from the recorded steps."""
        return self.replayed_ns / self.step_ns - 1 if self.step_ns else 0.0

    @property
    def is_reproduced(self) -> bool:
        """Return whether the replay with nothing changed is near enough to the recorded steps to price findings."""
        return abs(self.replay_error_ratio) <= savings.MAX_ERROR_RATIO


def answer(
    run: Run, names: tuple[str, ...] = (), *, gpu_hour_price: float | None = None, with_causes: bool = True
) -> WhatIf:
    """Return what a run would be without each of the causes named; of all that save anything where none is named.

    Where nothing is asked (`with_causes`), the replay alone is told.

    Raises InputError for a name that is no cause, a price below 0, or a run of which nothing can be replayed.
    """
    if gpu_hour_price is not None and not gpu_hour_price >= 0:
        raise InputError(f"--gpu-hour-price is {gpu_hour_price}; it must be 0 or more")
    wanted = [causes.find(name) for name in names or causes.CAUSES] if with_causes else []
    replay = savings.replayed_steps(run)
    if replay.is_empty():
        raise InputError(
            f"{run.path}: no step to replay: the trace has no work on a device, and no ops of a CPU run; "
            "record with activities=[CPU, CUDA]"
        )
    gpus = gpus_of(run)
    found = [_answer(each, savings.saving(run, each.name), gpus, gpu_hour_price) for each in wanted]
    answers = [each for each in found if not each.unavailable_reason and (names or each.saved_ratio >= MIN_SAVED_RATIO)]
    per = replay.select("window", "step").n_unique()
    return WhatIf(
        tuple(sorted(answers, key=lambda each: -each.saved_ns)),
        tuple(each for each in found if each.unavailable_reason),
        steps.total_ns(replay, "duration_ns") // per,
        steps.total_ns(replay, "replayed_ns") // per,
        replay,
        gpus,
        savings.infers_waits(run),
    )


def answer_combined(run: Run, names: tuple[str, ...], *, gpu_hour_price: float | None = None) -> Answer:
    """Return what a run would be without several causes at once, as one answer.

    Where one of them cannot be told, its `why_not` says so. Raises InputError for a name that is no cause, and for less
    than two.
    """
    several = [causes.find(name) for name in in_order(causes.find(name).name for name in names)]
    if len(several) < 2:
        raise InputError("--together takes two causes or more, each named by --without")
    both = Cause(
        savings.AND.join(each.name for each in several),
        "",
        "; ".join(each.summary for each in several),
        "; ".join(each.basis for each in several),
        min(each.confidence for each in several),
    )
    return _answer(both, savings.combined_saving(run, names), gpus_of(run), gpu_hour_price)


def gpus_of(run: Run) -> int:
    """Return the number of GPUs of the job, 0 if it ran on CPUs.

    One a rank: by the manifest, else by its traces and its largest process group.
    """
    if not run.table(contention.device_count)["devices"].sum():
        return 0
    world_size = run.manifest.get("world_size")
    if isinstance(world_size, int) and world_size > 0:
        return world_size
    sizes = run.table(collective_matching.calls)["group_size"].drop_nulls().to_list()
    return int(max(max(run.ranks, default=0) + 1, *sizes, 0))


def hours_per_day(saved_ratio: float, gpus: int) -> float | None:
    """Return the GPU-hours that a day of training would take less; None without GPUs."""
    return gpus * _HOURS * saved_ratio if gpus else None


def _answer(cause: Cause, found: Saving, gpus: int, price: float | None) -> Answer:
    hours = hours_per_day(found.saved_ratio, gpus)
    return Answer(
        cause,
        found.saved_ns,
        found.saved_ratio,
        found.step_ns,
        hours,
        None if price is None or hours is None else hours * price,
        found.confidence,
        cause.basis,
        found.caveat,
        found.unavailable_reason,
    )
