"""Collectives matched across ranks: by sequence number, otherwise by kind and end time."""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.sync import message_clocks, subgroups
from tracekit.sync.clock_offsets import UNKNOWN, Instances, RankCalls, match_by_sequence_number, match_rank

SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank can leave before all ranks have arrived."""
EXPERT = ("dispatch", "combine")
"""All-to-alls of expert parallelism: ranks wait for each other, but a kernel that only sends may leave before."""
UNEQUAL_SIZES = ("all_to_all", "gather", "scatter", *EXPERT)  # message sizes may differ between ranks
ROOTED = ("broadcast", "reduce", "gather", "scatter")
PAIRED = "send_recv"
"""A send and its receive, where both record the peer rank."""
SEQ, ORDER, MESSAGES, NONE = "seq", "order", "messages", "none"

CALLS = schema.columns(
    "activity_id op group members group_size seq dtype bytes start_ns end_ns step phase unit", members=pl.String
)

_Ints = npt.NDArray[np.int64]


def calls(trace: Trace) -> pl.DataFrame:
    """Return the collectives of a trace as calls to match with other ranks.

    Columns as CALLS: group is the group's name; members distinguishes groups of the same name (ranks as text; null if
    unknown); bytes is the larger of sent and received. One row per communication activity. If a trace lists only one
    group, all its collectives belong to it. A send or receive with a known peer has op send_recv and a group of two,
    with members "FROM>TO".
    """
    activities = trace.activities.select("id", "start_ns", "dur_ns", "step", "phase", "unit")
    groups = trace.groups.filter(pl.col("ranks").list.len() > 1)
    only = groups.row(0, named=True)["group"] if groups.height == 1 else None
    known = groups.select("group", _members(), pl.col("ranks").list.len().cast(pl.Int64).alias("listed_size"))
    found = (
        trace.collectives.join(activities, left_on="activity_id", right_on="id")
        .with_columns(pl.col("group").fill_null(pl.lit(only, pl.String)))
        .join(known.unique("group", keep="first"), on="group", how="left", maintain_order="left")
        .with_columns(
            pl.coalesce("listed_size", "group_size").alias("group_size"),
            pl.max_horizontal("sent_bytes", "received_bytes").alias("bytes"),
            (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"),
        )
        .sort("start_ns", "activity_id")
    )
    return _with_send_receive_pairs(found, trace.rank).pipe(schema.select, CALLS)


def _with_send_receive_pairs(found: pl.DataFrame, rank: int) -> pl.DataFrame:
    sends = pl.col("op") == "send"
    paired = (sends | (pl.col("op") == "recv")) & pl.col("peer").is_not_null()
    to_peer, from_peer = pl.format(f"{rank}>{{}}", "peer"), pl.format(f"{{}}>{rank}", "peer")
    between = pl.when(sends).then(to_peer).otherwise(from_peer)
    return found.with_columns(
        pl.when(paired).then(between).otherwise("members").alias("members"),
        pl.when(paired).then(2).otherwise("group_size").alias("group_size"),
        pl.when(paired).then(None).otherwise("seq").alias("seq"),  # of the group, not of the pair
        pl.when(paired).then(pl.lit(PAIRED)).otherwise("op").alias("op"),
    )


def matched_calls(run: Run) -> pl.DataFrame:
    """Return the calls of all ranks with the collective instance of each.

    Columns window, rank, those of CALLS, instance (unique in the window; null if unknown, and for sends and receives),
    matched_by (seq or order), rough_ns (the initial estimate of the rank's clock offset), message_error_ns (its error
    where sends and receives link the rank's clock; null where collectives do) and clock_domain (ranks of a window whose
    clocks are linked); one row per call.
    """
    table = run.table(calls).with_row_index("call")
    parts = [_match_window(rows) for _, rows in table.group_by("window", maintain_order=True)]
    if not parts:
        added = schema.columns("instance matched_by rough_ns message_error_ns clock_domain", matched_by=pl.String)
        return schema.conform(table.drop("call"), table.drop("call").schema | added)
    return pl.concat(parts).sort("call").drop("call")


def _members() -> pl.Expr:
    # Groups can have thousands of ranks, and this text is repeated in every row.
    ranks = pl.col("ranks").list
    text = ranks.sort().cast(pl.List(pl.String)).list.join(",")
    short = pl.format("{} ranks from {} to {}, {}", ranks.len(), ranks.min(), ranks.max(), text.hash(seed=0))
    return pl.when(ranks.len() <= 16).then(text).otherwise(short).alias("members")


# One window ----------------------------------------------------------------------------------------------------------


def _match_window(rows: pl.DataFrame) -> pl.DataFrame:
    clocks = _ClockGroups(rows["rank"].unique().to_list())
    groups = list(_groups(rows))
    found = [_match_group(group, clocks) for group in groups]
    if clocks.link_by_messages(rows.filter(_is_paired())):
        found = [_match_group(group, clocks) for group in groups]
    found = [
        part for group, match in zip(groups, found, strict=True) for part in _match_subgroups(group, match, clocks)
    ]
    instance = np.full(rows.height, UNKNOWN, np.int64)
    by_seq = np.zeros(rows.height, bool)
    first = 0
    for at, of_group, sequenced in found:
        instance[at[of_group >= 0]] = of_group[of_group >= 0] + first
        by_seq[at] = sequenced
        first += int(of_group.max(initial=-1)) + 1
    columns = schema.columns("rank rough_ns message_error_ns clock_domain")
    place = pl.DataFrame(clocks.rows(), schema=columns, orient="row")
    known = pl.Series("instance", instance)
    matched_by = pl.when(pl.Series(by_seq)).then(pl.lit(SEQ)).otherwise(pl.lit(ORDER))
    return rows.with_columns(
        known.replace(UNKNOWN, None), pl.when(known != UNKNOWN).then(matched_by).alias("matched_by")
    ).join(place, on="rank", how="left", maintain_order="left")


def _groups(rows: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield the calls of each group with more than one traced rank, the best described and largest groups first."""
    shared = (
        rows.with_row_index("at")
        .filter(pl.col("op").is_in([*SYNCHRONIZING, *ROOTED, *EXPERT]) | _is_paired())
        .with_columns(pl.col("rank").n_unique().over("group", "members").alias("present"))
        # More ranks than the group has: several groups share a name and cannot be distinguished.
        .filter(
            pl.col("present") > 1,
            pl.col("members").is_not_null() | (pl.col("present") <= pl.col("group_size").fill_null(1 << 62)),
        )
    )
    keys = (
        shared.group_by("group", "members")
        .agg(pl.len().alias("calls"), pl.col("present").first(), _is_paired().any().alias("paired"))
        .sort(
            "paired",  # the ends of collectives align clocks better
            pl.col("members").is_null(),
            pl.col("group").is_null(),
            -pl.col("present").cast(pl.Int64),
            -pl.col("calls").cast(pl.Int64),
            "group",
            "members",
        )
    )
    for group, members in keys.select("group", "members").iter_rows():
        yield shared.filter(pl.col("group").eq_missing(group), pl.col("members").eq_missing(members))


def _is_paired() -> pl.Expr:
    return (pl.col("op") == PAIRED) & pl.col("members").str.contains(">", literal=True).fill_null(value=False)


class _ClockGroups:
    """Clock offsets between ranks, known within each part: a set of ranks that collectives or messages link."""

    def __init__(self, ranks: list[int]) -> None:
        self.part = {rank: rank for rank in ranks}
        self.offset_ns = dict.fromkeys(ranks, 0)
        self.error_ns: dict[int, int | None] = dict.fromkeys(ranks)

    def link(self, rank: int, other: int, offset_ns: int) -> None:
        """Merge the part of `rank` into that of `other`; the offset of `rank` becomes `offset_ns`."""
        moved, shift = self.part[rank], offset_ns - self.offset_ns[rank]
        for member in self._members(moved):
            self.part[member] = self.part[other]
            self.offset_ns[member] += shift

    def link_by_messages(self, pairs: pl.DataFrame) -> bool:
        """Merge the parts whose ranks send to each other; return whether there are such. Errors of links add up."""
        if pairs.is_empty() or len(set(self.part.values())) < 2:
            return False
        found = [link for link in message_clocks.links(pairs) if self.part[link.rank] != self.part[link.other]]
        for link in found:
            first, moved = self.part[link.rank], self.part[link.other]
            if first == moved:  # an earlier link has merged them
                continue
            error_ns = link.error_ns + (self.error_ns[link.rank] or 0) + (self.error_ns[link.other] or 0)
            for member in self._members(first):
                self.error_ns[member] = self.error_ns[member] or 0
            for member in self._members(moved):
                self.error_ns[member] = (self.error_ns[member] or 0) + error_ns
            self.link(link.other, link.rank, self.offset_ns[link.rank] - link.offset_ns)
        return bool(found)

    def _members(self, part: int) -> list[int]:
        return [rank for rank, of in self.part.items() if of == part]

    def rows(self) -> list[tuple[int, int, int | None, int]]:
        return [(rank, self.offset_ns[rank], self.error_ns[rank], self.part[rank]) for rank in self.part]


_Match: TypeAlias = tuple[_Ints, _Ints, bool]
"""Row numbers, the instance of each (from 0; -1: unknown), and whether sequence numbers were used."""


def _match_subgroups(group: pl.DataFrame, match: _Match, clocks: _ClockGroups) -> list[_Match]:
    """Return the match of a group; kinds of calls that belong to smaller groups are matched within each of these."""
    at, instance, sequenced = match
    if sequenced or group["members"].null_count() < group.height:
        return [match]
    described = _described(group)
    offset_ns = pl.col("rank").replace_strict(clocks.offset_ns, return_dtype=pl.Int64)
    matched = described.with_columns(pl.Series("instance", instance)).filter(
        pl.col("together"), pl.col("instance") != UNKNOWN
    )
    smaller = subgroups.subgroups(matched.with_columns(pl.col("start_ns", "end_ns") + offset_ns))
    of_smaller = described["token"].is_in(list(smaller)).to_numpy()
    found: list[_Match] = [(at[~of_smaller], instance[~of_smaller], sequenced)]
    for token, groups in smaller.items():
        calls = group.filter(described["token"] == token)
        found += [_match_group(calls.filter(pl.col("rank").is_in(ranks)), clocks) for ranks in groups]
    return found


def _match_group(group: pl.DataFrame, clocks: _ClockGroups) -> _Match:
    described = _described(group)
    sequenced = _has_seq(group)
    instance = np.full(group.height, UNKNOWN, np.int64)
    numbered = described.drop("at").with_row_index("row")
    calls_of = RankCalls.by_rank(numbered)
    first, *others = sorted(calls_of, key=lambda rank: (-len(calls_of[rank].end), rank))
    instances = Instances.of(calls_of[first], clocks.offset_ns[first])
    instance[calls_of[first].row] = instances.instance
    for rank in others:
        calls = calls_of[rank]
        is_tied = clocks.part[rank] == clocks.part[first]
        match = match_rank(
            calls,
            instances,
            offset_ns=clocks.offset_ns[rank] if is_tied else None,
            pairs=match_by_sequence_number(calls, instances) if sequenced else None,
        )
        if match is None:
            continue
        if match.links_clocks and not is_tied:
            clocks.link(rank, first, match.offset_ns)
        instances = instances.with_rank(calls, match)
        instance[calls.row] = match.instance
    return group["at"].to_numpy().astype(np.int64), instance, sequenced


def _described(group: pl.DataFrame) -> pl.DataFrame:
    """Return the calls of a group with their kind (token), the op's number, and whether ranks leave it together."""
    return group.with_columns(
        pl.when(~pl.col("op").is_in(UNEQUAL_SIZES)).then(pl.col("bytes")).alias("bytes"),
        pl.col("op").rank("dense").cast(pl.Int64).alias("op_code"),
        _kind(),
        pl.col("op").is_in(SYNCHRONIZING).alias("together"),
    )


def _kind() -> pl.Expr:
    equal = ~pl.col("op").is_in(UNEQUAL_SIZES)
    attributes = (pl.when(equal).then(pl.col(of).cast(pl.String)).fill_null("?") for of in ("dtype", "bytes"))
    key = pl.concat_str("op", *attributes, separator="|")
    return key.rank("dense").cast(pl.Int64).alias("token")


def _has_seq(group: pl.DataFrame) -> bool:
    # Kernels replayed by a CUDA graph repeat the sequence number of their capture.
    return not group["seq"].null_count() and not group.select("rank", "op", "seq").is_duplicated().any()
