"""Contention on a device: the slowdown of each kind of work by each other kind, and its cost.

A kernel is compared with itself, alone and with concurrent work, within one step where possible, so that neither sizes
nor changing clock rates affect the result. For collectives see `collective_contention`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.time import breakdown, launched_work
from tracekit.model import columns, intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.sweep_line import Flags, Ints, distinct
from tracekit.model.trace import Trace

COMPUTE, COMMUNICATION, PREPARATION, COPY = KINDS = ("compute", "communication", "preparation", "copy")
"""Kinds of work: preparation is small compute outside the main lane, before or after collectives."""
ALONE_RATIO, CONCURRENT_RATIO = launched_work.ALONE_RATIO, 0.5
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
        """Number from 0 for each piece of work, equal for equal `kernel`."""
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


PAIRS = (
    (COMPUTE, COMMUNICATION),
    (COMPUTE, PREPARATION),
    (COMPUTE, COPY),
    (PREPARATION, COMPUTE),
    (PREPARATION, COMMUNICATION),
    (COPY, COMPUTE),
    (COPY, COMMUNICATION),
)
"""Pairs of slowed kind and concurrent kind; the slowdown of collectives is measured across ranks."""

STEP_COLUMNS = schema.columns(
    "device step phase unit kind concurrent_kind calls overlapped_ns judged_calls judged_ns lost_ns"
)
KERNEL_COLUMNS = schema.columns(
    "device kind concurrent_kind name grid block calls alone_calls alone_ns concurrent_calls concurrent_ns "
    "overlapped_ns lost_ns slowdown step lane start_ns dur_ns"
)
PREPARATION_COLUMNS = schema.columns(
    "step device phase unit lane name grid start_ns dur_ns alone_ns sample overlapped_ns collective_id "
    "communication_gap gap_ns contention_ns waited_ns",
    sample=pl.String,
)
NO_SAMPLE = "no sample alone"
ALONE = "the same work alone: one rank, prefetching off, or CUDA_LAUNCH_BLOCKING=1"
RECORD = f"record steps with {ALONE}; and record_shapes=True, to distinguish GEMMs of one grid"
"""What to record where the same work never ran alone."""


@trace_fact
@memoize
def by_step(trace: Trace) -> pl.DataFrame:
    """Time in which each kind of work overlapped another in each step and unit, and the resulting loss.

    Columns device, step, phase, unit, kind, concurrent_kind, calls, overlapped_ns (time of `kind` with
    `concurrent_kind` running on other lanes), judged_calls and judged_ns (the part with a solo sample, and with no
    other overlap than the sample's), lost_ns (its extra time over running alone; below 0 where it was faster). One row
    per step, phase, unit and pair of `PAIRS` that overlapped; empty on a CPU run.
    """
    parts = []
    for device, pairs in _all_compared(trace):
        used = [np.flatnonzero(rows.concurrent_ns > 0) for rows in pairs]
        both = list(zip(pairs, used, strict=True))
        table = _with_pairs(
            device.work.select("device", "step", "phase", "unit"),
            pairs,
            used,
            overlapped_ns=[rows.concurrent_ns[index] for rows, index in both],
            judged_calls=[rows.is_judged[index].astype(np.int64) for rows, index in both],
            judged_ns=[np.where(rows.is_judged, rows.concurrent_ns, 0)[index] for rows, index in both],
            lost_ns=[np.where(rows.is_judged, rows.comparison.excess_ns, 0.0)[index] for rows, index in both],
        )
        sums = (
            table.group_by("kind", "concurrent_kind", "device", "step", "phase", "unit", maintain_order=True)
            .agg(pl.len().alias("calls"), pl.col("overlapped_ns", "judged_calls", "judged_ns", "lost_ns").sum())
            .with_columns(pl.col("lost_ns").round())
        )
        parts.append(schema.select(sums, STEP_COLUMNS))
    return schema.concat(parts, STEP_COLUMNS)


@trace_fact
@memoize
def by_kernel(trace: Trace) -> pl.DataFrame:
    """Slowdown of each kernel by each concurrent kind of work.

    Columns KERNEL_COLUMNS: alone_ns and concurrent_ns are medians, the latter of calls overlapped for at least half of
    their time; slowdown is overlapped time over that of the same work alone; step, lane, start_ns and dur_ns are of the
    call that lost most. One row per kernel and pair with both samples, the largest loss first.
    """
    parts = [_sum_by_kernel(device, pairs) for device, pairs in _all_compared(trace)]
    return schema.concat(parts, KERNEL_COLUMNS).sort("lost_ns", descending=True)


@trace_fact
def preparation(trace: Trace) -> pl.DataFrame:
    """Preparation of collectives on devices, its slowdown by compute, and the compute that waited.

    Columns PREPARATION_COLUMNS: alone_ns (solo duration of the same kernel), sample (alone; scaled from another grid;
    null: none), collective_id (which it prepares), communication_gap (that contains it, null where none), gap_ns,
    contention_ns (of that gap) and waited_ns (how long compute was idle because of the gap). One row per activity;
    those of a gap share the last three.
    """
    if not breakdown.lane_devices(trace):
        return schema.empty(PREPARATION_COLUMNS)
    chains = compute_gap_causes.chains(trace).select(
        "collective_id", "communication_gap", pl.col("dur_ns").alias("gap_ns"), "contention_ns", "waited_ns"
    )
    parts = [schema.empty(PREPARATION_COLUMNS)]
    for device in breakdown.lane_devices(trace):
        prepared = launched_work.preparation(trace, device)
        if prepared.is_empty():
            continue
        joined = prepared.join(chains, on="collective_id", how="left", maintain_order="left")
        parts.append(schema.select(joined, PREPARATION_COLUMNS))
    return pl.concat(parts)


@run_fact
def pairs(run: Run) -> pl.DataFrame:
    """Slowdown of each kind of work by each concurrent kind, by rank; use ``run.table``.

    Columns rank, device, kind, concurrent_kind, overlapped_ns, judged_ns, lost_ns, slowdown, low, high (95% interval:
    percentile bootstrap over steps and units; null for fewer than six), unknown (why there is no result; null where
    there is one) and to_record (what to record then). One row per rank, device and overlapping pair of `PAIRS`.
    """
    return pool_pairs(run.table(by_step))


def pool_pairs(steps: pl.DataFrame, *, min_slowdown: float = 0.0) -> pl.DataFrame:
    """Rows of `pairs` from those of `by_step` (columns window, rank and STEP_COLUMNS').

    Pairs with a slowdown of at most `min_slowdown` are left out before their interval is drawn, which takes most of the
    time: its lower bound is not above the slowdown.
    """
    is_judged = pl.col("judged_ns") > 0
    pairs_of_ranks = steps.group_by("rank", "device", "kind", "concurrent_kind", maintain_order=True).agg(
        pl.col("overlapped_ns", "judged_ns", "lost_ns").sum(),
        pl.col("judged_ns").filter(is_judged).alias("together_ns"),
        pl.col("lost_ns").filter(is_judged).alias("excess_ns"),
    )
    rows = []
    for *pair, together_ns, excess_ns in pairs_of_ranks.iter_rows():
        result: tuple[object, ...] = (None, None, None, NO_SAMPLE, ALONE)
        if together_ns:
            if mean_slowdown(together_ns, excess_ns) <= min_slowdown:
                continue
            result = (*pooled_slowdown(together_ns, excess_ns), None, None)
        rows.append((*pair, *result))
    return pl.DataFrame(rows, schema=PAIR_COLUMNS, orient="row").sort("rank", "device", "kind", "concurrent_kind")


PAIR_COLUMNS = {
    "rank": pl.Int64, "device": pl.Int64, "kind": pl.String, "concurrent_kind": pl.String, "overlapped_ns": pl.Int64,
    "judged_ns": pl.Int64, "lost_ns": pl.Int64, "slowdown": pl.Float64, "low": pl.Float64, "high": pl.Float64,
    "unknown": pl.String, "to_record": pl.String,
}  # fmt: skip


@trace_fact
def device_count(trace: Trace) -> pl.DataFrame:
    """Number of devices with activity. Column devices; one row."""
    return pl.DataFrame({"devices": [trace.lanes["device"].n_unique() if trace.on_device else 0]})


@memoize
def device_work(trace: Trace) -> tuple[DeviceWork, ...]:
    """Work of each device; empty for a CPU run, whose lanes are threads that wait for each other."""
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


class _PairRows:
    """Work of one kind that overlapped another kind, or is the same as such work: rows of DeviceWork, compared."""

    def __init__(self, device: DeviceWork, row: Ints, pair: tuple[str, str]) -> None:
        concurrent_kind = KINDS.index(pair[1])
        other_kinds = [kind for kind in range(len(KINDS)) if kind != concurrent_kind]
        dur_ns = device.dur_ns[row]
        other_ns = device.concurrent_ns[row][:, other_kinds]
        overlaps_others = other_ns >= CONCURRENT_RATIO * dur_ns[:, None]
        plain = (overlaps_others | (other_ns <= ALONE_RATIO * dur_ns[:, None])).all(axis=1)
        pattern = overlaps_others @ (1 << np.arange(len(other_kinds)))
        self.pair, self.row, self.concurrent_ns = pair, row, device.concurrent_ns[row, concurrent_kind]
        self.key: Ints = device.kernel_code[row] * (1 << len(other_kinds)) + pattern
        self.solo: Flags = plain & (self.concurrent_ns <= ALONE_RATIO * dur_ns)
        self.concurrent: Flags = plain & (self.concurrent_ns >= CONCURRENT_RATIO * dur_ns)
        self.comparison = compare_with_alone(
            self.key, device.step[row], dur_ns, solo=self.solo, concurrent=self.concurrent
        )
        self.is_judged: Flags = self.comparison.is_judged & plain & ~self.solo


@memoize
def _all_compared(trace: Trace) -> list[tuple[DeviceWork, list[_PairRows]]]:
    compared = []
    for device in device_work(trace):
        pairs = []
        for kind, concurrent_kind in PAIRS:
            is_kind = device.kind == KINDS.index(kind)
            touched = is_kind & (device.concurrent_ns[:, KINDS.index(concurrent_kind)] > 0)
            if touched.any():
                has_touched = np.bincount(device.kernel_code[touched], minlength=int(device.kernel_code.max()) + 1) > 0
                rows = np.flatnonzero(is_kind & has_touched[device.kernel_code])
                pairs.append(_PairRows(device, rows, (kind, concurrent_kind)))
        if pairs:
            compared.append((device, pairs))
    return compared


def _with_pairs(work: pl.DataFrame, pairs: list[_PairRows], used: list[Ints], **columns: list[Any]) -> pl.DataFrame:
    """Used rows of each pair as one table: the columns of `work`, kind, concurrent_kind and `columns`."""
    number = np.repeat(np.arange(len(pairs)), [len(rows) for rows in used])
    kinds = pl.DataFrame([rows.pair for rows in pairs], {"kind": pl.String, "concurrent_kind": pl.String}, orient="row")
    row = np.concatenate([rows.row[index] for rows, index in zip(pairs, used, strict=True)])
    added = [pl.Series(name, np.concatenate(parts)) for name, parts in columns.items()]
    return work[row].hstack([*kinds[number], *added])


def _sum_by_kernel(device: DeviceWork, pairs: list[_PairRows]) -> pl.DataFrame:
    judged_keys = [distinct(rows.key[rows.is_judged]) for rows in pairs]
    used = [
        np.flatnonzero(rows.is_judged | (rows.solo & np.isin(rows.key, keys)))
        for rows, keys in zip(pairs, judged_keys, strict=True)
    ]
    both = list(zip(pairs, used, strict=True))
    table = _with_pairs(
        device.work.select("device", "name", "grid", "block", "step", "lane", "start_ns", "dur_ns"),
        pairs,
        used,
        judged=[rows.is_judged[index] for rows, index in both],
        was_concurrent=[(rows.is_judged & rows.concurrent)[index] for rows, index in both],
        key=[rows.key[index] for rows, index in both],
        by_ns=[rows.concurrent_ns[index] for rows, index in both],
        excess_ns=[np.where(rows.is_judged, rows.comparison.excess_ns, 0.0)[index] for rows, index in both],
    )
    if table.is_empty():
        return schema.empty(KERNEL_COLUMNS)
    dur, costliest = pl.col("dur_ns"), pl.col("excess_ns").arg_max()
    sums = table.group_by("kind", "concurrent_kind", "key", maintain_order=True).agg(
        pl.col("device", "name", "grid", "block").first(),
        pl.len().alias("calls"),
        (~pl.col("judged")).sum().alias("alone_calls"),
        dur.filter(~pl.col("judged")).median().alias("alone_ns"),
        pl.col("was_concurrent").sum().alias("concurrent_calls"),
        dur.filter("was_concurrent").median().alias("concurrent_ns"),
        pl.col("by_ns").filter("judged").sum().alias("overlapped_ns"),
        pl.col("excess_ns").sum().round().alias("lost_ns"),
        pl.col("step", "lane", "start_ns", "dur_ns").get(costliest),
    )
    together, lost = pl.col("overlapped_ns"), pl.col("lost_ns")
    ratio = together / pl.max_horizontal(together - lost, together / 50, 1)
    rounded = pl.col("alone_ns", "concurrent_ns").round()
    return sums.with_columns(ratio.alias("slowdown"), rounded).pipe(schema.select, KERNEL_COLUMNS)


def _work_on_device(trace: Trace, device: int) -> DeviceWork:
    work = launched_work.work(trace, device)
    spans = intervals.from_table(work)
    arrays = launched_work.work_columns(trace, device)
    kind = np.where(arrays.computes, KINDS.index(COMPUTE), KINDS.index(COPY)).astype(np.int64)
    kind[arrays.communicates] = KINDS.index(COMMUNICATION)
    if arrays.computes.any():
        computing_ns = np.bincount(arrays.lane[arrays.computes], (spans[:, 1] - spans[:, 0])[arrays.computes])
        small = (work["role"] == "communication").to_numpy()
        small |= np.isin(arrays.id, launched_work.preparation(trace, device)["id"].to_numpy())
        kind[arrays.computes & (arrays.lane != int(np.argmax(computing_ns))) & small] = KINDS.index(PREPARATION)
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
        launched_work.kernel_ids(trace, device),
    )


def _ratio(together: npt.ArrayLike, excess: npt.ArrayLike) -> Floats:
    time = np.maximum(np.asarray(together, np.float64), 1.0)
    return time / np.maximum(time - excess, time / _MOST_SLOWDOWN)


def _quartiles(key: Ints, values: Ints | Floats, which: Flags, count: int) -> tuple[Floats, Floats, Floats]:
    """Quartiles of each key's values (outer ones rounded outwards, the lower median); NaN: none."""
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
