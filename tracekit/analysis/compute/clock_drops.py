"""Clock drops: all kernels of a device become slower together at some moment, as with a lower clock."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.compute import concurrency, device_counters
from tracekit.analysis.compute.concurrency import COMMUNICATION, COMPUTE, KINDS, DeviceWork, Floats
from tracekit.analysis.time import device_stalls
from tracekit.conventions import device_metrics
from tracekit.model import columns, schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace

COLUMNS = schema.columns(
    "device step since_ns slowdown low high kernels", slowdown=pl.Float64, low=pl.Float64, high=pl.Float64
)
KERNEL_COLUMNS = schema.columns("device activity_id name step lane start_ns dur_ns excess_ns")
CLOCK_COLUMNS = schema.columns(
    "device before_mhz since_mhz reasons", before_mhz=pl.Float64, since_mhz=pl.Float64, reasons=pl.List(pl.String)
)
MIN_SLOWDOWN = 1.03
"""A smaller change is within what clocks vary by themselves."""
_MIN_KERNELS = 5
_MIN_SAMPLES = 30
_MIN_TIME_RATIO = 0.3
_TOGETHER_RATIO = 1 / 3
"""A kernel that is bound by memory loses less to a lower clock than one that is bound by arithmetic, but it loses."""


@trace_fact
@memoize
def clock_drops(trace: Trace) -> pl.DataFrame:
    """Return the devices whose kernels all become slower at some moment of the window.

    Columns device, step (in which that happens), since_ns, slowdown (median over kernels, by their time: duration after
    over before), low and high (quartiles), kernels (how many were compared); one row per such device. Each kernel is
    compared with the same kernel before, where no collective overlaps it. The moment is that after which the sum of
    their relative durations is highest (CUSUM). It counts as a drop of the clock if the slowdown exceeds both
    MIN_SLOWDOWN and how much the same kernel varies before and after (interquartile range), and if kernels with three
    quarters of the time are slower by at least a third of it: other causes slow single kernels.
    """
    rows = [
        (drop.device, drop.step, drop.since_ns, drop.slowdown, drop.low, drop.high, len(drop.ratio_of))
        for drop in _drops(trace)
    ]
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


@trace_fact
@memoize
def slowed_kernels(trace: Trace) -> pl.DataFrame:
    """Return the compute kernels that run with a lower clock.

    Columns KERNEL_COLUMNS: excess_ns (beyond what the kernel would take with the clock before; by the slowdown of the
    same kernel, else of the device); one row per kernel since the drop.
    """
    parts = [schema.empty(KERNEL_COLUMNS)]
    for drop in _drops(trace):
        device = next(work for work in concurrency.device_work(trace) if work.device == drop.device)
        since = (device.kind == KINDS.index(COMPUTE)) & (device.spans[:, 0] >= drop.since_ns)
        rows = np.flatnonzero(since)
        slower = [drop.ratio_of.get(kernel, drop.slowdown) for kernel in device.kernel[rows].tolist()]
        excess_ns = device.dur_ns[rows] * (1 - 1 / np.maximum(np.array(slower), 1.0))
        kernels = device.work[rows].with_columns(pl.col("id").alias("activity_id"))
        with_excess = kernels.with_columns(pl.Series("excess_ns", np.round(excess_ns), pl.Int64))
        parts.append(schema.select(with_excess, KERNEL_COLUMNS))
    return pl.concat(parts)


@trace_fact
@memoize
def recorded_clocks(trace: Trace) -> pl.DataFrame:
    """Return the recorded clock of the rank's GPU before and after each drop of `clock_drops`.

    Columns CLOCK_COLUMNS: before_mhz and since_mhz (medians over steps of the clock while the GPU is busy, the step of
    the drop left out), reasons (what limits the clock in most steps since, but not before); no rows without counters of
    both times.
    """
    if clock_drops(trace).is_empty():
        return schema.empty(CLOCK_COLUMNS)
    counters = device_counters.device_counters(trace).with_columns(clock_mhz=device_counters.busy_clock())
    clocked = counters.drop_nulls(["step", "clock_mhz"])
    rows = []
    for device, drop_step in clock_drops(trace).drop_nulls("step").select("device", "step").iter_rows():
        before, since = clocked.filter(pl.col("step") < drop_step), clocked.filter(pl.col("step") > drop_step)
        if before.height and since.height:
            reasons = [reason for reason in _usual_reasons(since) if reason not in _usual_reasons(before)]
            rows.append((device, before["clock_mhz"].median(), since["clock_mhz"].median(), reasons))
    return pl.DataFrame(rows, schema=CLOCK_COLUMNS, orient="row")


def _usual_reasons(counters: pl.DataFrame) -> list[str]:
    reason_counts = counters[device_metrics.THROTTLE_REASONS].drop_nulls().explode().drop_nulls().value_counts()
    return reason_counts.filter(pl.col("count") * 2 > counters.height)[device_metrics.THROTTLE_REASONS].sort().to_list()


@dataclass(frozen=True)
class _Drop:
    """A drop of one device's clock; `ratio_of`: duration after over before, by kernel."""

    device: int | None
    step: int | None
    since_ns: int
    slowdown: float
    low: float
    high: float
    ratio_of: dict[int, float]


@memoize
def _drops(trace: Trace) -> list[_Drop]:
    stalls = device_stalls.device_stalls(trace)
    paused = columns.ids(stalls["activity_id"])[columns.flags(stalls["kind"] == device_stalls.PAUSED)]
    drops = (_drop(device, paused) for device in concurrency.device_work(trace))
    return [drop for drop in drops if drop is not None]


def _drop(device: DeviceWork, paused: Ints) -> _Drop | None:
    is_alone = device.concurrent_ns[:, KINDS.index(COMMUNICATION)] <= concurrency.ALONE_RATIO * device.dur_ns
    is_alone &= (device.kind == KINDS.index(COMPUTE)) & (device.dur_ns > 0)
    is_alone &= ~np.isin(device.work["id"].to_numpy(), paused)
    rows = np.flatnonzero(is_alone)
    ids, code = np.unique(device.kernel[rows], return_inverse=True)
    dur = device.dur_ns[rows].astype(np.float64)
    change = _change(code, dur)
    if min(change, len(rows) - change) < _MIN_SAMPLES:
        return None
    after = np.arange(len(rows)) >= change
    # Each kernel's median duration after over before (NaN where it is on one side only), and its time.
    both = pl.DataFrame({"code": code, "dur": dur, "after": after})
    medians = both.group_by("code").agg(
        pl.col("dur").filter("after").median().alias("late"),
        pl.col("dur").filter(~pl.col("after")).median().alias("early"),
        pl.col("dur").sum().alias("time"),
    )
    ordered = medians.sort("code").select((pl.col("late") / pl.col("early")).fill_null(float("nan")).alias("r"), "time")
    ratio, weight = ordered["r"].to_numpy(), ordered["time"].to_numpy()
    is_compared = ~np.isnan(ratio)
    if is_compared.sum() < _MIN_KERNELS or weight[is_compared].sum() < _MIN_TIME_RATIO * dur.sum():
        return None
    low, slowdown, high = _weighted_quartiles(ratio[is_compared], weight[is_compared])
    is_common = low - 1 >= _TOGETHER_RATIO * (slowdown - 1)
    if slowdown < MIN_SLOWDOWN or not is_common or np.log(slowdown) <= _spread(code, dur, after):
        return None
    step = device.work["step"][int(rows[change])]
    ratio_of = dict(zip(ids[is_compared].tolist(), ratio[is_compared].tolist(), strict=True))
    return _Drop(device.device, step, int(device.spans[rows[change], 0]), slowdown, low, high, ratio_of)


def _change(code: Ints, dur: Floats) -> int:
    """Return the sample from which on the same kernels take longest, compared with those before."""
    if not len(dur):
        return 0
    relative = np.log(dur)
    mean = np.bincount(code, relative) / np.bincount(code)
    return int(np.argmin(np.cumsum(dur * (relative - mean[code])))) + 1


def _spread(code: Ints, dur: Floats, after: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    """Variation of the same kernel on one side: the interquartile range of relative durations, by time."""
    side = 2 * code + after.astype(np.int64)
    middle = pl.DataFrame({"side": side, "dur": dur}).select(pl.col("dur").median().over("side"))["dur"].to_numpy()
    many = np.bincount(side)[side] > 1
    if not many.any():
        return 0.0
    low, _, high = _weighted_quartiles(np.log(dur / middle)[many], dur[many])
    return high - low


def _weighted_quartiles(values: Floats, weight: Floats) -> tuple[float, float, float]:
    order = np.argsort(values, kind="stable")
    share = np.cumsum(weight[order]) / weight.sum()
    low, middle, high = (float(values[order[np.searchsorted(share, q)]]) for q in (0.25, 0.5, 0.75))
    return low, middle, high
