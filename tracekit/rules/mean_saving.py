"""The mean saving over steps, by a replay of a run without a cause."""

from dataclasses import dataclass

import polars as pl

from tracekit.model.run import Run
from tracekit.replay.graph import savings
from tracekit.replay.graph.causes.stalls import Removal


@dataclass(frozen=True)
class MeanStep:
    """What the mean step is shorter without a cause, the mean step, and the confidence of the replay.

    `before_steps_ns` is the part of `saved_ns` before the first device work of the window.
    """

    saved_ns: int
    step_ns: int
    confidence: float
    before_steps_ns: int


def mean_saving(run: Run, removal: Removal, first: tuple[Removal, ...] | None = None) -> MeanStep | None:
    """The mean saving over steps, each on the slowest rank, without a cause, in addition to those in `first`.

    None if there is no replay, or `first` is empty: the saving is then that of the cause alone.
    """
    if first is not None and not first:
        return None
    without = savings.saving_of(run, (*(first or ()), removal))
    if without.steps.is_empty():
        return None
    count = without.steps.select("window", "step").n_unique()
    saved_ns, before_steps_ns = _total_saved_ns(without.steps), without.before_steps_ns
    if first:
        by_first = savings.saving_of(run, first)
        saved_ns -= _total_saved_ns(by_first.steps)
        before_steps_ns -= by_first.before_steps_ns
    step_ns = max(1, savings.total_ns(without.steps, "duration_ns") // count)
    return MeanStep(saved_ns // count, step_ns, without.confidence, max(before_steps_ns, 0))


def _total_saved_ns(table: pl.DataFrame) -> int:
    return savings.total_ns(table, "replayed_ns") - savings.total_ns(table, "without_ns")
