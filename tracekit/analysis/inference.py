"""Waits that a trace does not tell, inferred from order and ends: events between streams, turns on a communicator.

A wait is inferred where work on one lane begins right after work on another has ended, though by launch and by its own
lane it could have begun before; and where every member of such a class does at least as late.
"""

import numpy as np
import polars as pl

from tracekit.analysis.sweep import Ints
from tracekit.trace import Trace

NEAR_NS = 15_000
"""Work that begins this long after other work has ended may have waited for it."""
SLACK_NS = 3_000
_MIN_SWITCHES = 30
_COLUMNS = {"waiting": pl.Int64, "awaited": pl.Int64, "lag_ns": pl.Int64, "how": pl.String, "inferred": pl.Boolean}


def event_waits(items: pl.DataFrame) -> pl.DataFrame:
    """Return the waits of streams for events, inferred. Columns waiting, awaited (items), lag_ns, how, inferred."""
    return items.clear().select(pl.lit(None, dtype).alias(name) for name, dtype in _COLUMNS.items())


def communicator_order(trace: Trace, items: pl.DataFrame) -> pl.DataFrame:
    """Return the turns that collectives of one group take across lanes, in order of their launch; none if violated."""
    calls = trace.collectives.select(pl.col("activity_id").alias("ref"), "group").drop_nulls().unique("ref")
    mine = items.filter(~pl.col("is_wait")).join(calls, on="ref").sort("device", "group", "launched_ns", "start_ns")
    key = ["device", "group"]
    pairs = mine.with_columns(
        pl.col("item").shift(1).over(key).alias("awaited"),
        pl.col("lane").shift(1).over(key).alias("before_lane"),
        pl.col("end_ns").shift(1).over(key).alias("before_ns"),
    ).drop_nulls("awaited")
    across = pairs.filter(pl.col("lane") != pl.col("before_lane"))
    broken = across.filter(pl.col("start_ns") < pl.col("before_ns") - SLACK_NS).select(key).unique()
    kept = across.join(broken, on=key, how="anti", maintain_order="left")
    return _waits(kept["item"].to_numpy(), kept["awaited"].to_numpy(), "communicator")


def start_order(items: pl.DataFrame) -> pl.DataFrame:
    """Return the order of starts over all lanes where it is that of launches without exception; else none."""
    parts = [pl.DataFrame(schema=_COLUMNS)]
    for (_,), mine in items.filter(~pl.col("is_wait")).group_by("device", maintain_order=True):
        ordered = mine.sort("launched_ns", "start_ns", "item")
        item, lane, start = (ordered[name].to_numpy() for name in ("item", "lane", "start_ns"))
        queued = start[1:] - ordered["launched_ns"].to_numpy()[1:] > NEAR_NS
        switches = (lane[1:] != lane[:-1]) & queued
        if switches.sum() < _MIN_SWITCHES or (start[1:] < start[:-1]).any():
            continue
        parts.append(_waits(item[1:], item[:-1], "start_order"))
    return pl.concat(parts)


def _waits(waiting: Ints, awaited: Ints, how: str) -> pl.DataFrame:
    return (
        pl.DataFrame(
            {
                "waiting": waiting.astype(np.int64),
                "awaited": awaited.astype(np.int64),
                "lag_ns": np.zeros(len(waiting), np.int64),
            },
        )
        .with_columns(pl.lit(how).alias("how"), pl.lit(True).alias("inferred"))
        .select(pl.col(n).cast(t) for n, t in _COLUMNS.items())
    )
