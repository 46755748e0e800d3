"""Counters of the GPUs by step: clocks, power, temperature, throttle reasons, memory errors.

They are those of the metrics log; else clocks are the means of the samples that Nsight Systems took.
"""

import polars as pl

from tracekit.conventions import device_metrics as names
from tracekit.model import schema
from tracekit.model.fact import trace_fact
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


@trace_fact(table=DEVICE_METRICS)
def device_counters(trace: Trace) -> pl.DataFrame:
    """Return the counters of the rank's GPU: columns as DEVICE_METRICS, one row per step that has any.

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
    """Return the clocks by step from the samples of a profiler, taken in the step's device window."""
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
    """Return the clock of the multiprocessors while the GPU is busy, in MHz, from the columns of DEVICE_METRICS.

    In a step in which the GPU is idle at times, its clock drops without a fault: then the highest one counts.
    """
    is_idle = pl.col(names.THROTTLE_REASONS).list.contains(names.REASONS[names.GPU_IDLE]).fill_null(value=False)
    return pl.when(is_idle).then(names.most(names.SM_CLOCK)).otherwise(names.SM_CLOCK)


def _plausible(name: str) -> pl.Expr:
    limit = _MOST.get(name.removeprefix("min_").removeprefix("max_"), 2.0**_MAX_BITS)
    return pl.when(pl.col(name).is_between(0, limit)).then(name)


def _reasons() -> pl.Expr:
    """Return the throttle reasons in words; null where they are not known."""
    bits = pl.col(names.THROTTLE_REASONS)
    is_valid = bits.is_between(0, 2.0**_MAX_BITS, closed="left") & (bits == bits.floor())
    valid_bits = pl.when(is_valid).then(bits).cast(pl.Int64)
    words = [pl.when((valid_bits & bit) != 0).then(pl.lit(word)) for bit, word in names.REASONS.items()]
    return pl.when(valid_bits.is_not_null()).then(pl.concat_list(words).list.drop_nulls())
