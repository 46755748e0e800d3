"""The steps of a replay: recorded and replayed duration on each rank."""

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Ints
from tracekit.replay.graph.dependency_graph import Graph, Replay
from tracekit.replay.graph.nodes import NodeTable

COLUMNS = schema.columns("window rank step device duration_ns replayed_ns")


def durations(graph: Graph, played: Replay, *, unchanged: Replay | None = None) -> pl.DataFrame:
    """Return each step's recorded and replayed device window: from its first node's start to the next step's.

    Columns window, rank, step, device, duration_ns, replayed_ns; one row per rank, step and device. The last step ends
    with its last activity. The first begins as in the `unchanged` replay, if given: what happens sooner after the
    recording began saves time too.
    """
    place = ["rank", "device"]
    windows = graph.windows.sort(*place, "start_ns")
    first = windows["first"].to_numpy()
    is_first = windows.select((pl.col("start_ns") == pl.col("start_ns").min().over(place)).alias("is_first"))[
        "is_first"
    ]
    begins = np.where(is_first.to_numpy(), (unchanged or played).start_ns[first], played.start_ns[first])
    ends = _lasts(graph, played).rename({"end": "own_end"})
    rows = windows.with_columns(pl.Series("begin", begins, pl.Int64)).join(
        ends, on=[*place, "step"], how="left", nulls_equal=True, maintain_order="left"
    )
    until = pl.col("begin").shift(-1).over(place)
    return rows.with_columns(
        pl.lit(graph.window, pl.Int64).alias("window"),
        (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"),
        (pl.coalesce(until, "own_end") - pl.col("begin")).alias("replayed_ns"),
    ).pipe(schema.select, COLUMNS)


def by_rank(table: pl.DataFrame) -> pl.DataFrame:
    """Return the step time of each rank: the mean over its steps, of its slowest device.

    `table` has the columns of `savings.STEP_COLUMNS`. Columns rank, duration_ns, replayed_ns, without_ns, saved_ns; one
    row per rank.
    """
    times = pl.col("duration_ns", "replayed_ns", "without_ns")
    per = table.select("window", "rank", "step").unique().group_by("rank").agg(pl.len().alias("per"))
    per_device = table.group_by("window", "rank", "device").agg(times.sum())
    sums = per_device.group_by("window", "rank").agg(times.max()).group_by("rank").agg(times.sum())
    means = sums.join(per, on="rank").with_columns((pl.col("replayed_ns") - pl.col("without_ns")).alias("saved_ns"))
    return means.sort("rank").select(
        "rank", pl.col("duration_ns", "replayed_ns", "without_ns", "saved_ns") // pl.col("per")
    )


def worst_error_ratio(table: pl.DataFrame) -> float:
    """Return the largest relative difference of a replayed step from its recording, over all ranks."""
    recorded = table.filter(pl.col("duration_ns") > 0)
    off = (recorded["replayed_ns"] / recorded["duration_ns"] - 1).abs().to_numpy()
    return float(off.max(initial=0.0))


def _lasts(graph: Graph, played: Replay) -> pl.DataFrame:
    """End of the last activity of each step."""
    rows, number, places = _places_of_work(graph.frame)
    end = np.full(places.height, np.iinfo(np.int64).min)
    np.maximum.at(end, number, played.end_ns[graph.done[rows]])
    return places.hstack([pl.Series("end", end)])


@memoize
def _places_of_work(frame: NodeTable) -> tuple[Ints, Ints, pl.DataFrame]:
    """Return the nodes that are work, the number of each one's rank, device and step, and these places by number."""
    nodes = frame.select("rank", "device", "step", "kind")
    rows = np.flatnonzero(nodes["kind"].is_not_null().to_numpy())
    of_work = nodes[rows].drop("kind")
    ranks = of_work.select(pl.struct(pl.all()).rank("dense")).to_series().to_numpy()
    _, first, number = np.unique(ranks, return_index=True, return_inverse=True)
    return rows, number, of_work[first]


def total_ns(table: pl.DataFrame, column: str) -> int:
    """Return the total duration of all windows, each on its slowest rank."""
    per_rank = table.group_by("window", "rank", "device").agg(pl.col(column).sum())
    longest = per_rank.group_by("window").agg(pl.col(column).max())[column]
    return int(np.sum(longest.to_numpy())) if longest.len() else 0
