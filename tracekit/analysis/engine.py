"""Which engine shards the model, by the spans that it leaves in a trace."""

import polars as pl

from tracekit.trace import Trace

PREFIXES = {
    "yafsdp": "YaFSDP::",
    "fsdp2": "FSDP::",
    "fsdp1": "FullyShardedDataParallel.",
    "ddp": "DistributedDataParallel.",
}
COLUMNS = {"engine": pl.String, "spans": pl.Int64}


def engines(trace: Trace) -> pl.DataFrame:
    """Return how many spans each engine left. Columns engine, spans; one row per engine seen, most spans first."""
    names = trace.ops.filter(pl.col("kind") != "python")["name"]
    counts = [(engine, names.str.starts_with(prefix).sum()) for engine, prefix in PREFIXES.items()]
    seen = sorted(((engine, count) for engine, count in counts if count), key=lambda row: -row[1])
    return pl.DataFrame(seen, schema=COLUMNS, orient="row")
