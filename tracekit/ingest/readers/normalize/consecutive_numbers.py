"""Consecutive numbers of a recording's events: how many the profiler gave, and so how many events are missing."""

import numpy as np
import polars as pl

from tracekit.model.nesting import Flags, Ints

OP_BLOCK_SIZE = 256
"""A thread's block of numbers of ops begins after a multiple of this: where one follows another, no op is missing."""
_WIDE_TIMES, _USUAL_QUANTILE = 300, 0.95
"""Multiple of the usual gap from which on a gap parts numbers that are no neighbours. In a recording of which 1% of
the ops were kept, the widest of 2,300 gaps is 212 times the usual one; in complete ones no gap exceeds two blocks."""
_FEW_RATIO = 0.01
"""Share of the numbers, or one, up to which those far from all others are wrong, as it is of times (`odd_times`)."""


def given_count(events: pl.DataFrame, *, block_size: int = 0) -> int:
    """Count of the numbers from the first event to the last: columns number, source (thread and kind) and start_ns.

    Few numbers far from all others are wrong and do not count. No number is missing between those of two counters:
    numbers far apart that have no source in common, or that a source gave at the same time.

    >>> events = {"number": [*range(101, 201), 900_000], "source": 1, "start_ns": range(101)}
    >>> given_count(pl.DataFrame(events))
    100
    """
    first_events = events.sort("number").unique("number", keep="first", maintain_order=True)
    numbers = first_events["number"].to_numpy()
    if not len(numbers):
        return 0
    is_outlier = _is_outlier(numbers, _range_starts(numbers, block_size))
    numbers = numbers[~is_outlier]
    range_starts = _range_starts(numbers, block_size)
    gaps = _gaps(numbers, block_size)
    gaps[range_starts[1:] & ~_follows_in_time(first_events.filter(pl.Series(~is_outlier)), range_starts)[1:]] = 1
    return 1 + int(gaps.sum())


def _gaps(numbers: Ints, block_size: int) -> Ints:
    """Distance from each number to the next one; 1 from the end of a block to the begin of another."""
    gaps = np.diff(numbers)
    if block_size:
        gaps[(numbers[:-1] % block_size == 0) & (numbers[1:] % block_size == 1)] = 1
    return gaps


def _range_starts(numbers: Ints, block_size: int) -> Flags:
    """Flags of the sorted numbers that begin a range: the gap before them is far wider than usual."""
    gaps = _gaps(numbers, block_size)
    usual_gap = float(np.quantile(gaps, _USUAL_QUANTILE)) if len(gaps) else 1.0
    return np.append(True, gaps > max(OP_BLOCK_SIZE, _WIDE_TIMES * usual_gap))


def _is_outlier(numbers: Ints, range_starts: Flags) -> Flags:
    """Flags of the numbers in the smallest ranges, which hold few of all numbers together."""
    range_index = np.cumsum(range_starts) - 1
    sizes = np.bincount(range_index)
    by_size = np.argsort(sizes, kind="stable")
    is_small = np.zeros(len(sizes), bool)
    is_small[by_size[np.cumsum(sizes[by_size]) <= max(_FEW_RATIO * len(numbers), 1)]] = True
    return np.asarray(is_small[range_index])


def _follows_in_time(events: pl.DataFrame, range_starts: Flags) -> Flags:
    """Flags of the numbers that begin a range of which a source gave most after it gave all of an earlier range."""
    if range_starts.sum() == 1:
        return np.zeros(len(range_starts), bool)
    ranges = (
        events.with_columns(pl.Series("range", np.cumsum(range_starts)))
        .group_by("source", "range")
        .agg(pl.col("start_ns").max().alias("last_ns"), pl.col("start_ns").median().alias("middle_ns"))
        .sort("range")
    )
    later = ranges.filter((pl.col("middle_ns") >= pl.col("last_ns").shift(1).cum_max()).over("source"))
    return range_starts & np.isin(np.cumsum(range_starts), later["range"].to_numpy())
