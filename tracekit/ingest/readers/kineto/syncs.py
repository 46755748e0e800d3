"""Waits that CUDA reports: of a stream for an event, and of the host for an event, a stream or the whole device."""

import numpy as np
import polars as pl

from tracekit.ingest.readers.kineto.host_slices import Host, first_of, nulled
from tracekit.model.nesting import Ints

STREAM_WAIT, EVENT, STREAM, CONTEXT = "stream_wait", "event", "stream", "context"
_KINDS = {
    "Stream Wait Event": STREAM_WAIT,
    "Event Sync": EVENT,
    "Stream Sync": STREAM,
    "Context Sync": CONTEXT,
}
_UNKNOWN_STREAM = (1 << 31) - 1  # CUPTI's value, as is -1


def table(found: pl.DataFrame, names: pl.Series, host: Host) -> pl.DataFrame:
    """Return the rows of the syncs table; events with other names are ignored."""
    named = found.with_columns(names.gather(found["name"]).alias("called")).filter(pl.col("called").is_in(list(_KINDS)))
    runtime = np.flatnonzero(host.is_kind("runtime"))
    of_call = host.correlation[runtime] if len(runtime) else runtime
    return named.select(
        nulled(_called(runtime, of_call, named["correlation"].to_numpy()), "call_id"),
        pl.col("called").replace_strict(_KINDS, return_dtype=pl.String).alias("kind"),
        "start_ns",
        "dur_ns",
        "device",
        *(
            pl.when(pl.col(name).is_between(0, _UNKNOWN_STREAM - 1)).then(pl.col(name)).alias(name)
            for name in ("stream", "awaited_stream")
        ),
        nulled(_called(runtime, of_call, named["awaited_correlation"].to_numpy()), "record_id"),
    )


def _called(runtime: Ints, correlation: Ints, wanted: Ints) -> Ints:
    """Return the runtime call of each correlation; -1 for none."""
    at = first_of(correlation, np.maximum(wanted, 0))
    return np.where(at >= 0, runtime[np.maximum(at, 0)], -1) if len(runtime) else np.full(len(wanted), -1, np.int64)
