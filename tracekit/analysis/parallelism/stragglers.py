"""Stragglers: the time that other ranks lose to the rank that arrives last, in each step or in some."""

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.communication import collective_instances
from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.parallelism import late_groups, late_ranks, outlier_steps, rank_places
from tracekit.analysis.time import breakdown
from tracekit.model import schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.sync import alignment, collective_matching

_KEY = ("window", "step")
_ACTIVITY = ("window", "rank", "activity_id")
PARTS = 4
"""Into how many parts a window without marked steps is divided, to see whether a rank is late throughout."""

OCCASIONAL_COLUMNS = {
    **schema.columns("window step late_rank step_ns reference_ns lost_ns window_ns steps"),
    **dict.fromkeys(("compute_ns", "usual_compute_ns"), pl.Int64),
    "ops_ratio": pl.Float64,
    "late_ranks": pl.List(pl.Int64),
}
_STEP, _RANK = ["window", "step"], ["window", "rank"]
_LONGER_RATIO, _LONGER_CPU_RATIO = 0.15, 0.25
"""Share of the median step that the others wait beyond what is usual; on a CPU run other processes delay ranks."""
_MOST_STEPS = 0.75
"""In as many steps a rank is a straggler, not an occasional one."""
_MOST = 0.5
_FEWEST_STEPS = 3

FACTS: tuple[TraceFact, ...] = (*late_ranks.FACTS, breakdown.ops_by_step)
"""The facts that the run tables of this module read, without those of `outlier_steps`."""


@run_fact
def late_calls(run: Run) -> pl.DataFrame:
    """Return the waits of ranks in collectives for a later arrival; use ``run.table``.

    Columns window, rank, step, phase, unit, op, instance, late_rank (the last arrival among ranks with a trace; the
    lowest rank of a group that arrives late together), activity_id, start_ns and dur_ns (on the clock of the rank's
    trace), wait_ns; one row per rank and collective in which it waited, except for its own group.
    """
    members = run.table(late_groups.groups).select("rank", own_group="leader")
    last = run.table(late_ranks.last_arrivals).drop_nulls("late_rank")
    starts = run.table(collective_matching.calls).select(*_ACTIVITY, "start_ns").unique(_ACTIVITY)
    waits = run.table(collective_instances.waits).filter(pl.col("wait_ns") > 0)
    late = waits.join(last, on=["window", "instance"]).join(members, on="rank", how="left", maintain_order="left")
    for_others = late.filter(pl.col("own_group").ne_missing(pl.col("late_rank")))
    return for_others.join(starts, on=_ACTIVITY, how="left", maintain_order="left").select(
        "window", "rank", "step", "phase", "unit", "op", "instance", "late_rank", "activity_id", "start_ns", "dur_ns",
        "wait_ns",
    )  # fmt: skip


@run_fact
def straggler_costs(run: Run) -> pl.DataFrame:
    """Return the time that other ranks lose in each step to each rank that arrived last at least once.

    Ranks that arrive late together (`late_groups.groups`) are one, under the lowest of them. Use ``run.table``.
    Columns window, step, order (number of the step among those judged), late_rank, late_ranks (all of a group, or
    that one), duration_ns (the median over ranks), waited_ns (in collectives for it, hidden or not: the median over
    the other ranks), idle_ns (the part of it without compute), lost_ns, lost_ratio, share (of all waiting in the
    step), late_calls and calls (collectives in which it arrived last, and all of the step), is_whole (all ranks of
    those have a trace); one row per step and rank. lost_ns is the larger of idle_ns and of the smaller of waited_ns
    and the others' extra exposed communication: ranks behind a hidden wait are delayed too. The rank's own extra
    transfer time, without waiting, is subtracted: that is a slow link. Steps with saves are left out, and those with
    collectives of which none was matched.
    """
    waits = run.table(late_calls)
    plain_steps = _matched_steps(run)
    per_rank = waits.group_by(*_KEY, "late_rank", "rank").agg(pl.col("wait_ns").sum())
    share = pl.col("all_ns") / pl.col("all_ns").sum().over(_KEY)
    waited = _of_others(run, per_rank, plain_steps).with_columns(share.alias("share"), waited_ns="median_ns")
    idle = _of_others(run, _idle(run), plain_steps).select(*_KEY, "late_rank", pl.col("median_ns").alias("idle_ns"))
    keys = [*_KEY, "late_rank"]
    late = plain_steps.join(_late_ranks(run, waits), how="cross").join(
        waited.select(*keys, "waited_ns", "share"), on=keys, how="left", nulls_equal=True
    )
    for columns in (idle, _exposed_longer(run), _calls(run)):
        late = late.join(columns, on=keys, how="left", nulls_equal=True)
    lost_ns = (
        pl.max_horizontal(pl.min_horizontal("waited_ns", "extra_idle_ns"), "idle_ns") - pl.col("own_transfer_excess_ns")
    ).clip(0)
    counts = pl.col("waited_ns", "idle_ns", "extra_idle_ns", "own_transfer_excess_ns", "late_calls", "calls")
    return (
        late.with_columns(counts.fill_null(0), pl.col("share").fill_null(0.0))
        .with_columns(lost_ns.alias("lost_ns"))
        .with_columns((pl.col("lost_ns") / pl.col("duration_ns")).alias("lost_ratio"))
        .select(
            *_KEY, "order", "late_rank", "late_ranks", "duration_ns", "waited_ns", "idle_ns", "lost_ns", "lost_ratio",
            "share", "late_calls", "calls", pl.col("is_whole").fill_null(value=False),
        )
        .sort("late_rank", "order")
    )  # fmt: skip


def steps(run: Run) -> pl.DataFrame:
    """Return the steps without saves: window, step, duration_ns (median), ranks (how many), order (number).

    Where no steps are marked, each window is one step, null.
    """
    rows = save_stages.steps(run)
    # A trace without marked steps shares no step with others that have some.
    rows = rows.filter(pl.col("step").is_not_null() | pl.col("step").is_null().all())
    table = rows.group_by(_KEY).agg(
        pl.col("duration_ns").median().cast(pl.Int64), pl.col("rank").n_unique().cast(pl.Int64).alias("ranks")
    )
    return table.sort(_KEY).with_columns(pl.int_range(pl.len()).alias("order"))


def _matched_steps(run: Run) -> pl.DataFrame:
    """`steps` without those in which ranks recorded collectives, of which none could be matched between them."""
    recorded, matched = (
        run.table(fact).select(_KEY).unique() for fact in (collective_matching.calls, collective_instances.waits)
    )
    unmatched = recorded.join(matched, on=_KEY, how="anti", nulls_equal=True)
    table = steps(run)
    matched = table.join(unmatched, on=_KEY, how="anti", nulls_equal=True, maintain_order="left")
    return (table if matched.is_empty() else matched).with_columns(pl.int_range(pl.len()).alias("order"))


def waiting_pieces(run: Run) -> pl.DataFrame:
    """Return the idle time of ranks in collectives for late ranks; columns of `compute_gap_causes.waits_for_peers`.

    Without collectives of several pipeline stages, where the order of the stages decides who waits.
    """
    pieces = run.table(compute_gap_causes.waits_for_peers)
    across = late_groups.across_stages(run)
    if across.is_empty():
        return pieces
    waits = run.table(collective_instances.waits).join(across, on=["window", "instance"], how="semi")
    calls = waits.select("window", "rank", collective_id="activity_id")
    return pieces.join(calls, on=["window", "rank", "collective_id"], how="anti")


@run_fact
def late_parts(run: Run) -> pl.DataFrame:
    """Parts of a window in which most of the waiting in collectives is for each rank; use ``run.table``.

    Columns window, late_rank, led (such parts), parts (PARTS, with equal numbers of collectives), largest_ratio (the
    share of one collective in all waiting for the rank); one row per window and rank that leads a part. Windows with
    fewer than PARTS collectives have no rows.
    """
    key = ["window", "instance"]
    begun = alignment.on_run_clock(run.table(late_calls), run.offsets, ("start_ns",))
    calls = begun.group_by(*key, "late_rank").agg(pl.col("start_ns").min(), pl.col("wait_ns").sum())
    order, count = pl.col("start_ns").rank("ordinal").over("window") - 1, pl.len().over("window")
    parted = calls.with_columns((order * PARTS // count).alias("part")).filter(count >= PARTS)
    sums = parted.group_by("window", "part", "late_rank").agg(pl.col("wait_ns").sum())
    leads = pl.col("wait_ns") * 2 > pl.col("wait_ns").sum().over("window", "part")
    led = sums.filter(leads).group_by("window", "late_rank").agg(pl.len().cast(pl.Int64).alias("led"))
    largest = pl.col("wait_ns").max() / pl.col("wait_ns").sum()
    shares = calls.group_by("window", "late_rank").agg(largest.alias("largest_ratio"))
    table = led.with_columns(pl.lit(PARTS, pl.Int64).alias("parts")).join(shares, on=["window", "late_rank"])
    return table.sort("window", "late_rank")


@run_fact
def occasional_stragglers(run: Run) -> pl.DataFrame:
    """Return the few steps in which most of the waiting is for one rank that takes longer than usual.

    Columns OCCASIONAL_COLUMNS: late_rank and late_ranks as in `straggler_costs`, step_ns and reference_ns (of the step,
    and the median), lost_ns (by the other ranks, beyond the lower quartile of the steps; of the last step, whose delay
    no later step shows, what the rank takes longer than usual and than the others, if it is late elsewhere, too),
    compute_ns (of the late rank in the step) and usual_compute_ns (the larger of two medians: of its steps, and of all
    ranks in the step), ops_ratio (operators over the same for operators; null if not recorded), window_ns (of the rank
    with the longest steps) and steps (of the window); one row per step and late rank. Use ``run.table``. Fewer than
    three quarters of the window's steps. Steps with saves, and those in which the rank's host stalls, are left out.
    """
    costs = run.table(straggler_costs).drop_nulls("step")
    if costs.is_empty():
        return schema.empty(OCCASIONAL_COLUMNS)
    of_rank = ["window", "late_rank"]
    # Of a rank that is late in half of the steps, the median lies between late and usual steps.
    usual_ns = pl.col("lost_ns").quantile(1 - _MOST_STEPS, "lower").over(of_rank).cast(pl.Int64)
    least_ratio = _LONGER_RATIO if breakdown.is_on_device(run) else _LONGER_CPU_RATIO
    measured = costs.with_columns(
        pl.col("duration_ns").alias("step_ns"),
        pl.col("duration_ns").median().over(of_rank).cast(pl.Int64).alias("reference_ns"),
        pl.len().over(of_rank).cast(pl.Int64).alias("steps"),
        (pl.col("lost_ns") - usual_ns).alias("lost_ns"),
    )
    is_outlier = (pl.col("lost_ns") >= least_ratio * pl.col("reference_ns")) & (pl.col("share") > _MOST)
    measured = measured.join(_window_lengths(run), on="window").join(
        _excess_of_last_steps(run), left_on=[*_STEP, "late_rank"], right_on=[*_STEP, "rank"], how="left"
    )
    is_last_outlier = (pl.col("excess_ns") >= least_ratio * pl.col("reference_ns")) & is_outlier.any().over(of_rank)
    few = measured.filter(is_outlier | is_last_outlier, pl.col("steps") >= _FEWEST_STEPS)
    few = few.with_columns(pl.max_horizontal("lost_ns", "excess_ns").alias("lost_ns"))
    few = few.filter(pl.len().over(of_rank) < _MOST_STEPS * pl.col("steps"))
    worked = _work(run).rename({"rank": "late_rank"})
    table = _without_host_stalls(run, few).join(worked, on=[*_STEP, "late_rank"], how="left")
    return table.pipe(schema.select, OCCASIONAL_COLUMNS).sort("window", "step", "late_rank")


def _window_lengths(run: Run) -> pl.DataFrame:
    """Time of all steps of the rank with most of it: columns window, window_ns."""
    of_rank = save_stages.steps(run).group_by(*_RANK, "step").agg(pl.col("duration_ns").max())
    sums = of_rank.group_by(_RANK).agg(pl.col("duration_ns").sum())
    return sums.group_by("window").agg(pl.col("duration_ns").max().alias("window_ns"))


def _excess_of_last_steps(run: Run) -> pl.DataFrame:
    """By how much the last step of each rank is longer than its usual ones and than that of most ranks.

    Columns window, step, rank, excess_ns.
    """
    of_steps = run.table(breakdown.by_step).group_by(*_RANK, "step").agg(pl.col("duration_ns").max())
    usual = of_steps.group_by(_RANK).agg(pl.col("duration_ns").quantile(1 - _MOST_STEPS, "lower").alias("usual_ns"))
    last = outlier_steps.last_steps(run).join(usual, on=_RANK)
    of_ranks = pl.col("duration_ns").quantile(0.5, "lower").over(_STEP)
    excess_ns = pl.col("duration_ns") - pl.max_horizontal("usual_ns", of_ranks)
    return last.select(*_STEP, "rank", excess_ns=excess_ns.cast(pl.Int64))


def _late_ranks(run: Run, waits: pl.DataFrame) -> pl.DataFrame:
    """Return each late_rank of a table once, with late_ranks: the ranks of its group, or itself."""
    members = run.table(late_groups.groups).select("late_ranks", late_rank="leader").unique("late_rank")
    ranks = waits.select(pl.col("late_rank").unique()).join(members, on="late_rank", how="left")
    return ranks.with_columns(pl.coalesce("late_ranks", pl.concat_list("late_rank")).alias("late_ranks"))


def _of_others(run: Run, per_rank: pl.DataFrame, plain_steps: pl.DataFrame) -> pl.DataFrame:
    """Return for each step and late rank the median over all other ranks of wait_ns (median_ns), and its sum (all_ns).

    Ranks without a row waited 0. Under pipeline parallelism the others are those of the same stages.
    """
    late = _late_ranks(run, per_rank)
    # Ranks that late ones are compared with: columns late_rank, rank. Those of the pipeline stages of late_ranks, or
    # all, without late_ranks.
    stage_of = rank_places.stages(run)
    ranks = pl.DataFrame({"rank": run.ranks}, schema={"rank": pl.Int64})
    stage = pl.col("rank").replace_strict(stage_of, default=None, return_dtype=pl.Int64).alias("stage")
    members = late.explode("late_ranks").select("late_rank", rank="late_ranks")
    stages = members.with_columns(stage).select("late_rank", "stage").unique()
    candidates = ranks.with_columns(stage).join(stages, on="stage", nulls_equal=True)
    mates = candidates.join(members, on=["late_rank", "rank"], how="anti").select("late_rank", "rank")
    counts = mates.group_by("late_rank").agg(pl.len().cast(pl.Int64).alias("mates")).join(late, on="late_rank")
    of_mates = per_rank.join(mates, on=["late_rank", "rank"], how="semi").group_by(*_KEY, "late_rank")
    sorted_waits = of_mates.agg(pl.col("wait_ns").sort(descending=True).alias("each"))
    sums = per_rank.group_by(*_KEY, "late_rank").agg(pl.col("wait_ns").sum().alias("all_ns"))
    rank_counts = plain_steps.select(*_KEY, "ranks")
    joined = sums.join(rank_counts, on=_KEY, nulls_equal=True).join(counts, on="late_rank", how="left")
    count = pl.min_horizontal(pl.col("ranks") - pl.col("late_ranks").list.len().cast(pl.Int64), "mates").fill_null(0)
    middle = pl.col("each").list.get(count // 2, null_on_oob=True)
    return joined.join(sorted_waits, on=[*_KEY, "late_rank"], how="left", nulls_equal=True).with_columns(
        middle.fill_null(0).alias("median_ns")
    )


def _idle(run: Run) -> pl.DataFrame:
    """Return each rank's idle time while it waited for another: columns late_rank, wait_ns, window, step, rank."""
    pieces = waiting_pieces(run)
    late = run.table(late_calls).select("window", "rank", "late_rank", collective_id="activity_id")
    waits = pieces.join(late.unique(["window", "rank", "collective_id"]), on=["window", "rank", "collective_id"])
    return waits.group_by(*_KEY, "late_rank", "rank").agg(pl.col("dur_ns").sum().alias("wait_ns"))


def _exposed_longer(run: Run) -> pl.DataFrame:
    """Return for each step and rank how its exposed communication differs from that of the median other rank.

    extra_idle_ns: how much longer the others'; own_transfer_excess_ns: how much longer its own, waiting excluded, at
    most what its transfers, hidden or not, take longer: those that a late host leaves exposed are no slow link.
    """
    by_step = run.table(breakdown.by_step)
    waits = _idle(run).group_by(*_KEY, "rank").agg(pl.col("wait_ns").sum())
    all_waits = run.table(late_calls).group_by(*_KEY, "rank").agg(all_wait_ns=pl.col("wait_ns").sum())
    # Devices of one rank run in lockstep: the one that waits least shows the rank's own time.
    ranks = (
        by_step.group_by(*_KEY, "rank")
        .agg(
            pl.col("exposed_communication_ns").min().alias("exposed_ns"),
            pl.col("communication_ns").min().alias("transfer_ns"),
        )
        .join(waits, on=[*_KEY, "rank"], how="left", nulls_equal=True)
        .join(all_waits, on=[*_KEY, "rank"], how="left", nulls_equal=True)
        .with_columns(
            (pl.col("exposed_ns") - pl.col("wait_ns").fill_null(0)).alias("moving_ns"),
            pl.col("transfer_ns") - pl.col("all_wait_ns").fill_null(0),
        )
    )
    leaders = ranks.join(run.table(late_groups.groups), on="rank", how="left").with_columns(
        pl.coalesce("leader", "rank").alias("late_rank")
    )
    compared = [_beyond_others(step) for step in leaders.partition_by(_KEY, maintain_order=True)]
    zero = pl.lit(0, pl.Int64)
    none = leaders.clear().select(*_KEY, "late_rank", extra_idle_ns=zero, own_transfer_excess_ns=zero)
    return pl.concat([none, *compared])


def _beyond_others(step: pl.DataFrame) -> pl.DataFrame:
    """Return `_exposed_longer` of the ranks of one step: no row for one whose group has all ranks."""
    leaders = step.group_by("late_rank").agg(
        pl.col(*_KEY).first(),
        own_ns=pl.col("exposed_ns").median(),
        own_moving_ns=pl.col("moving_ns").median(),
        own_transfer_ns=pl.col("transfer_ns").median(),
    )
    leaders = leaders.sort("late_rank")
    group = np.searchsorted(leaders["late_rank"].to_numpy(), step["late_rank"].to_numpy())
    names = ("exposed_ns", "moving_ns", "transfer_ns")
    exposed_ns, moving_ns, transfer_ns = (_medians_of_others(step[name].to_numpy(), group) for name in names)
    extra_idle_ns = pl.Series(exposed_ns) - pl.col("own_ns")
    own_transfer_excess_ns = pl.min_horizontal(
        pl.col("own_moving_ns") - pl.Series(moving_ns), pl.col("own_transfer_ns") - pl.Series(transfer_ns)
    )
    compared = leaders.select(
        *_KEY,
        "late_rank",
        extra_idle_ns=extra_idle_ns,
        own_transfer_excess_ns=own_transfer_excess_ns.clip(0),
    )
    return compared.drop_nans().cast({"extra_idle_ns": pl.Int64, "own_transfer_excess_ns": pl.Int64})


def _medians_of_others(values: npt.NDArray[Any], group: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return for each group (numbers from 0) the median of the values of all other groups; NaN if there are none.

    In n log n for groups of one: 16,384 ranks would have 268 million pairs.

    >>> _medians_of_others(np.array([10, 20, 40]), np.array([0, 1, 2])).tolist()
    [30.0, 25.0, 15.0]
    """
    order = np.argsort(values, kind="stable")
    ascending, position = values[order].astype(np.float64), np.empty(len(values), np.int64)
    position[order] = np.arange(len(values))
    medians = np.full(int(group.max(initial=-1)) + 1, np.nan)
    other_count = len(values) - 1
    is_alone = np.bincount(group) == 1
    if other_count > 0:
        is_single = is_alone[group]
        removed = position[is_single]
        middles = np.array([[(other_count - 1) // 2], [other_count // 2]])
        lower, upper = np.where(middles >= removed, middles + 1, middles)
        medians[group[is_single]] = (ascending[lower] + ascending[upper]) / 2
    for several in np.flatnonzero(~is_alone):
        rest = values[group != several]
        medians[several] = np.median(rest) if len(rest) else np.nan
    return medians


def _calls(run: Run) -> pl.DataFrame:
    """Number of collectives in which each rank arrived last per step: late_calls, calls, is_whole."""
    instances = run.table(collective_instances.instances)
    is_whole = (pl.col("ranks").list.len() == pl.col("group_size")).all().over(_KEY)
    counted = instances.with_columns(pl.len().cast(pl.Int64).over(_KEY).alias("calls"), is_whole.alias("is_whole"))
    return (
        counted.join(run.table(late_ranks.last_arrivals), on=["window", "instance"])
        .drop_nulls("late_rank")
        .group_by(*_KEY, "late_rank")
        .agg(pl.len().cast(pl.Int64).alias("late_calls"), pl.col("calls", "is_whole").first())
    )


def _work(run: Run) -> pl.DataFrame:
    """Return columns window, rank, step, compute_ns, usual_compute_ns, ops_ratio."""
    computed = run.table(breakdown.by_step).drop_nulls("step").group_by(*_RANK, "step").agg(pl.col("compute_ns").max())
    counted = computed.join(run.table(breakdown.ops_by_step), on=[*_RANK, "step"], how="left")
    return counted.with_columns(
        _usual("compute_ns").cast(pl.Int64).alias("usual_compute_ns"),
        (pl.col("ops") / _usual("ops")).alias("ops_ratio"),
    ).drop("ops")


def _usual(name: str) -> pl.Expr:
    of_ranks = pl.col(name).quantile(0.5, "lower").over(_STEP)
    return pl.max_horizontal(pl.col(name).median().over(_RANK), of_ranks)


def _without_host_stalls(run: Run, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the steps without those in which stalls of the late rank's host explain most of the time.

    A stall of hosts that are not late, as of all ranks, makes no rank late.
    Where ranks do not meet in each step, as in local SGD, the others wait in a later step than that of the stall.
    """
    meetings = run.table(collective_matching.calls).select("window", since="step").drop_nulls().unique().sort("since")
    late = steps.select(*_STEP, "late_rank", "late_ranks", "lost_ns").sort("step")
    since = late.join_asof(
        meetings, left_on="step", right_on="since", by="window", allow_exact_matches=False, check_sortedness=False
    )
    stalls = run.table(outlier_steps.outlier_steps)
    stalled = stalls.select("window", "ranks", "gap_step", stalled_ns="lost_ns")
    is_between = (pl.col("gap_step") <= pl.col("step")) & (pl.col("gap_step") >= pl.coalesce("since", "step"))
    pairs = since.join(stalled, on="window").filter(is_between)
    of_rank = pairs.filter(pl.col("ranks").list.set_difference("late_ranks").list.len() == 0)
    sums = of_rank.group_by(*_STEP, "late_rank").agg(pl.col("stalled_ns").sum(), pl.col("lost_ns").first())
    explained = sums.filter(pl.col("stalled_ns") >= _MOST * pl.col("lost_ns"))
    return steps.join(explained, on=[*_STEP, "late_rank"], how="anti", maintain_order="left")
