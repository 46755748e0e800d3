"""Load of experts: how many tokens each rank's experts get, and how long they compute."""

import polars as pl

from tracekit.analysis.parallelism import axis_communication, group_axes
from tracekit.conventions.strategies import EP
from tracekit.model import intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact
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
