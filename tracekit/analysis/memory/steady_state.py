"""The allocator in steady state: device allocation calls, retries, regrowth, and unit buffers."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.memory import allocations
from tracekit.analysis.time import breakdown, trace_columns
from tracekit.model import columns, intervals, schema
from tracekit.model.fact import trace_fact
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

_DEVICE_CALL = r"^(cuda|hip)(Malloc|Free|HostAlloc|FreeHost|MallocHost|HostMalloc|HostFree|MallocAsync|FreeAsync)"
_MIB = 1 << 20
_CALL_AGO_NS = 100_000_000

CALL_COLUMNS = schema.columns("step name start_ns dur_ns stalled_ns")
STALL_COLUMNS = schema.columns("step device start_ns duration_ns calls host_ns stalled_ns")
REGROWTH_COLUMNS = schema.columns("step device start_ns dur_ns bytes idle_bytes grown_bytes stalled_ns reserved_bytes")
BUFFER_COLUMNS = schema.columns("step unit span start_ns dur_ns bytes")
RETRY_COLUMNS = {"step": pl.Int64, "retries": pl.Int64, "step_time_ns": pl.Int64}


@trace_fact
def device_calls(trace: Trace) -> pl.DataFrame:
    """Runtime calls that allocate or free device or pinned memory, and the device stall of each.

    Columns step, name, start_ns, dur_ns (on the host), stalled_ns; one row per call. A call stalls the devices while
    none of them works during the call, and from its end to the next work (or call) for at most as long as they were
    busy during the call: without the call, that work could have started earlier by the call's duration at most.
    """
    calls = _calls(trace)
    idle = _idle(trace)
    stalled_ns = pl.Series("stalled_ns", intervals.coverage(_with_aftermath(calls, idle), idle), pl.Int64)
    return calls.with_columns(stalled_ns).select(*CALL_COLUMNS)


@trace_fact
def stalls(trace: Trace) -> pl.DataFrame:
    """Cost of such calls in each step.

    Columns step, device, start_ns, duration_ns (the step's device window), calls, host_ns (time in calls), stalled_ns
    (device stall, each moment once); one row per step and device. Where the trace marks no steps, its second half is
    the window, which leaves out the filling of an empty cache.
    """
    calls, idle = _calls(trace), _idle(trace)
    rows = []
    windows = breakdown.by_step(trace).select("step", "device", "start_ns", "duration_ns")
    skipped_ns = pl.when(pl.col("step").is_null()).then(pl.col("duration_ns") // 2).otherwise(0)
    windows = windows.with_columns(pl.col("start_ns") + skipped_ns, pl.col("duration_ns") - skipped_ns)
    for step, device, start_ns, duration_ns in windows.iter_rows():
        end_ns = start_ns + duration_ns
        within = pl.col("start_ns").is_between(start_ns, end_ns) if step is None else pl.col("step") == step
        step_calls = calls.filter(within) if calls.height else calls
        stalled = intervals.intersect(_with_aftermath(step_calls, idle), idle)
        place, host_ns = (step, device, start_ns, duration_ns), step_calls["dur_ns"].sum()
        rows.append((*place, step_calls.height, host_ns, intervals.length(stalled)))
    return pl.DataFrame(rows, schema=STALL_COLUMNS, orient="row")


@trace_fact
def retries(trace: Trace) -> pl.DataFrame:
    """Allocation retries of each step (cudaMalloc failed, cache flushed), from the metrics log.

    Columns step, retries, step_time_ns; one row per step with the growth of the counter. The first logged step has no
    row, since the counter before it is unknown.
    """
    if trace.metrics.is_empty():
        return schema.empty(RETRY_COLUMNS)
    wide = trace.metrics.filter(
        pl.col("name").is_in([conventions.ALLOC_RETRIES_METRIC, conventions.STEP_TIME_METRIC])
    ).pivot("name", index="step", values="value", aggregate_function="first")
    if conventions.ALLOC_RETRIES_METRIC not in wide.columns:
        return schema.empty(RETRY_COLUMNS)
    step_time = conventions.STEP_TIME_METRIC
    times = pl.col(step_time) if step_time in wide.columns else pl.lit(None, pl.Int64)
    # The counter restarts at 0 when training is resumed.
    grown = pl.col(conventions.ALLOC_RETRIES_METRIC).diff().clip(lower_bound=0)
    counted = wide.sort("step").select("step", grown.alias("retries"), times.alias("step_time_ns"))
    return counted.drop_nulls("retries").cast(RETRY_COLUMNS)  # type: ignore[arg-type]


@trace_fact
def regrowth(trace: Trace) -> pl.DataFrame:
    """Requests for which the allocator reserved device memory although its cache had enough idle bytes.

    Columns step, device, start_ns, dur_ns (0), bytes (of the block), idle_bytes (reserved and not allocated before),
    grown_bytes (newly reserved), stalled_ns (by the device call before it), reserved_bytes (after); one row per
    request. The idle memory was fragmented, on another stream or in another pool.
    """
    if trace.allocations.is_empty():
        return schema.empty(REGROWTH_COLUMNS)
    device = pl.col("device")
    idle_bytes = pl.col("slack_bytes").shift(1).over(device)
    grown_bytes = pl.col("reserved_bytes").diff().over(device)
    usage = allocations.live(trace).with_columns(
        trace.allocations["delta_bytes"].alias("bytes"), idle_bytes=idle_bytes, grown_bytes=grown_bytes,
        start_ns="at_ns", dur_ns=pl.lit(0, pl.Int64),
    )  # fmt: skip
    grew = usage.filter(pl.col("bytes") > 0, pl.col("grown_bytes") > 0, pl.col("idle_bytes") >= pl.col("bytes"))
    calls = device_calls(trace).select("stalled_ns", call_ns="start_ns").sort("call_ns")
    last = grew.sort("start_ns").join_asof(calls, left_on="start_ns", right_on="call_ns", tolerance=_CALL_AGO_NS)
    filled = last.with_columns(pl.col("stalled_ns").fill_null(0))
    return schema.select(filled, REGROWTH_COLUMNS)


@trace_fact
def unit_buffers(trace: Trace) -> pl.DataFrame:
    """Allocations of at least 1 MiB in FSDP's gather and reduce spans, except the backend's own.

    Columns step, unit, span, start_ns, dur_ns (0), bytes; one row per allocation. Those of saves are left out.
    """
    if trace.allocations.is_empty():
        return schema.empty(BUFFER_COLUMNS)
    span = pl.col("span")
    # Allocations of the backend inside its collective are not FSDP's buffers (gloo copies its messages).
    inside = allocations.in_collectives(trace, trace.allocations["at_ns"])
    allocated = trace.allocations.filter(~inside).filter(
        pl.col("delta_bytes") >= _MIB,
        pl.col("step").is_not_null(),
        pl.col("phase").ne_missing(conventions.CHECKPOINT),
        span.str.contains("all_gather|reduce|unshard|pre_forward|pre_backward|post_backward"),
    )
    return allocated.select(
        "step", "unit", "span", pl.col("at_ns").alias("start_ns"), pl.lit(0, pl.Int64).alias("dur_ns"),
        pl.col("delta_bytes").alias("bytes"),
    )  # fmt: skip


@memoize
def _calls(trace: Trace) -> pl.DataFrame:
    calls = trace_columns.is_kind(trace, "runtime") & trace_columns.is_named(trace, _DEVICE_CALL)
    rows = columns.where(trace.ops[["step", "name", "start_ns", "dur_ns", "id"]], calls)
    return rows.sort("start_ns", "id") if rows.height else rows


@memoize
def _idle(trace: Trace) -> Spans:
    """Time between first and last activity without device work; none on a CPU run."""
    if not trace.on_device:
        return intervals.EMPTY
    work = trace.activities
    busy = intervals.union(intervals.from_table(work))
    return intervals.gaps(busy, (int(busy[0, 0]), int(busy[-1, 1]))) if len(busy) else intervals.EMPTY


def _with_aftermath(calls: pl.DataFrame, idle: Spans) -> Spans:
    """Span of each call, extended over the idle time right after it that the call explains."""
    spans = intervals.from_table(calls)
    if not len(spans) or not len(idle):
        return spans
    starts, ends = spans[:, 0], spans[:, 1]
    gap = np.searchsorted(idle[:, 0], ends, side="right") - 1
    gap_end = np.where(gap >= 0, idle[np.maximum(gap, 0), 1], ends)
    hidden_ns = ends - starts - intervals.coverage(spans, idle)
    next_start = np.append(starts[1:], np.iinfo(np.int64).max)
    reach = np.minimum(np.minimum(gap_end, ends + hidden_ns), next_start)
    return np.stack((starts, np.maximum(reach, ends)), axis=1)
