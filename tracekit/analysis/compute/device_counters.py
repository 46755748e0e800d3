"""Counters of the GPUs by step: clocks, power, temperature, throttle reasons, memory errors.

They are those of the metrics log; else clocks are the means of the samples that Nsight Systems took.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl

from tracekit.analysis.compute import contention
from tracekit.analysis.compute.contention import COMMUNICATION, COMPUTE, KINDS, DeviceWork, Floats
from tracekit.analysis.time import device_stalls
from tracekit.conventions import device_metrics
from tracekit.conventions import device_metrics as names
from tracekit.model import columns, intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import Trace

_NO_SPANS: Spans = np.empty((0, 2), np.int64)
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
    "device step since_ns slowdown low high kernels is_gradual spans slow_ns",
    **dict.fromkeys(("slowdown", "low", "high"), pl.Float64),
    is_gradual=pl.Boolean,
)
VARIATION_COLUMNS = schema.columns("device ratio", ratio=pl.Float64)
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
_RAMPS = np.arange(6) / 8
"""Where a clock that drops steadily may begin to do so, as shares of the window."""
_SHAPED_RATIO = 0.75
"""Share of the variation between steps that a drop has to explain: by varying work, each step is another level."""
_MOST_LEVELS = 64
_MIN_SPAN_SLOWDOWN = 1.1
"""A span of time is the slowest of many: by chance, one is slower than the rest by a few percent."""
_MAX_SPAN_RATIO = 0.6
"""A span with more of the kernels leaves too few that are fast to compare with."""
_BOUNDARY_RATIO = 0.1
"""A span that begins and ends this near to ends of steps, as a share of their kernels, is work of these steps."""
_VARYING_RATIO = 0.5
"""Work that varies by this share of a drop on another rank makes the drop as likely to be work, too."""


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
    over before; of a gradual drop, of the last kernels over the first), low and high (quartiles), kernels (how many
    were compared), is_gradual (they take longer and longer), spans and slow_ns (how often they are slow for a while
    only, once or in the same part of every step, and how long in total; 0 where it lasts); one row per such device.
    Each kernel is compared with the same kernel before, where no collective overlaps it. The moment is that after which
    the sum of their relative durations is highest (CUSUM). It counts as a drop of the clock if the slowdown exceeds
    both MIN_SLOWDOWN and how much the same kernel varies before and after (interquartile range), if kernels with three
    quarters of the time are slower by at least a third of it, since other causes slow single kernels, and if a drop at
    one moment, or a steady one, explains three quarters of how the steps differ: varying work has a level of its own in
    each step.
    """
    rows = [
        (
            *(device, drop.step, drop.since_ns, drop.slowdown, drop.low, drop.high),
            *(len(drop.ratio_of), drop.is_gradual, len(drop.spans), intervals.length(drop.spans)),
        )
        for device, change in _changes(trace)
        if (drop := change.drop) is not None
    ]
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


@trace_fact
@memoize
def work_variation(trace: Trace) -> pl.DataFrame:
    """Devices whose kernels take longer in some steps and shorter in others, not as by a clock that drops once.

    Columns device, ratio (of the slowest step's kernels to the fastest's, at the same kernels); one row per device.
    """
    rows = [(device, change.level_ratio) for device, change in _changes(trace) if not change.is_drop_shaped]
    return pl.DataFrame(rows, schema=VARIATION_COLUMNS, orient="row")


@run_fact
def confirmed_drops(run: Run) -> pl.DataFrame:
    """The rows of `clock_drops` of all ranks, columns window, rank and COLUMNS'; use ``run.table``.

    Without those in windows in which the work of another device varies by half of the slowdown or more. What recurs in
    every step counts if it does so on half of the ranks: of a few, the comparison with the others has more to go by.
    """
    drops, variation = run.table(clock_drops), run.table(work_variation)
    most = variation.group_by("window").agg((pl.col("ratio").max() - 1).alias("varies_by"))
    compared = drops.join(most, on="window", how="left", maintain_order="left")
    is_own = pl.col("varies_by").fill_null(0.0) < _VARYING_RATIO * (pl.col("slowdown") - 1)
    recurs_on = pl.col("rank").filter(pl.col("spans") > 1).n_unique().over("window")
    is_common = (pl.col("spans") <= 1) | (2 * recurs_on >= len(run.ranks))
    return compared.filter(is_own, is_common).drop("varies_by")


@trace_fact
@memoize
def slowed_kernels(trace: Trace) -> pl.DataFrame:
    """Compute kernels that run with a lower clock.

    Columns KERNEL_COLUMNS: excess_ns (beyond what the kernel would take with the clock before; by the slowdown of the
    same kernel, else of the device; of a gradual drop, by how far it had come); one row per kernel since the drop.
    """
    parts = [schema.empty(KERNEL_COLUMNS)]
    for work, (_, change) in zip(contention.device_work(trace), _changes(trace), strict=True):
        drop = change.drop
        if drop is None:
            continue
        since = (work.kind == KINDS.index(COMPUTE)) & (work.spans[:, 0] >= drop.since_ns)
        if len(drop.spans):
            span = np.searchsorted(drop.spans[:, 0], work.spans[:, 0], "right") - 1
            since &= work.spans[:, 0] < drop.spans[np.maximum(span, 0), 1]
        rows = np.flatnonzero(since)
        slower = np.array([drop.ratio_of.get(kernel, drop.slowdown) for kernel in work.kernel[rows].tolist()])
        if drop.is_gradual:
            reached = (work.spans[rows, 0] - drop.since_ns) / max(1, drop.until_ns - drop.since_ns)
            slower = 1 + (drop.slowdown - 1) * np.minimum(reached, 1.0)
        excess_ns = work.dur_ns[rows] * (1 - 1 / np.maximum(slower, 1.0))
        kernels = work.work[rows].with_columns(pl.col("id").alias("activity_id"))
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
    drops = clock_drops(trace).drop_nulls("step").select("device", "step", "is_gradual")
    for device, drop_step, is_gradual in drops.iter_rows():
        before, since = clocked.filter(pl.col("step") < drop_step), clocked.filter(pl.col("step") > drop_step)
        if is_gradual:
            before, since = clocked.head(1), clocked.tail(1)
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

    step: int | None
    since_ns: int
    until_ns: int
    slowdown: float
    low: float
    high: float
    ratio_of: dict[int, float]
    is_gradual: bool
    spans: Spans
    """When kernels are slow, if only for a while."""


@dataclass(frozen=True)
class _Change:
    """How the same kernels of a device change over the window.

    `level_ratio` is that of the slowest step to the fastest; `is_drop_shaped`: one drop explains it.
    """

    drop: _Drop | None = None
    level_ratio: float = 1.0
    is_drop_shaped: bool = True


@memoize
def _changes(trace: Trace) -> list[tuple[int | None, _Change]]:
    stalls = device_stalls.device_stalls(trace)
    paused = columns.ids(stalls["activity_id"])[columns.flags(stalls["kind"] == device_stalls.PAUSED)]
    return [(device.device, _change(device, paused)) for device in contention.device_work(trace)]


def _change(device: DeviceWork, paused: Ints) -> _Change:
    is_alone = device.concurrent_ns[:, KINDS.index(COMMUNICATION)] <= contention.ALONE_RATIO * device.dur_ns
    is_alone &= (device.kind == KINDS.index(COMPUTE)) & (device.dur_ns > 0)
    is_alone &= ~np.isin(device.work["id"].to_numpy(), paused)
    rows = np.flatnonzero(is_alone)
    if len(rows) < 2 * _MIN_SAMPLES:
        return _Change()
    ids, code = np.unique(device.kernel[rows], return_inverse=True)
    times = _KernelTimes(code, device.dur_ns[rows].astype(np.float64), device.spans[rows, 0].astype(np.float64))
    # The sample from which on the same kernels take longest, compared with those before.
    relative = np.log(times.dur_ns)
    relative -= (np.bincount(code, relative) / np.bincount(code))[code]
    change = int(np.argmin(np.cumsum(times.dur_ns * relative))) + 1
    after = np.arange(len(rows)) >= change
    ramps = [np.maximum(times.place - begin, 0.0) / (1 - begin) for begin in _RAMPS.tolist()]
    (_, by_drop), *fits = (times.fit(shape) for shape in (after.astype(np.float64), *ramps))
    best = int(np.argmax([explained for _, explained in fits]))
    slowdown, by_ramp = fits[best]
    level_ratio, by_steps = times.levels(device.step[rows])
    span, by_span = _slowest_span(times, device.step[rows])
    is_drop_shaped = max(by_drop, by_ramp, by_span) >= _SHAPED_RATIO * by_steps
    if is_drop_shaped and by_span > max(by_drop, by_ramp):
        return _Change(_temporary_drop(times, span, ids, device, rows), level_ratio, is_drop_shaped)
    drop = _drop(times, after, ids) if is_drop_shaped and min(change, len(rows) - change) >= _MIN_SAMPLES else None
    if drop is not None:
        is_gradual = by_ramp > by_drop
        first = int(np.searchsorted(times.start_ns, times.start_ns[0] + _RAMPS[best] * np.ptp(times.start_ns)))
        begin = int(rows[first if is_gradual else change])
        drop = replace(
            drop,
            step=device.work["step"][begin:].drop_nulls().first(),  # type: ignore[arg-type]
            since_ns=int(device.spans[begin, 0]),
            until_ns=int(times.start_ns[-1]),
            slowdown=slowdown if is_gradual else drop.slowdown,
            is_gradual=is_gradual,
        )
    return _Change(drop, level_ratio, is_drop_shaped)


def _slowest_span(times: "_KernelTimes", step: Ints) -> tuple[Flags, float]:
    """The part of the window, or of every step, in which the same kernels take longest; the squares that it explains.

    None of it, and 0, if it lasts from one end of a step to another: that is work of these steps.
    """
    count = len(step)
    names, number = np.unique(step, return_inverse=True)
    sizes = np.bincount(number)
    nth = np.arange(count) - np.searchsorted(number, number)  # samples are in order, and so are steps
    place = (nth + 0.5) / sizes[number]
    best, by_best = np.zeros(count, np.bool_), 0.0
    orders = [np.arange(count)] + ([np.argsort(place, kind="stable")] if len(names) > 1 else [])
    for is_of_every_step, order in enumerate(orders):
        first, last = times.heaviest_part(order)
        if last == count and not is_of_every_step:
            continue  # it lasts until the window ends
        inside = np.zeros(count, np.bool_)
        inside[order[first:last]] = True
        is_large = _MIN_SAMPLES <= last - first <= _MAX_SPAN_RATIO * count and count - (last - first) >= _MIN_SAMPLES
        ends = (place[order[first]], 1 - place[order[last - 1]])
        is_within = max(min(end, 1 - end) for end in ends) > _BOUNDARY_RATIO
        _, explained = times.fit(inside.astype(np.float64))
        if is_large and is_within and explained > by_best:
            best, by_best = inside, explained
    return best, by_best


def _temporary_drop(
    times: "_KernelTimes",
    inside: Flags,
    ids: np.ndarray[tuple[int], np.dtype[np.uint64]],
    device: DeviceWork,
    rows: Ints,
) -> _Drop | None:
    """The slowdown of kernels that lasts for a while, once or in every step; None if it is small, or not of all."""
    drop = _drop(times, inside, ids)
    if drop is None or drop.slowdown < _MIN_SPAN_SLOWDOWN:
        return None
    edges = np.flatnonzero(np.diff(np.concatenate(([0], inside.view(np.int8), [0]))))
    spans = np.stack((device.spans[rows[edges[::2]], 0], device.spans[rows[edges[1::2] - 1], 1]), axis=1)
    first = device.work["step"][int(rows[edges[0]])]
    return replace(drop, step=first, since_ns=int(spans[0, 0]), until_ns=int(spans[-1, 1]), spans=spans)


@dataclass(frozen=True, eq=False)
class _KernelTimes:
    """Kernels of a device by start: the code of each, its duration and start."""

    code: Ints
    dur_ns: Floats
    start_ns: Floats

    @cached_property
    def mean_ns(self) -> Floats:
        """Mean duration of the same kernel, for each: its weight, and what it is compared with."""
        return self._means(self.dur_ns, np.ones(len(self.code)))

    @cached_property
    def place(self) -> Floats:
        """Where in the window each kernel starts, from 0 to 1."""
        return np.asarray((self.start_ns - self.start_ns[0]) / max(1.0, float(np.ptp(self.start_ns))))

    @cached_property
    def _excess(self) -> Floats:
        """How much longer than the mean each takes, without outliers: one that takes ten times as long says little."""
        excess = self.dur_ns / self.mean_ns - 1
        most = float(np.quantile(np.abs(excess), 0.9))
        return np.clip(excess, -most, most)

    def _means(self, values: Floats, weight: Floats) -> Floats:
        means = np.bincount(self.code, weight * values) / np.bincount(self.code, weight)
        return np.asarray(means[self.code], np.float64)

    def fit(self, shape: Floats) -> tuple[float, float]:
        """How many times as long kernels take where `shape` is 1 as where it is 0, and the squares that it explains."""
        centred = shape - self._means(shape, self.mean_ns)
        square, product = (float((self.mean_ns * centred * other).sum()) for other in (centred, self._excess))
        if square <= 0 or product <= 0:
            return 1.0, 0.0
        rise = product / square  # beyond the mean, which contains a part of it
        usual = 1 - rise * float(np.average(shape, weights=self.mean_ns))
        return 1 + rise / max(usual, 0.1), product**2 / square

    def heaviest_part(self, order: Ints) -> tuple[int, int]:
        """First and last place, exclusive, of the part of an order with the largest sum of excess over the mean."""
        sums = np.concatenate(([0.0], np.cumsum((self.mean_ns * self._excess)[order])))
        rise = sums - np.minimum.accumulate(sums)
        last = int(np.argmax(rise))
        return int(np.argmin(sums[: last + 1])), last

    def levels(self, step: Ints) -> tuple[float, float]:
        """Ratio of the slowest step to the fastest, and the sum of squares that levels of all steps explain."""
        names, number = np.unique(step, return_inverse=True)
        number = number * min(len(names), _MOST_LEVELS) // len(names)
        count = int(number.max()) + 1
        both = np.bincount(self.code * count + number, self.mean_ns, minlength=count * (int(self.code.max()) + 1))
        both = both.reshape(-1, count)
        normal = np.diag(both.sum(axis=0)) - both.T @ (both / both.sum(axis=1, keepdims=True))
        products = np.bincount(number, self.mean_ns * (self._excess - self._means(self._excess, self.mean_ns)))
        level = np.linalg.pinv(normal, hermitian=True) @ products
        return float((1 + level.max()) / max(1 + level.min(), 0.1)), float(level @ products)


def _drop(times: _KernelTimes, after: Flags, ids: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> _Drop | None:
    # Each kernel's median duration after over before (NaN where it is on one side only), and its time.
    both = pl.DataFrame({"code": times.code, "dur": times.dur_ns, "after": after})
    medians = both.group_by("code").agg(
        pl.col("dur").filter("after").median().alias("late"),
        pl.col("dur").filter(~pl.col("after")).median().alias("early"),
        pl.col("dur").sum().alias("time"),
    )
    ordered = medians.sort("code").select((pl.col("late") / pl.col("early")).fill_null(float("nan")).alias("r"), "time")
    ratio, weight = ordered["r"].to_numpy(), ordered["time"].to_numpy()
    is_compared = ~np.isnan(ratio)
    if is_compared.sum() < _MIN_KERNELS or weight[is_compared].sum() < _MIN_TIME_RATIO * times.dur_ns.sum():
        return None
    low, slowdown, high = _weighted_quartiles(ratio[is_compared], weight[is_compared])
    is_common = low - 1 >= _TOGETHER_RATIO * (slowdown - 1)
    if slowdown < MIN_SLOWDOWN or not is_common or np.log(slowdown) <= _spread(times.code, times.dur_ns, after):
        return None
    ratio_of = dict(zip(ids[is_compared].tolist(), ratio[is_compared].tolist(), strict=True))
    return _Drop(None, 0, 0, slowdown, low, high, ratio_of, is_gradual=False, spans=_NO_SPANS)


def _spread(code: Ints, dur: Floats, after: Flags) -> float:
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
