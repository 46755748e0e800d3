"""Whether a recording got processors as the baseline's did: where it did not, its times say nothing.

On a machine that is shared with others a training waits for processors that a neighbour has, and any time by the clock
grows through no fault of the training; that the recordings of a baseline agree says only that the neighbour was away
then. The share of a step's time in which a rank's process runs tells the two moments apart. It falls as well where the
training waits for more, such as a slower network. Nothing in a recording tells that from a neighbour, so such times
cannot tell; that more is waited for is left to the findings, which say for what.
"""

from collections.abc import Sequence
from dataclasses import replace

import polars as pl

from tracekit import conventions, units
from tracekit.change import Change, Verdict
from tracekit.compare import Comparison
from tracekit.gate.baseline import Recording
from tracekit.quantities import is_share

LEAST_OF_BASELINE = 0.9
"""A recording starves whose processes ran for less than this much of the least share in the baseline."""
OF_PROCESSORS = (conventions.CPU_TIME_METRIC, "checkpoint_cpu_ns")
"""The times that are of processors, not of the clock."""


def running_ratio(recording: Recording) -> float | None:
    """Return the share of a step's time in which a rank's process ran: the median over ranks and steps.

    With several threads it may be above 1. None where the recording does not tell.
    """
    told = recording.samples.filter(pl.col("metric").is_in(["step_time_ns", conventions.CPU_TIME_METRIC]))
    if told["metric"].n_unique() < 2:
        return None
    wide = told.pivot("metric", index=["rank", "step"], values="value").drop_nulls()
    ratios = wide.filter(pl.col("step_time_ns") > 0).select(
        pl.col(conventions.CPU_TIME_METRIC) / pl.col("step_time_ns")
    )
    median = ratios.to_series().median()
    return float(str(median)) if median is not None else None


def without_starved(
    comparison: Comparison, reference: Sequence[Recording], candidate: Sequence[Recording]
) -> Comparison:
    """Return the comparison, in which times that got worse cannot tell if every recording of the candidate starved."""
    before = [ratio for each in reference if (ratio := running_ratio(each)) is not None]
    after = [ratio for each in candidate if (ratio := running_ratio(each)) is not None]
    if not before or not after or max(after) >= LEAST_OF_BASELINE * min(before):
        return comparison
    if not any(_is_doubtful(change) for change in comparison.changes):
        return comparison
    changes = tuple(
        replace(change, verdict=Verdict.CANNOT_TELL) if _is_doubtful(change) else change
        for change in comparison.changes
    )
    note = (
        f"the processes ran for {units.share(max(after))} of a step's time, in the baseline for "
        f"{units.share(min(before))} at least: another program had the processors, or the training waits for more; "
        "times that grew are not held against it, so record again on a machine as free as the baseline's"
    )
    return replace(comparison, changes=changes, notes=(*comparison.notes, note))


def _is_doubtful(change: Change) -> bool:
    of_clock = change.metric.endswith("_ns") and change.metric not in OF_PROCESSORS
    by_clock = of_clock or is_share(change.metric) or change.metric == "tokens_per_second"
    return by_clock and change.verdict is Verdict.WORSE
