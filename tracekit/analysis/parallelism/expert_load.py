"""Load of experts: how many tokens each rank's experts get, and how long they compute."""

import polars as pl

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.parallelism import axis_communication, group_axes
from tracekit.conventions.strategies import EP
from tracekit.model import intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.sync import alignment
from tracekit.sync.collective_matching import EXPERT

COLUMNS = schema.columns(
    "window step rank group members layer load_bytes load_tokens mean_bytes load_ratio expert_ns balanced_ns start_ns "
    "dur_ns first_id second_id",
    group=pl.String, members=pl.String,
)  # fmt: skip
_PLACE = ["window", "rank", "step", "group", "members"]
PASS = ("window", "step", "group", "members", "layer")
"""The columns of `expert_load` that number a pass through a layer of experts: one row of each rank."""
_OF_NEXT = ("sent_bytes", "received_bytes", "start_ns", "end_ns", "activity_id")
_MIN_PAIRED_RATIO = 0.9
"""Share of the bytes that pairs must move: exchanges of counts move few."""

PAIRS = schema.table(
    "expert_pairs",
    "pair of ranks of an expert-parallel group: tokens that one sends to the other's experts",
    schema.column("window", "Profiled window of the run, from 0."),
    schema.column("step", "Training step."),
    schema.column("group", "Process group; null where not known.", pl.String()),
    schema.column("rank", "Global rank that sends tokens."),
    schema.column("peer", "Global rank whose experts get them."),
    schema.column("tokens", "Tokens, once for each of their experts, over all layers, forward and backward."),
    schema.column("bytes", "Size of the tokens."),
    schema.Column("load_ratio", pl.Float64(), "ratio", "bytes over the mean of the group's pairs."),
    schema.column(
        "transfer_ns",
        "Upper bound of their way there and back: from the group's last arrival in an all-to-all to when the first of "
        "the two leaves it; null for a rank's own experts, and where within clock error.",
    ),
    schema.Column(
        "bytes_per_s", pl.Float64(), "bytes/s", "Lower bound of the link's bandwidth: twice bytes over transfer_ns."
    ),
)
_PAIR = ["window", "step", "group", "members", "rank", "peer"]


@trace_fact
def message_sizes(trace: Trace) -> pl.DataFrame:
    """Sizes of each all-to-all. Columns activity_id, sent_bytes, received_bytes, splits, row_bytes."""
    calls = trace.collectives.filter(pl.col("op").is_in(["all_to_all", *EXPERT]))
    return calls.select("activity_id", "sent_bytes", "received_bytes", "splits", "row_bytes")


FACTS: tuple[TraceFact, ...] = (*axis_communication.FACTS, message_sizes)
"""The facts that the run tables of this module read."""


@run_fact
def expert_load(run: Run) -> pl.DataFrame:
    """Return the load of each rank's experts, per pass through a layer of experts; use ``run.table``.

    Columns COLUMNS; one row per rank and pair of all-to-alls: the first brings tokens to the experts, the second
    returns as many. load_bytes is what the first brings, load_tokens its rows (null where not known), mean_bytes the
    mean of load_bytes over the ranks of the group, load_ratio their quotient, expert_ns the compute between the two,
    balanced_ns what it would take with the mean load (in proportion, within the times of the group), first_id and
    second_id their activities. Empty where sizes of messages are unknown, or all-to-alls do not come in
    such pairs.
    """
    if not axis_communication.has_calls(run, EP):
        return schema.empty(COLUMNS)
    sizes = run.table(message_sizes)
    expert_calls = run.table(axis_communication.calls).filter(pl.col("axis") == EP)
    sized = expert_calls.join(sizes, on=["window", "rank", "activity_id"]).drop_nulls(["sent_bytes", "received_bytes"])
    # Calls with the ranks of their groups, where the trace does not name the groups of calls (gloo).
    members = {rank: ",".join(map(str, ranks)) for ranks in group_axes.listed_groups(run, EP) for rank in ranks}
    stated = pl.col("rank").replace_strict(members, default=None, return_dtype=pl.String)
    calls = sized.with_columns(pl.coalesce("members", stated).alias("members"))
    pairs = _pairs(calls)
    if pairs.is_empty():
        return schema.empty(COLUMNS)
    mean = pl.col("load_bytes").mean().over(PASS)
    compute = axis_communication.compute_spans(run)
    parts = []
    for place, rank_pairs in pairs.partition_by("window", "rank", as_dict=True, maintain_order=True).items():
        between = rank_pairs.select("from_ns", pl.max_horizontal("from_ns", "to_ns").alias("to_ns")).to_numpy()
        busy_ns = intervals.coverage(between, compute.get(place, intervals.EMPTY))
        parts.append(rank_pairs.with_columns(pl.Series("expert_ns", busy_ns, pl.Int64)))
    table = pl.concat(parts).with_columns(
        mean.round().cast(pl.Int64).alias("mean_bytes"), (pl.col("load_bytes") / mean).alias("load_ratio")
    )
    expert_ns, times = pl.col("expert_ns"), (pl.col("expert_ns").min().over(PASS), pl.col("expert_ns").max().over(PASS))
    # Experts without tokens take as long as the fastest of the group.
    scaled_ns = pl.when(pl.col("load_ratio") > 0).then(expert_ns / pl.col("load_ratio")).otherwise(0)
    table = table.with_columns(scaled_ns.clip(*times).round().cast(pl.Int64).alias("balanced_ns"))
    complete = table.filter(pl.len().over(PASS) > 1)
    return schema.conform(complete, COLUMNS).sort("window", "step", "group", "layer", "rank")


def by_rank(run: Run) -> pl.DataFrame:
    """Return the load of each rank's experts over all steps, for display.

    Columns members, rank, passes (through layers, forward and backward), tokens, bytes, load_ratio (mean over passes),
    max_load_ratio, expert_ns; one row per rank. tokens is null where traces do not record how messages are split.
    """
    tokens = pl.col("load_tokens")
    loads = (
        run.table(expert_load)
        .group_by("members", "rank")
        .agg(
            pl.len().cast(pl.Int64).alias("passes"),
            pl.when(tokens.is_not_null().all()).then(tokens.sum()).alias("tokens"),
            pl.col("load_bytes").sum().alias("bytes"),
            pl.col("load_ratio").mean(),
            pl.col("load_ratio").max().alias("max_load_ratio"),
            pl.col("expert_ns").sum(),
        )
    )
    return loads.sort("members", "rank")


def ranks_of_groups(run: Run, table: pl.DataFrame) -> pl.DataFrame:
    """Return a table, which has columns group and members, with the ranks of each group in its order: column ranks."""
    groups = run.table(group_axes.group_axes).filter(axis=EP).select("group", "members", "ranks")
    listed = [(",".join(map(str, ranks)), ranks) for ranks in group_axes.listed_groups(run, EP)]
    stated = pl.DataFrame(listed, {"members": pl.String, "stated": pl.List(pl.Int64)}, orient="row")
    return (
        table.join(groups.unique(["group", "members"]), on=["group", "members"], how="left", nulls_equal=True)
        .join(stated, on="members", how="left")
        .with_columns(pl.coalesce("stated", "ranks").alias("ranks"))
        .drop("stated")
    )


@run_fact(table=PAIRS)
def expert_pairs(run: Run) -> pl.DataFrame:
    """Tokens from each rank to the experts of each rank of its group, itself too; use ``run.table``.

    Columns as PAIRS; one row per step, rank and peer. The tokens are those of the all-to-alls that bring them to the
    experts: the others return as many. Empty where traces do not record how messages are split, or the group's ranks
    are not known.
    """
    loads = run.table(expert_load)
    if loads.is_empty():
        return PAIRS.empty()
    sizes = run.table(message_sizes).select("window", "rank", "splits", "row_bytes", first_id="activity_id")
    sent = ranks_of_groups(run, loads.join(sizes.drop_nulls("splits"), on=["window", "rank", "first_id"]))
    matched = sent.rename({"ranks": "peer"}).filter(pl.col("peer").list.len() == pl.col("splits").list.len())
    of_pass = matched.select(*_PAIR, "layer", "row_bytes", bytes="splits").explode("peer", "bytes")
    timed = of_pass.join(_transfers(run, loads), on=[*_PAIR, "layer"], how="left", nulls_equal=True)
    ratio = pl.col("bytes") / pl.col("bytes").mean().over("window", "step", "group", "members")
    # Sum of transfers; null where their mean is within clock error.
    total_ns = pl.col("transfer_ns").sum()
    is_longer = total_ns > pl.col("residual_ns").max() * pl.col("calls").sum()
    table = timed.group_by(_PAIR).agg(
        (pl.col("bytes") // pl.col("row_bytes")).sum().alias("tokens"),
        pl.col("bytes").sum(),
        pl.when(is_longer).then(total_ns).alias("transfer_ns"),
    )
    rated = table.with_columns(ratio.alias("load_ratio"), _rate())
    return PAIRS.conform(rated).sort("window", "step", "rank", "peer")


@run_fact
def by_pair(run: Run) -> pl.DataFrame:
    """Tokens from each rank to the experts of each over all steps, for display: the slowest pair first.

    Columns rank, peer, tokens, bytes, load_ratio (mean over steps), transfer_ns, bytes_per_s. Where no transfer is
    longer than the clock error, the pairs are in the order of their ranks.
    """
    is_timed = pl.col("transfer_ns").is_not_null().all()
    sums = (
        run.table(expert_pairs)
        .group_by("rank", "peer")
        .agg(
            pl.col("tokens", "bytes").sum(),
            pl.col("load_ratio").mean(),
            pl.when(is_timed).then(pl.col("transfer_ns").sum()).alias("transfer_ns"),
        )
    )
    order = ["transfer_ns", "bytes", "rank", "peer"]
    timed = sums.drop_nulls("transfer_ns").sort(order, descending=[True, True, False, False])
    rest = sums.filter(pl.col("transfer_ns").is_null()).sort("rank", "peer")
    return pl.concat([timed, rest]).with_columns(_rate())


def _pairs(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the pairs of consecutive all-to-alls of a rank of which the second returns what the first brought.

    Calls between pairs, which exchange the numbers of tokens, are skipped. Empty where other calls move much.
    """
    following = {name: pl.col(name).shift(-1) for name in _OF_NEXT}
    returns = (pl.col("next_sent_bytes") == pl.col("received_bytes")) & (
        pl.col("next_received_bytes") == pl.col("sent_bytes")
    )
    # Where loads are equal, each call returns what the one before brought: every other one begins a pair.
    flagged = (
        calls.sort(*_PLACE, "start_ns")
        .with_columns(value.over(_PLACE).alias(f"next_{name}") for name, value in following.items())
        .with_columns(returns.fill_null(value=False).alias("returns"))
        .with_columns(pl.col("returns").rle_id().over(_PLACE).alias("run"))
        .with_columns(((pl.int_range(pl.len()) % 2 == 0).over(*_PLACE, "run") & pl.col("returns")).alias("is_first"))
    )
    pairs = flagged.filter("is_first").with_columns(pl.int_range(pl.len()).over(_PLACE).cast(pl.Int64).alias("layer"))
    paired_bytes = (pairs["sent_bytes"] + pairs["received_bytes"]).sum()
    if paired_bytes < _MIN_PAIRED_RATIO * float(flagged["sent_bytes"].sum() or 1):
        pairs = pairs.clear()
    return pairs.select(
        *_PLACE, "layer", "start_ns", load_bytes="received_bytes",
        load_tokens=pl.col("received_bytes") // pl.col("row_bytes"), from_ns="end_ns", to_ns="next_start_ns",
        dur_ns=pl.col("next_end_ns") - pl.col("start_ns"), first_id="activity_id", second_id="next_activity_id",
    )  # fmt: skip


def _rate() -> pl.Expr:
    return (collective_instances.SECOND_NS * 2 * pl.col("bytes") / pl.col("transfer_ns")).alias("bytes_per_s")


def _transfers(run: Run, loads: pl.DataFrame) -> pl.DataFrame:
    """Time that both ranks of each pair stay in a pass's two all-to-alls after the group's last arrival.

    Columns _PAIR, layer, transfer_ns, calls and residual_ns; pairs of different ranks only. A rank leaves when all that
    it sends and receives has arrived: the transfer between two ranks has ended when the first of them leaves.
    """
    ends = _calls(run, loads)
    place = [*PASS, "is_return"]
    last_ns = pl.col("start_ns").max().over(place)
    after = ends.with_columns((pl.col("end_ns") - last_ns).clip(0).alias("after_ns"))
    peer = after.select(*place, peer="rank", peer_ns="after_ns", peer_residual_ns="residual_ns")
    both = after.join(peer, on=place, nulls_equal=True).filter(pl.col("rank") != pl.col("peer"))
    return both.group_by(*_PAIR, "layer").agg(
        pl.min_horizontal("after_ns", "peer_ns").sum().alias("transfer_ns"),
        pl.len().alias("calls"),
        pl.max_horizontal("residual_ns", "peer_residual_ns").max().alias("residual_ns"),
    )


def _calls(run: Run, loads: pl.DataFrame) -> pl.DataFrame:
    """Return both all-to-alls of each pass on the run's clock: columns of PASS, rank, is_return, start_ns, end_ns."""
    times = run.table(axis_communication.calls).select("window", "rank", "activity_id", "start_ns", "end_ns")
    clocks = run.offsets.select("window", "rank", "residual_ns").drop_nulls("residual_ns")
    ways = [
        loads.select(*PASS, "rank", pl.col(name).alias("activity_id"), is_return=pl.lit(value=back))
        for name, back in (("first_id", False), ("second_id", True))
    ]
    timed = pl.concat(ways).join(times, on=["window", "rank", "activity_id"]).join(clocks, on=["window", "rank"])
    return alignment.on_run_clock(timed, run.offsets, ("start_ns", "end_ns"))
