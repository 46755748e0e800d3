"""Groups of ranks that arrive late together, such as those of one node."""

import statistics
from collections.abc import Sequence

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.communication import collective_instances
from tracekit.analysis.parallelism import rank_places
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.sync import collective_matching

_KEY = ["window", "instance"]
_CANDIDATES = 5
_MIN_CALLS = 3
_MIN_STEPS = 2
_TOGETHER = 2.0
"""How many times as much waiting must end without the whole group as without its latest rank alone."""
_NEEDED = 0.8
"""A rank belongs to a group if without it, less than this share of the waiting would end in its own collectives."""
_WAITED_FOR = 0.5
"""Of pipeline stages, those are waited for that wait less by at least this share of what the one does by the most."""
_MAX_OWN_WAIT = 0.5
"""The longest that a rank of a group may wait itself, as a share of what the median of the other ranks waits."""


@run_fact
def groups(run: Run) -> pl.DataFrame:
    """Return the ranks that arrive late together, such as those of one node; use ``run.table``.

    Columns rank, leader (the lowest rank of the group), late_ranks (all of them, sorted); one row per rank of the
    group; empty where single ranks arrive late. A group is at most half of the ranks of a collective. If it were not
    late, the others would wait less: until the last of them arrives. That time must be twice as long as for any single
    rank, in three collectives and two steps or more. Ranks may also be late each in a process group of its own, such
    as those of a node whose collectives with other nodes have one rank per node, or a few: then none of them may wait
    itself.
    Of a group in several stages of a pipeline, those stages count that do not only wait for another stage of it. All
    ranks of a pipeline stage are no group: how long stages take is what PIPE002 judges.
    """
    arrivals = run.table(rank_arrivals).filter("is_judged")
    waits = _waits(arrivals)
    # Sets of ranks after the longest pause between arrivals, those with most time first.
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
    joint: list[list[int]] = (
        totals.sort("longest_ns", "late", descending=[True, False])["late"].head(_CANDIDATES).to_list()
    )
    parallel = _in_parallel_groups(waits, rank_places.places(run))
    late_sets = [ranks for ranks in joint if _is_late_together(arrivals, ranks)]
    late_sets += [ranks for ranks in [*joint, *parallel] if _is_late_in_parallel(arrivals, waits, ranks)]
    late_sets += [ranks for ranks in parallel if _is_not_waiting(waits, ranks) and _is_late_together(arrivals, ranks)]
    latest = max(late_sets, key=lambda group: (lead_ns(arrivals, group), -len(group)), default=[])
    members = _without_delayed_stages(run, arrivals, latest)
    if rank_places.is_of_stages(run, members):
        members = []
    return pl.DataFrame(
        [(rank, members[0], members) for rank in members],
        schema={"rank": pl.Int64, "leader": pl.Int64, "late_ranks": pl.List(pl.Int64)},
        orient="row",
    )


@run_fact
def rank_arrivals(run: Run) -> pl.DataFrame:
    """Arrivals of each rank at each collective: window, instance, step, rank, arrival_ns, residual_ns, and two flags.

    is_across_stages: collectives, and sends, between several pipeline stages, where the order of the stages decides who
    arrives last. is_judged: of the others, those in steps without saves; where no steps are marked, in the window.
    """
    stage_of = rank_places.stages(run)
    steps = run.table(collective_instances.instances).select(*_KEY, "step")
    waits = run.table(collective_instances.waits).select(*_KEY, "rank", "arrival_ns", "residual_ns")
    stage = pl.col("rank").replace_strict(stage_of, default=None, return_dtype=pl.Int64)
    arrivals = waits.join(steps, on=_KEY).with_columns(is_across_stages=stage.n_unique().over(_KEY) > 1)
    of_step = ["window", "step"]
    within = arrivals.filter(~pl.col("is_across_stages")).select(of_step).unique()
    marked = within.filter(pl.col("step").is_not_null() | pl.col("step").is_null().all())
    judged_steps = save_stages.without_saves(run, marked).with_columns(is_judged=pl.lit(value=True))
    is_judged = pl.col("is_judged").fill_null(value=False) & ~pl.col("is_across_stages")
    joined = arrivals.join(judged_steps, on=of_step, how="left", nulls_equal=True)
    return joined.with_columns(is_judged=is_judged).sort(*_KEY, "arrival_ns", "rank")


def across_stages(run: Run) -> pl.DataFrame:
    """Collectives, and sends, between ranks of several pipeline stages: columns window, instance."""
    return run.table(rank_arrivals).filter("is_across_stages").select(_KEY).unique()


def lead_ns(arrivals: pl.DataFrame, group: list[int]) -> int:
    """Time, in ns, that the others wait for some ranks, over all collectives of `arrivals`."""
    return int(lead(arrivals, group)["lead_ns"].sum())


def leads_of_ranks(arrivals: pl.DataFrame) -> dict[int, int]:
    """Time that the others wait for each rank alone, as `lead_ns`, by rank in order."""
    latest_first = arrivals.sort("arrival_ns", descending=True, nulls_last=True, maintain_order=True)
    by_rank = latest_first.unique([*_KEY, "rank"], keep="first", maintain_order=True)
    arrival_ns = pl.col("arrival_ns")
    leads = by_rank.group_by(_KEY).agg(
        pl.col("rank").first(),
        (arrival_ns.first() - arrival_ns.slice(1, 1).first()).alias("lead_ns"),
        pl.col("residual_ns").max(),
    )
    late = leads.filter(pl.col("lead_ns") > pl.col("residual_ns")).group_by("rank").agg(pl.col("lead_ns").sum())
    of_rank: dict[int, int] = dict(late.iter_rows())
    return {rank: of_rank.get(rank, 0) for rank in arrivals["rank"].unique().sort().to_list()}


def lead(arrivals: pl.DataFrame, group: list[int]) -> pl.DataFrame:
    """Return by how much some ranks arrive after the last of the others.

    Columns window, instance, step, lead_ns, residual_ns (clock error); only leads above the clock error.
    """
    is_late, arrival_ns = pl.col("rank").is_in(group), pl.col("arrival_ns")
    both = arrivals.filter(is_late.any().over(_KEY) & (~is_late).any().over(_KEY))
    by_ns = (arrival_ns.max() - arrival_ns.filter(~is_late).max()).alias("lead_ns")
    leads = both.group_by(_KEY).agg(pl.col("step").first(), by_ns, pl.col("residual_ns").max())
    return leads.filter(pl.col("lead_ns") > pl.col("residual_ns"))


def _without_delayed_stages(run: Run, arrivals: pl.DataFrame, group: list[int]) -> list[int]:
    """Return a group without the ranks of pipeline stages that are late because they wait for others of it.

    Waits are those for sends and receives, compared with ranks of the same stage outside of the group. A stage that
    others wait for waits less itself: if one does, by at least as long as the ranks outside wait for it, the stages
    that do not are left out. Else those are, which wait longer by at least as long as the ranks outside wait for them.
    Stages whose own ranks compute longer stay.
    """
    stage_of = rank_places.stages(run)
    if len({stage_of.get(rank) for rank in group}) < 2:
        return group
    waits = run.table(collective_instances.waits).filter(pl.col("op") == collective_matching.PAIRED)
    waits_ns = dict(waits.group_by("rank").agg(pl.col("wait_ns").sum()).iter_rows())
    longer_ns: dict[int, float] = {}
    behind_ns: dict[int, int] = {}
    for stage in {stage_of[rank] for rank in group if rank in stage_of}:
        same = [rank for rank, rank_stage in stage_of.items() if rank_stage == stage and rank in waits_ns]
        inside, outside = [rank for rank in same if rank in group], [rank for rank in same if rank not in group]
        if inside and outside:
            late_ns, usual_ns = (statistics.median(waits_ns[rank] for rank in ranks) for ranks in (inside, outside))
            longer_ns[stage] = late_ns - usual_ns
            leads = lead(arrivals, inside).group_by("window", "step").agg(pl.col("lead_ns").max())
            behind_ns[stage] = int(leads["lead_ns"].sum())
    least_ns = min(longer_ns.values(), default=0.0)
    if any(longer_ns[stage] <= -behind_ns[stage] < 0 for stage in longer_ns):
        delayed = {stage for stage, ns in longer_ns.items() if ns > _WAITED_FOR * least_ns}
    else:
        delayed = {stage for stage, ns in longer_ns.items() if ns >= behind_ns[stage] > 0}
    delayed -= _computing_longer(run, group, behind_ns)
    return [rank for rank in group if stage_of.get(rank) not in delayed] or group


def _computing_longer(run: Run, group: list[int], behind_ns: dict[int, int]) -> set[int]:
    """Return the stages of which the ranks of a group compute longer than others: by half of what these wait for them.

    With experts, all replicas of a stage wait for the slowest in each layer, so that none waits longer for a stage.
    """
    steps = save_stages.steps(run).group_by("window", "step", "rank").agg(pl.col("compute_ns").max())
    compute_ns = dict(steps.group_by("rank").agg(pl.col("compute_ns").sum()).iter_rows())
    stage_of, longer = rank_places.stages(run), set()
    for stage, ns in behind_ns.items():
        same = [rank for rank in compute_ns if stage_of.get(rank) == stage]
        inside, outside = ([compute_ns[rank] for rank in same if (rank in group) == is_own] for is_own in (True, False))
        if inside and outside and 2 * (statistics.median(inside) - statistics.median(outside)) >= ns > 0:
            longer.add(stage)
    return longer


def _in_parallel_groups(waits: dict[int, int], places: Sequence[rank_places.Place]) -> list[list[int]]:
    """Return the sets of ranks that may each be late in process groups of their own, each once.

    Those that wait least, and those that share a place: no single collective shows them together.
    """
    of_places = (list(place.ranks) for place in places)
    # The ranks that wait least, each time before one of the largest differences between ranks.
    ranking = sorted(waits, key=lambda rank: (waits[rank], rank))
    pauses = {size: waits[ranking[size]] - waits[ranking[size - 1]] for size in range(2, len(ranking) // 2 + 1)}
    sizes = sorted(pauses, key=lambda size: -pauses[size])[:_CANDIDATES]
    present = set(waits)
    sets = (ranks for ranks in (*(sorted(ranking[:size]) for size in sizes), *of_places) if present >= set(ranks))
    return [list(ranks) for ranks in dict.fromkeys(map(tuple, sets)) if 1 < len(ranks) <= len(present) // 2]


def _waits(arrivals: pl.DataFrame) -> dict[int, int]:
    """Time that each rank waits for later ones in the collectives of `arrivals`, in ns."""
    wait_ns = pl.col("arrival_ns").max().over(_KEY) - pl.col("arrival_ns")
    significant_ns = pl.when(wait_ns > pl.col("residual_ns")).then(wait_ns).otherwise(0).alias("wait_ns")
    return dict(arrivals.select("rank", significant_ns).group_by("rank").agg(pl.col("wait_ns").sum()).iter_rows())


def _is_late_together(arrivals: pl.DataFrame, group: list[int]) -> bool:
    """Return whether the others wait for the group, and for every rank of it, in collectives that these join."""
    members = _late_members(arrivals, group)
    if not _is_every_rank_late(members, group):
        return False
    # Time that the others wait for the single rank that they wait for longest.
    ahead_ns = (pl.col("arrival_ns") - pl.col("arrival_ns").shift(1)).over(_KEY)
    is_last = pl.int_range(pl.len()).over(_KEY) == pl.len().over(_KEY) - 1
    leads = arrivals.select("rank", "residual_ns", is_last.alias("is_last"), ahead_ns.alias("ahead_ns"))
    sums = leads.filter("is_last", pl.col("ahead_ns") > pl.col("residual_ns")).group_by("rank").agg(pl.sum("ahead_ns"))
    most_ahead_ns = int(sums["ahead_ns"].max() or 0)  # type: ignore[arg-type]
    return _lead_sum_ns(members) > _TOGETHER * most_ahead_ns


def _is_late_in_parallel(arrivals: pl.DataFrame, waits: dict[int, int], group: list[int]) -> bool:
    """Return whether others wait for every rank of the group, most in collectives that no other rank of it joins."""
    members = _late_members(arrivals, group)
    if not (_is_every_rank_late(members, group) and _is_not_waiting(waits, group)):
        return False
    single = members.filter(pl.len().over(_KEY) == 1)
    return 2 * _lead_sum_ns(single) > _lead_sum_ns(members)


def _late_members(arrivals: pl.DataFrame, group: list[int]) -> pl.DataFrame:
    """Return the arrivals of a group at collectives in which the others wait for it, with lead_ns.

    No rows if these are too few calls or steps.
    """
    leads = lead(arrivals, group)
    members = arrivals.filter(pl.col("rank").is_in(group)).join(leads.select(*_KEY, "lead_ns"), on=_KEY)
    is_enough = leads.height >= _MIN_CALLS and leads["step"].n_unique() >= _MIN_STEPS
    return members if is_enough else members.clear()


def _lead_sum_ns(members: pl.DataFrame) -> int:
    return int(members.unique(_KEY)["lead_ns"].sum())


def _is_every_rank_late(members: pl.DataFrame, group: list[int]) -> bool:
    """Return whether the others wait for every rank: if all but this one came early, they would wait as long for it."""
    left_ns = pl.min_horizontal("lead_ns", pl.col("arrival_ns").max().over(_KEY) - pl.col("arrival_ns"))
    remaining = members.with_columns(pl.when(left_ns > pl.col("residual_ns")).then(left_ns).alias("remaining_ns"))
    sums = remaining.group_by("rank").agg(pl.col("lead_ns", "remaining_ns").sum())
    return sums.filter(pl.col("remaining_ns") < _NEEDED * pl.col("lead_ns")).height == len(group)


def _is_not_waiting(waits: dict[int, int], group: list[int]) -> bool:
    """Return whether no rank of the group waits itself, as one does that another rank delays."""
    others_ns = statistics.median(ns for rank, ns in waits.items() if rank not in group)
    return max(waits[rank] for rank in group) < _MAX_OWN_WAIT * others_ns
