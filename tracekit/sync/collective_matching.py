"""Collectives matched across ranks: by sequence number, otherwise by kind and end time."""

from collections.abc import Container, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model import schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.sync import subgroups
from tracekit.sync.clock_groups import ClockGroups
from tracekit.sync.clock_offsets import MIN_PAIRS, UNKNOWN, Instances, RankCalls, match_by_sequence_number, match_rank

SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank can leave before all ranks have arrived."""
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
"""Those that all ranks leave at one time; from an all-to-all, ranks with slow links leave later than the others."""
EXPERT = ("dispatch", "combine")
"""All-to-alls of expert parallelism: ranks wait for each other, but a kernel that only sends may leave before."""
UNEQUAL_SIZES = ("all_to_all", "gather", "scatter", *EXPERT)  # message sizes may differ between ranks
ROOTED = ("broadcast", "reduce", "gather", "scatter")
PAIRED = "send_recv"
"""A send and its receive, where both record the peer rank."""
SEQ, ORDER, MESSAGES, NONE = "seq", "order", "messages", "none"

CALLS = schema.columns(
    "activity_id op group members group_size seq dtype bytes start_ns end_ns is_end_stated step phase unit",
    members=pl.String,
)

_ROUNDS = 4
"""In which calls of unknown groups are divided into smaller groups, and clocks aligned by these."""
_Ints = npt.NDArray[np.int64]


@trace_fact
def calls(trace: Trace) -> pl.DataFrame:
    """Return the collectives of a trace as calls to match with other ranks.

    Columns as CALLS: group is the group's name; members distinguishes groups of the same name (ranks as text; null if
    unknown); bytes is the larger of sent and received; is_end_stated is false where end_ns is the time at which a log
    was written, before which the call ended. One row per communication activity. If a trace lists only one group, all
    its collectives belong to it. A send or receive with a known peer has op send_recv and a group of two,
    with members "FROM>TO".
    """
    activities = trace.activities.select("id", "start_ns", "dur_ns", "step", "phase", "unit")
    collectives = (
        with_groups(trace, trace.collectives)
        .join(activities, left_on="activity_id", right_on="id", maintain_order="left")
        .with_columns(
            pl.max_horizontal("sent_bytes", "received_bytes").alias("bytes"),
            (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"),
            pl.lit(schema.WRITE_TIMES not in trace.data_quality["kind"]).alias("is_end_stated"),
        )
        .sort("start_ns", "activity_id")
    )
    sends = pl.col("op") == "send"
    paired = (sends | (pl.col("op") == "recv")) & pl.col("peer").is_not_null()
    to_peer, from_peer = pl.format(f"{trace.rank}>{{}}", "peer"), pl.format(f"{{}}>{trace.rank}", "peer")
    between = pl.when(sends).then(to_peer).otherwise(from_peer)
    return (
        collectives.with_columns(
            pl.when(paired).then(between).otherwise("members").alias("members"),
            pl.when(paired).then(2).otherwise("group_size").alias("group_size"),
            pl.when(paired).then(None).otherwise("seq").alias("seq"),  # of the group, not of the pair
            pl.when(paired).then(pl.lit(PAIRED)).otherwise("op").alias("op"),
        )
    ).pipe(schema.select, CALLS)


def with_groups(trace: Trace, collectives: pl.DataFrame) -> pl.DataFrame:
    """Return collectives of a trace, with columns group and group_size, with what its list of groups says of these.

    Adds members (ranks as text; null if unknown). If the trace lists only one group, all its collectives belong to it.
    """
    is_own = pl.col("ranks").list.contains(trace.rank)  # a file merged of several ranks lists the groups of one of them
    groups = trace.groups.filter(pl.col("ranks").list.len() > 1, is_own)
    only = groups.row(0, named=True)["group"] if groups.height == 1 else None
    ranks = pl.col("ranks").list
    text = ranks.sort().cast(pl.List(pl.String)).list.join(",")
    # Groups can have thousands of ranks, and this text is repeated in every row.
    short = pl.format("{} ranks from {} to {}, {}", ranks.len(), ranks.min(), ranks.max(), text.hash(seed=0))
    members = pl.when(ranks.len() <= 16).then(text).otherwise(short).alias("members")
    listed = groups.select("group", members, ranks.len().cast(pl.Int64).alias("listed_size"))
    return (
        collectives.with_columns(pl.col("group").fill_null(pl.lit(only, pl.String)))
        .join(listed.unique("group", keep="first"), on="group", how="left", maintain_order="left")
        .with_columns(pl.coalesce("listed_size", "group_size").alias("group_size"))
        .drop("listed_size")
    )


@run_fact
def run_calls(run: Run) -> pl.DataFrame:
    """Return the calls of all ranks; use ``run.table(run_calls)``. Columns window, rank, and those of CALLS.

    A trace that does not list its groups states the peer of a send or receive by its place in a group, which is taken
    for its rank. Where that rank has a trace without the call, it is not the peer: the pair is not known.
    """
    table = run.table(calls)
    if not (table["op"] == PAIRED).any():
        return table
    # Only those of pairs: the text of a large group ends with a hash, which may be beyond 63 bits.
    pair = pl.when(_is_paired()).then("members")
    ranks = pair.str.extract_all(r"\b[0-9]{1,18}\b").cast(pl.List(pl.Int64))
    traced = table.group_by("window").agg(pl.col("rank").unique().alias("traced"))
    recorded = pl.col("rank").n_unique().over("window", "members")
    both_traced = ranks.list.set_difference("traced").list.len() == 0
    is_wrong = (_is_paired() & both_traced & (recorded < ranks.list.n_unique())).fill_null(value=False)
    op = (
        pl.when(pl.col("members").str.starts_with(pl.format("{}>", "rank")))
        .then(pl.lit("send"))
        .otherwise(pl.lit("recv"))
    )
    return (
        table.join(traced, on="window", how="left", maintain_order="left")
        .with_columns(is_wrong.alias("is_wrong"), op.alias("one_sided"))
        .with_columns(
            pl.when("is_wrong").then(None).otherwise("members").alias("members"),
            pl.when("is_wrong").then("one_sided").otherwise("op").alias("op"),
            pl.when("is_wrong").then(None).otherwise("group_size").alias("group_size"),
        )
        .select(table.columns)
    )


@run_fact
def matched_calls(run: Run) -> pl.DataFrame:
    """Return the calls of all ranks with the collective instance of each.

    Columns window, rank, those of CALLS, instance (unique in the window; null if unknown, and for sends and receives),
    matched_by (seq or order), rough_ns (the initial estimate of the rank's clock offset), message_error_ns (its error
    where sends and receives link the rank's clock; null where collectives do) and clock_domain (ranks of a window whose
    clocks are linked); one row per call.
    """
    table = run.table(run_calls).with_row_index("call")
    parts = [_match_window(rows) for _, rows in table.group_by("window", maintain_order=True)]
    if not parts:
        added = schema.columns("instance matched_by rough_ns message_error_ns clock_domain", matched_by=pl.String)
        return schema.conform(table.drop("call"), table.drop("call").schema | added)
    return pl.concat(parts).sort("call").drop("call")


# One window ----------------------------------------------------------------------------------------------------------


def _match_window(rows: pl.DataFrame) -> pl.DataFrame:
    clocks = ClockGroups(rows["rank"].unique().to_list())
    pairs = rows.filter(_is_paired())
    known_groups: list[pl.DataFrame] = []
    unknown_groups: list[pl.DataFrame] = []  # of ranks that are not known
    paired: list[pl.DataFrame] = []
    for group in _groups(rows):
        members = group["members"][0]
        if group["op"][0] == PAIRED and ">" in (members or ""):
            paired.append(group)
        else:
            (known_groups if members is not None else unknown_groups).append(group)
    matches = [_match_group(group, clocks) for group in known_groups]
    parts = len(set(clocks.part.values()))
    # Before calls of which the group is not known: those of different groups would align clocks wrongly.
    clocks.link_by_messages(pairs)
    if len(set(clocks.part.values())) < parts:
        matches = [_match_group(group, clocks) for group in known_groups]
    matches += [part for group in unknown_groups for part in _match_unnamed(group, clocks)]
    matches += [_match_group(group, clocks) for group in paired]
    instance = np.full(rows.height, UNKNOWN, np.int64)
    by_seq = np.zeros(rows.height, bool)
    first = 0
    for row, group_instance, sequenced in matches:
        instance[row[group_instance >= 0]] = group_instance[group_instance >= 0] + first
        by_seq[row] = sequenced
        first += int(group_instance.max(initial=-1)) + 1
    columns = schema.columns("rank rough_ns message_error_ns clock_domain")
    place = pl.DataFrame(clocks.rows(pairs), schema=columns, orient="row")
    instances = pl.Series("instance", instance)
    matched_by = pl.when(pl.Series(by_seq)).then(pl.lit(SEQ)).otherwise(pl.lit(ORDER))
    return rows.with_columns(
        instances.replace(UNKNOWN, None), pl.when(instances != UNKNOWN).then(matched_by).alias("matched_by")
    ).join(place, on="rank", how="left", maintain_order="left")


def _groups(rows: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield the calls of each group with more than one traced rank, the best described and largest groups first."""
    shared = (
        rows.with_row_index("at")
        .filter(pl.col("op").is_in([*SYNCHRONIZING, *ROOTED, *EXPERT]) | _is_paired())
        .with_columns(pl.col("rank").n_unique().over("group", "members").alias("present"))
        .filter(pl.col("present") > 1)
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


_Match: TypeAlias = tuple[_Ints, _Ints, bool]
"""Row numbers, the instance of each (from 0; -1: unknown), and whether sequence numbers were used."""


def _match_unnamed(group: pl.DataFrame, clocks: ClockGroups) -> list[_Match]:
    """Return the matches of calls of which the group's ranks are not known: they may be of several groups.

    Kinds of calls that belong to smaller groups are matched within each of these. The clocks are aligned once more
    without instances of which calls are of different groups.
    """
    before, smaller = clocks.copy(), dict[int, list[list[int]]]()
    matches = _match_smaller(group, smaller, clocks)
    for _ in range(_ROUNDS):
        more = _smaller_groups(group, matches, clocks, before=before, known_tokens=smaller)
        if not more and smaller and len(set(clocks.part.values())) == 1:
            as_one = _smaller_groups(group, _match_all(group, clocks.copy()), clocks, before=before)
            more = {token: groups for token, groups in as_one.items() if smaller.get(token) != groups}
        if not more:
            break
        smaller |= more
        clocks.replace(before)
        matches = _match_smaller(group, smaller, clocks)
    if not _has_too_many(group):
        return matches
    if not smaller:
        clocks.replace(before)
    # Matches without instances of more ranks than the group has: of several groups with one name.
    sizes = group.select(pl.col("at"), pl.col("group_size").fill_null(len(group)))
    counted = _row_instances(matches).join(sizes, on="at", maintain_order="left")
    too_many = (pl.len().over("instance") > pl.col("group_size")) | (pl.col("instance") == UNKNOWN)
    unknown = counted.filter(too_many)["at"].to_numpy()
    return [(row, np.where(np.isin(row, unknown), UNKNOWN, instance), by_seq) for row, instance, by_seq in matches]


def _match_all(group: pl.DataFrame, clocks: ClockGroups) -> list[_Match]:
    """Return the matches of a group. Ranks whose calls fit none of the first ranks' are matched among themselves."""
    matches: list[_Match] = []
    while True:
        row, instance, sequenced = _match_group(group, clocks)
        unmatched = group.filter(instance == UNKNOWN)
        if unmatched["rank"].n_unique() < 2:
            return [*matches, (row, instance, sequenced)]
        matches.append((row[instance != UNKNOWN], instance[instance != UNKNOWN], sequenced))
        group = unmatched


def _smaller_groups(
    group: pl.DataFrame,
    matches: list[_Match],
    clocks: ClockGroups,
    *,
    before: ClockGroups,
    known_tokens: Container[int] = (),
) -> dict[int, list[list[int]]]:
    """Return the kinds of calls that belong to smaller groups than `matches` assume, each with its groups of ranks.

    Kinds in `known_tokens` are left out. `before` are the clocks before they were aligned by these calls.
    """
    if any(sequenced for *_, sequenced in matches) and not _has_too_many(group):
        return {}
    offset_ns = pl.col("rank").replace_strict(clocks.offset_ns, return_dtype=pl.Int64)
    shifts = {rank: offset - before.offset_ns[rank] for rank, offset in clocks.offset_ns.items()}
    matched = _describe_calls(group).join(_row_instances(matches), on="at")
    is_open = ~pl.col("token").is_in([token for token in matched["token"].unique() if token in known_tokens])
    together = matched.filter("together", is_open, pl.col("instance") != UNKNOWN)
    return subgroups.subgroups(together.with_columns(pl.col("start_ns", "end_ns") + offset_ns), shifts)


def _row_instances(matches: list[_Match]) -> pl.DataFrame:
    """Return the instance of each row, unique over all matches. Columns at, instance."""
    parts, first = [pl.DataFrame(schema={"at": pl.UInt32, "instance": pl.Int64})], 0
    for row, instance, _ in matches:
        number = np.where(instance >= 0, instance + first, UNKNOWN)
        parts.append(pl.DataFrame({"at": row.astype(np.uint32), "instance": number}))
        first += int(instance.max(initial=-1)) + 1
    return pl.concat(parts)


def _match_smaller(group: pl.DataFrame, smaller: dict[int, list[list[int]]], clocks: ClockGroups) -> list[_Match]:
    """Return the matches within smaller groups, and of the other kinds of calls within the whole group."""
    token = _describe_calls(group)["token"]
    tokens_of: dict[str, list[int]] = {}
    for kind, groups in smaller.items():
        tokens_of.setdefault(str(groups), []).append(kind)
    matches: list[_Match] = []
    for tokens in tokens_of.values():
        calls = group.filter(token.is_in(tokens))
        for ranks in smaller[tokens[0]]:
            if len(ranks) > 1:  # the peers of a rank alone have no trace
                matches += _match_all(calls.filter(pl.col("rank").is_in(ranks)), clocks)
    rest = group.filter(~token.is_in(list(smaller)))
    return matches + (_match_all(rest, clocks) if rest["rank"].n_unique() > 1 else [])


def _has_too_many(group: pl.DataFrame) -> bool:
    """Return whether more ranks have such calls than the group has: several groups share its name."""
    return bool((group["present"] > group["group_size"]).any())


def _match_group(group: pl.DataFrame, clocks: ClockGroups) -> _Match:
    described = _describe_calls(group)
    # Kernels replayed by a CUDA graph repeat the sequence number of their capture.
    sequenced = not group["seq"].null_count() and not group.select("rank", "op", "seq").is_duplicated().any()
    instance = np.full(group.height, UNKNOWN, np.int64)
    rows = described.drop("at").with_row_index("row")
    calls_of = RankCalls.by_rank(rows)
    first, *other_ranks = sorted(calls_of, key=lambda rank: (-len(calls_of[rank].end), rank))
    instances = Instances.of(calls_of[first], clocks.offset_ns[first])
    instance[calls_of[first].row] = instances.instance
    for rank in other_ranks:
        calls = calls_of[rank]
        is_tied = clocks.part[rank] == clocks.part[first]
        match = match_rank(
            calls,
            instances,
            offset_ns=clocks.offset_ns[rank] if is_tied else None,
            error_ns=clocks.error_between_ns(rank, first) or 0,
            pairs=match_by_sequence_number(calls, instances) if sequenced else None,
        )
        if match is None:
            continue
        if match.links_clocks and calls.synchronizing.sum() >= MIN_PAIRS:
            clocks.link_by_collectives(rank, first, match.offset_ns)
        instances = instances.with_rank(calls, match)
        instance[calls.row] = match.instance
    return group["at"].to_numpy().astype(np.int64), instance, sequenced


def _describe_calls(group: pl.DataFrame) -> pl.DataFrame:
    """Return the calls of a group with their kind (token), the op's number, and whether ranks leave it together."""
    equal = ~pl.col("op").is_in(UNEQUAL_SIZES)
    attributes = (pl.when(equal).then(pl.col(column).cast(pl.String)).fill_null("?") for column in ("dtype", "bytes"))
    key = pl.concat_str("op", *attributes, separator="|")
    return group.with_columns(
        pl.when(~pl.col("op").is_in(UNEQUAL_SIZES)).then(pl.col("bytes")).alias("bytes"),
        pl.col("op").rank("dense").cast(pl.Int64).alias("op_code"),
        key.rank("dense").cast(pl.Int64).alias("token"),
        pl.col("op").is_in(SYNCHRONIZING).alias("together"),
    )
