"""Checkpoint loads of a run: how long training waited, and read amplification."""

import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import save_stages
from tracekit.model import schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run

COLUMNS = schema.columns(
    "checkpoint window rank step start_ns dur_ns ranks read_bytes unique_bytes amplification", amplification=pl.Float64
)
_FILE_CALLS = (conventions.TORCH_LOAD, conventions.SAFETENSORS_LOAD)


@run_fact
def restores(run: Run) -> pl.DataFrame:
    """Return the loads of a run, each over all its ranks; one row per load, in order of time. Columns COLUMNS.

    `rank` is the slowest, `dur_ns` its time. `unique_bytes` is the size of the checkpoint: for a single file the most
    that a rank reads of it, else the size in its metadata; null where neither is known. `amplification` is what all
    ranks read over that.
    """
    lines = run.table(save_stages.loads)
    lines = lines.unique(lines.columns[1:], keep="first", maintain_order=True)
    stage, size = pl.col("stage"), pl.col("bytes")
    by_rank = lines.group_by("checkpoint", "path", "rank", maintain_order=True).agg(
        pl.col("window", "step", "start_ns").min(),
        pl.col("dur_ns").filter(stage == conventions.TOTAL).sum(),
        size.filter(stage == conventions.READ).sum().alias("read_bytes"),
        pl.col("whole_bytes").max(),
        pl.col("call").is_in(_FILE_CALLS).any().alias("one_file"),
    )
    longest = by_rank.sort("dur_ns", "rank", descending=[True, False])
    of_file = pl.when(pl.col("one_file").any()).then(pl.col("read_bytes").max())
    read = pl.col("read_bytes").sum()
    unique = of_file.otherwise(pl.col("whole_bytes").max()).alias("unique_bytes")
    table = longest.group_by("checkpoint", "path", maintain_order=True).agg(
        pl.col("window", "rank", "dur_ns").first(),
        pl.col("step", "start_ns").min(),
        pl.col("rank").n_unique().alias("ranks"),
        read,
        unique,
    )
    has_size = pl.col("unique_bytes") > 0
    amplification = pl.when(has_size).then(pl.col("read_bytes") / pl.col("unique_bytes")).alias("amplification")
    return table.with_columns(amplification).pipe(schema.select, COLUMNS).sort("start_ns", "checkpoint")
