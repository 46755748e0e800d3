"""The actions of all ranks of a pipeline on one clock: with the stage of each, and the pipeline that it belongs to."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.parallelism import rank_places
from tracekit.analysis.parallelism.pipeline_actions import (
    BACKWARD,
    COMPUTE_ACTIONS,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    pipeline_actions,
    with_launches,
)
from tracekit.model import schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.sync import alignment

_ACTIONS_OF = ["window", "rank", "step"]

_STEP = ["window", "step", "iteration"]
PIPELINE = [*_STEP, "pipeline"]
"""One pass of one pipeline: a replica's ranks (one of each tensor-parallel group) in a step."""
COLUMNS = schema.columns(
    "window rank step iteration pipeline stage micro_batch action start_ns end_ns trace_start_ns",
    action=pl.String,
    stage=pl.Int64,
)

PEER_COLUMNS = schema.columns("peer is_sender")

Floats: TypeAlias = npt.NDArray[np.float64]
Action: TypeAlias = tuple[int, int, int, str]
"""Place of the rank in the pipeline, stage, micro-batch, action (of pipeline_actions.COMPUTE_ACTIONS)."""
_GRADIENTS = (BACKWARD, INPUT_GRADIENT)


@dataclass(frozen=True)
class ScheduleGraph:
    """Actions in an order in which each follows what it waits for: `order`, and `waits_for` of each action."""

    order: tuple[int, ...]
    waits_for: tuple[tuple[int, ...], ...]
    sender: tuple[int | None, ...]
    """The action of another rank that each action gets its input from; None for those without."""


@trace_fact
def peers(trace: Trace) -> pl.DataFrame:
    """Return the ranks that this rank sends to and receives from. Columns peer, sends (whether its first is a send)."""
    if trace.collectives["peer"].null_count() == trace.collectives.height:
        return schema.empty(PEER_COLUMNS)
    calls = trace.collectives.filter(pl.col("op").is_in(["send", "recv"])).drop_nulls("peer")
    starts = trace.activities.select("launch_id", "start_ns", activity_id="id")
    # By launch: on a device a receive that was posted early starts before the send that the host issued first.
    launched = with_launches(trace, calls.select("activity_id", "op", "peer").join(starts, on="activity_id"))
    ordered = launched.sort("launched_ns")
    first_sends = bool(ordered["op"].head(1).eq("send").any())
    return ordered.select("peer").unique(maintain_order=True).with_columns(is_sender=pl.lit(first_sends))


FACTS: tuple[TraceFact, ...] = (pipeline_actions, peers)


def is_pipelined(run: Run) -> bool:
    """Return whether any rank of a run has actions of a pipeline schedule."""
    return not run.table(pipeline_actions).is_empty()


@run_fact
def staged_actions(run: Run) -> pl.DataFrame:
    """Return the forwards and backwards of all ranks with their stage, on one clock; use ``run.table``.

    Columns COLUMNS; one row per action. trace_start_ns is the start on the clock of the rank's trace. iteration
    counts repetitions of the same action where no steps are marked; pipeline numbers the replicas: the n-th rank of
    each stage belongs to pipeline n. Where a span does not name its stage, the manifest does, else the process
    groups, else who sends to whom. Where clocks contradict the order of a micro-batch through the stages, they are
    corrected by the least shift that agrees. Ranks without a known stage are left out. Where neither spans nor manifest
    name stages, and a rank that sends or receives has no actions, the table is empty. Pipelines are left out of which
    a stage between two others has no trace: neither their schedule nor their clocks are known.
    """
    actions = run.table(pipeline_actions).filter(pl.col("action").is_in(COMPUTE_ACTIONS)).drop_nulls("start_ns")
    if actions.is_empty():
        return schema.empty(COLUMNS)
    staged = actions.with_columns(pl.coalesce("stage", _stage_of(run, actions)).alias("stage")).drop_nulls("stage")
    if staged.is_empty():
        return schema.empty(COLUMNS)
    if actions["stage"].is_null().all():
        if not set(run.table(peers)["rank"]) <= set(staged["rank"]):
            return schema.empty(COLUMNS)  # ranks without actions: neither their stages nor the others' are known
        staged = with_virtual_stages(staged)
    repeated = pl.int_range(pl.len()).over(
        "window", "rank", "step", "stage", "micro_batch", "action", order_by="start_ns"
    )
    counted = staged.with_columns(repeated.cast(pl.Int64).alias("iteration"))
    on_own_clock = pl.col("start_ns").alias("trace_start_ns")
    # Pipeline of each rank: its place among the ranks of its first stage.
    firsts = counted.group_by("window", "rank").agg(pl.col("stage").min())
    place = (pl.col("rank").rank("ordinal").over("window", "stage") - 1).cast(pl.Int64)
    in_pipelines = (
        counted.join(firsts.select("window", "rank", place.alias("pipeline")), on=["window", "rank"])
        .with_columns(on_own_clock)
        .select(*COLUMNS)
    )
    stages = pl.col("stage").max() - pl.col("stage").min() + 1
    in_pipelines = in_pipelines.filter((stages == pl.col("stage").n_unique()).over("window", "pipeline"))
    return _on_one_clock(run, in_pipelines).sort("window", "step", "iteration", "pipeline", "rank", "start_ns")


def representative_passes(run: Run) -> dict[tuple[int, int], pl.DataFrame]:
    """Return the actions of the pass of median duration of each pipeline, by window and pipeline."""
    actions = run.table(staged_actions)
    passes = actions.group_by(PIPELINE).agg((pl.col("end_ns").max() - pl.col("start_ns").min()).alias("duration_ns"))
    ordered = passes.sort("duration_ns", *PIPELINE).group_by("window", "pipeline", maintain_order=True)
    medians = ordered.agg(pl.all().get((pl.len() - 1) // 2))
    table = actions.join(medians.select(PIPELINE), on=PIPELINE, how="semi", nulls_equal=True).sort("rank", "start_ns")
    by_pipeline = table.partition_by("window", "pipeline", as_dict=True)
    return {(window, pipeline): rows for (window, pipeline), rows in by_pipeline.items()}


def _stage_of(run: Run, actions: pl.DataFrame) -> pl.Expr:
    stages = rank_places.stages_by_rank(run.manifest)
    if actions["stage"].null_count() and not stages:
        stages = _by_groups(run, actions) or _by_peers(run)
    return pl.col("rank").replace_strict(stages, default=None, return_dtype=pl.Int64)


def _by_groups(run: Run, actions: pl.DataFrame) -> dict[int, int]:
    """Return stages by the places of ranks in the groups of axis pp, if these contain all ranks of the actions.

    A rank that has another place in another group, as where each pair of neighbors has a group, has no known stage.
    """
    from tracekit.analysis.parallelism import group_axes

    groups = group_axes.described_groups(run).filter(pl.col("axis") == "pp")["ranks"].to_list()
    places = {(rank, stage) for ranks in groups for stage, rank in enumerate(ranks)}
    stages = dict(places)
    return stages if len(stages) == len(places) and set(actions["rank"].unique()) <= set(stages) else {}


def _by_peers(run: Run) -> dict[int, int]:
    """Return stages where the ranks that send to each other form chains: from the end that sends first."""
    table = run.table(peers)
    neighbors: dict[int, set[int]] = {}
    for rank, peer in table.select("rank", "peer").unique().iter_rows():
        neighbors.setdefault(rank, set()).add(peer)
    mutual = all(rank in neighbors.get(peer, ()) for rank, linked in neighbors.items() for peer in linked)
    senders = set(table.filter(pl.col("is_sender"))["rank"])
    firsts = sorted(rank for rank, linked in neighbors.items() if len(linked) == 1 and rank in senders)
    if not mutual or not firsts:
        return {}
    stages: dict[int, int] = {}
    for first in firsts:
        chain = _chain(neighbors, first)
        stages |= {rank: stage for stage, rank in enumerate(chain)}
    return stages if set(stages) == set(neighbors) else {}


def _chain(neighbors: dict[int, set[int]], first: int) -> list[int]:
    chain = [first]
    while following := neighbors[chain[-1]] - set(chain):
        chain.append(min(following))
    return chain


# One clock -----------------------------------------------------------------------------------------------------------


def _on_one_clock(run: Run, actions: pl.DataFrame) -> pl.DataFrame:
    aligned = alignment.on_run_clock(actions, run.offsets, ("start_ns", "end_ns"))
    limits = _limits(aligned)
    if limits.filter((pl.col("least_ns") > 0) | (pl.col("most_ns") < 0)).is_empty():
        return aligned
    trace_limits = _limits(actions)
    if trace_limits.filter((pl.col("least_ns") > 0) | (pl.col("most_ns") < 0)).is_empty():
        return actions  # the files' own clocks agree: collectives without a known group were matched wrongly
    shifts = _shifts(limits)
    shift_ns = pl.col("shift_ns").fill_null(0)
    moved = aligned.join(shifts, on=["window", "pipeline", "rank"], how="left", maintain_order="left")
    return moved.with_columns(pl.col("start_ns", "end_ns") + shift_ns).drop("shift_ns")


def dependencies(actions: pl.DataFrame) -> pl.DataFrame:
    """Return the actions that need the result of another rank: columns of `actions`, producer_rank, ready_ns.

    ready_ns is the end of the producer: the forward of the stage before, or the backward of the next stage.
    """
    key = [*PIPELINE, "stage", "micro_batch"]
    ends = actions.select(*key, "action", producer_rank="rank", ready_ns="end_ns")
    forwards = ends.filter(pl.col("action") == FORWARD).with_columns(pl.col("stage") + 1)
    gradients = ends.filter(pl.col("action").is_in([BACKWARD, INPUT_GRADIENT])).with_columns(pl.col("stage") - 1)
    needs_forward = pl.col("action") == FORWARD
    needs_gradient = pl.col("action").is_in([BACKWARD, INPUT_GRADIENT])
    parts = [
        actions.filter(needs).join(produced.drop("action"), on=key, nulls_equal=True)
        for needs, produced in ((needs_forward, forwards), (needs_gradient, gradients))
    ]
    return pl.concat(parts).filter(pl.col("producer_rank") != pl.col("rank"))


def with_virtual_stages(actions: pl.DataFrame) -> pl.DataFrame:
    """Return actions with the stage and micro-batch of their chunk, where each rank has several; else as they are.

    `actions` has columns window, rank, step, action, host_start_ns, stage (the place of the rank in the pipeline) and
    micro_batch (which counts the forwards, and the backwards, of a step in their order).
    """
    ranks = int(actions["stage"].max() or 0) + 1  # type: ignore[arg-type]
    # Forwards of each rank in a step, and those before its first backward: stage, forwards, first.
    is_forward = pl.col("action") == FORWARD
    begun_ns = pl.col("host_start_ns").filter(~is_forward).min()
    chunks = _chunks(
        actions.group_by(_ACTIONS_OF).agg(
            pl.col("stage").first(),
            is_forward.sum().cast(pl.Int64).alias("forwards"),
            (is_forward & (pl.col("host_start_ns") < begun_ns)).sum().cast(pl.Int64).alias("first"),
        ),
        ranks,
    )
    if chunks == 1:
        return actions
    turn = pl.col("micro_batch") // ranks
    in_forward = turn % chunks
    chunk = pl.when(pl.col("action") == FORWARD).then(in_forward).otherwise(chunks - 1 - in_forward)
    return actions.with_columns(
        stage=chunk * ranks + pl.col("stage"),
        micro_batch=turn // chunks * ranks + pl.col("micro_batch") % ranks,
    )


@lru_cache(maxsize=64)
def schedule_graph(actions: tuple[Action, ...]) -> ScheduleGraph | None:
    """Return the graph of actions, given in the order in which each rank runs its own.

    An action follows the one before it on its rank. A forward needs that of the stage before, a backward (or input
    gradient) that of the next stage and its own forward, a weight gradient its input gradient. None where actions wait
    for each other in a circle: the order is none of a schedule.
    """
    index_of = {action[1:]: index for index, action in enumerate(actions)}
    last_of: dict[int, int] = {}
    waits_for, sender = [], []
    for index, action in enumerate(actions):
        needed = [index_of[key] for key in producers(*action[1:]) if key in index_of]
        sender.append(next((other for other in needed if actions[other][0] != action[0]), None))
        waits_for.append(tuple({*needed, *([last_of[action[0]]] if action[0] in last_of else [])}))
        last_of[action[0]] = index
    order = _topological(waits_for)
    return None if order is None else ScheduleGraph(order, tuple(waits_for), tuple(sender))


def producers(stage: int, micro_batch: int, action: str) -> list[tuple[int, int, str]]:
    """Return the actions (stage, micro-batch, action) whose result an action may need.

    >>> producers(1, 0, "forward")
    [(0, 0, 'forward')]
    """
    if action == FORWARD:
        return [(stage - 1, micro_batch, FORWARD)]
    if action == WEIGHT_GRADIENT:
        return [(stage, micro_batch, INPUT_GRADIENT)]
    return [(stage, micro_batch, FORWARD), *((stage + 1, micro_batch, gradient) for gradient in _GRADIENTS)]


def end_times(schedule: ScheduleGraph, durations: Floats, delays: Floats | None = None) -> Floats:
    """End of each action if it starts as soon as it can, from 0; shape (actions, cases) like `durations`.

    `delays` has the same shape: how long after the end of its sender the input of an action arrives; by default 0.
    """
    ends = np.zeros_like(durations)
    for action in schedule.order:
        needed, sender = schedule.waits_for[action], schedule.sender[action]
        start = ends[list(needed)].max(axis=0) if needed else np.zeros(durations.shape[1:])
        if delays is not None and sender is not None:
            start = np.maximum(start, ends[sender] + delays[action])
        ends[action] = start + durations[action]
    return ends


def _limits(actions: pl.DataFrame) -> pl.DataFrame:
    """Return for neighboring ranks how much may be added to the clock of the later: window, pipeline, rank, other, ….

    least_ns and most_ns are the limits, null where no action limits it; `rank` is the lower of the two.
    """
    needed = dependencies(actions).with_columns(
        pl.min_horizontal("rank", "producer_rank").alias("one"),
        pl.max_horizontal("rank", "producer_rank").alias("other"),
    )
    slack_ns = pl.col("start_ns") - pl.col("ready_ns")
    is_consumer = pl.col("rank") == pl.col("other")
    return (
        needed.group_by("window", "pipeline", rank="one", other="other")
        .agg(
            (-slack_ns.filter(is_consumer)).max().alias("least_ns"),
            slack_ns.filter(~is_consumer).min().alias("most_ns"),
        )
        .sort("window", "pipeline", "rank", "other")
    )


def _shifts(limits: pl.DataFrame) -> pl.DataFrame:
    """Return the shift of each rank's clock: from rank to rank along the pipeline, the least within the limits."""
    shifts: dict[tuple[int, int, int], int] = {}
    for window, pipeline, rank, other, least_ns, most_ns in limits.iter_rows():
        base = shifts.setdefault((window, pipeline, rank), 0)
        if (window, pipeline, other) in shifts or (least_ns or 0) > (most_ns if most_ns is not None else 1 << 62):
            continue
        low = base + least_ns if least_ns is not None else -(1 << 62)
        high = base + most_ns if most_ns is not None else 1 << 62
        shifts[window, pipeline, other] = min(max(base, low), high)
    rows = [(*place, shift_ns) for place, shift_ns in shifts.items()]
    return pl.DataFrame(rows, schema=schema.columns("window pipeline rank shift_ns"), orient="row")


def _chunks(warm_ups: pl.DataFrame, ranks: int) -> int:
    """Number of chunks of each rank: 1 unless all ranks and steps agree with an interleaved schedule."""
    ends = warm_ups.filter(pl.col("stage") == ranks - 1)["first"].unique()
    chunks = (int(ends[0]) - 1) // ranks + 1 if len(ends) == 1 else 1
    usual = 2 * (ranks - 1 - pl.col("stage")) + (chunks - 1) * ranks + 1
    agrees = pl.col("first") == pl.min_horizontal(usual, "forwards")
    is_whole = (pl.col("forwards") % (ranks * chunks) == 0) & (pl.col("first") < pl.col("forwards"))
    is_last = pl.col("stage") == ranks - 1
    fits = warm_ups.select((agrees & (is_whole | ~is_last)).all()).item()
    return chunks if chunks > 1 and fits else 1


def _topological(waits_for: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    remaining = [len(needed) for needed in waits_for]
    followers: list[list[int]] = [[] for _ in waits_for]
    for index, needed in enumerate(waits_for):
        for other in needed:
            followers[other].append(index)
    ready = [index for index, count in enumerate(remaining) if not count]
    order = []
    while ready:
        index = ready.pop()
        order.append(index)
        for follower in followers[index]:
            remaining[follower] -= 1
            if not remaining[follower]:
                ready.append(follower)
    return tuple(order) if len(order) == len(waits_for) else None
