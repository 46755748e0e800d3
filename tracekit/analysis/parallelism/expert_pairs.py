"""Traffic of experts between ranks: the tokens that each rank sends to each, and how fast they get there."""

import polars as pl

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.parallelism import axis_communication, expert_load
from tracekit.model import schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.sync import alignment

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


@run_fact(table=PAIRS)
def expert_pairs(run: Run) -> pl.DataFrame:
    """Tokens from each rank to the experts of each rank of its group, itself too; use ``run.table``.

    Columns as PAIRS; one row per step, rank and peer. The tokens are those of the all-to-alls that bring them to the
    experts: the others return as many. Empty where traces do not record how messages are split, or the group's ranks
    are not known.
    """
    loads = run.table(expert_load.expert_load)
    if loads.is_empty():
        return PAIRS.empty()
    sizes = run.table(expert_load.message_sizes).select("window", "rank", "splits", "row_bytes", first_id="activity_id")
    sent = expert_load.ranks_of_groups(run, loads.join(sizes.drop_nulls("splits"), on=["window", "rank", "first_id"]))
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


def _rate() -> pl.Expr:
    return (collective_instances.SECOND_NS * 2 * pl.col("bytes") / pl.col("transfer_ns")).alias("bytes_per_s")


def _transfers(run: Run, loads: pl.DataFrame) -> pl.DataFrame:
    """Time that both ranks of each pair stay in a pass's two all-to-alls after the group's last arrival.

    Columns _PAIR, layer, transfer_ns, calls and residual_ns; pairs of different ranks only. A rank leaves when all that
    it sends and receives has arrived: the transfer between two ranks has ended when the first of them leaves.
    """
    ends = _calls(run, loads)
    place = [*expert_load.PASS, "is_return"]
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
        loads.select(*expert_load.PASS, "rank", pl.col(name).alias("activity_id"), is_return=pl.lit(value=back))
        for name, back in (("first_id", False), ("second_id", True))
    ]
    timed = pl.concat(ways).join(times, on=["window", "rank", "activity_id"]).join(clocks, on=["window", "rank"])
    return alignment.on_run_clock(timed, run.offsets, ("start_ns", "end_ns"))
