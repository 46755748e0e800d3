"""Collectives across ranks: arrival times, waiting time of each rank, bandwidth of the transfer."""

from collections.abc import Mapping

import polars as pl

from tracekit.model import environment, schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.sync import alignment, collective_matching

BUS_FACTORS: Mapping[str, tuple[float, float]] = {
    "all_reduce": (2.0, -2.0),
    "all_gather": (1.0, -1.0),
    "reduce_scatter": (1.0, -1.0),
    "all_to_all": (1.0, -1.0),
    "gather": (1.0, -1.0),
    "scatter": (1.0, -1.0),
    "broadcast": (1.0, 0.0),
    "reduce": (1.0, 0.0),
    "send_recv": (1.0, 0.0),
}
"""Bus bandwidth is algorithm bandwidth times a + b/n on n ranks, for each op (a, b).

From nccl-tests, doc/PERFORMANCE.md: 2(n-1)/n for an all-reduce, (n-1)/n for an all-gather and a reduce-scatter, 1 for
a broadcast and a reduce; and its sources, for sendrecv 1, for all-to-all, gather and scatter (n-1)/n. The size is that
of the whole: what an all-gather receives, what a reduce-scatter sends.
"""

SECOND_NS = 1_000_000_000
_COMMON_END_NS = 56_000
"""How far apart ranks leave a collective at most, as `median_departure` measured in recordings of four kinds of GPU."""
_KEY = ("window", "instance")

_INT, _TEXT, _FLOAT = pl.Int64(), pl.String(), pl.Float64()

_WHICH = (
    schema.column("window", "Profiled window of the run, from 0."),
    schema.column("instance", "Number of the collective, unique in the window and the same on every rank."),
)
_WHAT = (
    schema.column("op", "all_reduce, all_gather, reduce_scatter, broadcast or another.", _TEXT),
    schema.column("group", "Process group; null where not known.", _TEXT),
    schema.column("group_size", "Ranks in the group; where unknown, the most that ever joined one collective."),
    schema.column("seq", "Sequence number within the group; null in most traces."),
    schema.column("dtype", "Element type; null where not known.", _TEXT),
    schema.column("bytes", "Size as nccl-tests counts it: the whole, the larger of sent and received."),
    schema.column("step", "Training step that launched it."),
    schema.column("phase", "forward, backward, clip or optimizer; null where not known.", _TEXT),
    schema.column("unit", "FSDP unit (layer) by its module path; null outside FSDP's spans.", _TEXT),
)
_HOW = (
    schema.column("residual_ns", "Clock error between its ranks, at worst; smaller differences are not reported."),
    schema.column("matched_by", "seq (sequence number) or order: how the calls of the ranks were matched.", _TEXT),
)

INSTANCES = schema.table(
    "instances",
    "collective that several ranks recorded, on the run's clock",
    *_WHICH,
    *_WHAT,
    schema.column("ranks", "Ranks whose traces have it.", pl.List(_INT)),
    schema.column("first_arrival_ns", "Start on the rank that came first."),
    schema.column("last_arrival_ns", "Start on the rank that arrived last."),
    schema.column("end_ns", "Median end over ranks."),
    schema.column("last_rank", "Rank that arrived last; null if by less than the residual or a rank has no trace."),
    schema.column("last_known_rank", "The same of the ranks that have a trace."),
    schema.column("max_wait_ns", "Longest that a rank waited for the last."),
    schema.column("transfer_ns", "From the last arrival to the end; null where a rank has no trace."),
    schema.column("algorithm_bytes_per_s", "bytes over transfer_ns; null if no longer than residual.", _FLOAT),
    schema.column("bus_bytes_per_s", "What nccl-tests calls bus bandwidth; null as the former.", _FLOAT),
    *_HOW,
)

WAITS = schema.table(
    "waits",
    "rank's part in a collective that several ranks recorded, on the run's clock",
    *_WHICH,
    schema.column("rank", "Global rank of the process."),
    schema.column("activity_id", "activities.id."),
    *_WHAT,
    schema.column("arrival_ns", "Start of the kernel, or of the gloo slice."),
    schema.column("end_ns", "Its end."),
    schema.column("dur_ns", "Its duration: waiting and transfer."),
    schema.column("wait_ns", "From arrival to the last known arrival; 0 where less than the residual."),
    *_HOW,
)


@run_fact(table=INSTANCES)
def instances(run: Run) -> pl.DataFrame:
    """Return the collectives that several ranks recorded; use ``run.table(instances)``.

    Columns as INSTANCES; one row per window and instance. Times are on the run's clock. An arrival is the start of the
    kernel, or of the gloo slice. transfer_ns, last_rank and the bandwidths are null where a rank of the group has no
    trace, last_rank also where the last two arrivals, and a bandwidth where the transfer, are within residual_ns.
    """
    rank_waits = run.table(waits)
    if rank_waits.is_empty():
        return INSTANCES.empty()
    arrival, end = pl.col("arrival_ns"), pl.col("end_ns")
    median_end_ns = end.min() + (end - end.min()).median().round().cast(pl.Int64)  # a float cannot represent Unix ns
    table = rank_waits.group_by(*_KEY, maintain_order=True).agg(
        pl.col("op", "group").first(),
        pl.col("seq", "dtype", "step", "phase", "unit").drop_nulls().first(),
        pl.col("bytes").max(),
        pl.col("rank").sort().alias("ranks"),
        pl.col("group_size").max(),
        arrival.min().alias("first_arrival_ns"),
        arrival.max().alias("last_arrival_ns"),
        (arrival.max() - arrival.sort().get(-2, null_on_oob=True)).alias("lead_ns"),
        pl.col("rank").sort_by(arrival).last().alias("latest"),
        median_end_ns.alias("end_ns"),
        pl.col("wait_ns").max().alias("max_wait_ns"),
        pl.col("residual_ns").max(),
        pl.col("matched_by").first(),
    )
    is_whole = pl.col("ranks").list.len() == pl.col("group_size")
    transfer_ns = (pl.col("end_ns") - pl.col("last_arrival_ns")).clip(0)
    is_significant = pl.col("lead_ns") >= pl.col("residual_ns")
    return (
        table.with_columns(
            pl.when(is_whole & is_significant).then("latest").alias("last_rank"),
            pl.when(is_significant).then("latest").alias("last_known_rank"),
            pl.when(is_whole).then(transfer_ns).alias("transfer_ns"),
        )
        .with_columns(
            pl.when(pl.col("transfer_ns") > pl.col("residual_ns"))
            .then(pl.col("bytes") * SECOND_NS / pl.col("transfer_ns"))
            .alias("algorithm_bytes_per_s")
        )
        .with_columns((pl.col("algorithm_bytes_per_s") * bus_factor()).alias("bus_bytes_per_s"))
        .pipe(schema.select, INSTANCES.schema)
        .sort("window", "first_arrival_ns")
    )


def median_departure(run: Run) -> tuple[int, int]:
    """How far apart ranks leave a collective, and its shortest duration, in ns: medians over collectives, 0 if none.

    Kernels of ranks with a device each end together: within 11 to 56 µs in recordings of V100, A100, H100 and MI300.
    """
    calls = run.table(waits).filter(~pl.col("op").is_in(MESSAGES))
    spread_ns = pl.col("end_ns").max() - pl.col("end_ns").min()
    medians = calls.group_by(_KEY).agg(spread_ns, pl.col("dur_ns").min()).select(pl.col("end_ns", "dur_ns").median())
    apart_ns, shortest_ns = medians.fill_null(0).row(0)
    return int(apart_ns), int(shortest_ns)


@run_fact(table=WAITS)
def waits(run: Run) -> pl.DataFrame:
    """Return the part of each rank in each collective that several ranks recorded; use ``run.table(waits)``.

    Columns as WAITS; one row per window, instance and rank. A rank waits from its arrival to the last known arrival, or
    until it leaves; 0 where that is less than the residual, which is within clock error. Where a rank of the group has
    no trace, the wait is a lower bound. Of logs that state durations only, all ranks end at the median end.
    """
    calls = run.table(collective_matching.matched_calls).drop_nulls("instance")
    clocks = run.offsets.select("window", "rank", "residual_ns")
    aligned = (
        alignment.on_run_clock(calls, run.offsets, ("start_ns", "end_ns"))
        .join(clocks, on=["window", "rank"], maintain_order="left")
        .filter(pl.col("residual_ns").is_not_null())
        .filter(pl.len().over(*_KEY) > 1)
    )
    aligned = _with_common_ends(aligned)
    max_joined = pl.len().over(*_KEY).max().over("window", "group", "members").cast(pl.Int64)
    last_ns, residual_ns = pl.col("arrival_ns").max().over(*_KEY), pl.col("residual_ns").max().over(*_KEY)
    wait_ns = (pl.min_horizontal(last_ns, "end_ns") - pl.col("arrival_ns")).clip(0)
    return (
        aligned.rename({"start_ns": "arrival_ns"})
        # Without recorded groups, all ranks that ever joined one collective count as the group.
        .with_columns(pl.coalesce("group_size", max_joined).alias("group_size"), residual_ns.alias("residual_ns"))
        .with_columns(
            (pl.col("end_ns") - pl.col("arrival_ns")).alias("dur_ns"),
            pl.when(wait_ns >= pl.col("residual_ns")).then(wait_ns).otherwise(0).alias("wait_ns"),
        )
        .pipe(schema.select, WAITS.schema)
        .sort("window", "instance", "rank")
    )


def _with_common_ends(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls where those that state durations only (is_end_stated) end at the median end of their instance.

    Ranks leave a collective together, so the durations alone say who arrived last.
    """
    if calls["is_end_stated"].all():
        return calls
    first_ns = pl.col("end_ns").min().over(*_KEY)
    end_ns = first_ns + (pl.col("end_ns") - first_ns).median().over(*_KEY).round().cast(pl.Int64)
    by_duration = ~pl.col("is_end_stated").all().over(*_KEY) & pl.col("op").is_in(collective_matching.TOGETHER)
    residual_ns = pl.when(by_duration).then(_COMMON_END_NS).otherwise("residual_ns")
    return calls.with_columns(
        pl.when(by_duration)
        .then(end_ns - pl.col("end_ns") + pl.col("start_ns"))
        .otherwise("start_ns")
        .alias("start_ns"),
        pl.when(by_duration).then(end_ns).otherwise("end_ns").alias("end_ns"),
        residual_ns.alias("residual_ns"),
    )


PEER_FACTS: tuple[TraceFact, ...] = (environment.versions,)
"""What `ranks_without_peers` reads beyond the collectives."""


def ranks_without_peers(run: Run) -> tuple[int, ...]:
    """Return the ranks most of whose collectives lack, or may lack, the trace of a rank, in order.

    How long they wait in them is not known. Groups of unknown size are taken to have as many ranks as ever joined one
    collective of that op. Nobody is missing where the number of ranks is stated and each has a trace.
    """
    is_stated = environment.stated_rank_count(run) is not None
    if is_stated and "missing_ranks" not in run.data_quality["kind"]:
        return ()
    calls = run.table(collective_matching.matched_calls).filter(~pl.col("op").is_in(MESSAGES))
    traced = pl.when(pl.col("instance").is_null()).then(1).otherwise(pl.len().over(*_KEY))
    counted = calls.with_columns(traced.alias("traced"))
    size = pl.coalesce("group_size", pl.col("traced").max().over("window", "group", "members", "op"))
    lacks = counted.with_columns((pl.col("traced") < pl.max_horizontal(size, 2)).alias("lacks"))
    incomplete = lacks.group_by("rank").agg(pl.col("lacks").mean()).filter(pl.col("lacks") > 0.5)
    return tuple(incomplete["rank"].sort())


@run_fact
def by_collective(run: Run) -> pl.DataFrame:
    """Waiting time of each rank in each kind of collective.

    Columns op, group, rank, calls, communication_ns, wait_ns, arrived_last (how often the others waited for it),
    transfer_ns, bytes, bus_bytes_per_s, residual_ns; one row per op, group and rank. transfer_ns and bytes add up over
    the collectives with known size and transfer; bus_bytes_per_s is their average. The three are null where the mean
    transfer is not longer than the residual.
    """
    sized = pl.col("transfer_ns").is_not_null() & pl.col("bytes").is_not_null() & bus_factor().is_not_null()
    transfers = run.table(instances).select(
        *_KEY,
        "last_rank",
        pl.when(sized).then("transfer_ns").alias("transfer_ns"),
        pl.when(sized).then("bytes").alias("sized_bytes"),
        pl.when(sized).then(pl.col("bytes") * bus_factor()).alias("bus_bytes"),
    )
    rows = run.table(waits).join(transfers, on=_KEY)
    return (
        rows.group_by("op", "group", "rank")
        .agg(
            pl.len().cast(pl.Int64).alias("calls"),
            pl.col("dur_ns").sum().alias("communication_ns"),
            pl.col("wait_ns").sum(),
            (pl.col("last_rank") == pl.col("rank")).sum().cast(pl.Int64).alias("arrived_last"),
            pl.col("transfer_ns").sum(),
            pl.col("sized_bytes").sum().alias("bytes"),
            (pl.col("bus_bytes").sum() * SECOND_NS / pl.col("transfer_ns").sum()).alias("bus_bytes_per_s"),
            pl.col("residual_ns").max(),
            pl.col("transfer_ns").mean().alias("mean_ns"),
        )
        .with_columns(
            pl.when(pl.col("mean_ns") > pl.col("residual_ns")).then(name).alias(name) for name in _TRANSFER_COLUMNS
        )
        .drop("mean_ns")
        .sort("op", "group", "rank")
    )


def bus_factor() -> pl.Expr:
    """Return bus bandwidth over algorithm bandwidth, from columns op and group_size; null where undefined."""
    constant, per_rank = (
        pl.col("op").replace_strict({op: f[i] for op, f in BUS_FACTORS.items()}, default=None, return_dtype=pl.Float64)
        for i in (0, 1)
    )
    return constant + per_rank / pl.col("group_size")


MESSAGES = ("send", "recv", collective_matching.PAIRED)
"""Ops of two ranks, which are no collectives."""
_TRANSFER_COLUMNS = ("transfer_ns", "bytes", "bus_bytes_per_s")
