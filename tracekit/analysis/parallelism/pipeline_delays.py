"""Delays that pipelines pass on: ranks that are late because another stage of their pipeline is."""

import polars as pl

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.parallelism import rank_places
from tracekit.model.run import Run
from tracekit.sync import collective_matching

_STEP = ["window", "step"]


def delays(run: Run, members: pl.DataFrame) -> pl.DataFrame:
    """Extra waits of ranks for sends and receives, beyond the other ranks of their stage, and for whom.

    `members` has columns rank and leader of a late group. Columns window, step, waiting, cause (the rank of the same
    pipeline that waits least compared with its own stage; the leader if the group has a rank in that pipeline),
    waited_ns; one row per step and rank that waits longer and belongs to no group. Empty without two pipelines.
    """
    stage_of = rank_places.stages(run)
    waits = run.table(collective_instances.waits).filter(pl.col("op") == collective_matching.PAIRED)
    if not stage_of or waits.is_empty():
        return _EMPTY
    stage = pl.col("rank").replace_strict(stage_of, default=None, return_dtype=pl.Int64).alias("stage")
    pipeline = pl.col("rank").replace_strict(_pipelines(waits), return_dtype=pl.Int64).alias("pipeline")
    rank_waits = waits.group_by(*_STEP, "rank").agg(pl.col("wait_ns").sum()).with_columns(stage, pipeline)
    compared = _beside_stage(rank_waits.drop_nulls("stage")).join(members.select("rank", "leader"), "rank", how="left")
    return _EMPTY.vstack(_with_causes(compared).select(_EMPTY.columns).cast(pl.Int64))


_EMPTY = pl.DataFrame(schema=dict.fromkeys((*_STEP, "waiting", "cause", "waited_ns"), pl.Int64))


def _pipelines(waits: pl.DataFrame) -> dict[int, int]:
    """Return the pipeline of each rank, by its lowest rank: ranks that send to each other, directly or not."""
    pairs = waits.group_by("window", "instance").agg(first=pl.col("rank").min(), last=pl.col("rank").max())
    pipeline_of = {rank: rank for rank in waits["rank"].unique().sort()}
    for first, last in pairs.select("first", "last").unique().sort("first", "last").iter_rows():
        merged, into = sorted((pipeline_of[first], pipeline_of[last]), reverse=True)
        pipeline_of = {rank: into if lowest == merged else lowest for rank, lowest in pipeline_of.items()}
    return pipeline_of


def _beside_stage(rank_waits: pl.DataFrame) -> pl.DataFrame:
    """Return the ranks of stages with several, with longer_ns: their wait less the median of the stage's others."""
    key = [*_STEP, "stage"]
    ordered = rank_waits.sort(*key, "wait_ns", "rank").with_columns(
        at=pl.int_range(pl.len()).over(key), others=pl.len().over(key) - 1, all_ns=pl.col("wait_ns").implode().over(key)
    )
    middle = ((pl.col("others") - 1) // 2, pl.col("others") // 2)
    rows = (pl.when(index >= pl.col("at")).then(index + 1).otherwise(index) for index in middle)
    low, high = (pl.col("all_ns").list.get(row, null_on_oob=True) for row in rows)
    longer_ns = pl.col("wait_ns") - (low + high) // 2
    return ordered.filter(pl.col("others") > 0).with_columns(longer_ns.alias("longer_ns")).drop("all_ns")


def _with_causes(compared: pl.DataFrame) -> pl.DataFrame:
    """Return the ranks that wait longer, with the rank or group of their pipeline that the others wait for."""
    of_pipeline = [*_STEP, "pipeline"]
    shortest = pl.col("rank").sort_by("longer_ns", "rank").first()
    cause = pl.coalesce(
        pl.col("leader").drop_nulls().first(), pl.when(pl.col("longer_ns").min() < 0).then(shortest)
    ).over(of_pipeline)
    table = compared.with_columns(cause.alias("cause"), waiting="rank", waited_ns="longer_ns")
    return table.filter(pl.col("leader").is_null(), pl.col("waited_ns") > 0, pl.col("cause") != pl.col("rank"))
