"""Ranks that arrive late, and what takes them longer than the other ranks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.communication import collective_instances, communication_gap_causes
from tracekit.analysis.compute import compute_gap_causes, step_charges
from tracekit.analysis.compute import excess_time as excess_times
from tracekit.analysis.compute.excess_time import ExcessTime
from tracekit.analysis.parallelism import late_groups, rank_places
from tracekit.analysis.time import breakdown, host_state, launched_work
from tracekit.model import schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.sync import collective_matching

COMPUTE, LAUNCH, SYNCHRONIZE, DATA, ALLOCATOR, STALL, COMPILE, GARBAGE_COLLECTION = PARTS = (
    "compute", "launch", "synchronize", "data", "allocator", "device_stall", "compile", "garbage_collection",
)  # fmt: skip
"""What a rank can take longer for: its kernels, late launches, waits for the device, data loading, the allocator, a
device that runs nothing although work is queued, compilation, garbage collection."""

_PART_OF_STATE = {
    **dict.fromkeys((host_state.PYTHON, host_state.OP, host_state.LAUNCH, host_state.LOCK), LAUNCH),
    host_state.SYNCHRONIZE: SYNCHRONIZE,
    host_state.DATA: DATA,
    host_state.ALLOCATOR: ALLOCATOR,
    host_state.COMPILE: COMPILE,
    host_state.GARBAGE_COLLECTION: GARBAGE_COLLECTION,
}
_KEY = ["window", "instance"]
_STEP = ["window", "step"]
_MIN_PASSED = 0.5
"""A rank passes its delay on if it waits itself, for a rank of another group, for this share of what others wait."""
_MAX_HOPS = 3
_MOST_COMPARED = 16
"""Ranks whose work is compared by operator: reading all traces of a larger run again takes as long as the check."""
_SEGMENT = " before collective "
"""Between an operator and the number of the collective before which it runs, where calls are compared by both."""
_MOST_OF_RANK = 0.6
"""Share of what a rank takes longer for that is of one kind, if that is to be another cause than its group has."""

_MOST_AWAITED = 0.5
"""Share of all waiting that ends without a rank, from which the waiting is for it. On 8 A100s of which two hosts are
late in turn, 39% and 31% of it end without either; 61% where one device is slow and one host begins late."""

_TIMES_THE_SECOND = 2
"""How many times as long as for any other rank the others wait for such a rank."""

_LATE_AND_OTHERS: tuple[Literal["semi"], Literal["anti"]] = ("semi", "anti")
QUEUE_COLUMNS = schema.columns("activity_id queued_ns")


@trace_fact
def queue_times(trace: Trace) -> pl.DataFrame:
    """Delay from the launch of each collective on a device to its start. Columns activity_id, queued_ns."""
    calls = [
        launched_work.collectives(trace, device).select("id", "start_ns", "launched_ns")
        for device in breakdown.devices(trace)
        if device is not None
    ]
    queued_ns = (pl.col("start_ns") - pl.col("launched_ns")).alias("queued_ns")
    parts = [part.drop_nulls("launched_ns").select(pl.col("id").alias("activity_id"), queued_ns) for part in calls]
    return schema.concat(parts, QUEUE_COLUMNS)


FACTS: tuple[TraceFact, ...] = (
    queue_times,
    collective_matching.calls,
    compute_gap_causes.compute_gap_causes,
    *rank_places.FACTS,
    *save_stages.FACTS,
)
"""The facts that the run tables of this module read."""
EXCESS_FACTS: tuple[TraceFact, ...] = (step_charges.step_charges,)
"""The facts that explain by how much a rank is late."""
TURN_FACTS: tuple[TraceFact, ...] = (*EXCESS_FACTS, step_charges.segment_charges)
"""The same where ranks take turns within a step."""


@run_fact
def last_arrivals(run: Run) -> pl.DataFrame:
    """Rank that arrived last at each collective; use ``run.table``.

    Columns window, instance, late_rank (among ranks with a trace; the leader of a group that arrived last; null within
    clock error). A rank that waited as long for a rank of another process group in the same step passes that on: then
    late_rank is that one. Collectives of several pipeline stages have no rows: there the stages' order decides.
    """
    members = run.table(late_groups.groups)
    instances = run.table(collective_instances.instances)
    last = instances.join(late_groups.across_stages(run), on=_KEY, how="anti")
    leaders = dict(members.select("rank", "leader").iter_rows())
    last = last.select(*_KEY, "step", "ranks", "max_wait_ns", late_rank=pl.col("last_known_rank").replace(leaders))
    of_group = _delayed_by_others(run, last, members).select(*_KEY, "late_rank")
    if members.is_empty():
        return of_group
    arrivals = run.table(late_groups.rank_arrivals).filter(~pl.col("is_across_stages"))
    leads = late_groups.lead(arrivals, members["rank"].to_list()).select(*_KEY, leader=pl.lit(members["leader"][0]))
    return of_group.join(leads, on=_KEY, how="left").select(
        *_KEY, pl.coalesce("leader", "late_rank").alias("late_rank")
    )


def latest(run: Run, *, left_out: pl.DataFrame | None = None) -> tuple[int, ...]:
    """Return the rank, or the group of ranks, without which the waiting of the others would be shortest; () if none.

    The steps that are `left_out` (window and step) do not count.
    """
    members = run.table(late_groups.groups)
    if not members.is_empty():
        return tuple(members["rank"].to_list())
    arrivals = run.table(late_groups.rank_arrivals).filter("is_judged")
    if left_out is not None:
        arrivals = arrivals.join(left_out, on=_STEP, how="anti", nulls_equal=True)
    leads = late_groups.leads_of_ranks(arrivals)
    best = max(leads, key=lambda rank: leads[rank], default=None)
    return (best,) if best is not None and leads[best] > 0 else ()


def mostly_awaited(run: Run) -> int | None:
    """Return the rank without which the others would wait half as long, or less; None where no single one is it.

    A rank that arrives last at most collectives is none if another one arrives as late.
    """
    arrivals = run.table(late_groups.rank_arrivals).filter("is_judged")
    leads = late_groups.leads_of_ranks(arrivals)
    most_awaited = sorted(leads, key=lambda rank: leads[rank], reverse=True)[:2]
    if len(most_awaited) < 2:
        return None
    waited = (pl.col("arrival_ns").max() - pl.col("arrival_ns").median()).cast(pl.Int64)
    waited_ns = int(arrivals.group_by(_KEY).agg(waited.alias("waited_ns"))["waited_ns"].sum())
    # Of two ranks that are late in turn, chance makes one of them the latest for more than half of the waiting.
    least_ns = max(_MOST_AWAITED * waited_ns, _TIMES_THE_SECOND * leads[most_awaited[1]], 1)
    return most_awaited[0] if leads[most_awaited[0]] >= least_ns else None


def launched_late_ratio(run: Run, members: tuple[int, ...]) -> float:
    """Return for which share of the waiting late ranks launched their collective late.

    A collective was launched late if it started sooner after its launch than half of the time for which the others
    waited: it was not queued behind other work. 0 where nobody waits.
    """
    arrivals = run.table(late_groups.rank_arrivals).filter("is_judged")
    late_calls = run.table(collective_instances.waits).filter(pl.col("rank").is_in(list(members)))
    queued = late_calls.select("window", "instance", "rank", "activity_id").join(
        run.table(queue_times), on=["window", "rank", "activity_id"], how="left"
    )
    longest = queued.group_by(_KEY).agg(pl.col("queued_ns").max())
    leads = late_groups.lead(arrivals, list(members)).join(longest, on=_KEY)
    late_ns = int(leads.filter(pl.col("queued_ns") < pl.col("lead_ns") / 2)["lead_ns"].sum())
    return late_ns / max(1, int(leads["lead_ns"].sum()))


def extra_time(run: Run, members: tuple[int, ...]) -> pl.DataFrame:
    """Extra time of late ranks by part: the median over steps of the mean over these ranks.

    Columns part (of PARTS), extra_ns (idle time of compute, or compute, beyond the median of the other ranks); one row
    per part that takes longer, the largest first.
    """
    times = run.table(_own_time)
    is_late = pl.col("rank").is_in(list(members))
    late, usual = pl.col("dur_ns").filter(is_late).mean(), pl.col("dur_ns").filter(~is_late).median()
    by_step = times.group_by(*_STEP, "part").agg((late - usual).alias("extra_ns"))
    medians = by_step.group_by("part").agg(pl.col("extra_ns").median().round().cast(pl.Int64))
    return medians.filter(pl.col("extra_ns") > 0).sort("extra_ns", "part", descending=[True, False])


def excess_time(run: Run, late: pl.DataFrame, *, left_out: tuple[int, ...] = ()) -> ExcessTime | None:
    """What late ranks take longer for than the other ranks of their pipeline stages in the same steps.

    `late` has the columns window, step and rank, one row per step in which a rank is late. Waits for others do not
    count. In a run of many ranks, some of them are compared. Ranks that are `left_out` are late too. None if there are
    no others.
    """
    stage_of = rank_places.stages(run)
    members = late["rank"].unique().sort().to_list()
    stages = {stage_of.get(rank) for rank in members}
    mates = [rank for rank in run.ranks if rank not in left_out and stage_of.get(rank) in stages]
    others = [rank for rank in mates if rank not in members]
    if len(mates) < 2:
        return None
    own = _own_charges(run, members, others)
    in_steps = own.join(late.select(_STEP).unique(), on=_STEP, how="semi", nulls_equal=True, maintain_order="left")
    keys = [*_STEP, "rank"]
    sides = [in_steps.join(late, on=keys, how=how, nulls_equal=True, maintain_order="left") for how in _LATE_AND_OTHERS]
    return None if sides[1].is_empty() else excess_times.split(*sides)


def excess_in_turn(run: Run, steps: pl.DataFrame, ranks: Sequence[int]) -> dict[int, ExcessTime]:
    """What each rank takes longer for than the others at some calls of the same steps, whatever it does faster.

    Ranks that are late at different collectives of a step take as long as the others in all: what one takes longer for
    at its turn, the others take longer for at theirs. Calls are compared between the same collectives. `steps` has the
    columns window and step. Empty for pipelines, whose stages have other calls, and runs of many ranks.
    """
    parts: dict[int, ExcessTime] = {}
    if len(run.ranks) > _MOST_COMPARED or rank_places.stages(run):
        return parts
    charges = excess_times.own_time(run.table(step_charges.segment_charges)).with_columns(
        operator=pl.concat_str(pl.coalesce("operator", pl.lit("")), pl.col("segment").fill_null(-1), separator=_SEGMENT)
    )
    in_steps = charges.join(steps, on=_STEP, how="semi", nulls_equal=True, maintain_order="left")
    for rank in ranks:
        excess = excess_times.split(in_steps.filter(rank=rank), in_steps.filter(pl.col("rank") != rank))
        operator = pl.col("operator").str.replace(rf"{_SEGMENT}-?\d+$", "")
        longer = excess.rows.filter(pl.col("excess_ns") > 0).with_columns(operator=operator)
        total_ns = int(longer["excess_ns"].sum())
        parts[rank] = replace(excess, rows=longer, total_ns=total_ns, slowdown=1.0, is_uniform=False)
    return parts


def excess_of_stages(run: Run, stages: Sequence[int]) -> ExcessTime | None:
    """What some pipeline stages take longer for than the others, per rank and step; None if there are no others.

    Layers count as the same module, whatever their number, since stages have different ones.
    """
    stage_of = rank_places.stages(run)
    late = [rank for rank in run.ranks if stage_of.get(rank) in stages]
    others = [rank for rank in run.ranks if rank in stage_of and rank not in late]
    if not late or not others:
        return None
    own = _own_charges(run, late, others).with_columns(pl.col("module").str.replace_all(r"\d+", "*"))
    is_late = pl.col("rank").is_in(late)
    return excess_times.split(own.filter(is_late), own.filter(~is_late))


def excess_of_steps(run: Run, ranks: Sequence[int], slow: pl.DataFrame, usual: pl.DataFrame) -> ExcessTime | None:
    """What some ranks take longer for in slow steps than in their usual ones, per rank and step.

    Both have the columns window and step. Waits for others do not count. None where one of them has no work.
    """
    own = _own_charges(run, ranks, [])
    sides = [own.join(steps.select(_STEP), on=_STEP, how="semi", maintain_order="left") for steps in (slow, usual)]
    return None if any(side.is_empty() for side in sides) else excess_times.split(*sides)


def of_steps(ranks: Sequence[int], steps: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of `excess_time`: each of these ranks in each of these steps (window, step)."""
    return steps.select(_STEP).unique(maintain_order=True).join(pl.DataFrame({"rank": list(ranks)}), how="cross")


def divide_late_group(run: Run, members: tuple[int, ...], steps: pl.DataFrame) -> list[tuple[int, ...]]:
    """Divide a late group by what its ranks take longer for, the largest excess first; one part where all do alike.

    Ranks that are late at the same collectives hide each other: a slow device, and a host that launches late, look like
    a group.
    """
    if len(members) * 2 > _MOST_COMPARED:
        return [members]
    longest_ns, ranks_by_kind = dict[str, int](), dict[str, list[int]]()
    for rank in members:
        excess = excess_time(run, of_steps([rank], steps), left_out=tuple(other for other in members if other != rank))
        if excess is None or excess.total_ns <= 0 or excess.kinds[excess.largest] < _MOST_OF_RANK * excess.total_ns:
            return [members]
        ranks_by_kind.setdefault(excess.largest, []).append(rank)
        longest_ns[excess.largest] = max(longest_ns.get(excess.largest, 0), excess.total_ns)
    return [tuple(ranks_by_kind[kind]) for kind in sorted(ranks_by_kind, key=lambda kind: -longest_ns[kind])]


def _own_charges(run: Run, late: Sequence[int], others: Sequence[int]) -> pl.DataFrame:
    """Return the charges of these ranks, without waits; of a run of many ranks, of some of either side."""
    is_small = len(run.ranks) <= _MOST_COMPARED
    ranks = [*late, *others] if is_small else [*_some(late), *_some(others)]
    compared = run if is_small else run.of_ranks(ranks)
    charges = compared.table(step_charges.step_charges).filter(pl.col("rank").is_in(ranks))
    return excess_times.own_time(charges)


def _some(ranks: Sequence[int]) -> list[int]:
    """Return at most half of the ranks that are compared, evenly spaced."""
    stride = math.ceil(2 * len(ranks) / _MOST_COMPARED)
    return list(ranks[:: max(1, stride)])


def pipeline_delays(run: Run, members: pl.DataFrame) -> pl.DataFrame:
    """Extra waits of ranks for sends and receives, beyond the other ranks of their stage, and for whom.

    `members` has columns rank and leader of a late group. Columns window, step, waiting, cause (the rank of the same
    pipeline that waits least compared with its own stage; the leader if the group has a rank in that pipeline),
    waited_ns; one row per step and rank that waits longer and belongs to no group. Empty without two pipelines.
    """
    stage_of = rank_places.stages(run)
    waits = run.table(collective_instances.waits).filter(pl.col("op") == collective_matching.PAIRED)
    if not stage_of or waits.is_empty():
        return _EMPTY
    stage = pl.col("rank").replace_strict(stage_of, default=None, return_dtype=pl.Int64).alias("stage")
    # Pipeline of each rank, by its lowest rank: ranks that send to each other, directly or not.
    pairs = waits.group_by("window", "instance").agg(first=pl.col("rank").min(), last=pl.col("rank").max())
    pipeline_of = {rank: rank for rank in waits["rank"].unique().sort()}
    for first, last in pairs.select("first", "last").unique().sort("first", "last").iter_rows():
        merged, into = sorted((pipeline_of[first], pipeline_of[last]), reverse=True)
        pipeline_of = {rank: into if lowest == merged else lowest for rank, lowest in pipeline_of.items()}
    pipeline = pl.col("rank").replace_strict(pipeline_of, return_dtype=pl.Int64).alias("pipeline")
    rank_waits = waits.group_by(*_STEP, "rank").agg(pl.col("wait_ns").sum()).with_columns(stage, pipeline)
    # Ranks of stages with several, with longer_ns: their wait less the median of the stage's others.
    key = [*_STEP, "stage"]
    ordered = (
        rank_waits.drop_nulls("stage")
        .sort(*key, "wait_ns", "rank")
        .with_columns(
            at=pl.int_range(pl.len()).over(key),
            others=pl.len().over(key) - 1,
            all_ns=pl.col("wait_ns").implode().over(key),
        )
    )
    middle = ((pl.col("others") - 1) // 2, pl.col("others") // 2)
    rows = (pl.when(index >= pl.col("at")).then(index + 1).otherwise(index) for index in middle)
    low, high = (pl.col("all_ns").list.get(row, null_on_oob=True) for row in rows)
    longer_ns = pl.col("wait_ns") - (low + high) // 2
    compared = (
        ordered.filter(pl.col("others") > 0)
        .with_columns(longer_ns.alias("longer_ns"))
        .drop("all_ns")
        .join(members.select("rank", "leader"), "rank", how="left")
    )
    # Ranks that wait longer, with the rank or group of their pipeline that the others wait for.
    shortest = pl.col("rank").sort_by("longer_ns", "rank").first()
    cause = pl.coalesce(pl.col("leader").drop_nulls().first(), pl.when(pl.col("longer_ns").min() < 0).then(shortest))
    table = compared.with_columns(cause.over(*_STEP, "pipeline").alias("cause"), waiting="rank", waited_ns="longer_ns")
    delayed = table.filter(pl.col("leader").is_null(), pl.col("waited_ns") > 0, pl.col("cause") != pl.col("rank"))
    return _EMPTY.vstack(delayed.select(_EMPTY.columns).cast(pl.Int64))


def _delayed_by_others(run: Run, last: pl.DataFrame, members: pl.DataFrame) -> pl.DataFrame:
    """Return collectives with the late_rank that delayed the one that arrived last.

    A rank that waits for one of another process group arrives late at the collectives of its own groups.
    """
    leaders = dict(members.select("rank", "leader").iter_rows())
    waits = run.table(collective_instances.waits).select(
        *_KEY, "step", waited_ns="wait_ns", waiting=pl.col("rank").replace(leaders)
    )
    caused = waits.join(last.select(*_KEY, cause="late_rank"), on=_KEY).filter(pl.col("waiting") != pl.col("cause"))
    within = caused.group_by(*_STEP, "waiting", "cause").agg(pl.col("waited_ns").sum())
    delays = pl.concat([within, pipeline_delays(run, members).select(within.columns)])
    for _ in range(_MAX_HOPS):
        others_ns = pl.col("max_wait_ns").sum().over(*_STEP, "late_rank", "ranks")
        candidates = last.with_columns(others_ns.alias("others_ns")).join(
            delays, left_on=[*_STEP, "late_rank"], right_on=[*_STEP, "waiting"], nulls_equal=True
        )
        is_cause = ~pl.col("ranks").list.contains(pl.col("cause")) & (
            pl.col("waited_ns") >= _MIN_PASSED * pl.col("others_ns")
        )
        causes = candidates.filter(is_cause).sort("waited_ns", "cause", descending=[True, False])
        if causes.is_empty():
            break
        first = causes.unique(_KEY, keep="first", maintain_order=True).select(*_KEY, "cause")
        last = last.join(first, on=_KEY, how="left").with_columns(late_rank=pl.coalesce("cause", "late_rank"))
        last = last.drop("cause")
    return last


@run_fact
def _own_time(run: Run) -> pl.DataFrame:
    """Return the own time of each rank and step by part: window, step, rank, part, dur_ns; 0 where there is none."""
    steps = save_stages.steps(run)
    ranks = steps.group_by(*_STEP, "rank").agg(pl.col("compute_ns").max().alias("dur_ns"))
    is_stall = pl.col("cause") == communication_gap_causes.DEVICE_STALL
    by_host = (pl.col("cause") == communication_gap_causes.HOST) & pl.col("detail").is_in(list(_PART_OF_STATE))
    of_host = pl.col("detail").replace_strict(_PART_OF_STATE, default=None, return_dtype=pl.String)
    part = pl.when(is_stall).then(pl.lit(STALL)).otherwise(of_host).alias("part")
    idle = (
        run.scan(compute_gap_causes.compute_gap_causes)  # of a thousand ranks, these rows would take 200 MiB
        .filter(is_stall | by_host)
        .group_by(*_STEP, "rank", "device", part)
        .agg(pl.col("dur_ns").sum())
        .group_by(*_STEP, "rank", "part")
        .agg(pl.col("dur_ns").max())
        .collect(engine="streaming")
    )
    all_parts = ranks.select(*_STEP, "rank").join(pl.DataFrame({"part": PARTS[1:]}), how="cross")
    filled = all_parts.join(idle, on=[*_STEP, "rank", "part"], how="left", nulls_equal=True).with_columns(
        pl.col("dur_ns").fill_null(0)
    )
    compute = ranks.with_columns(part=pl.lit(COMPUTE))
    return pl.concat([compute.select(filled.columns), filled])


_EMPTY = pl.DataFrame(schema=dict.fromkeys((*_STEP, "waiting", "cause", "waited_ns"), pl.Int64))
