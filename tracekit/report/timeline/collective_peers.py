"""The same collective on the other ranks of a scene."""

import polars as pl

from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.report.timeline import lookup
from tracekit.report.timeline.scene import Scene
from tracekit.sync import alignment, collective_matching

PEERS = schema.columns("rank track row id start_ns dur_ns wait_ns")
MAX_PEERS = 64


def peers(run: Run, scene: Scene, rank: int, activity_id: int) -> pl.DataFrame:
    """Return the activities of all ranks that belong to the same collective as an activity of a rank.

    Columns PEERS, times on the run's clock, by rank; no rows if no other rank is known to take part. wait_ns is from a
    rank's start to the last rank's. Of a large group, the MAX_PEERS last ranks are returned.
    """
    calls = run.run_table(collective_matching.matched_calls).filter(pl.col("window") == scene.window)
    own = calls.filter(pl.col("rank") == rank, pl.col("activity_id") == activity_id).drop_nulls("instance")
    there = calls.join(own.select("instance"), on="instance", how="semi")
    if there.height < 2:
        return pl.DataFrame(schema=PEERS)
    placed = alignment.on_run_clock(there, run.offsets, ("start_ns", "end_ns"))
    last_ns = pl.col("start_ns").max()
    timed = placed.with_columns(pl.min_horizontal(last_ns, "end_ns").alias("until_ns"))
    rows = []
    for call in timed.sort("start_ns", descending=True).head(MAX_PEERS).iter_rows(named=True):
        position = lookup.slice_near(scene, call["rank"], "activities", call["activity_id"], call["start_ns"])
        if position is not None:
            rows.append({**position, "rank": call["rank"], "wait_ns": max(0, call["until_ns"] - position["start_ns"])})
    return pl.DataFrame(rows, schema=PEERS).sort("rank")
