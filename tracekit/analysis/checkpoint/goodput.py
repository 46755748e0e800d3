"""Goodput of a job as it was: the time of all its attempts, divided into productive steps and losses.

Each moment from the start of the first attempt to the end of the last has one class, so that the classes add up to the
whole exactly. The share of productive steps is what the Llama 3 report calls effective training time (arXiv 2407.21783,
section 3.3.4), and Google's ML Productivity Goodput its runtime part.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions
from tracekit.analysis.hangs import diagnosis
from tracekit.errors import InputError
from tracekit.ingest import job_attempts
from tracekit.ingest.hang_dumps import folder as hang_dumps
from tracekit.model import intervals
from tracekit.model.attempt import Attempt, CheckpointCall
from tracekit.model.intervals import EMPTY, Spans
from tracekit.plan import checkpoint as planned

SLOW_RATIO = 1.5
"""A step longer than this many representative ones has stalled, or warms up: without a cause, steps vary by less."""
WAIT_S, WAIT_STEPS = 30.0, 10
"""A failed attempt without a step for longer than both had stopped to train: its last steps are on disk within 1 s."""


@dataclass(frozen=True)
class TimeClass:
    """What a job's time went to: its key in JSON, its title, and what belongs to it."""

    key: str
    title: str
    content: str


PRODUCTIVE = TimeClass("productive", "productive steps", "steps that no later attempt repeats")
LOST = TimeClass("lost", "lost work", "what followed the checkpoint from which the next attempt resumed")
SAVE = TimeClass("save", "saves", "training blocked by a save")
STALL = TimeClass("stall", "stalls", "excess of slow steps over the median step; no step until the attempt ended")
WARM_UP = TimeClass("warm_up", "warm-up", "excess of the first steps over the median step: compilation, caches")
BETWEEN = TimeClass("between", "between steps", "evaluation, writing of traces")
LOAD = TimeClass("load", "loading", "checkpoints are loaded")
START = TimeClass("start", "starting", "from the launch to the first step: imports, process groups, the model")
STOP = TimeClass("stop", "ending", "from the end of training, or the first rank's failure, to the command's exit")
IDLE = TimeClass("idle", "idle allocation", "no attempt runs")
CLASSES = (PRODUCTIVE, LOST, SAVE, STALL, WARM_UP, BETWEEN, LOAD, START, STOP, IDLE)

Times = Mapping[TimeClass, int]
"""Time of each class, in ns."""
ClassSpans = Mapping[TimeClass, Spans]
"""When each class was, in Unix ns."""


@dataclass(frozen=True)
class AttemptAccount:
    """One attempt from `start_ns` to `end_ns` in Unix ns, and the idle time before it.

    Steps count over the whole job: it began with `first_step`, and `lost_steps` of its recorded ones were lost.
    `end_step` is the number of the last recorded step + 1.
    """

    attempt: Attempt
    start_ns: int
    end_ns: int
    first_step: int
    end_step: int
    lost_steps: int
    spans: ClassSpans
    idle_before_ns: int

    @property
    def times(self) -> Times:
        """Time of each class in the attempt, in ns; these add up to its window."""
        return {kind: intervals.length(spans) for kind, spans in self.spans.items()}


@dataclass(frozen=True)
class SaveInterval:
    """What the failures and saves of the job say about the interval of saves. Times in s; None where unknown.

    `mtbf_seconds` is the time of attempts over failures. `restart_seconds` is what a failure costs on average besides
    lost work: ending, idle allocation, starting, loading and warm-up. Goodput is that of `planned.goodput_ratio`.
    """

    saves: int
    failures: int
    blocked_seconds: float | None = None
    interval_seconds: float | None = None
    mtbf_seconds: float | None = None
    restart_seconds: float | None = None
    best_interval_seconds: float | None = None
    goodput_ratio: float | None = None
    best_goodput_ratio: float | None = None


@dataclass(frozen=True)
class Goodput:
    """Accounts of a job's attempts in order of time. `gpu_ns` is the time of each class times its GPUs."""

    attempts: tuple[AttemptAccount, ...]
    times: Times
    gpu_ns: Times
    save_interval: SaveInterval
    step_ns: int | None
    """The representative step: the median over all attempts, saves left out."""
    left_out: int
    """Attempts at earlier jobs in the same folders."""

    @property
    def whole_ns(self) -> int:
        """Time from the start of the first attempt to the end of the last."""
        return self.attempts[-1].end_ns - self.attempts[0].start_ns

    @property
    def productive_ratio(self) -> float:
        """Share of productive steps in the whole: the effective training time ratio."""
        return self.times[PRODUCTIVE] / self.whole_ns if self.whole_ns else 0.0


def read_job(paths: Sequence[Path]) -> tuple[Goodput, list[str]]:
    """Account of the job in the folders of its runs, with the verdicts on its hangs, and notes on what was not read.

    Raises InputError if a path has no attempt, or two attempts ran at the same time.
    """
    attempts, notes = job_attempts.read(paths)
    return goodput(with_hang_verdicts(attempts)), notes


def goodput(attempts: Sequence[Attempt]) -> Goodput:
    """Account of a job's attempts, which are in order of time and at least one.

    Raises InputError where two ran at the same time.
    """
    places = _places(attempts)
    job = places[_first_of_last_job(places) :]
    windows = list(_windows([place.attempt for place in job]))
    medians_ns = _median_steps_ns([place.attempt for place in job])
    accounts: list[AttemptAccount] = []
    gpu_ns = dict.fromkeys(CLASSES, 0)
    for index, (place, (start_ns, end_ns)) in enumerate(zip(job, windows, strict=True)):
        attempt = place.attempt
        kept_step = _kept_step(place, job[index + 1 :])
        spans = _class_spans(place, (start_ns, end_ns), kept_step, median_ns=medians_ns.get(attempt.world_size))
        idle_ns = start_ns - windows[index - 1][1] if index else 0
        lost_steps = int((attempt.step_numbers + place.offset >= kept_step).sum())
        accounts.append(
            AttemptAccount(attempt, start_ns, end_ns, place.first_step, place.end_step, lost_steps, spans, idle_ns)
        )
        for kind, time_ns in accounts[-1].times.items():
            gpu_ns[kind] += time_ns * attempt.world_size
        if index:  # an allocation is as large as the attempt that it had before
            gpu_ns[IDLE] += idle_ns * job[index - 1].attempt.world_size
    totals = {kind: sum(account.times[kind] for account in accounts) for kind in CLASSES if kind is not IDLE}
    totals[IDLE] = sum(account.idle_before_ns for account in accounts)
    all_steps_ns = _training_ns([place.attempt for place in job])
    return Goodput(
        tuple(accounts), {kind: totals[kind] for kind in CLASSES}, gpu_ns, _save_interval(accounts),
        int(np.median(all_steps_ns)) if len(all_steps_ns) else None, len(places) - len(job),
    )  # fmt: skip


def over_time(job: Goodput, *, parts: int) -> pl.DataFrame:
    """Time of each class in equal parts of a job's time.

    Columns start_ns and end_ns in Unix ns, class (its key) and time_ns; one row per part and class. Over all parts, a
    class has the time that it has in `times`.
    """
    edges = np.linspace(0, job.whole_ns, parts + 1).round().astype(np.int64) + job.attempts[0].start_ns
    windows = np.stack((edges[:-1], edges[1:]), axis=1)
    spans = {kind: [account.spans[kind] for account in job.attempts] for kind in CLASSES if kind is not IDLE}
    spans[IDLE] = [_spans([(account.start_ns - account.idle_before_ns, account.start_ns)]) for account in job.attempts]
    tables = [
        pl.DataFrame({"start_ns": edges[:-1], "end_ns": edges[1:]}).with_columns(
            pl.lit(kind.key).alias("class"),
            pl.Series("time_ns", intervals.coverage(windows, intervals.union(*of_class))),
        )
        for kind, of_class in spans.items()
    ]
    return pl.concat(tables)


def with_hang_verdicts(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Attempts with the verdict on the dumps in their folders, each at the latest attempt that began before these."""
    verdicts: dict[tuple[str, int], str] = {}
    for name in dict.fromkeys(attempt.folder for attempt in attempts):
        folder = Path(name) / conventions.HANG_FOLDER
        of_folder = [attempt for attempt in attempts if attempt.folder == name]
        try:
            dumped_ns = max(file.stat().st_mtime_ns for file in folder.iterdir())
            result = diagnosis.diagnose(hang_dumps.read(folder))
        except (OSError, ValueError, InputError):  # no dumps, or none that can be used: tracekit hang states why
            continue
        before = [attempt for attempt in of_folder if attempt.begin_ns <= dumped_ns]
        if before and result.is_hang:
            verdicts[name, before[-1].begin_ns] = result.verdict
    return [replace(attempt, hang=verdicts.get((attempt.folder, attempt.begin_ns))) for attempt in attempts]


@dataclass(frozen=True)
class _Place:
    """An attempt in its job: its first step, counted over the whole job, and the difference to its own count."""

    attempt: Attempt
    first_step: int
    offset: int

    @property
    def end_step(self) -> int:
        numbers = self.attempt.step_numbers
        return int(numbers[-1]) + 1 + self.offset if len(numbers) else self.first_step

    @property
    def saves(self) -> list[tuple[int, CheckpointCall]]:
        """Saves whose step is known, with that step counted over the whole job."""
        return [(save.step + self.offset, save) for save in self.attempt.saves if save.step is not None]


def _places(attempts: Sequence[Attempt]) -> list[_Place]:
    """Attempts with their first steps.

    The recorder of an unchanged script counts from 0 in each process. What the script loaded states where it resumed:
    the step of the latest save to the same path.
    """
    places: list[_Place] = []
    saved_steps: dict[str, int] = {}
    for attempt in attempts:
        loaded = [saved_steps[load.path] for load in attempt.loads if load.path in saved_steps]
        is_counted_anew = attempt.first_step == 0 and loaded
        if not attempt.has_begun:
            place = _Place(attempt, places[-1].end_step if places else 0, 0)
        elif is_counted_anew:
            place = _Place(attempt, loaded[-1], loaded[-1])
        else:
            place = _Place(attempt, attempt.first_step, 0)
        places.append(place)
        saved_steps |= {save.path: step for step, save in place.saves}
    return places


def _first_of_last_job(places: Sequence[_Place]) -> int:
    """Index of the last attempt that begins anew after one that had not failed; 0 without one."""
    starts = [
        index
        for index, (previous, place) in enumerate(itertools.pairwise(places), start=1)
        if place.attempt.has_begun and place.first_step == 0 and not previous.attempt.has_failed
    ]
    return starts[-1] if starts else 0


def _windows(attempts: Sequence[Attempt]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each attempt in Unix ns. Raises InputError where two overlap."""
    previous_end_ns = 0
    for index, attempt in enumerate(attempts):
        if attempt.begin_ns < previous_end_ns:
            raise InputError(
                f"{attempts[index - 1].folder} and {attempt.folder} ran at the same time: they are not attempts at one "
                "job; name the folders of one job"
            )
        # After a restart by torchrun, the launch is that of an earlier attempt.
        times_ns = (attempt.launched_ns, attempt.process_start_ns, attempt.begin_ns)
        start_ns = next(time_ns for time_ns in times_ns if time_ns is not None and time_ns >= previous_end_ns)
        previous_end_ns = max(attempt.last_evidence_ns, start_ns)
        yield start_ns, previous_end_ns


def _kept_step(place: _Place, following: Sequence[_Place]) -> int:
    """First step of the job that was lost, as far as this attempt did it: later attempts repeat it.

    After a last attempt that failed, nothing beyond its last save is left.
    """
    resumed = [later.first_step for later in following if later.attempt.has_begun]
    if resumed:
        return min(resumed)
    if place.attempt.has_failed:
        return max((step for step, _ in place.saves), default=place.first_step)
    return place.end_step


def _training_ns(attempts: Sequence[Attempt]) -> npt.NDArray[np.int64]:
    """Duration of each recorded step, without saves in it, in ns."""
    parts = [_step_training_ns(attempt) for attempt in attempts]
    return np.concatenate([np.empty(0, np.int64), *parts])


def _step_training_ns(attempt: Attempt) -> npt.NDArray[np.int64]:
    steps = attempt.step_spans
    return np.asarray(steps[:, 1] - steps[:, 0] - intervals.coverage(steps, _save_spans(attempt)), np.int64)


def _median_steps_ns(attempts: Sequence[Attempt]) -> dict[int, int]:
    """Median step by number of GPUs, in ns: with more, a step may take another time."""
    medians = {}
    for world_size in {attempt.world_size for attempt in attempts}:
        steps_ns = _training_ns([attempt for attempt in attempts if attempt.world_size == world_size])
        if len(steps_ns):
            medians[world_size] = int(np.median(steps_ns))
    return medians


def _class_spans(place: _Place, window: tuple[int, int], kept_step: int, *, median_ns: int | None) -> ClassSpans:
    """When each class was in an attempt, in Unix ns: each moment of the window has one class."""
    attempt = place.attempt
    steps = attempt.step_spans
    first_ns = int(steps[0, 0]) if len(steps) else attempt.begin_ns
    if not attempt.has_begun:
        first_ns = window[1]
    ends_ns = [time_ns for time_ns in (attempt.failed_ns, attempt.loop_end_ns) if time_ns is not None]
    trained_until_ns = max(first_ns, min([*ends_ns, window[1]]))
    slow = _slow_parts(attempt, median_ns) if median_ns else {}
    # The first class that has a moment keeps it: what happened to lost work costs nothing on top.
    claims: list[tuple[TimeClass, Spans]] = [
        (LOAD, _spans((load.start_ns, load.end_ns) for load in attempt.loads)),
        (START, _spans([(window[0], first_ns)])),
        (STOP, _spans([(trained_until_ns, window[1])])),
        (STALL, _spans(_wait(attempt, first_ns, trained_until_ns, median_ns or 0))),
        (LOST, _spans(_lost(place, kept_step, first_ns, trained_until_ns))),
        (SAVE, _save_spans(attempt)),
        (WARM_UP, slow.get(WARM_UP, EMPTY)),
        (STALL, slow.get(STALL, EMPTY)),
        (BETWEEN, _time_between_steps(attempt, trained_until_ns)),
    ]
    unclaimed = _spans([window])
    claimed = dict.fromkeys((kind for kind in CLASSES if kind is not IDLE), EMPTY)
    for kind, spans in claims:
        claimed[kind] = intervals.union(claimed[kind], intervals.intersect(unclaimed, spans))
        unclaimed = intervals.subtract(unclaimed, spans)
    claimed[PRODUCTIVE] = unclaimed
    return claimed


def _spans(pairs: "Iterator[tuple[int, int]] | Sequence[tuple[int, int]]") -> Spans:
    return intervals.union(np.array(list(pairs), np.int64).reshape(-1, 2))


def _save_spans(attempt: Attempt) -> Spans:
    return _spans((save.start_ns, save.end_ns) for save in attempt.saves)


def _wait(attempt: Attempt, first_ns: int, until_ns: int, median_ns: int) -> list[tuple[int, int]]:
    """Time at the end of a failed attempt in which no step ended: it hung, or waited for a timeout."""
    active_ns = [first_ns, *(save.end_ns for save in attempt.saves)]
    active_ns += [int(attempt.step_spans[-1, 1])] if len(attempt.step_spans) else []
    last_ns = max(active_ns) + median_ns
    is_long = until_ns - last_ns > max(WAIT_S * 1e9, WAIT_STEPS * median_ns)
    return [(last_ns, until_ns)] if attempt.has_failed and is_long else []


def _lost(place: _Place, kept_step: int, first_ns: int, until_ns: int) -> list[tuple[int, int]]:
    """Time after the state from which the next attempt resumed; all of the training if that is older."""
    attempt = place.attempt
    if kept_step <= place.first_step:
        return [(first_ns, until_ns)]
    has_lost_steps = place.end_step > kept_step
    if not (has_lost_steps or attempt.has_failed):
        return []
    saved_ns = [save.end_ns for step, save in place.saves if step == kept_step]
    if saved_ns:
        return [(saved_ns[-1], until_ns)]
    before = attempt.step_spans[attempt.step_numbers + place.offset < kept_step]
    return [(int(before[-1, 1]), until_ns)] if has_lost_steps and len(before) else []


def _slow_parts(attempt: Attempt, median_ns: int) -> dict[TimeClass, Spans]:
    """Excess of slow steps over the median, as spans: warm-up before the first usual step, stalls after it."""
    steps, training_ns, saves = attempt.step_spans, _step_training_ns(attempt), _save_spans(attempt)
    slow = np.flatnonzero(training_ns > SLOW_RATIO * median_ns)
    usual = np.flatnonzero(training_ns <= SLOW_RATIO * median_ns)
    first_usual = int(usual[0]) if len(usual) else len(steps)
    parts: dict[TimeClass, list[Spans]] = {WARM_UP: [], STALL: []}
    for index in slow:
        free = intervals.subtract(steps[index : index + 1], saves)
        parts[WARM_UP if index < first_usual else STALL].append(_first_part(free, int(training_ns[index]) - median_ns))
    return {kind: intervals.union(*spans) for kind, spans in parts.items()}


def _first_part(spans: Spans, length_ns: int) -> Spans:
    """The first `length_ns` of a sorted, disjoint set.

    >>> _first_part(np.array([[0, 4], [6, 9]]), 5).tolist()
    [[0, 4], [6, 7]]
    """
    durations_ns = spans[:, 1] - spans[:, 0]
    before_ns = np.cumsum(durations_ns) - durations_ns
    taken_ns = np.clip(length_ns - before_ns, 0, durations_ns)
    return intervals.union(np.stack((spans[:, 0], spans[:, 0] + taken_ns), axis=1))


def _time_between_steps(attempt: Attempt, until_ns: int) -> Spans:
    """Time between recorded steps, and after the last one; a failed attempt trained on after its last recorded one."""
    steps = attempt.step_spans
    if not len(steps):
        return EMPTY
    end_ns = int(steps[-1, 1]) if attempt.has_failed else until_ns
    return intervals.gaps(steps, (int(steps[0, 0]), max(end_ns, int(steps[0, 0]))))


def _save_interval(accounts: Sequence[AttemptAccount]) -> SaveInterval:
    saves = [save for account in accounts for save in account.attempt.saves]
    failures = sum(account.attempt.has_failed for account in accounts)
    interval_s, blocked_s = _interval_s(accounts), _mean_s([save.end_ns - save.start_ns for save in saves])
    if not failures:
        return SaveInterval(len(saves), 0, blocked_s, interval_s)
    mtbf_s = sum(account.end_ns - account.start_ns for account in accounts) / failures / 1e9
    restart_s = _restart_s(accounts, failures)
    if not blocked_s or mtbf_s <= 0:
        return SaveInterval(len(saves), failures, blocked_s, interval_s, mtbf_s, restart_s)
    drain_s = _mean_s([save.complete_ns - save.end_ns for save in saves]) or 0.0
    best_s = planned.best_interval_s(blocked_s, mtbf_s)

    def ratio(at_s: float) -> float:
        return planned.goodput_ratio(blocked_s, at_s, mtbf_s, restore_s=restart_s, drain_s=drain_s)

    current_ratio = None if interval_s is None else ratio(interval_s)
    return SaveInterval(
        len(saves), failures, blocked_s, interval_s, mtbf_s, restart_s, best_s, current_ratio, ratio(best_s)
    )


def _interval_s(accounts: Sequence[AttemptAccount]) -> float | None:
    """Median time from the start of a save to that of the next in the same attempt, in s; None without two."""
    starts_ns = [[save.start_ns for save in account.attempt.saves] for account in accounts]
    gaps_ns = [later - earlier for of_attempt in starts_ns for earlier, later in itertools.pairwise(of_attempt)]
    return float(np.median(gaps_ns)) / 1e9 if gaps_ns else None


def _mean_s(times_ns: Sequence[int]) -> float | None:
    return math.fsum(times_ns) / len(times_ns) / 1e9 if times_ns else None


def _restart_s(accounts: Sequence[AttemptAccount], failures: int) -> float:
    """What a failure costs besides lost work, in s: the mean over failures that an attempt followed."""
    following = [later for earlier, later in itertools.pairwise(accounts) if earlier.attempt.has_failed]
    costs_ns = [
        account.idle_before_ns + sum(account.times[kind] for kind in (START, LOAD, WARM_UP)) for account in following
    ]
    ended_ns = sum(account.times[STOP] for account in accounts if account.attempt.has_failed)
    return (math.fsum(costs_ns) / max(1, len(following)) + ended_ns / failures) / 1e9
