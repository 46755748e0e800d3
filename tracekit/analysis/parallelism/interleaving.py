"""Stages of interleaved schedules whose spans name no stage: by how many forwards run before the first backward.

Source: Megatron-LM, core/pipeline_parallel/schedules.py (get_pp_rank_microbatches, get_schedule_table). With v chunks
of the model on each of p ranks, the rank at place r runs 2 (p - r - 1) + (v - 1) p + 1 forwards before its first
backward, and its chunks take turns after p micro-batches each. Without interleaving that are p - r forwards.
"""

import polars as pl

from tracekit.analysis.parallelism.pipeline_actions import FORWARD

_ACTIONS_OF = ["window", "rank", "step"]


def with_virtual_stages(actions: pl.DataFrame) -> pl.DataFrame:
    """Return actions with the stage and micro-batch of their chunk, where each rank has several; else as they are.

    `actions` has columns window, rank, step, action, host_start_ns, stage (the place of the rank in the pipeline) and
    micro_batch (which counts the forwards, and the backwards, of a step in their order).
    """
    ranks = int(actions["stage"].max() or 0) + 1  # type: ignore[arg-type]
    chunks = _chunks(_warm_ups(actions), ranks)
    if chunks == 1:
        return actions
    turn = pl.col("micro_batch") // ranks
    in_forward = turn % chunks
    chunk = pl.when(pl.col("action") == FORWARD).then(in_forward).otherwise(chunks - 1 - in_forward)
    return actions.with_columns(
        stage=chunk * ranks + pl.col("stage"),
        micro_batch=turn // chunks * ranks + pl.col("micro_batch") % ranks,
    )


def _warm_ups(actions: pl.DataFrame) -> pl.DataFrame:
    """Forwards of each rank in a step, and those before its first backward: stage, forwards, first."""
    is_forward = pl.col("action") == FORWARD
    begun_ns = pl.col("host_start_ns").filter(~is_forward).min()
    return actions.group_by(_ACTIONS_OF).agg(
        pl.col("stage").first(),
        is_forward.sum().cast(pl.Int64).alias("forwards"),
        (is_forward & (pl.col("host_start_ns") < begun_ns)).sum().cast(pl.Int64).alias("first"),
    )


def _chunks(warm_ups: pl.DataFrame, ranks: int) -> int:
    """Number of chunks of each rank: 1 unless all ranks and steps agree with an interleaved schedule."""
    ends = warm_ups.filter(pl.col("stage") == ranks - 1)["first"].unique()
    chunks = (int(ends[0]) - 1) // ranks + 1 if len(ends) == 1 else 1
    usual = 2 * (ranks - 1 - pl.col("stage")) + (chunks - 1) * ranks + 1
    agrees = pl.col("first") == pl.min_horizontal(usual, "forwards")
    is_whole = (pl.col("forwards") % (ranks * chunks) == 0) & (pl.col("first") < pl.col("forwards"))
    is_last = pl.col("stage") == ranks - 1
    fits = warm_ups.select((agrees & (is_whole | ~is_last)).all()).item()
    return chunks if chunks > 1 and fits else 1
