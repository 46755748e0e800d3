"""Ranks that arrive late together, and what takes them longer than the other ranks."""

import polars as pl

from tracekit.analysis.checkpoint import steps_without_saves
from tracekit.analysis.communication import collective_instances, communication_gap_causes
from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.time import breakdown, host_state, launches
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Fact, Trace
from tracekit.sync import collective_matching

COMPUTE, LAUNCH, SYNCHRONIZE, DATA, ALLOCATOR, STALL = PARTS = (
    "compute", "launch", "synchronize", "data", "allocator", "device_stall",
)  # fmt: skip
"""What a rank can take longer for: its kernels, late launches, waits for the device, data loading, the allocator, a
device that runs nothing although work is queued."""

_PART_OF_STATE = {
    **dict.fromkeys((host_state.PYTHON, host_state.OP, host_state.LAUNCH, host_state.LOCK), LAUNCH),
    host_state.SYNCHRONIZE: SYNCHRONIZE,
    host_state.DATA: DATA,
    host_state.ALLOCATOR: ALLOCATOR,
}
_KEY = ["window", "instance"]
_STEP = ["window", "step"]
_CANDIDATES = 5
_MIN_CALLS = 3
_MIN_STEPS = 2
_TOGETHER = 2.0
"""How many times as much waiting must end without the whole group as without its latest rank alone."""
_NEEDED = 0.8
"""A rank belongs to a group if without it, less than this share of the waiting would end."""


QUEUE_COLUMNS = schema.columns("activity_id queued_ns")


def queue_times(trace: Trace) -> pl.DataFrame:
    """Return how long after its launch each collective on a device started. Columns activity_id, queued_ns."""
    calls = [
        launches.work(trace, device).filter(pl.col("kind") == "communication")
        for device in breakdown.devices(trace)
        if device is not None
    ]
    queued_ns = (pl.col("start_ns") - pl.col("launched_ns")).alias("queued_ns")
    parts = [part.drop_nulls("launched_ns").select(pl.col("id").alias("activity_id"), queued_ns) for part in calls]
    return pl.concat([pl.DataFrame(schema=QUEUE_COLUMNS), *parts])


FACTS: tuple[Fact, ...] = (
    queue_times,
    collective_matching.calls,
    compute_gap_causes.compute_gap_causes,
    *steps_without_saves.FACTS,
)
"""The facts that the run tables of this module read."""


def groups(run: Run) -> pl.DataFrame:
    """Return the ranks that arrive late together, such as those of one host; use ``run.run_table``.

    Columns rank, leader (the lowest rank of the group), late_ranks (all of them, sorted); one row per rank of the
    group; empty where single ranks arrive late. A group is at most half of the ranks of a collective. If it were not
    late, the others would wait less: until the last of them arrives. That time must be twice as long as for any single
    rank, in three collectives and two steps or more.
    """
    arrivals = run.run_table(_arrivals)
    found = [group for group in _candidates(arrivals) if _is_late_together(arrivals, group)]
    members = max(found, key=lambda group: _lead_ns(arrivals, group), default=[])
    return pl.DataFrame(
        [(rank, members[0], members) for rank in members],
        schema={"rank": pl.Int64, "leader": pl.Int64, "late_ranks": pl.List(pl.Int64)},
        orient="row",
    )


def last_arrivals(run: Run) -> pl.DataFrame:
    """Return which rank arrived last at each collective; use ``run.run_table``.

    Columns window, instance, late_rank (among ranks with a trace; the leader of a group that arrived last; null within
    clock error).
    """
    members = run.run_table(groups)
    last = run.run_table(collective_instances.instances).select(*_KEY, rank="last_known_rank")
    of_group = last.join(members, on="rank", how="left").select(*_KEY, pl.coalesce("leader", "rank").alias("late_rank"))
    if members.is_empty():
        return of_group
    leads = _lead(_all_arrivals(run), members["rank"].to_list()).select(*_KEY, leader=pl.lit(members["leader"][0]))
    return of_group.join(leads, on=_KEY, how="left").select(
        *_KEY, pl.coalesce("leader", "late_rank").alias("late_rank")
    )


def latest(run: Run) -> tuple[int, ...]:
    """Return the rank, or the group of ranks, without which the waiting of the others would be shortest; () if none."""
    members = run.run_table(groups)
    if not members.is_empty():
        return tuple(members["rank"].to_list())
    arrivals = run.run_table(_arrivals)
    leads = {rank: _lead_ns(arrivals, [rank]) for rank in arrivals["rank"].unique().sort().to_list()}
    best = max(leads, key=lambda rank: leads[rank], default=None)
    return (best,) if best is not None and leads[best] > 0 else ()


def launched_late_ratio(run: Run, members: tuple[int, ...]) -> float:
    """Return for which share of the waiting late ranks launched their collective late.

    A collective was launched late if it started sooner after its launch than half of the time for which the others
    waited: it was not queued behind other work. 0 where nobody waits.
    """
    arrivals = run.run_table(_arrivals)
    late_calls = run.run_table(collective_instances.waits).filter(pl.col("rank").is_in(list(members)))
    queued = late_calls.select("window", "instance", "rank", "activity_id").join(
        run.table(queue_times), on=["window", "rank", "activity_id"], how="left"
    )
    longest = queued.group_by(_KEY).agg(pl.col("queued_ns").max())
    leads = _lead(arrivals, list(members)).join(longest, on=_KEY)
    late_ns = int(leads.filter(pl.col("queued_ns") < pl.col("lead_ns") / 2)["lead_ns"].sum())
    return late_ns / max(1, int(leads["lead_ns"].sum()))


def extra_time(run: Run, members: tuple[int, ...]) -> pl.DataFrame:
    """Return what takes late ranks longer than others: the median over steps of the mean over these ranks.

    Columns part (of PARTS), extra_ns (idle time of compute, or compute, beyond the median of the other ranks); one row
    per part that takes longer, the largest first.
    """
    times = run.run_table(_own_time)
    is_late = pl.col("rank").is_in(list(members))
    late, others = pl.col("dur_ns").filter(is_late).mean(), pl.col("dur_ns").filter(~is_late).median()
    each = times.group_by(*_STEP, "part").agg((late - others).alias("extra_ns"))
    medians = each.group_by("part").agg(pl.col("extra_ns").median().round().cast(pl.Int64))
    return medians.filter(pl.col("extra_ns") > 0).sort("extra_ns", "part", descending=[True, False])


def _arrivals(run: Run) -> pl.DataFrame:
    """Return `_all_arrivals` in steps without saves; where no steps are marked, in the window."""
    marked = pl.col("step").is_not_null() | pl.col("step").is_null().all()
    return steps_without_saves.without_saves(run, _all_arrivals(run).filter(marked))


def _all_arrivals(run: Run) -> pl.DataFrame:
    """Return when each rank arrived at each collective: window, instance, step, rank, arrival_ns, residual_ns."""
    steps = run.run_table(collective_instances.instances).select(*_KEY, "step")
    waits = run.run_table(collective_instances.waits).select(*_KEY, "rank", "arrival_ns", "residual_ns")
    return waits.join(steps, on=_KEY).sort(*_KEY, "arrival_ns", "rank")


def _candidates(arrivals: pl.DataFrame) -> list[list[int]]:
    """Return the sets of ranks after the longest pause between arrivals, those with most time first."""
    count, place = pl.len().over(_KEY), pl.int_range(pl.len()).over(_KEY)
    pause = (pl.col("arrival_ns") - pl.col("arrival_ns").shift(1)).over(_KEY)
    eligible = (place * 2 >= count) & (place > 0) & (pause > pl.col("residual_ns"))
    marked = arrivals.with_columns(
        place.alias("place"), pl.when(eligible).then(pause).fill_null(0).alias("pause_ns")
    ).with_columns(pl.col("pause_ns").max().over(_KEY).alias("longest_ns"))
    first = pl.col("place").filter((pl.col("pause_ns") == pl.col("longest_ns")) & (pl.col("pause_ns") > 0)).min()
    late = marked.with_columns(first.over(_KEY).alias("first")).filter(pl.col("place") >= pl.col("first"))
    sets = late.group_by(_KEY).agg(pl.col("rank").sort().alias("late"), pl.col("longest_ns").first())
    totals = sets.filter(pl.col("late").list.len() > 1).group_by("late").agg(pl.col("longest_ns").sum())
    return totals.sort("longest_ns", "late", descending=[True, False])["late"].head(_CANDIDATES).to_list()


def _is_late_together(arrivals: pl.DataFrame, group: list[int]) -> bool:
    """Return whether the others wait for the group, and for every rank of it."""
    leads = _lead(arrivals, group)
    total_ns = int(leads["lead_ns"].sum())
    waiting = leads.filter(pl.col("lead_ns") > 0)
    if waiting.height < _MIN_CALLS or waiting["step"].n_unique() < _MIN_STEPS:
        return False
    alone_ns = max(_lead_ns(arrivals, [rank]) for rank in arrivals["rank"].unique().to_list())
    without = (_lead_ns(arrivals, [other for other in group if other != rank]) for rank in group)
    return total_ns > _TOGETHER * alone_ns and all(part_ns < _NEEDED * total_ns for part_ns in without)


def _lead_ns(arrivals: pl.DataFrame, group: list[int]) -> int:
    return int(_lead(arrivals, group)["lead_ns"].sum())


def _lead(arrivals: pl.DataFrame, group: list[int]) -> pl.DataFrame:
    """Return by how much some ranks arrive after the last of the others: window, instance, step, lead_ns."""
    is_late, arrival_ns = pl.col("rank").is_in(group), pl.col("arrival_ns")
    both = arrivals.filter(is_late.any().over(_KEY) & (~is_late).any().over(_KEY))
    lead_ns = (arrival_ns.max() - arrival_ns.filter(~is_late).max()).alias("lead_ns")
    leads = both.group_by(_KEY).agg(pl.col("step").first(), lead_ns, pl.col("residual_ns").max())
    return leads.filter(pl.col("lead_ns") > pl.col("residual_ns"))


def _own_time(run: Run) -> pl.DataFrame:
    """Return the own time of each rank and step by part: window, step, rank, part, dur_ns; 0 where there is none."""
    steps = steps_without_saves.steps(run)
    ranks = steps.group_by(*_STEP, "rank").agg(pl.col("compute_ns").max().alias("dur_ns"))
    is_stall = pl.col("cause") == communication_gap_causes.DEVICE_STALL
    by_host = (pl.col("cause") == communication_gap_causes.HOST) & pl.col("detail").is_in(list(_PART_OF_STATE))
    pieces = run.table(compute_gap_causes.compute_gap_causes).filter(is_stall | by_host)
    part = pl.col("detail").replace_strict(_PART_OF_STATE, default=None, return_dtype=pl.String)
    idle = (
        pieces.with_columns(pl.when(is_stall).then(pl.lit(STALL)).otherwise(part).alias("part"))
        .group_by(*_STEP, "rank", "device", "part")
        .agg(pl.col("dur_ns").sum())
        .group_by(*_STEP, "rank", "part")
        .agg(pl.col("dur_ns").max())
    )
    every = ranks.select(*_STEP, "rank").join(pl.DataFrame({"part": PARTS[1:]}), how="cross")
    filled = every.join(idle, on=[*_STEP, "rank", "part"], how="left", nulls_equal=True).with_columns(
        pl.col("dur_ns").fill_null(0)
    )
    compute = ranks.with_columns(part=pl.lit(COMPUTE))
    return pl.concat([compute.select(filled.columns), filled])
