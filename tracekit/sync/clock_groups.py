"""Clocks of ranks that are linked: by collectives that they share, or by what they send to each other."""

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


class ClockGroups:
    """Clock offsets between ranks, known within each part: a set of ranks that collectives or messages link."""

    def __init__(self, ranks: list[int]) -> None:
        self.part = {rank: rank for rank in ranks}
        self.offset_ns = dict.fromkeys(ranks, 0)
        self.error_ns: dict[int, int | None] = dict.fromkeys(ranks)
        self._collectives: set[tuple[int, int]] = set()

    def copy(self) -> "ClockGroups":
        """Return clocks that can be linked further without a change to these."""
        copied = ClockGroups([])
        copied.replace(self)
        return copied

    def replace(self, other: "ClockGroups") -> None:
        """Take over all that is known of other clocks."""
        self.part, self.offset_ns, self.error_ns = dict(other.part), dict(other.offset_ns), dict(other.error_ns)
        self._collectives = set(other._collectives)

    def link_by_collectives(self, rank: int, other: int, offset_ns: int) -> None:
        """Merge the parts of two ranks that share collectives; if they were apart, `offset_ns` is that of `rank`."""
        self._collectives.add((rank, other))
        if self.part[rank] != self.part[other]:
            self._link(rank, other, offset_ns)

    def _link(self, rank: int, other: int, offset_ns: int) -> None:
        shift = offset_ns - self.offset_ns[rank]
        for member in self._members(self.part[rank]):
            self.part[member] = self.part[other]
            self.offset_ns[member] += shift

    def link_by_messages(self, pairs: pl.DataFrame) -> None:
        """Merge the parts whose ranks send to each other. Errors of links add up."""
        if pairs.is_empty() or len(set(self.part.values())) < 2:
            return
        for link in links(pairs):
            first, moved = self.part[link.rank], self.part[link.other]
            if first == moved:  # collectives or an earlier link have merged them
                continue
            error_ns = link.error_ns + (self.error_ns[link.rank] or 0) + (self.error_ns[link.other] or 0)
            for member in self._members(first):
                self.error_ns[member] = self.error_ns[member] or 0
            for member in self._members(moved):
                self.error_ns[member] = (self.error_ns[member] or 0) + error_ns
            self._link(link.other, link.rank, self.offset_ns[link.rank] - link.offset_ns)

    def error_between_ns(self, rank: int, other: int) -> int | None:
        """Largest error of the offset between two ranks where only messages link them, else None."""
        errors = (self.error_ns[rank], self.error_ns[other])
        return None if self.part[rank] != self.part[other] or None in errors else sum(error or 0 for error in errors)

    def rows(self, pairs: pl.DataFrame) -> list[tuple[int, int, int | None, int]]:
        """Return rank, offset_ns, error_ns and part of each rank.

        The error is that of sends and receives (`pairs`), where no collectives link the rank's clock; else None.
        """
        last = ClockGroups(list(self.part))
        last.offset_ns = dict(self.offset_ns)
        for rank, other in sorted(self._collectives):
            last.link_by_collectives(rank, other, last.offset_ns[rank])
        last.link_by_messages(pairs)
        return [(rank, last.offset_ns[rank], last.error_ns[rank], last.part[rank]) for rank in last.part]

    def _members(self, part: int) -> list[int]:
        return [rank for rank, rank_part in self.part.items() if rank_part == part]


def links(pairs: pl.DataFrame) -> list[Link]:
    """Return the links between the clocks of ranks that send to each other, the most exact first.

    `pairs` are the sends and receives of a window: columns rank, members ("FROM>TO"), step, bytes, start_ns, end_ns. A
    send belongs to the receive of the same number in its step; steps in which the numbers or sizes differ are left out.
    Bounds that contradict each other give no link.
    """
    # The delay of a message is from the start of the send to the end of the receive, each on its own clock.
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
    delays = (
        both.filter(agrees.all().over("sender", "receiver", "step"), pl.col("sender") != pl.col("receiver"))
        .group_by("sender", "receiver", maintain_order=True)
        .agg(pl.len().alias("messages"), (pl.col("end_ns") - pl.col("start_ns")).min().alias("delay_ns"))
    )
    quickest = {(row["sender"], row["receiver"]): row for row in delays.iter_rows(named=True)}
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
