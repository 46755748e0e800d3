"""Whether a recording received as much CPU time as the reference's did: where it did not, its times grew by that much.

On a machine that is shared with others a training waits for processors that a neighbour uses, and every time by the
clock grows through no fault of the training; that the recordings of a baseline agree shows only that the neighbour was
away then. The indicator is by how much computing is stretched: the time by the clock in which operators run, over the
CPU time spent for it. A neighbour stretches it; a training that waits for data, a disk or a network does not, for it
waits outside of its operators, and one that computes more needs more of both. A time that grew by more than computing
is stretched is worse all the same.

Where processors are shared, CPU time differs between recordings too, for caches are shared. Several recordings show by
how much; fewer than three do not, and then neither times nor CPU times are judged.
"""

from collections.abc import Sequence
from dataclasses import replace

import polars as pl

from tracekit import conventions
from tracekit.regression.change import Change, Verdict
from tracekit.regression.metrics import metric_of
from tracekit.regression.quantities import NS
from tracekit.regression.thresholds import Thresholds

_COMPUTE = "compute_ns"


def stretch(samples: pl.DataFrame) -> float | None:
    """Return the time in which a step computes over its CPU time, the median over ranks and steps.

    Other threads of the process run too, so that it is mostly below 1. None where the recording does not have both.
    """
    metric, value = pl.col("metric"), pl.col("value")
    # The log of the CPU time has no windows.
    per_step = samples.lazy().filter(metric.is_in([_COMPUTE, conventions.CPU_TIME_METRIC])).group_by("rank", "step")
    compute, cpu = (value.filter(metric == name).median() for name in (_COMPUTE, conventions.CPU_TIME_METRIC))
    ratios = per_step.agg(compute.alias("compute"), cpu.alias("cpu")).filter(pl.col("cpu") > 0)
    median = ratios.select((pl.col("compute") / pl.col("cpu")).median()).collect().item()
    return None if median is None else float(median)


def without_starved(
    changes: tuple[Change, ...],
    reference: Sequence[pl.DataFrame],
    candidate: Sequence[pl.DataFrame],
    thresholds: Thresholds,
) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """Return the changes, where times that grew no more than computing is stretched are inconclusive, and a note on it.

    The least stretched recording of the candidate is compared with the most stretched of the reference.
    """
    before, after = (_stretches(side) for side in (reference, candidate))
    if _is_unknown(len(reference), (*before, *after), thresholds):
        return _without_times(changes, thresholds)
    if not before or not after or not max(before) or min(after) <= thresholds.max_cpu_stretch * max(before):
        return changes, ()
    factor = min(after) / max(before)
    explained = {change.metric for change in changes if _is_explained(change, factor)}
    if not explained:
        return changes, ()
    note = (
        f"compute takes {factor:.1f} times as long by the clock for the same CPU time as in the reference: "
        "another program used the processors, or compute runs on fewer threads; times that grew by no more are "
        "inconclusive, so record again on a machine as free as the reference's"
    )
    revised = (replace(c, verdict=Verdict.INCONCLUSIVE) if c.metric in explained else c for c in changes)
    return tuple(revised), (note,)


def is_unknown(reference: Sequence[pl.DataFrame], candidate: Sequence[pl.DataFrame], thresholds: Thresholds) -> bool:
    """Return whether a recording was starved, and too few of the reference show how much such recordings differ."""
    return _is_unknown(len(reference), _stretches((*reference, *candidate)), thresholds)


def _is_unknown(references: int, stretches: Sequence[float], thresholds: Thresholds) -> bool:
    return references < thresholds.min_cpu_recordings and max(stretches, default=0.0) > thresholds.max_cpu_stretch


def _stretches(recordings: Sequence[pl.DataFrame]) -> list[float]:
    return [ratio for ratio in map(stretch, recordings) if ratio is not None]


def _without_times(changes: tuple[Change, ...], thresholds: Thresholds) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """Return the changes, where times that are worse or better are inconclusive, and a note on it."""
    changed = [c.metric for c in changes if c.verdict in (Verdict.WORSE, Verdict.BETTER)]
    timed = {metric for metric in changed if metric_of(metric).unit.is_time}
    if not timed:
        return changes, ()
    note = (
        f"compute takes more than {thresholds.max_cpu_stretch:g} times its CPU time, so other programs used the "
        f"processors; fewer than {thresholds.min_cpu_recordings} recordings in the reference do not show how much "
        "times differ then, and those that are changed are inconclusive"
    )
    revised = (replace(c, verdict=Verdict.INCONCLUSIVE) if c.metric in timed else c for c in changes)
    return tuple(revised), (note,)


def _is_explained(change: Change, factor: float) -> bool:
    """Return whether a time is worse by the clock, but not significantly by more than a factor."""
    metric = metric_of(change.metric)
    is_timed = metric.unit.is_time and not metric.is_cpu_time
    if not is_timed or change.verdict is not Verdict.WORSE or change.low is None or change.high is None:
        return False
    return 1 + change.low <= factor if metric.unit is NS else (1 + change.high) * factor >= 1
