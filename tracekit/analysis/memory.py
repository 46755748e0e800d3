"""What the allocator does in steady state: device mallocs and frees, and unit buffers that come and go."""

import numpy as np
import polars as pl

from tracekit import conventions, intervals
from tracekit.trace import Trace

# Of device and pinned memory. Those that end in Async only queue work on a stream.
_DEVICE_CALL = (
    r"^(?:cuda|hip)(?:Malloc|MallocHost|MallocManaged|HostMalloc|HostAlloc|ExtMallocWithFlags|Free|FreeHost|HostFree)$"
)
_MIB = 1 << 20

CALL_COLUMNS = {"step": pl.Int64, "name": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64, "stalled_ns": pl.Int64}
RETRY_COLUMNS = {"step": pl.Int64, "retries": pl.Int64}
BUFFER_COLUMNS = {
    "step": pl.Int64, "unit": pl.String, "span": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64, "bytes": pl.Int64,
}  # fmt: skip


def device_calls(trace: Trace) -> pl.DataFrame:
    """Return the runtime calls inside steps that take or return device or pinned memory.

    Columns step, name, start_ns, dur_ns (of the host), stalled_ns (time of it during which all of the rank's devices
    idled); one row per call. Empty on a CPU run.
    """
    calls = trace.ops.filter(
        pl.col("kind") == "runtime", pl.col("name").str.contains(_DEVICE_CALL), pl.col("step").is_not_null()
    )
    busy = intervals.from_columns(trace.activities["start_ns"], trace.activities["dur_ns"])
    covered = intervals.coverage(intervals.from_columns(calls["start_ns"], calls["dur_ns"]), busy)
    return calls.with_columns((pl.col("dur_ns") - pl.Series(covered, dtype=pl.Int64)).alias("stalled_ns")).select(
        *CALL_COLUMNS
    )


def retries(trace: Trace) -> pl.DataFrame:
    """Return the steps in which the caching allocator found no memory, freed what it cached and tried again.

    Columns step, retries (in that step, by the metrics log, which spans the whole training); one row per step with any.
    The first step logged is left out: what came before it is not known.
    """
    counted = trace.metrics.filter(pl.col("name") == conventions.ALLOC_RETRIES_METRIC).sort("step")
    new = counted.select("step", pl.col("value").diff().cast(pl.Int64).alias("retries"))
    return new.filter(pl.col("retries") > 0).select(*RETRY_COLUMNS)


def unit_buffers(trace: Trace) -> pl.DataFrame:
    """Return the allocations of at least 1 MiB made in FSDP's gather and reduce spans, not by the backend itself.

    Columns step, unit, span, start_ns, dur_ns (0: a moment), bytes; one row per allocation.
    """
    span = pl.col("span")
    # What a backend allocates inside its own collective is not the engine's buffer (gloo copies what it sends).
    calls = trace.ops.filter(pl.col("name").str.starts_with("c10d::"))
    at_ns = trace.allocations["at_ns"].to_numpy()
    inside = intervals.coverage(
        np.stack((at_ns, at_ns + 1), axis=1), intervals.from_columns(calls["start_ns"], calls["dur_ns"])
    )
    taken = trace.allocations.filter(pl.Series(inside == 0)).filter(
        pl.col("delta_bytes") >= _MIB,
        pl.col("step").is_not_null(),
        span.str.contains("all_gather|reduce|unshard|pre_forward|pre_backward|post_backward"),
    )
    return taken.select(
        "step", "unit", "span", pl.col("at_ns").alias("start_ns"), pl.lit(0, pl.Int64).alias("dur_ns"),
        pl.col("delta_bytes").alias("bytes"),
    )  # fmt: skip
