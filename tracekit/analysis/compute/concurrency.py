"""Concurrency on a device: the kinds of work that overlap each kernel, and its slowdown against running alone."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.time import breakdown, launches
from tracekit.model import columns, intervals
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints, distinct
from tracekit.model.trace import Trace

COMPUTE, COMMUNICATION, PREPARATION, COPY = KINDS = ("compute", "communication", "preparation", "copy")
"""Kinds of work: preparation is small compute outside the main lane, before or after collectives."""
ALONE_RATIO, CONCURRENT_RATIO = launches.ALONE_RATIO, 0.5
"""Work counts as alone up to the first share of overlapped time, as concurrent from the second."""


@dataclass(frozen=True)
class DeviceWork:
    """One device's work by start: its kind (an index into KINDS), and how long each kind overlapped it.

    `concurrent_ns`, shape (n, len(KINDS)), counts work on other lanes. `kernel` is equal for the same work: name, grid,
    block, bytes, and input shapes of the launching op; without recorded shapes, the neighbouring kernels on its lane.
    """

    device: int | None
    work: pl.DataFrame
    step: Ints
    """The step of each piece of work; -1 for none."""
    kind: Ints
    spans: Spans
    concurrent_ns: npt.NDArray[np.int64]
    kernel: npt.NDArray[np.uint64]

    @cached_property
    def kernel_code(self) -> Ints:
        """Return a number from 0 for each piece of work, equal for equal `kernel`."""
        return np.unique(self.kernel, return_inverse=True)[1].astype(np.int64)

    @property
    def dur_ns(self) -> Ints:
        """Duration of each piece of work."""
        return self.spans[:, 1] - self.spans[:, 0]


Floats = npt.NDArray[np.float64]

MAX_SPREAD = 0.5
"""Kernels with a larger interquartile range (over the median of their step) are not the same work."""
_RESAMPLES = 400
_LEAST_BLOCKS = 6
_MOST_SLOWDOWN = 50.0
_INTERVAL = (2.5, 97.5)
_FAR_OUT = 3.0


@dataclass(frozen=True)
class Comparison:
    """Samples compared with the same work alone; arrays in the order of the samples.

    `alone_ns` is the median of the same work alone in the same step, else in any; 0 where not `is_judged`: never alone,
    or durations vary too much to be the same work. `excess_ns` is the extra time of a sample; outliers (Tukey: three
    interquartile ranges beyond the quartiles of concurrent samples) are clipped to that fence.
    """

    alone_ns: Floats
    excess_ns: Floats
    is_judged: Flags


@memoize
def device_work(trace: Trace) -> tuple[DeviceWork, ...]:
    """Return the work of each device; empty for a CPU run, whose lanes are threads that wait for each other."""
    return tuple(_work_on_device(trace, device) for device in breakdown.devices(trace) if device is not None)


def compare_with_alone(key: Ints, step: Ints, dur_ns: Ints, *, solo: Flags, concurrent: Flags) -> Comparison:
    """Compare samples of equal `key`: those that ran `solo` with all others; `concurrent` define the outlier fence."""
    (_, key), (steps, step) = (np.unique(values, return_inverse=True) for values in (key, step))
    _, place = np.unique(key * len(steps) + step, return_inverse=True)
    count = int(key.max(initial=-1)) + 1
    middle = _quartiles(key, dur_ns, solo, count)[1]
    step_ns = _quartiles(place, dur_ns, solo, int(place.max(initial=-1)) + 1)[1]
    low, _, high = _quartiles(key, dur_ns / np.maximum(step_ns[place], 1), solo, count)
    alone_ns = np.where(np.isnan(step_ns[place]), middle[key], step_ns[place])
    low_concurrent, _, high_concurrent = _quartiles(key, dur_ns, concurrent, count)
    with np.errstate(invalid="ignore"):
        alike = high - low <= MAX_SPREAD
        fence = high_concurrent + _FAR_OUT * (high_concurrent - low_concurrent)
        clipped_ns = np.fmin(
            dur_ns.astype(np.float64), np.fmax(np.where(np.isnan(fence), np.inf, fence)[key], alone_ns)
        )
    is_judged = alike[key]
    return Comparison(
        np.where(is_judged, alone_ns, 0.0),
        np.where(is_judged & ~solo, clipped_ns - alone_ns, 0.0),
        np.asarray(is_judged, np.bool_),
    )


def pooled_slowdown(overlapped_ns: npt.ArrayLike, excess_ns: npt.ArrayLike) -> tuple[float, float | None, float | None]:
    """Return overlapped time over the time of the same work alone, and its 95% interval.

    The samples are blocks (steps of ranks and units) with their overlapped time and excess. The interval is a
    percentile bootstrap over the blocks; null for fewer than six.
    """
    together, excess = np.asarray(overlapped_ns, np.float64), np.asarray(excess_ns, np.float64)
    slowdown = mean_slowdown(together, excess)
    if len(together) < _LEAST_BLOCKS:
        return slowdown, None, None
    draws = np.random.default_rng(len(together)).multinomial(
        len(together), np.full(len(together), 1 / len(together)), _RESAMPLES
    )
    low, high = np.percentile(_ratio(draws @ together, draws @ excess), _INTERVAL)
    return slowdown, float(low), float(high)


def mean_slowdown(overlapped_ns: npt.ArrayLike, excess_ns: npt.ArrayLike) -> float:
    """Return overlapped time over the time of the same work alone: `pooled_slowdown` without its interval."""
    return float(_ratio(np.asarray(overlapped_ns, np.float64).sum(), np.asarray(excess_ns, np.float64).sum()))


def _work_on_device(trace: Trace, device: int) -> DeviceWork:
    work = launches.work(trace, device)
    spans = intervals.from_table(work)
    kind = _kinds(trace, device)
    # Time in which each kind overlapped each span; of its own kind, only other lanes count.
    concurrent_ns = np.zeros((len(spans), len(KINDS)), np.int64)
    for code in distinct(kind):
        of_kind = kind == code
        other_rows = np.flatnonzero(~of_kind)
        concurrent_ns[other_rows, code] = intervals.coverage(spans[other_rows], spans[of_kind])
        rows = np.flatnonzero(of_kind)
        concurrent_ns[rows, code] = intervals.coverage(
            spans[rows], intervals.covered_twice(spans[rows], work["lane"].to_numpy()[rows])
        )
    return DeviceWork(
        device,
        work,
        columns.to_ints(work["step"], -1),
        kind,
        spans,
        concurrent_ns,
        launches.kernel_ids(trace, device),
    )


def _kinds(trace: Trace, device: int) -> Ints:
    work = launches.work_columns(trace, device)
    kind = np.where(work.computes, KINDS.index(COMPUTE), KINDS.index(COPY))
    kind[work.communicates] = KINDS.index(COMMUNICATION)
    if work.computes.any():
        dur = work.spans[:, 1] - work.spans[:, 0]
        main = int(np.argmax(np.bincount(work.lane[work.computes], weights=dur[work.computes])))
        small = (launches.work(trace, device)["role"] == "communication").to_numpy()
        small |= np.isin(work.id, launches.preparation(trace, device)["id"].to_numpy())
        kind[work.computes & (work.lane != main) & small] = KINDS.index(PREPARATION)
    return kind.astype(np.int64)


def _ratio(together: npt.ArrayLike, excess: npt.ArrayLike) -> Floats:
    time = np.maximum(np.asarray(together, np.float64), 1.0)
    return time / np.maximum(time - excess, time / _MOST_SLOWDOWN)


def _quartiles(key: Ints, values: Ints | Floats, which: Flags, count: int) -> tuple[Floats, Floats, Floats]:
    """Return the quartiles of each key's values (outer ones rounded outwards, the lower median); NaN: none."""
    rows = np.flatnonzero(which)
    rows = rows[np.lexsort((values[rows], key[rows]))]
    many = np.bincount(key[rows], minlength=count)
    first = np.cumsum(many) - many
    quartiles = []
    for quarter in (1, 2, 3):
        index = first + (np.maximum(many - 1, 0) * quarter + (3 if quarter == 3 else 0)) // 4
        quartile = values[rows[np.minimum(index, len(rows) - 1)]] if len(rows) else np.zeros(count)
        quartiles.append(np.where(many > 0, quartile, np.nan))
    return quartiles[0], quartiles[1], quartiles[2]
