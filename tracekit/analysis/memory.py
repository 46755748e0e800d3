"""What the allocator does in steady state: device mallocs and frees, and unit buffers that come and go."""

import numpy as np
import polars as pl

from tracekit import intervals
from tracekit.trace import Trace

_DEVICE_CALL = r"^(cuda|hip)(Malloc|Free|HostAlloc|FreeHost|MallocHost|HostMalloc|HostFree|MallocAsync|FreeAsync)"
_MIB = 1 << 20

CALL_COLUMNS = {"step": pl.Int64, "name": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64}
BUFFER_COLUMNS = {
    "step": pl.Int64, "unit": pl.String, "span": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64, "bytes": pl.Int64,
}  # fmt: skip


def device_calls(trace: Trace) -> pl.DataFrame:
    """Return the runtime calls inside steps that take or return device or pinned memory.

    Columns step, name, start_ns, dur_ns; one row per call.
    """
    calls = trace.ops.filter(
        pl.col("kind") == "runtime", pl.col("name").str.contains(_DEVICE_CALL), pl.col("step").is_not_null()
    )
    return calls.select(*CALL_COLUMNS)


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
