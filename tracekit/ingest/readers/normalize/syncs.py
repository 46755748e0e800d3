"""Waits that CUDA reports: of a stream for an event, and of the host for an event, a stream or the whole device."""

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize.host_slices import Host, id_column
from tracekit.model.nesting import Ints

STREAM_WAIT, EVENT, STREAM, CONTEXT = "stream_wait", "event", "stream", "context"
_KINDS = {
    "Stream Wait Event": STREAM_WAIT,
    "Event Sync": EVENT,
    "Stream Sync": STREAM,
    "Context Sync": CONTEXT,
}
_UNKNOWN_STREAM = (1 << 31) - 1  # CUPTI's value, as is -1


def table(syncs: pl.DataFrame, names: pl.Series, host: Host) -> pl.DataFrame:
    """Return the rows of the syncs table; events with other names are ignored."""
    rows = syncs.with_columns(names.gather(syncs["name"]).alias("called")).filter(pl.col("called").is_in(list(_KINDS)))
    return rows.select(
        id_column(_call(host, rows["correlation"]), "call_id"),
        pl.col("called").replace_strict(_KINDS, return_dtype=pl.String).alias("kind"),
        "start_ns",
        "dur_ns",
        "device",
        *(
            pl.when(pl.col(name).is_between(0, _UNKNOWN_STREAM - 1)).then(pl.col(name)).alias(name)
            for name in ("stream", "awaited_stream")
        ),
        id_column(_call(host, rows["awaited_correlation"]), "record_id"),
    )


def _call(host: Host, correlation: pl.Series) -> Ints:
    """Return the runtime call of each correlation id; -1 for none."""
    return host.find("runtime", "correlation", np.maximum(correlation.to_numpy(), 0))
