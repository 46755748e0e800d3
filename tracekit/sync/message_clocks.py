"""Clock offsets between ranks that send to each other, from the quickest messages of both directions.

No message arrives before it was sent, so each direction bounds the offset of two clocks from one side. The estimate is
the middle between the bounds, its error at most half their distance (F. Cristian, Probabilistic clock synchronization,
1989; RFC 5905, NTP). Collectives are preferred where there are enough: their ends are more precise.
"""

from dataclasses import dataclass

import polars as pl

MIN_MESSAGES = 3
"""Messages in each direction from which two clocks are aligned."""
_SIDE = ("rank", "members", "step")
_MESSAGE = ("sender", "receiver", "step", "number")


@dataclass(frozen=True)
class Link:
    """`offset_ns`, added to a time of `rank`, gives the time of `other`, within `error_ns`."""

    rank: int
    other: int
    offset_ns: int
    error_ns: int


def links(pairs: pl.DataFrame) -> list[Link]:
    """Return the links between the clocks of ranks that send to each other, the most exact first.

    `pairs` are the sends and receives of a window: columns rank, members ("FROM>TO"), step, bytes, start_ns, end_ns. A
    send belongs to the receive of the same number in its step; steps in which the numbers or sizes differ are left out.
    Bounds that contradict each other give no link.
    """
    quickest = {(row["sender"], row["receiver"]): row for row in _quickest(pairs).iter_rows(named=True)}
    clock_links = []
    for (rank, other), forth in quickest.items():
        back = quickest.get((other, rank))
        if rank > other or back is None or min(forth["messages"], back["messages"]) < MIN_MESSAGES:
            continue
        distance_ns = forth["delay_ns"] + back["delay_ns"]
        if distance_ns >= 0:
            offset_ns = (forth["delay_ns"] - back["delay_ns"]) // 2
            clock_links.append(Link(rank, other, offset_ns, -(-distance_ns // 2)))
    return sorted(clock_links, key=lambda link: (link.error_ns, link.rank, link.other))


def _quickest(pairs: pl.DataFrame) -> pl.DataFrame:
    """Return the messages and the least delay of each direction. Columns sender, receiver, messages, delay_ns.

    A delay is from the start of the send to the end of the receive, each on its own clock.
    """
    ends = pl.col("members").str.split_exact(">", 1).struct.rename_fields(["sender", "receiver"]).struct
    messages = (
        pairs.sort("start_ns")
        .with_columns(ends.unnest().cast(pl.Int64, strict=False))
        .with_columns(number=pl.int_range(pl.len()).over(_SIDE), sent=pl.len().over(_SIDE))
    )
    columns = (*_MESSAGE, "sent", "bytes")
    sends = messages.filter(pl.col("rank") == pl.col("sender")).select(*columns, "start_ns")
    receives = messages.filter(pl.col("rank") == pl.col("receiver")).select(*columns, "end_ns")
    both = sends.join(receives, on=_MESSAGE, nulls_equal=True)
    agrees = (pl.col("sent") == pl.col("sent_right")) & pl.col("bytes").eq(pl.col("bytes_right")).fill_null(value=True)
    return (
        both.filter(agrees.all().over("sender", "receiver", "step"), pl.col("sender") != pl.col("receiver"))
        .group_by("sender", "receiver", maintain_order=True)
        .agg(
            pl.len().cast(pl.Int64).alias("messages"),
            (pl.col("end_ns") - pl.col("start_ns")).min().alias("delay_ns"),
        )
    )
