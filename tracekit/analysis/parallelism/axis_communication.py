"""Communication of each mesh axis: how long, how long without compute; overlap of a ring of context parallelism."""

import polars as pl

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.parallelism import group_axes, rank_places
from tracekit.analysis.parallelism.group_axes import ACTIVATIONS, PARAMETERS
from tracekit.analysis.time import breakdown
from tracekit.conventions.strategies import CP, DP, DP_REPLICATE, DP_SHARD, EP, JOINT, PP
from tracekit.model import intervals, schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.sync.collective_matching import EXPERT, PAIRED

AXIS_COMMUNICATION = schema.table(
    "axis_communication",
    "rank, step, mesh axis and op",
    schema.column("window", "Profiled window of the run, from 0."),
    schema.column("rank", "Global rank of the process."),
    schema.column("step", "Training step; null where none are marked."),
    schema.column("axis", "Mesh axis of the process group, as group_axes.axis; null: unknown.", pl.String()),
    schema.column("op", "all_reduce, all_gather, send_recv or another.", pl.String()),
    schema.column("calls", "Collectives."),
    schema.column("communication_ns", "Time in which at least one of them runs."),
    schema.column("exposed_communication_ns", "The part of it in which the rank computes nothing."),
    schema.column("bytes", "Sum of their sizes; null where none is known."),
)
FACTS: tuple[TraceFact, ...] = (*group_axes.FACTS, breakdown.spans, breakdown.by_step)
"""The facts that the run tables of this module read."""
_BY_CALL = 0.8
"""Confidence of an axis that a collective has by its op or purpose, out of those that the run is known to have."""

RINGS = schema.table(
    "ring_overlap",
    "rank and step of a ring of context parallelism",
    schema.column("window", "Profiled window of the run, from 0."),
    schema.column("rank", "Global rank of the process."),
    schema.column("step", "Training step; null where none are marked."),
    schema.column("calls", "Sends and receives along axis cp."),
    schema.column("bytes", "Sum of their sizes; null where none is known."),
    schema.column("communication_ns", "Time in which at least one of them is under way."),
    schema.column("hidden_ns", "The part of it in which the rank computes: attention to the block at hand."),
    schema.column("exposed_communication_ns", "The rest."),
    schema.column("waited_ns", "The part of the rest before the peer has begun; null where no peer is known."),
    schema.Column("hidden_ratio", pl.Float64(), "ratio", "hidden_ns over communication_ns."),
)
_RING_STEP = ["window", "rank", "step"]


@run_fact(table=AXIS_COMMUNICATION)
def axis_communication(run: Run) -> pl.DataFrame:
    """Return the communication of each rank, step, axis and op; use ``run.table``. Columns as AXIS_COMMUNICATION.

    Where steps are marked, collectives outside them are left out. Concurrent collectives of one axis and op count once.
    """
    return AXIS_COMMUNICATION.conform(_sums(run, ["window", "rank", "step", "axis", "op"]))


@run_fact
def by_axis(run: Run) -> pl.DataFrame:
    """Return the communication of each rank and axis over all steps, for display.

    Columns rank, axis, steps, calls, communication_ns, exposed_communication_ns, bytes, source, confidence.
    """
    sums = _sums(run, ["window", "rank", "axis"])
    of_rank = sums.group_by("rank", "axis").agg(
        pl.col("steps", "calls", "communication_ns", "exposed_communication_ns", "bytes").sum()
    )
    return of_rank.join(sources(run), on="axis", how="left").sort("rank", "axis", nulls_last=True)


def sources(run: Run) -> pl.DataFrame:
    """Source of each axis of the run's collectives. Columns axis, source, confidence; one row per axis.

    Of several groups of an axis the surest counts. Where no group is of an axis, it is inferred from each collective.
    """
    surest = run.table(group_axes.group_axes).drop_nulls("axis").sort("confidence", descending=True)
    by_group = surest.unique("axis", keep="first", maintain_order=True).select("axis", "source", "confidence")
    by_call = run.table(calls).select("axis").drop_nulls().unique(maintain_order=True)
    return (
        by_call.join(by_group, on="axis", how="left", maintain_order="left")
        .with_columns(pl.col("source").fill_null(group_axes.INFERRED), pl.col("confidence").fill_null(_BY_CALL))
        .select("axis", "source", "confidence")
    )


def has_calls(run: Run, axis: str) -> bool:
    """Return whether a run has collectives of an axis, in a group of this axis or by what each transfers."""
    return bool((run.table(calls)["axis"] == axis).any())


@run_fact
def calls(run: Run) -> pl.DataFrame:
    """Return the collectives in steps with their axis; where no steps are marked, all. Columns as `axis_of_calls`.

    Where the trace does not name the group of a collective (gloo) but the run's axes are known, its op decides: sends
    and receives are pp, or cp without pp, all-to-all is ep, others are of the one other axis. If there are several, the
    purpose of the collective decides: parameters and gradients are of the data-parallel axis (under HSDP all-reduces of
    dp_replicate, others of dp_shard), activations of the one axis that is left; otherwise the axis is null.
    """
    all_calls = run.table(group_axes.axis_of_calls)
    marked = run.table(breakdown.by_step)["step"].is_not_null().any()
    inside = all_calls.drop_nulls("step") if marked else all_calls
    described = group_axes.described_groups(run).filter(pl.col("ranks").list.len() > 1)
    axes = (set(rank_places.groups_of(run.manifest)) | set(described["axis"])) - JOINT
    by_op = (
        pl.when(pl.col("op").is_in([PAIRED, "send", "recv"]) & bool(axes & {PP, CP}))
        .then(pl.lit(PP if PP in axes else CP))
        .when(pl.col("op").is_in(["all_to_all", *EXPERT]) & (EP in axes))
        .then(pl.lit(EP))
        .otherwise(_by_purpose(axes - {PP, EP}))
    )
    is_unnamed = pl.col("group").is_null() if axes else pl.lit(value=False)
    return inside.with_columns(pl.when(is_unnamed).then(by_op).otherwise("axis").alias("axis"))


def _by_purpose(axes: set[str]) -> pl.Expr:
    """Return the axis of a collective that could be of any of these."""
    if len(axes) == 1:
        return pl.lit(next(iter(axes)))
    of_data = {axis for axis in axes if axis == DP or axis.startswith("dp_")}
    of_parameters = pl.lit(_only(of_data), pl.String)
    if of_data == {DP_REPLICATE, DP_SHARD}:
        is_replicated = pl.col("op") == "all_reduce"
        of_parameters = pl.when(is_replicated).then(pl.lit(DP_REPLICATE)).otherwise(pl.lit(DP_SHARD))
    return (
        pl.when(pl.col("purpose") == PARAMETERS)
        .then(of_parameters)
        .when(pl.col("purpose") == ACTIVATIONS)
        .then(pl.lit(_only(axes - of_data), pl.String))
    )


def _only(axes: set[str]) -> str | None:
    return next(iter(axes)) if len(axes) == 1 else None


def _sums(run: Run, by: list[str]) -> pl.DataFrame:
    axis_calls = run.table(calls)
    compute = compute_spans(run)
    rows = []
    for place, group_calls in axis_calls.partition_by(by, as_dict=True, maintain_order=True).items():
        spans = intervals.union(group_calls.select("start_ns", "end_ns").to_numpy())
        hidden_ns = intervals.length(intervals.intersect(spans, compute.get(place[:2], intervals.EMPTY)))
        total_ns = intervals.length(spans)
        sizes = group_calls["bytes"].drop_nulls()
        row = dict(zip(by, place, strict=True)) | {"communication_ns": total_ns, "calls": group_calls.height}
        row |= {"exposed_communication_ns": total_ns - hidden_ns, "bytes": sizes.sum() if len(sizes) else None}
        rows.append(row | {"steps": group_calls["step"].n_unique()})
    types = {name: axis_calls.schema[name] for name in by} | _SUMMED
    return pl.DataFrame(rows, schema=types).sort(by, nulls_last=True)


_SUMMED = schema.columns("communication_ns calls exposed_communication_ns bytes steps")


def compute_spans(run: Run) -> dict[tuple[object, ...], intervals.Spans]:
    """Spans in which each rank computes, on any of its devices: by window and rank."""
    spans = run.scan(breakdown.spans).filter(pl.col("part") == breakdown.COMPUTE)
    computing = spans.select("window", "rank", "start_ns", "dur_ns").collect()
    of_rank = computing.partition_by("window", "rank", as_dict=True)
    return {place: intervals.union(intervals.from_table(rank_spans)) for place, rank_spans in of_rank.items()}


@run_fact(table=RINGS)
def ring_overlap(run: Run) -> pl.DataFrame:
    """Share of a ring's transfers that compute hides; use ``run.table``. Columns as RINGS.

    A transfer is under way from its issue to its completion: on a device its kernel, under gloo from the call to the
    end of the wait. Empty without sends and receives along axis cp.
    """
    if not has_calls(run, CP):
        return RINGS.empty()
    ring_calls = run.table(calls).filter(pl.col("axis") == CP, pl.col("op").is_in([PAIRED, "send", "recv"]))
    compute, rows = compute_spans(run), []
    waits = run.table(collective_instances.waits).select("window", "rank", "activity_id", "wait_ns")
    timed_calls = ring_calls.join(waits, on=["window", "rank", "activity_id"], how="left").with_columns(
        (pl.col("start_ns") + pl.col("wait_ns")).alias("present_ns")  # when both ranks have begun
    )
    for place, step_calls in timed_calls.partition_by(_RING_STEP, as_dict=True, maintain_order=True).items():
        spans = intervals.union(step_calls.select("start_ns", "end_ns").to_numpy())
        busy = compute.get(place[:2], intervals.EMPTY)
        timed = step_calls.drop_nulls("present_ns")
        wait_spans = intervals.union(timed.select("start_ns", "present_ns").to_numpy())
        total_ns, hidden_ns = intervals.length(spans), intervals.length(intervals.intersect(spans, busy))
        waited_ns = intervals.length(wait_spans) - intervals.length(intervals.intersect(wait_spans, busy))
        sizes = step_calls["bytes"].drop_nulls()
        row = dict(zip(_RING_STEP, place, strict=True)) | {
            "calls": step_calls.height,
            "communication_ns": total_ns,
        }
        row |= {"hidden_ns": hidden_ns, "exposed_communication_ns": total_ns - hidden_ns}
        row |= {"waited_ns": waited_ns if timed.height else None, "bytes": sizes.sum() if len(sizes) else None}
        rows.append(row | {"hidden_ratio": hidden_ns / total_ns if total_ns else None})
    return RINGS.conform(pl.DataFrame(rows, RINGS.schema)).sort(_RING_STEP, nulls_last=True)
