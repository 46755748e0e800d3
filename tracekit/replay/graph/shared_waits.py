"""Event waits that one rank shows and that hold at the same place of the other ranks, which run the same program."""

import polars as pl

from tracekit.model import schema
from tracekit.replay.graph.nodes import EDGE_COLUMNS, WORK

_EVENT = "event"
_SLACK_NS = 3_000
_OF_NAME = ["window", "step", "name"]
_PLACE = [*_OF_NAME, "nth", "times"]
NODES = ("window", "rank", "node", "what", "step", "lane", "name", "launch", "start_ns", "end_ns")
"""The columns of nodes that `shared_waits` needs."""
COLUMNS = {**schema.columns("window rank"), **EDGE_COLUMNS}


def shared_waits(nodes: pl.DataFrame, edges: pl.DataFrame) -> pl.DataFrame:
    """Return inferred event waits that only other ranks show.

    `nodes` has the columns NODES, `edges` those of `trace_graph.edges`, window and rank. A wait between
    streams binds, and so can be inferred, only where the awaited work ends last: on a late rank, a collective waits for
    compute, on the others for its peers. Ranks run the same program: the same wait is at the same place (step, kernel,
    its number in the step by launch, and how often it runs there) of the other ranks, unless any of them started the
    waiting work before the awaited work had ended, or launched it first. Streams and threads may be numbered
    differently on each rank. Columns COLUMNS; one row per wait.
    """
    waits = edges.filter("inferred", pl.col("kind") == _EVENT).select("window", "rank", "waiting", "awaited")
    places = _places(nodes, waits)
    seen = waits.join(_ends(places, "waiting"), on=["window", "rank", "waiting"]).join(
        _ends(places, "awaited"), on=["window", "rank", "awaited"]
    )
    pairs = seen.select("window", "at_waiting", "at_awaited").unique()
    on_ranks = pairs.join(_ends(places, "waiting"), on=["window", "at_waiting"]).join(
        _ends(places, "awaited"), on=["window", "rank", "at_awaited"]
    )
    holds = (pl.col("end_awaited") <= pl.col("start_waiting") + _SLACK_NS) & (
        pl.col("launch_awaited") < pl.col("launch_waiting")
    )
    always = on_ranks.filter(holds.all().over("window", "at_waiting", "at_awaited"))
    between = always.filter(pl.col("lane_waiting") != pl.col("lane_awaited"))
    more = between.join(waits, on=["window", "rank", "waiting", "awaited"], how="anti", maintain_order="left")
    new_waits = more.with_columns(lag_ns=pl.lit(0, pl.Int64), kind=pl.lit(_EVENT), inferred=pl.lit(value=True))
    return schema.select(new_waits.sort("window", "rank", "waiting", "awaited"), COLUMNS)


def _places(nodes: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Return the place of each piece of device work, as a number that is the same on all ranks.

    Only of work with the name and step of a node of a `waits` wait (waiting and awaited).
    """
    ends = pl.concat([waits.select("window", "rank", node=end) for end in ("waiting", "awaited")]).unique()
    launched = nodes.filter((pl.col("what") == WORK) & (pl.col("launch") >= 0))
    names = launched.join(ends, on=["window", "rank", "node"], how="semi").select(_OF_NAME).unique()
    work = launched.join(names, on=_OF_NAME, how="semi", nulls_equal=True).sort("window", "rank", "launch", "start_ns")
    of_rank = ["rank", *_OF_NAME]
    with_nth = work.with_columns(nth=pl.int_range(pl.len()).over(of_rank), times=pl.len().over(of_rank))
    return with_nth.select(
        "window", "rank", "node", "lane", "launch", "start_ns", "end_ns", place=pl.struct(_PLACE).rank("dense")
    )


def _ends(places: pl.DataFrame, side: str) -> pl.DataFrame:
    """Return the places as those of waiting or awaited nodes."""
    return places.select(
        "window",
        "rank",
        pl.col("node").alias(side),
        pl.col("place").alias(f"at_{side}"),
        pl.col("lane", "launch", "start_ns", "end_ns").name.map(lambda name: f"{name.removesuffix('_ns')}_{side}"),
    )
