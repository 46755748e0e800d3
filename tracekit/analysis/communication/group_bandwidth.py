"""Transfer times of each process group: against similar groups, from step to step, and by message."""

import polars as pl

from tracekit import conventions
from tracekit.analysis.communication import collective_instances
from tracekit.analysis.time import breakdown
from tracekit.model import rank_lists, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.sync import collective_matching

_GROUP, _OF_RANK = ("window", "group", "members"), ["window", "rank", "group"]
_WHAT = ("op", "dtype", "bytes", "nth")
_MEASURED = (
    "axis", "group_size", "transfer_ns", "start_ns", "dur_ns", "activity_id", "unit", "rank", "ranks", "exposed_ns",
    "group_ranks",
)  # fmt: skip
_LARGE = 0.25  # of the group's largest message: smaller ones measure latency, not bandwidth

SPEED_COLUMNS = schema.columns(
    "window step op group axis group_size bytes transfer_ns algorithm_bytes_per_s bus_bytes_per_s is_whole"
)
KIND_COLUMNS = schema.columns(
    "op group axis group_size dtype bytes ranks calls total_ns p50_ns waited_ns exposed_ns algorithm_bytes_per_s "
    "bus_bytes_per_s is_whole"
)
_PLACE = ["window", "rank", "activity_id"]


@trace_fact
def group_axes(trace: Trace) -> pl.DataFrame:
    """Return the program's name of each process group. Columns group, axis, group_ranks; one row per group.

    group_ranks is a text of `rank_lists`, null where the trace does not list them.
    """
    groups = trace.groups.unique("group", keep="first")
    return groups.select("group", axis="description", group_ranks=rank_lists.texts(groups["ranks"]))


@trace_fact
def exposed_times(trace: Trace) -> pl.DataFrame:
    """Return the exposed time of each collective. Columns activity_id, exposed_ns; one row each."""
    calls = breakdown.with_exposure(trace, breakdown.communication(trace))
    return calls.select(pl.col("id").alias("activity_id"), "exposed_ns")


FACTS: tuple[TraceFact, ...] = (collective_matching.calls, group_axes, exposed_times, breakdown.by_step)
"""The facts that the run tables of this module read."""


@run_fact
def transfers(run: Run) -> pl.DataFrame:
    """Return an upper bound of each group's transfer time in each collective; use ``run.table``.

    Columns window, group, members, axis, group_size, ranks (with a trace), step, op, dtype, bytes, nth (of its op, type
    and size in the step and group), transfer_ns, exposed_ns (the longest over ranks), start_ns, dur_ns, rank and
    activity_id (of the rank that waited least); one row per collective of a step. transfer_ns is the shortest time over
    ranks from the last known arrival to the end: a rank without a trace may have arrived later.
    """
    measured = list(collective_instances.BUS_FACTORS)
    return run.table(collective_times).filter(pl.col("op").is_in(measured), pl.col("bytes").is_not_null())


@run_fact
def collective_times(run: Run) -> pl.DataFrame:
    """Return `transfers` of all ops, also of those without a size; use ``run.table``.

    Calls that were matched between ranks are one collective even if their sizes differ, as in an uneven all-to-all:
    bytes is then the largest. Where the trace names no group, members are the ranks that take part, if these are known.
    """
    key = ["window", "rank", "activity_id"]
    matched = run.table(collective_instances.waits)
    in_instance = ["window", "instance"]
    ranks = pl.col("rank").unique().sort().cast(pl.String).str.join(",").alias("taking_part")  # as text, as in `calls`
    joined = matched.group_by(in_instance).agg(ranks)
    waits = matched.join(joined, on=in_instance).select(*key, "instance", "wait_ns", "taking_part", joined="group_size")
    axes = run.table(group_axes).unique(_OF_RANK, keep="first")
    windows = run.table(breakdown.by_step).filter(pl.col("step").is_null()).select("window", "rank", "step").unique()
    all_calls = run.table(collective_matching.calls)
    in_window = all_calls.join(windows, on=list(windows.columns), how="semi", nulls_equal=True)
    is_nameless = pl.col("group").is_null() & pl.col("members").is_null()
    calls = (
        pl.concat([all_calls.drop_nulls("step"), in_window])
        .filter(pl.col("phase").ne_missing(conventions.CHECKPOINT))
        .join(waits.unique(key), on=key, how="left")
        .join(run.table(exposed_times), on=key, how="left")
        .join(axes.drop("group_ranks"), on=_OF_RANK, how="left")
        .with_columns(
            pl.when(is_nameless).then("taking_part").otherwise("members").alias("members"),
            pl.coalesce("group_size", "joined").alias("group_size"),
        )
        .sort("window", "rank", "start_ns", "activity_id")
    )
    is_uneven = pl.col("op").is_in(collective_matching.UNEQUAL_SIZES)
    sizes = pl.when(~is_uneven).then("bytes")
    nth = pl.int_range(pl.len()).over("rank", *_GROUP, "step", "op", "dtype", sizes).cast(pl.Int64)
    dur_ns = pl.col("end_ns") - pl.col("start_ns")
    # Equal where the instance is; without one, the same call on all ranks.
    alike = [pl.when(pl.col("instance").is_null()).then(name).alias(f"{name}_alike") for name in ("bytes", "nth")]
    first = (
        calls.with_columns(
            nth.alias("nth"),
            dur_ns.alias("dur_ns"),
            (dur_ns - pl.col("wait_ns").fill_null(0)).alias("transfer_ns"),
            pl.col("exposed_ns").fill_null(0),
        )
        .sort("transfer_ns")
        .group_by(*_GROUP, "step", "op", "dtype", "instance", *alike, maintain_order=True)
        .agg(
            pl.col("axis", "group_size", "transfer_ns", "start_ns", "dur_ns").first(),
            pl.col("activity_id", "unit", "rank", "nth").first(),
            pl.col("bytes").max(),
            pl.col("rank").sort().alias("ranks"),
            pl.col("exposed_ns").max(),
        )
        .sort(*_GROUP, "step", "start_ns")
    )
    listed = first.join(axes.drop("axis"), on=_OF_RANK, how="left", maintain_order="left")
    columns = [*_GROUP, "step", *_WHAT, *_MEASURED]
    return listed.with_columns(rank_lists.lists(listed["group_ranks"])).select(columns)


@run_fact
def group_comparison(run: Run) -> pl.DataFrame:
    """Compare each group with others of its axis and size at the same collective of the same step.

    Columns window, group, members, axis, group_size, ranks, step, groups (how many were compared), ratio (median
    over collectives of its time over the others'), transfer_ns and usual_ns (sums: its own, the others'), bus_bytes
    (as nccl-tests counts bus bandwidth), exposed_ns, extra_ns (the exposed part of the difference), group_ranks
    (null where unknown), calls (how many collectives were compared); one row per group and step. Only messages of
    at least a quarter of the group's largest count.
    """
    place = ["window", "axis", "group_size", "step", *_WHAT]
    # Transfers whose groups have peers: of unnamed groups those whose axis is known and that are complete. The ranks of
    # an unnamed group are those whose calls were matched, which may be a part of it.
    is_unnamed = (pl.col("group").is_null() & ~pl.col("members").str.contains(">", literal=True)).fill_null(value=True)
    is_complete = pl.col("axis").is_not_null() & (pl.col("ranks").list.len() == pl.col("group_size"))
    grouped = _comparable(run).filter(~is_unnamed | is_complete)
    compared = grouped.with_columns(pl.len().over(place).alias("groups")).filter(pl.col("groups") > 1)
    # With two groups, each is compared with the other.
    other = pl.col("transfer_ns").sum().over(place) - pl.col("transfer_ns")
    usual = pl.when(pl.col("groups") == 2).then(other).otherwise(pl.col("transfer_ns").median().over(place))
    return _sum_by(compared.with_columns(usual.cast(pl.Int64).alias("usual_ns")), [*_GROUP, "step"], "groups")


@run_fact
def step_comparison(run: Run) -> pl.DataFrame:
    """Compare each group's collectives in each step with the same collectives in the median step.

    Columns as `group_comparison`, without groups; one row per group and step.
    """
    usual = pl.col("transfer_ns").median().over(*_GROUP, *_WHAT).cast(pl.Int64)
    rows = _comparable(run).with_columns(usual.alias("usual_ns"))
    return _sum_by(rows, [*_GROUP, "step"])


@run_fact
def step_variation(run: Run) -> pl.DataFrame:
    """Variation of a group's collectives from step to step, beyond variation common to the whole step.

    Columns window, group, members, spread_ratio (median over collectives of the interquartile range of its times over
    their median); one row per group.
    """
    usual = pl.col("transfer_ns").median()
    rows = _comparable(run).with_columns(usual.over(*_GROUP, *_WHAT).alias("usual_ns"))
    level = (pl.col("transfer_ns") / pl.col("usual_ns")).median().over(*_GROUP, "step")
    normalized = rows.with_columns((pl.col("transfer_ns") / level).alias("freed_ns"))
    times = pl.col("freed_ns")
    between = times.quantile(0.75, "linear") - times.quantile(0.25, "linear")
    by_place = normalized.group_by(*_GROUP, *_WHAT).agg((between / times.median()).alias("spread_ratio"))
    return by_place.group_by(_GROUP).agg(pl.col("spread_ratio").median())


def _comparable(run: Run) -> pl.DataFrame:
    """Large transfers of which as many ranks of the group are known as of its others.

    The time of one that a rank lacks contains the wait for that rank, that of others doesn't.
    """
    rank_count = pl.col("ranks").list.len()
    return _large(run.table(transfers)).filter(rank_count == rank_count.max().over(_GROUP))


def first_slow_step(levels: list[float], *, min_ratio: float, share: float) -> int | None:
    """Return the index of the step from which a group stays slow; None if there is none, or only one later step.

    It is the first from which `share` of the levels are at least `min_ratio` times the median of the earlier ones, and
    no earlier level is.

    >>> first_slow_step([1.0, 1.1, 2.6, 2.5], min_ratio=1.5, share=0.75)
    2
    """
    for first in range(1, len(levels) - 1):
        before, after = sorted(levels[:first]), levels[first:]
        bar = min_ratio * before[(len(before) - 1) // 2]
        slow = [level >= bar for level in after]
        if slow[0] and before[-1] < bar and sum(slow) >= share * len(slow):
            return first
    return None


@run_fact
def speeds(run: Run) -> pl.DataFrame:
    """Return the bandwidth of each message of known size; use ``run.table``.

    Columns SPEED_COLUMNS; one row per collective. Where every rank of the group has a trace (is_whole), as
    `collective_instances.instances`: size over the time from the last arrival to the end; transfers not longer than the
    clocks' residual are left out. Where ranks are missing, the time on the rank that waited least gives a lower bound.
    bus_bytes_per_s is nccl-tests' bus bandwidth.
    """
    instances = run.table(collective_instances.instances)
    group = ["window", "group"]
    axes = run.table(group_axes).select(*group, "axis").unique(group, keep="first")
    complete = instances.drop_nulls("bus_bytes_per_s").join(axes, on=group, how="left", maintain_order="left")
    transfer_rows = run.table(transfers).filter(pl.col("transfer_ns") > 0)
    matched_groups = instances.select(group).unique()
    lone = transfer_rows.join(matched_groups, on=group, how="anti", nulls_equal=True)
    partly = transfer_rows.join(matched_groups, on=group, how="semi", nulls_equal=True)
    partly = partly.filter(pl.col("ranks").list.len() < pl.col("group_size"))
    rate = pl.col("bytes") * collective_instances.SECOND_NS / pl.col("transfer_ns")
    lower_bounds = (
        pl.concat([lone, partly])
        .with_columns(rate.alias("algorithm_bytes_per_s"))
        .with_columns((pl.col("algorithm_bytes_per_s") * collective_instances.bus_factor()).alias("bus_bytes_per_s"))
        .drop_nulls("bus_bytes_per_s")
    )
    return pl.concat(
        part.with_columns(is_whole=pl.lit(is_whole)).pipe(schema.select, SPEED_COLUMNS)
        for part, is_whole in ((complete, True), (lower_bounds, False))
    )


@run_fact
def by_kind(run: Run) -> pl.DataFrame:
    """Return totals of collectives by op, group, element type and size, most time first; use ``run.table``.

    Columns KIND_COLUMNS: ranks (with a trace of it), calls and total_ns (of all ranks), p50_ns (of one call), waited_ns
    (until the last known arrival), exposed_ns (concurrent collectives each count it), and the medians of `speeds`.
    """
    waits = run.table(collective_instances.waits).select(*_PLACE, "wait_ns").unique(_PLACE)
    axes = run.table(group_axes).select("group", "axis").unique("group", keep="first")
    key = ["op", "group", "group_size", "dtype", "bytes"]
    dur_ns = pl.col("end_ns") - pl.col("start_ns")
    sums = (
        run.table(collective_matching.calls)
        .join(waits, on=_PLACE, how="left", maintain_order="left")
        .join(run.table(exposed_times), on=_PLACE, how="left", maintain_order="left")
        .group_by(key, maintain_order=True)
        .agg(
            pl.col("rank").n_unique().alias("ranks"),
            pl.len().alias("calls"),
            dur_ns.sum().alias("total_ns"),
            dur_ns.median().round().alias("p50_ns"),
            pl.col("wait_ns").sum().alias("waited_ns"),
            pl.col("exposed_ns").sum(),
        )
    )
    kind = ["op", "group", "group_size", "bytes"]
    rates = run.table(speeds).group_by(kind).agg(
        pl.col("algorithm_bytes_per_s", "bus_bytes_per_s").median(), pl.col("is_whole").all()
    )  # fmt: skip
    return (
        sums.join(axes, on="group", how="left", maintain_order="left")
        .join(rates, on=kind, how="left", nulls_equal=True, maintain_order="left")
        .pipe(schema.select, KIND_COLUMNS)
        .sort("total_ns", descending=True, maintain_order=True)
    )


def _large(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("bytes") >= _LARGE * pl.col("bytes").max().over(*_GROUP), pl.col("transfer_ns") > 0)


def _sum_by(rows: pl.DataFrame, by: list[str], *more: str) -> pl.DataFrame:
    over_ns = (pl.col("transfer_ns") - pl.col("usual_ns")).clip(0)
    return (
        rows.filter(pl.col("usual_ns") > 0)
        .with_columns(pl.min_horizontal(over_ns, "exposed_ns").alias("extra_ns"))
        .group_by(by, maintain_order=True)
        .agg(
            pl.col("axis", "group_size", "ranks", "group_ranks", *more).first(),
            (pl.col("transfer_ns") / pl.col("usual_ns")).median().alias("ratio"),
            pl.col("transfer_ns", "usual_ns", "exposed_ns", "extra_ns").sum(),
            (pl.col("bytes") * collective_instances.bus_factor()).sum().alias("bus_bytes"),
            pl.len().cast(pl.Int64).alias("calls"),
        )
        .sort(by)
    )
