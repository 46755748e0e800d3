"""Counters of the GPUs by step: clocks, power, temperature, throttle reasons, memory errors.

They are those of the metrics log; else clocks are the means of the samples that Nsight Systems took.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.compute import contention
from tracekit.analysis.compute.contention import COMMUNICATION, COMPUTE, KINDS, DeviceWork, Floats
from tracekit.analysis.time import device_stalls
from tracekit.conventions import device_metrics
from tracekit.conventions import device_metrics as names
from tracekit.model import columns, schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace

_FLOAT, _TEXTS = pl.Float64(), pl.List(pl.String())
_MAX_BITS = 53  # the bits that a JSON number has exactly
_MOST = {
    names.SM_CLOCK: 1e5,
    names.MEMORY_CLOCK: 1e5,
    names.POWER: 1e6,
    names.POWER_LIMIT: 1e6,
    names.TEMPERATURE: 1e3,
    names.UTILIZATION: 1.0,
    names.MEMORY_UTILIZATION: 1.0,
}
"""The largest value of a counter that can be true."""
_MEANINGS = {
    names.SM_CLOCK: "clock of the multiprocessors",
    names.MEMORY_CLOCK: "clock of the memory",
    names.POWER: "power draw",
    names.TEMPERATURE: "temperature of the GPU",
    names.UTILIZATION: "share of the driver's sampling period in which a kernel ran",
    names.MEMORY_UTILIZATION: "share of it in which memory was read or written",
}

DEVICE_METRICS = schema.table(
    "device_metrics",
    "step with counters of the GPU: in the metrics log (record --device-metrics), else in an Nsight Systems report",
    schema.column("step", "Training step."),
    *(
        schema.column(form, f"{which} over the step's samples: {meaning}.", _FLOAT)
        for name, meaning in _MEANINGS.items()
        for form, which in ((name, "Mean"), (names.least(name), "Smallest"), (names.most(name), "Largest"))
    ),
    schema.column(names.POWER_LIMIT, "Enforced power limit.", _FLOAT),
    schema.column(names.ECC_CORRECTED, "Corrected memory errors since the driver was loaded."),
    schema.column(names.ECC_UNCORRECTED, "Uncorrected memory errors since the driver was loaded."),
    schema.column(names.REMAPPED_ROWS, "Rows of the memory that were replaced by spare ones."),
    schema.column(names.PENDING_ROW_REMAP, "1 where another row is replaced at the next reset of the GPU, else 0."),
    schema.column(names.THROTTLE_REASONS, "Why clocks were not higher, over all samples, such as power cap.", _TEXTS),
    schema.column(names.SAMPLES, "Samples in the step; 0: the values are those of the latest sample before."),
)
_COUNTERS = [name for name in names.NAMES if name != names.THROTTLE_REASONS]
_SAMPLED_CLOCK = "GPC Clock Frequency"
"""The metric of Nsight Systems that is the clock of the multiprocessors, which are in the GPCs."""
OF_STEPS = (names.SM_CLOCK, names.MEMORY_CLOCK, names.POWER, names.TEMPERATURE, names.THROTTLE_REASONS)
"""The counters that a breakdown by step has."""

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


@trace_fact(table=DEVICE_METRICS)
def device_counters(trace: Trace) -> pl.DataFrame:
    """Counters of the rank's GPU: columns as DEVICE_METRICS, one row per step that has any.

    Values that no GPU can have are null.
    """
    if trace.metrics.is_empty():
        return _sampled_clocks(trace)
    logged = trace.metrics.filter(pl.col("name").is_in(names.NAMES), pl.col("value").is_finite()).drop_nulls()
    if logged.is_empty():
        return _sampled_clocks(trace)
    wide = logged.pivot("name", index="step", values="value", aggregate_function="last").sort("step")
    absent = [pl.lit(None, _FLOAT).alias(name) for name in names.NAMES if name not in wide.columns]
    counters = wide.with_columns(absent).with_columns(
        *(_plausible(name) for name in _COUNTERS), _reasons().alias(names.THROTTLE_REASONS)
    )
    return DEVICE_METRICS.conform(counters.filter(pl.any_horizontal(pl.all().exclude("step").is_not_null())))


def _sampled_clocks(trace: Trace) -> pl.DataFrame:
    samples = trace.counters.filter(pl.col("name").str.starts_with(_SAMPLED_CLOCK)).sort("at_ns")
    steps = trace.steps.drop_nulls("step").select("step", "start_ns", "end_ns", "device").sort("start_ns")
    if samples.is_empty() or steps.is_empty():
        return DEVICE_METRICS.empty()
    by = "device" if samples["device"].null_count() == 0 else None
    in_steps = samples.join_asof(
        steps, left_on="at_ns", right_on="start_ns", by=by, strategy="backward", check_sortedness=False
    )
    clock = pl.col("value")
    clocks = (
        in_steps.filter(pl.col("at_ns") < pl.col("end_ns"))
        .group_by("step")
        .agg(
            clock.mean().alias(names.SM_CLOCK),
            clock.min().alias(names.least(names.SM_CLOCK)),
            clock.max().alias(names.most(names.SM_CLOCK)),
            pl.len().alias(names.SAMPLES),
        )
    )
    return DEVICE_METRICS.conform(clocks.sort("step"))


def busy_clock() -> pl.Expr:
    """Clock of the multiprocessors while the GPU is busy, in MHz, from the columns of DEVICE_METRICS.

    In a step in which the GPU is idle at times, its clock drops without a fault: then the highest one counts.
    """
    is_idle = pl.col(names.THROTTLE_REASONS).list.contains(names.REASONS[names.GPU_IDLE]).fill_null(value=False)
    return pl.when(is_idle).then(names.most(names.SM_CLOCK)).otherwise(names.SM_CLOCK)


@trace_fact
@memoize
def clock_drops(trace: Trace) -> pl.DataFrame:
    """Devices whose kernels all become slower at some moment of the window.

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
    """Compute kernels that run with a lower clock.

    Columns KERNEL_COLUMNS: excess_ns (beyond what the kernel would take with the clock before; by the slowdown of the
    same kernel, else of the device); one row per kernel since the drop.
    """
    parts = [schema.empty(KERNEL_COLUMNS)]
    for drop in _drops(trace):
        device = next(work for work in contention.device_work(trace) if work.device == drop.device)
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
    """Recorded clock of the rank's GPU before and after each drop of `clock_drops`.

    Columns CLOCK_COLUMNS: before_mhz and since_mhz (medians over steps of the clock while the GPU is busy, the step of
    the drop left out), reasons (what limits the clock in most steps since, but not before); no rows without counters of
    both times.
    """
    if clock_drops(trace).is_empty():
        return schema.empty(CLOCK_COLUMNS)
    counters = device_counters(trace).with_columns(clock_mhz=busy_clock())
    clocked = counters.drop_nulls(["step", "clock_mhz"])
    rows = []
    for device, drop_step in clock_drops(trace).drop_nulls("step").select("device", "step").iter_rows():
        before, since = clocked.filter(pl.col("step") < drop_step), clocked.filter(pl.col("step") > drop_step)
        if before.height and since.height:
            reasons = [reason for reason in _usual_reasons(since) if reason not in _usual_reasons(before)]
            rows.append((device, before["clock_mhz"].median(), since["clock_mhz"].median(), reasons))
    return pl.DataFrame(rows, schema=CLOCK_COLUMNS, orient="row")


def _plausible(name: str) -> pl.Expr:
    limit = _MOST.get(name.removeprefix("min_").removeprefix("max_"), 2.0**_MAX_BITS)
    return pl.when(pl.col(name).is_between(0, limit)).then(name)


def _reasons() -> pl.Expr:
    """Throttle reasons in words; null where they are not known."""
    bits = pl.col(names.THROTTLE_REASONS)
    is_valid = bits.is_between(0, 2.0**_MAX_BITS, closed="left") & (bits == bits.floor())
    valid_bits = pl.when(is_valid).then(bits).cast(pl.Int64)
    words = [pl.when((valid_bits & bit) != 0).then(pl.lit(word)) for bit, word in names.REASONS.items()]
    return pl.when(valid_bits.is_not_null()).then(pl.concat_list(words).list.drop_nulls())


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
    drops = (_drop(device, paused) for device in contention.device_work(trace))
    return [drop for drop in drops if drop is not None]


def _drop(device: DeviceWork, paused: Ints) -> _Drop | None:
    is_alone = device.concurrent_ns[:, KINDS.index(COMMUNICATION)] <= contention.ALONE_RATIO * device.dur_ns
    is_alone &= (device.kind == KINDS.index(COMPUTE)) & (device.dur_ns > 0)
    is_alone &= ~np.isin(device.work["id"].to_numpy(), paused)
    rows = np.flatnonzero(is_alone)
    ids, code = np.unique(device.kernel[rows], return_inverse=True)
    dur = device.dur_ns[rows].astype(np.float64)
    if not len(rows):
        return None
    # The sample from which on the same kernels take longest, compared with those before.
    relative = np.log(dur)
    mean = np.bincount(code, relative) / np.bincount(code)
    change = int(np.argmin(np.cumsum(dur * (relative - mean[code])))) + 1
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
