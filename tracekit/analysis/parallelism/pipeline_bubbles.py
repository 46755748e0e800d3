"""Pipeline bubbles: the time in which a rank runs no action, that of the schedule itself, and its causes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from tracekit.analysis.parallelism import pipeline_stages
from tracekit.analysis.parallelism.pipeline_actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    POINT_TO_POINT,
    WEIGHT_GRADIENT,
)
from tracekit.analysis.parallelism.pipeline_stages import PIPELINE, Floats
from tracekit.model import intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.sync import alignment, collective_matching

_RANK = [*PIPELINE, "rank"]
WARMUP, STEADY, COOLDOWN = PHASES = ("warmup_ns", "steady_ns", "cooldown_ns")
SCHEDULE, IMBALANCE, UNEVEN, COMMUNICATION, HOST = CAUSES = (
    "schedule_ns", "imbalance_ns", "uneven_ns", "communication_ns", "host_ns",
)  # fmt: skip

_FLOAT = pl.Float64()
BUBBLES = schema.table(
    "pipeline_bubbles",
    "rank, stage and step of a pipeline; the bubble is the rank's, the same in the rows of all its stages",
    schema.column("window", "Profiled window of the run, from 0."),
    schema.column("rank", "Global rank of the process."),
    schema.column("stage", "Stage of the pipeline."),
    schema.column("step", "Training step; null where none are marked."),
    schema.column("iteration", "Repetition of the pipeline's actions where no steps are marked, from 0."),
    schema.column("pipeline", "Replica of the pipeline: its n-th ranks of each stage."),
    schema.column("start_ns", "Start of the first action of the pipeline in the step."),
    schema.column("duration_ns", "From the first to the last action of the pipeline, over its ranks."),
    schema.column("stages", "Stages of the pipeline."),
    schema.column("stages_per_rank", "Stages that the rank runs: virtual stages."),
    schema.column("pipeline_ranks", "Ranks of the pipeline."),
    schema.column("micro_batches", "Micro-batches in the step."),
    schema.column("bubble_ns", "Time of duration_ns in which the rank runs no action."),
    schema.column("bubble_ratio", "bubble_ns over duration_ns.", _FLOAT),
    schema.column("ideal_bubble_ns", "Bubble of the same actions, as long and in this order, on links without cost."),
    schema.column("ideal_duration_ns", "Duration of the pipeline in that case."),
    schema.column("ideal_bubble_ratio", "Their quotient: what the schedule allows with the run's stage times.", _FLOAT),
    schema.column(
        "formula_bubble_ratio",
        "(p - 1)/(v m + p - 1) with p ranks, v stages a rank, m micro-batches; null for zero-bubble with v > 1.",
        _FLOAT,
    ),
    schema.column("forward_ns", "Time of the stage's forwards."),
    schema.column("backward_ns", "Time of the stage's backwards, input and weight gradients included."),
    schema.column("warmup_ns", "Bubble before the rank's first backward."),
    schema.column("steady_ns", "Bubble between its first backward and its last forward."),
    schema.column("cooldown_ns", "Bubble after its last forward."),
    schema.column("schedule_ns", "Bubble with equal stages and micro-batches: the schedule's own."),
    schema.column("imbalance_ns", "Change of the bubble by unequal stages; below 0 on a rank with longer stages."),
    schema.column("uneven_ns", "Change by unequal micro-batches of a stage."),
    schema.column("communication_ns", "Change by sends and receives."),
    schema.column("host_ns", "The rest: actions that start late although their input has arrived."),
)  # fmt: skip
GAPS = schema.columns(
    "window step iteration pipeline rank start_ns end_ns stage micro_batch action ready_ns phase late_ns sent_ns",
    action=pl.String,
    stage=pl.Int64,
)


@trace_fact
def transfer_spans(trace: Trace) -> pl.DataFrame:
    """Return the sends and receives of a rank. Columns step, op, peer, bytes, start_ns, dur_ns; one row each."""
    calls = trace.collectives.filter(pl.col("op").is_in(POINT_TO_POINT))
    times = trace.activities.select("step", "start_ns", "dur_ns", activity_id="id")
    size = pl.max_horizontal("sent_bytes", "received_bytes").alias("bytes")
    joined = calls.join(times, on="activity_id", maintain_order="left")
    return joined.select("step", "op", "peer", size, "start_ns", "dur_ns")


FACTS: tuple[TraceFact, ...] = (*pipeline_stages.FACTS, transfer_spans, collective_matching.calls)
"""The facts that the run tables of this module read."""


@run_fact(table=BUBBLES)
def pipeline_bubbles(run: Run) -> pl.DataFrame:
    """Return the bubble of each rank of a pipeline in each step, with its parts and causes; use ``run.table``.

    Columns as BUBBLES; one row per rank, stage and step; empty without a pipeline. warmup_ns + steady_ns + cooldown_ns
    = bubble_ns, and so is the sum of the causes: each is what the bubble changes by when the recorded actions are run
    in their order with equal times, with each stage's mean, and with their own times, on links without cost; the rest
    is shared between communication and host as the delays after each input's arrival are.
    """
    if not pipeline_stages.is_pipelined(run):
        return BUBBLES.empty()
    actions = run.table(pipeline_stages.staged_actions)
    if actions.is_empty():
        return BUBBLES.empty()
    sizes = _pipeline_sizes(actions)
    gaps = run.table(idle_gaps)
    parts = gaps.group_by(_RANK).agg(
        (pl.col("end_ns") - pl.col("start_ns")).sum().alias("bubble_ns"),
        *(
            (pl.col("end_ns") - pl.col("start_ns")).filter(pl.col("phase") + "_ns" == name).sum().alias(name)
            for name in PHASES
        ),
    )
    # Waits travel from rank to rank, so the shares of communication and host are those of the whole pipeline.
    shares = gaps.group_by(PIPELINE).agg(pl.col("late_ns").sum(), pl.col("sent_ns").sum())
    ranks = (
        sizes.join(parts, on=_RANK, how="left", nulls_equal=True)
        .join(shares, on=PIPELINE, how="left", nulls_equal=True)
        .join(_ideal(run), on=_RANK, how="left", nulls_equal=True)
        .with_columns(pl.col("bubble_ns", *PHASES, "late_ns", "sent_ns").fill_null(0))
        .with_columns(_formula_ratio(), (pl.col("bubble_ns") / pl.col("duration_ns")).alias("bubble_ratio"))
        .with_columns(_rest_by_cause())
    )
    dur_ns, is_forward = pl.col("end_ns") - pl.col("start_ns"), pl.col("action") == FORWARD
    return BUBBLES.conform(
        (
            actions.group_by(*_RANK, "stage").agg(
                dur_ns.filter(is_forward).sum().alias("forward_ns"),
                dur_ns.filter(~is_forward).sum().alias("backward_ns"),
            )
        ).join(ranks, on=_RANK, nulls_equal=True)
    ).sort("window", "step", "iteration", "rank", "stage")


def by_stage(run: Run) -> pl.DataFrame:
    """Return the bubbles for display: columns rank, stage, step, … of BUBBLES, one row per rank, stage and step."""
    bubbles = run.table(pipeline_bubbles)
    some = [name for name in ("window", "iteration", "pipeline") if bubbles[name].n_unique() > 1]
    return bubbles.select(
        "rank", "stage", "step", *some, "duration_ns", "bubble_ns", "bubble_ratio", "ideal_bubble_ratio",
        "formula_bubble_ratio", "forward_ns", "backward_ns", *PHASES, *CAUSES,
    ).sort("rank", "stage", "step", *some)  # fmt: skip


@run_fact
def idle_gaps(run: Run) -> pl.DataFrame:
    """Return the gaps between the actions of each rank, from the pipeline's first action to its last.

    Columns GAPS; one row per gap: the action that ends it (null for the last gap), ready_ns (when its input was
    complete on the rank that makes it), phase (warmup, steady, cooldown), late_ns (from ready_ns to the
    action) and sent_ns (the part of late_ns in which the rank sends or receives).
    """
    actions = run.table(pipeline_stages.staged_actions)
    gaps = _gaps(actions)
    ready = (
        pipeline_stages.dependencies(actions)
        .group_by(*_RANK, "stage", "micro_batch", "action")
        .agg(pl.col("ready_ns").max())
    )
    key = [*_RANK, "stage", "micro_batch", "action"]
    joined = gaps.join(ready, on=key, how="left", nulls_equal=True, maintain_order="left")
    after_ns = pl.max_horizontal("start_ns", pl.min_horizontal("ready_ns", "end_ns"))
    late_ns = pl.when(pl.col("action").is_not_null()).then(pl.col("end_ns") - after_ns).otherwise(0)
    return _with_transfers(run, joined.with_columns(late_ns.alias("late_ns"))).pipe(schema.select, GAPS)


def _pipeline_sizes(actions: pl.DataFrame) -> pl.DataFrame:
    """Return each rank of each pipeline with the pipeline's time and size."""
    sizes = actions.group_by(PIPELINE).agg(
        pl.col("start_ns").min(),
        (pl.col("end_ns").max() - pl.col("start_ns").min()).alias("duration_ns"),
        pl.col("stage").n_unique().alias("stages"),
        pl.col("rank").n_unique().alias("pipeline_ranks"),
        pl.col("micro_batch").n_unique().alias("micro_batches"),
        (pl.col("action") == WEIGHT_GRADIENT).any().alias("is_zero_bubble"),
    )
    per_rank = actions.group_by(_RANK).agg(pl.col("stage").n_unique().alias("stages_per_rank"))
    return per_rank.join(sizes, on=PIPELINE, nulls_equal=True)


def _formula_ratio() -> pl.Expr:
    work = pl.col("stages_per_rank") * pl.col("micro_batches") * pl.when("is_zero_bubble").then(3).otherwise(1)
    idle = pl.col("pipeline_ranks") - 1
    is_known = ~pl.col("is_zero_bubble") | (pl.col("stages_per_rank") == 1)
    return pl.when(is_known).then(idle / (work + idle)).alias("formula_bubble_ratio")


def _rest_by_cause() -> list[pl.Expr]:
    rest_ns = pl.col("bubble_ns") - pl.col("ideal_bubble_ns")
    share = pl.when(pl.col("late_ns") > 0).then(pl.col("sent_ns") / pl.col("late_ns")).otherwise(0.0)
    communication_ns = (rest_ns * share).round().cast(pl.Int64)
    return [communication_ns.alias(COMMUNICATION), (rest_ns - communication_ns).alias(HOST)]


# Gaps ----------------------------------------------------------------------------------------------------------------


def _gaps(actions: pl.DataFrame) -> pl.DataFrame:
    """Return the gaps of each rank with the action that ends it, and the phase of each."""
    key = ["stage", "micro_batch", "action"]
    edges = actions.group_by(PIPELINE).agg(first_ns=pl.col("start_ns").min(), last_ns=pl.col("end_ns").max())
    ordered = actions.join(edges, on=PIPELINE, nulls_equal=True).sort(*_RANK, "start_ns", "end_ns")
    reached_ns = pl.col("end_ns").cum_max().shift(1).over(_RANK)
    is_backward = pl.col("action").is_in([BACKWARD, INPUT_GRADIENT])
    of_rank = ordered.with_columns(
        pl.coalesce(reached_ns, "first_ns").alias("free_ns"),
        pl.col("start_ns").filter(is_backward).min().over(_RANK).alias("first_backward_ns"),
        pl.col("end_ns").filter(pl.col("action") == FORWARD).max().over(_RANK).alias("last_forward_ns"),
    )
    marks = ["first_backward_ns", "last_forward_ns"]
    between = of_rank.select(*_RANK, *key, *marks, start_ns="free_ns", end_ns="start_ns")
    last = of_rank.group_by(_RANK).agg(
        pl.col("end_ns").max().alias("start_ns"), pl.col("last_ns").first(), pl.col(*marks).first()
    )
    trailing = last.rename({"last_ns": "end_ns"}).with_columns(
        pl.lit(None, actions.schema[name]).alias(name) for name in key
    )
    is_warmup = pl.col("end_ns") <= pl.coalesce("first_backward_ns", pl.lit(1 << 62))
    phase = (
        pl.when(is_warmup)
        .then(pl.lit("warmup"))
        .when(pl.col("start_ns") >= pl.col("last_forward_ns"))
        .then(pl.lit("cooldown"))
        .otherwise(pl.lit("steady"))
    )
    gaps = pl.concat([between, trailing.select(between.columns)]).filter(pl.col("end_ns") > pl.col("start_ns"))
    return gaps.with_columns(phase.alias("phase")).sort(*_RANK, "start_ns")


def _with_transfers(run: Run, gaps: pl.DataFrame) -> pl.DataFrame:
    """Return gaps with sent_ns: the part of late_ns in which the rank sends or receives."""
    spans = alignment.on_run_clock(run.table(transfer_spans), run.offsets, ("start_ns",))
    by_rank = spans.partition_by("window", "rank", as_dict=True)
    parts = [gaps.clear().with_columns(sent_ns=pl.lit(0, pl.Int64))]
    for place, rank_gaps in gaps.partition_by("window", "rank", as_dict=True, maintain_order=True).items():
        late = intervals.from_columns(rank_gaps["end_ns"] - rank_gaps["late_ns"], rank_gaps["late_ns"])
        sends = intervals.from_table(by_rank[place]) if place in by_rank else intervals.EMPTY
        sent_ns = intervals.coverage(late, sends)
        parts.append(rank_gaps.with_columns(pl.Series("sent_ns", sent_ns, pl.Int64)))
    return pl.concat(parts)


# The schedule without links ------------------------------------------------------------------------------------------


@run_fact
def schedule_cases(run: Run) -> pl.DataFrame:
    """Durations of the schedule without links, in three cases; use ``run.table``.

    Columns window, step, iteration, pipeline, rank, and bubbles (even_ns, stages_ns, ideal_bubble_ns) and durations
    (even_duration_ns, stages_duration_ns, ideal_duration_ns) with equal times, each stage's mean, and their own times.
    """
    actions = run.table(pipeline_stages.staged_actions)
    parts = [schema.empty(_CASES)]
    for places, ranks, bubbles, durations in _schedule_passes(actions):
        rows = [
            (*place, rank, *map(round, bubbles[index, case]), *map(round, durations[case]))
            for case, place in enumerate(places)
            for index, rank in enumerate(ranks[case])
        ]
        parts.append(pl.DataFrame(rows, schema=_CASES, orient="row"))
    return pl.concat(parts)


def _ideal(run: Run) -> pl.DataFrame:
    """Return the ideal bubble of each rank, and what the bubble changes by with each cause."""
    even, stages, ideal = "even_ns", "stages_ns", "ideal_bubble_ns"
    return run.table(schedule_cases).with_columns(
        pl.col(even).alias(SCHEDULE),
        (pl.col(stages) - pl.col(even)).alias(IMBALANCE),
        (pl.col(ideal) - pl.col(stages)).alias(UNEVEN),
        pl.when(pl.col("ideal_duration_ns") > 0)
        .then(pl.col(ideal) / pl.col("ideal_duration_ns"))
        .alias("ideal_bubble_ratio"),
    )


_CASES = schema.columns(
    "window step iteration pipeline rank even_ns stages_ns ideal_bubble_ns even_duration_ns stages_duration_ns "
    "ideal_duration_ns"
)


def _schedule_passes(actions: pl.DataFrame) -> Iterator[tuple[list[Any], list[list[int]], Floats, Floats]]:
    """Yield, for pipelines whose ranks run the same actions: places, ranks, bubbles (rank, place, case), durations.

    The cases are equal times of all actions of a kind, equal times in each stage, and the times as they were.
    """
    by_order: dict[tuple[Any, ...], list[tuple[Any, list[int], pl.DataFrame]]] = {}
    for place, pass_actions in (
        actions.sort(*_RANK, "start_ns").partition_by(PIPELINE, as_dict=True, maintain_order=True).items()
    ):
        rank_index = (pl.col("rank").rank("dense") - 1).cast(pl.Int64)
        order = tuple(pass_actions.select(rank_index, "stage", "micro_batch", "action").iter_rows())
        by_order.setdefault(order, []).append((place, pass_actions["rank"].unique().sort().to_list(), pass_actions))
    for order, cases in by_order.items():
        schedule = pipeline_stages.schedule_graph(order)
        if schedule is None:
            continue
        durations = np.stack([_durations(pass_actions) for _, _, pass_actions in cases], axis=1).astype(np.float64)
        ends = pipeline_stages.end_times(schedule, durations)
        rank_of = np.array([action[0] for action in order])
        total = ends.max(axis=0)
        busy = np.stack([durations[rank_of == rank].sum(axis=0) for rank in range(rank_of.max() + 1)])
        yield [place for place, _, _ in cases], [ranks for _, ranks, _ in cases], total[None] - busy, total


def _durations(actions: pl.DataFrame) -> Floats:
    """Return the durations of actions in the three cases, shape (actions, 3)."""
    dur_ns = pl.col("end_ns") - pl.col("start_ns")
    cases = actions.select(
        even=dur_ns.mean().over("action"), stages=dur_ns.mean().over("action", "stage"), own=dur_ns.cast(pl.Float64)
    )
    return cases.to_numpy()
