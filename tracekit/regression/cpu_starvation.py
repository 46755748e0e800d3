"""Whether a recording got processors as the baseline's did: where it did not, its times grew by that much too.

On a machine that is shared with others a training waits for processors that a neighbour has, and any time by the clock
grows through no fault of the training; that the recordings of a baseline agree says only that the neighbour was away
then. What tells is by how much computing is stretched: the time by the clock in which operators run, over the time that
processors ran for it. A neighbour stretches it; a training that waits for data, a disk or a network does not, for it
waits outside of its operators, and one that computes more needs more of both. A time that grew by more than computing
is stretched by is worse all the same.
"""

from collections.abc import Sequence
from dataclasses import replace

import polars as pl

from tracekit import conventions
from tracekit.regression.baseline import Recording
from tracekit.regression.change import Change, Verdict
from tracekit.regression.comparison import Comparison

MOST_OF_BASELINE = 1.1
"""A recording starves whose computing is stretched by more than this, over the most stretched of the baseline."""
OF_PROCESSORS = (conventions.CPU_TIME_METRIC, "checkpoint_cpu_ns")
"""The times that are of processors, not of the clock."""
_COMPUTE = "compute_ns"


def stretch(recording: Recording) -> float | None:
    """Return the time in which a step computes over that in which processors ran, the median over ranks and steps.

    Other threads of the process run too, so that it is mostly below 1. None where the recording does not tell.
    """
    told = recording.samples.filter(pl.col("metric").is_in([_COMPUTE, conventions.CPU_TIME_METRIC]))
    if told["metric"].n_unique() < 2:
        return None
    wide = told.pivot("metric", index=["rank", "step"], values="value").drop_nulls()
    ran = wide.filter(pl.col(conventions.CPU_TIME_METRIC) > 0)
    median = ran.select(pl.col(_COMPUTE) / pl.col(conventions.CPU_TIME_METRIC)).to_series().median()
    return float(str(median)) if median is not None else None


def without_starved(
    comparison: Comparison, reference: Sequence[Recording], candidate: Sequence[Recording]
) -> Comparison:
    """Return the comparison, in which times that grew no more than computing is stretched by cannot tell.

    The least stretched recording of the candidate is held against the most stretched of the reference.
    """
    before = [each for each in map(stretch, reference) if each is not None]
    after = [each for each in map(stretch, candidate) if each is not None]
    if not before or not after or min(after) <= MOST_OF_BASELINE * max(before):
        return comparison
    factor = min(after) / max(before)
    doubtful = {change.metric for change in comparison.changes if _is_doubtful(change, factor)}
    if not doubtful:
        return comparison
    changes = tuple(
        replace(change, verdict=Verdict.CANNOT_TELL) if change.metric in doubtful else change
        for change in comparison.changes
    )
    note = (
        f"what computes takes {factor:.1f} times as long by the clock, for the same time of processors, as in the "
        "baseline at most: another program had them, or it computes on fewer threads; times that grew by no more are "
        "not held against it, so record again on a machine as free as the baseline's"
    )
    return replace(comparison, changes=changes, notes=(*comparison.notes, note))


def _is_doubtful(change: Change, factor: float) -> bool:
    """Return whether a time is worse by the clock, but not for certain by more than a factor."""
    if change.verdict is not Verdict.WORSE or change.low is None or change.high is None:
        return False
    if change.metric == "tokens_per_second":
        return (1 + change.high) * factor >= 1
    return change.metric.endswith("_ns") and change.metric not in OF_PROCESSORS and 1 + change.low <= factor
