"""The mesh axis of each process group: by its description, the manifest, or what its collectives look like."""

from typing import Any

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.communication import group_bandwidth
from tracekit.analysis.parallelism import rank_places
from tracekit.analysis.time import trace_columns
from tracekit.conventions.strategies import CP, DP, DP_SHARD, EP, PP, TP, axis_of_description
from tracekit.model import columns, nesting, rank_lists, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.nesting import Flags, Ints
from tracekit.model.run import Run
from tracekit.model.sweep_line import at, distinct
from tracekit.model.trace import Trace, TraceFact
from tracekit.sync import collective_matching
from tracekit.sync.collective_matching import EXPERT, PAIRED

PARAMETERS, ACTIVATIONS, OTHER = "parameters", "activations", "other"
PURPOSE_COLUMNS = schema.columns("activity_id purpose is_forward", purpose=pl.String, is_forward=pl.Boolean)
_MODULE = "forward"
"""FSDP1's span around the forward of the module itself; those in its other spans transfer parameters or gradients."""
_ACCUMULATES = r"AccumulateGrad$"

WORLD = "world"
DESCRIPTION, MANIFEST, INFERRED = SOURCES = ("description", "manifest", "inferred")

AXES = schema.table(
    "group_axes",
    "process group in which collectives ran",
    schema.column("group", "Name of the group; null where the trace does not name it.", pl.String()),
    schema.column("members", "Its ranks as text, or FROM>TO of sends and receives; null where unknown.", pl.String()),
    schema.column(
        "ranks", "Its ranks; where the trace does not list them, those with such collectives.", pl.List(pl.Int64())
    ),
    schema.column(
        "axis", "pp, dp_replicate, dp_shard, dp, cp, tp, ep, world or another name; null: unknown.", pl.String()
    ),
    schema.column("source", "description (of the group), manifest, or inferred (from its collectives).", pl.String()),
    schema.Column("confidence", pl.Float64(), "ratio", "How sure the axis is: 1 where it is stated."),
)

_MIN_CALLS = 4
_MIN_ALIKE_RATIO = 0.6
"""Share of all-reduces of one size from which they may be activations: a micro-batch's are all of one size."""
_MIN_ACTIVATION_BYTES = 64 << 10
_SURE_RATIO, _MIN_SURE_BYTES = 0.9, 4 << 10
"""Smaller all-reduces may be of activations too, where so many of them are known to be."""
_MIN_FORWARD_CALLS = 2
"""All-reduces of one forward from which they may be of tensor parallelism, where no size is known: one a layer."""
"""The facts that the run tables of this module read."""


@trace_fact
@memoize
def purposes(trace: Trace) -> pl.DataFrame:
    """Purpose of each collective. Columns activity_id, purpose, is_forward; one row per collective.

    parameters: in a span of FSDP, or called while autograd accumulates a gradient, where the hooks of DDP, Megatron-LM
    and DeepSpeed run. activations: between two ops of one forward, or in another node of autograd. other: outside of
    both, such as gradients reduced after the backward. null: the trace links no backward op to its forward op, so where
    forward ends is unknown, and no compute of backward or optimizer is next to the call; or it lacks the launch of a
    collective on a device, which may run long after its call.
    """
    # Collectives with phase, span, and where each was called. Columns accumulates (while a gradient is accumulated) and
    # between_forward_ops (null where no op is known to be of a forward, or the launch is not recorded).
    row = columns.rows_of(trace.activities["id"].to_numpy(), trace.collectives["activity_id"].to_numpy())
    row = row[row >= 0]
    calls = trace.activities[["id", "lane", "phase", "span"]][row]
    call, start_ns = trace_columns.launch_rows(trace)[row], trace.activities["start_ns"].to_numpy()[row]
    called_ns = np.where(call >= 0, at(trace.ops["start_ns"].to_numpy(), call, 0), start_ns)
    accumulates = pl.Series("accumulates", _accumulates(trace, trace_columns.launch_ids(trace)[row]))
    device_lanes = trace.lanes["lane"].filter(trace.lanes["device"].is_not_null())
    is_call_known = pl.Series(call >= 0) | ~calls["lane"].is_in(device_lanes.implode())
    between = _between_forward_ops(trace, called_ns)
    masked = pl.select(pl.when(is_call_known).then(between).alias(between.name)).to_series()
    host = calls.hstack([accumulates, masked]).rename({"id": "activity_id"})
    if host.is_empty():
        return schema.conform(host, PURPOSE_COLUMNS)
    moves_parameters = pl.col("accumulates") | (pl.col("span") != _MODULE).fill_null(value=False)
    in_backward = pl.col("phase") == conventions.BACKWARD
    in_forward = (pl.col("phase") == conventions.FORWARD) | (pl.col("phase").is_null() & pl.col("between_forward_ops"))
    purpose = (
        pl.when(moves_parameters)
        .then(pl.lit(PARAMETERS))
        .when(in_forward | in_backward)
        .then(pl.lit(ACTIVATIONS))
        .when(pl.col("phase").is_not_null() | pl.col("between_forward_ops").is_not_null())
        .then(pl.lit(OTHER))
    )
    table = host.with_columns(purpose.alias("purpose"), in_forward.fill_null(value=False).alias("is_forward"))
    return schema.conform(table.select(*PURPOSE_COLUMNS), PURPOSE_COLUMNS)


FACTS: tuple[TraceFact, ...] = (
    collective_matching.calls,
    group_bandwidth.group_axes,
    purposes,
)


def described_groups(run: Run) -> pl.DataFrame:
    """Return the groups whose description names their axis, used or not. Columns group, ranks, axis."""
    listed = run.table(group_bandwidth.group_axes).drop_nulls("group_ranks")
    groups = listed.select("group", ranks="group_ranks", axis=pl.col("axis")).unique(maintain_order=True)
    groups = groups.with_columns(rank_lists.lists(groups["ranks"]))
    axes = {text: axis for text in groups["axis"].drop_nulls().unique() if (axis := axis_of_description(text))}
    return groups.with_columns(pl.col("axis").replace_strict(axes, default=None, return_dtype=pl.String)).drop_nulls(
        "axis"
    )


@run_fact(table=AXES)
def group_axes(run: Run) -> pl.DataFrame:
    """Return the axis of each group in which collectives ran; use ``run.table``.

    Columns as AXES; one row per group and members. A description that names an axis counts first, then the manifest,
    whose mesh has a group of these ranks (or, for two ranks that send to each other, one that contains both, of pp or
    of cp); otherwise the axis is inferred from the group's collectives: sends and
    receives are pp; mostly all-to-all is ep; reduce-scatters of activations, or many all-reduces of them in forward, of
    one size where sizes are known, are tp; all-gathers with reduce-scatters are dp_shard; all-reduces of gradients are
    dp. Where collectives without a named group transfer both parameters and activations, the axis is unknown.
    """
    calls = run.table(collective_matching.run_calls)
    if calls.is_empty():
        return AXES.empty()
    listed = list(described_groups(run).iter_rows())
    described = {(group, _text(ranks)): axis for group, ranks, axis in listed}
    stated = {_text(ranks): axis for axis, groups in rank_places.groups_of(run.manifest).items() for ranks in groups}
    rows = []
    for usage in _usage(run, calls).iter_rows(named=True):
        group, ranks = usage["group"], usage["ranks"]
        axis, source, confidence = described.get((group, _text(ranks))), DESCRIPTION, 1.0
        if axis is None and usage["is_pair"]:
            axis = next((axis for name, members, axis in listed if name == group and set(ranks) <= set(members)), None)
        if axis is None:
            axis, source = stated.get(_text(ranks)), MANIFEST
        if axis is None and usage["is_pair"]:
            axis = _axis_of_pair(ranks, run)
        if axis is None:
            axis, confidence = _infer_axis(usage, len(run.ranks), bool(described or stated))
            source = INFERRED
        rows.append((group, usage["members"], ranks, axis, source, confidence))
    return pl.DataFrame(rows, schema=AXES.schema, orient="row")


@run_fact
def axis_of_calls(run: Run) -> pl.DataFrame:
    """Return the axis of each collective. Columns window, rank, activity_id, step, op, bytes, phase, axis.

    Also its group and members, unit, start_ns and end_ns, and purpose (of `purposes`). Calls without a named
    group may be of several: sends and receives are pp, all-to-alls are ep if most calls are such; the axis of the
    others is inferred from these.
    """
    calls = run.table(collective_matching.run_calls)
    axes = run.table(group_axes).select("group", "members", "axis")
    joined = calls.join(axes, on=["group", "members"], how="left", nulls_equal=True, maintain_order="left")
    group_purposes = run.table(purposes)
    table = joined.join(group_purposes, on=["window", "rank", "activity_id"], how="left", maintain_order="left")
    table = table.with_columns(_axis_of_unnamed(run, calls).alias("axis"))
    return table.select(*_CALL, "group", "members", "axis", "purpose")


def _axis_of_unnamed(run: Run, calls: pl.DataFrame) -> pl.Expr:
    """Return the axis of each call: of one without a named group by op and purpose, of others as in column axis."""
    is_unnamed = pl.col("group").is_null() & pl.col("members").is_null()
    unnamed = calls.filter(is_unnamed)
    rest = unnamed.filter(~pl.col("op").is_in([PAIRED, *_SENDS, *_ALL_TO_ALLS]))
    group_purposes = run.table(purposes).select("window", "rank", "activity_id", "purpose")
    place = ["window", "rank", "activity_id"]
    parts = [
        rest.join(group_purposes.filter(pl.col("purpose") == PARAMETERS), on=place, how=how) for how in ("semi", "anti")
    ]
    if max(part.height for part in parts) == unnamed.height:
        return pl.col("axis")  # calls of one kind, of which the axis of the whole group says more
    axes = [
        _infer_axis(_usage(run, part).row(0, named=True), len(run.ranks), has_mesh=False)[0] if part.height else None
        for part in parts
    ]
    if axes[1] == TP and unnamed["op"].is_in(_ALL_TO_ALLS).any():
        axes[1] = None  # results of sharded embeddings are reduced in forward too
    op, of_group, of_parameters = pl.col("op"), pl.col("axis"), pl.col("purpose") == PARAMETERS
    by_call = (
        pl.when(op.is_in(_SENDS))
        .then(pl.lit(PP))
        .when(op.is_in(EXPERT))
        .then(pl.lit(EP))
        # Embeddings are exchanged by all-to-alls too: only where most calls are such, these are of experts.
        .when(op.is_in(_ALL_TO_ALLS))
        .then(pl.when(of_group == EP).then(of_group))
        .when((op != PAIRED) & of_group.is_not_null() & ~of_group.is_in([PP, EP]))
        .then(of_group)
        .when(op != PAIRED)
        .then(pl.when(of_parameters).then(pl.lit(axes[0], pl.String)).otherwise(pl.lit(axes[1], pl.String)))
    )
    return pl.when(is_unnamed).then(by_call).otherwise(of_group)


_SENDS, _ALL_TO_ALLS = ("send", "recv"), ("all_to_all", *EXPERT)
_CALL = ("window", "rank", "activity_id", "step", "op", "bytes", "phase", "unit", "start_ns", "end_ns")


def listed_groups(run: Run, axis: str) -> list[list[int]]:
    """Return the groups of several ranks of an axis that run.json lists, else those that descriptions name."""
    if stated := rank_places.groups_of(run.manifest).get(axis):
        return stated
    described = described_groups(run).filter(pl.col("axis") == axis, pl.col("ranks").list.len() > 1)
    listed: list[list[int]] = described["ranks"].unique(maintain_order=True).to_list()
    return listed


def _accumulates(trace: Trace, launch_ids: Ints) -> Flags:
    """Mask of the ops, by id, that run while autograd accumulates a gradient; false for -1."""
    marked = trace_columns.is_named(trace, _ACCUMULATES)
    if not marked.any():
        return np.zeros(len(launch_ids), bool)
    ids = trace.ops["id"].to_numpy()
    parent, flags = np.full(ids.max() + 1, -1, np.int64), np.zeros(ids.max() + 1, bool)
    parent[ids], flags[ids] = trace_columns.parent_ids(trace), marked
    return np.asarray((launch_ids >= 0) & (nesting.nearest(parent, flags)[launch_ids] >= 0))


def _between_forward_ops(trace: Trace, called_ns: Ints) -> pl.Series:
    """Mask of the times between two ops of one forward: ops with a gradient, and no backward op between.

    Where no op is known to be of a forward, null, but for times that are known to be outside of it.
    """
    name = "between_forward_ops"
    with_gradient = columns.rows_of(trace.ops["id"].to_numpy(), distinct(columns.to_ints(trace.ops["forward_id"], -1)))
    is_forward = np.zeros(trace.ops.height, np.bool_)
    is_forward[with_gradient[with_gradient >= 0]] = True
    is_backward = trace_columns.is_phase(trace, conventions.BACKWARD)
    is_forward &= ~is_backward
    if not is_forward.any():
        return _next_to_no_backward(trace, called_ns).alias(name)
    rows = np.flatnonzero(is_forward | is_backward)
    start_ns = trace.ops["start_ns"].to_numpy()[rows]
    order = np.argsort(start_ns, kind="stable")
    after = np.searchsorted(start_ns[order], called_ns, side="right")
    forward = np.concatenate(([False], is_forward[rows[order]], [False]))
    return pl.Series(name, forward[after] & forward[after + 1])


def _next_to_no_backward(trace: Trace, called_ns: Ints) -> pl.Series:
    """False for times directly before or after compute of a backward pass or an optimizer; else null.

    Where the trace does not link ops to their backward, the forward is not known, but gradients are reduced there.
    """
    computes = trace_columns.is_activity_kind(trace, "compute")
    phase = trace.activities["phase"].filter(pl.Series(computes))
    call = trace_columns.launch_rows(trace)[computes]
    start_ns = trace.activities["start_ns"].to_numpy()[computes]
    launched_ns = np.where(call >= 0, at(trace.ops["start_ns"].to_numpy(), call, 0), start_ns)
    order = np.argsort(launched_ns, kind="stable")
    follows_forward = phase.is_in([conventions.BACKWARD, conventions.OPTIMIZER]).fill_null(value=False).to_numpy()
    is_other = np.concatenate(([False], follows_forward[order], [False]))
    after = np.searchsorted(launched_ns[order], called_ns, side="right")
    is_outside = pl.Series(is_other[after] | is_other[after + 1])
    return pl.select(pl.when(is_outside).then(pl.lit(value=False))).to_series()


def _axis_of_pair(ranks: list[int], run: Run) -> str | None:
    """Axis of the manifest along which two ranks send to each other, where it can be only one."""
    groups = rank_places.groups_of(run.manifest)
    possible = [axis for axis in (PP, CP) if any(set(ranks) <= set(members) for members in groups.get(axis, []))]
    return possible[0] if len(possible) == 1 else None


def _text(ranks: list[int] | None) -> str:
    return ",".join(map(str, sorted(ranks or [])))


def _usage(run: Run, calls: pl.DataFrame) -> pl.DataFrame:
    """Usage of each group: its ranks, and per op how often, in which phases, and of how many sizes it runs."""
    of_rank = ["window", "rank", "group"]
    listed = run.table(group_bandwidth.group_axes).drop_nulls("group_ranks").select(*of_rank, "group_ranks")
    lister = listed.select(*of_rank, lister=pl.struct("window", "rank"))
    joined = calls.join(lister, on=of_rank, how="left", maintain_order="left").join(
        run.table(purposes),
        on=["window", "rank", "activity_id"],
        how="left",
        maintain_order="left",
    )
    op, purpose = pl.col("op"), pl.col("purpose")
    # NCCL's SendRecv kernels may also be all-to-alls, where nothing but their name is recorded.
    is_pair = ((op == PAIRED) & pl.col("members").str.contains(">", literal=True)).fill_null(value=False)
    in_forward = pl.col("is_forward").fill_null(value=False) & (purpose == ACTIVATIONS).fill_null(value=False)
    reduces = op == "all_reduce"
    usual_bytes = pl.col("bytes").filter(reduces).mode().max()
    per = pl.struct("window", "rank", "step").n_unique()
    usage = (
        joined.group_by("group", "members", maintain_order=True)
        .agg(
            pl.col("members").filter(is_pair).first().alias("pair"),
            pl.col("lister").filter(~is_pair).drop_nulls().first(),
            pl.col("rank").unique().sort().alias("callers"),
            pl.len().alias("calls"),
            per.alias("places"),
            (is_pair | op.is_in(_SENDS)).sum().alias("sends"),
            is_pair.all().alias("is_pair"),
            op.is_in(_ALL_TO_ALLS).sum().alias("all_to_alls"),
            reduces.sum().alias("all_reduces"),
            (op == "all_gather").sum().alias("all_gathers"),
            (op == "reduce_scatter").sum().alias("reduce_scatters"),
            ((op == "reduce_scatter") & in_forward).sum().alias("reduce_scatters_in_forward"),
            (reduces & in_forward).sum().alias("all_reduces_in_forward"),
            (reduces & purpose.is_null()).sum().alias("all_reduces_of_unknown_purpose"),
            (reduces & (purpose == ACTIVATIONS)).sum().alias("all_reduces_of_activations"),
            (purpose == PARAMETERS).sum().alias("of_parameters"),
            (purpose == ACTIVATIONS).sum().alias("of_activations"),
            usual_bytes.alias("usual_bytes"),
            (reduces & (pl.col("bytes") == usual_bytes)).sum().alias("all_reduces_alike"),
        )
        .sort("group", "members")
    )  # fmt: skip
    with_lister = usage.with_columns(pl.col("lister").struct.field("window", "rank"))
    joined = with_lister.join(listed, on=of_rank, how="left", maintain_order="left")
    pair = pl.col("pair").str.extract_all(r"\b[0-9]{1,9}\b").cast(pl.List(pl.Int64))
    return joined.with_columns(rank_lists.lists(joined["group_ranks"])).with_columns(
        pl.coalesce(pair, "group_ranks", "callers").alias("ranks")
    )


def _infer_axis(usage: dict[str, Any], world_size: int, has_mesh: bool) -> tuple[str | None, float]:
    """Return the axis that a group's collectives look like, and how sure that is."""
    if usage["sends"] * 2 > usage["calls"]:
        return PP, 0.8
    if usage["all_to_alls"] * 2 >= usage["calls"]:
        return EP, 0.6
    if usage["group"] is None and usage["of_parameters"] and usage["of_activations"]:
        return None, 0.0  # several groups, whose collectives have no names
    if usage["reduce_scatters_in_forward"]:
        return TP, 0.8
    if _are_activations(usage):
        return TP, 0.8 if usage["all_reduces_in_forward"] and usage["usual_bytes"] else 0.6
    if has_mesh and len(usage["ranks"]) == world_size:
        return WORLD, 0.6
    if usage["all_gathers"] and usage["reduce_scatters"]:
        return DP_SHARD, 0.8 if usage["of_parameters"] * 2 > usage["calls"] else 0.6
    are_of_data = usage["of_activations"] * 2 <= usage["calls"] and not (
        usage["usual_bytes"] is None and usage["all_reduces_in_forward"] > usage["of_parameters"]
    )
    if usage["all_reduces"] * 2 > usage["calls"] and are_of_data:
        return DP, 0.8 if usage["of_parameters"] * 2 > usage["calls"] else 0.5
    if usage["of_parameters"] and not usage["of_activations"]:
        return DP, 0.6  # with broadcasts of updated parameters: ZeRO-1
    return None, 0.0


def _are_activations(usage: dict[str, Any]) -> bool:
    """Return whether all-reduces are many, of one size or most of activations, and not only in backward."""
    count, in_forward = usage["all_reduces"], usage["all_reduces_in_forward"]
    if usage["usual_bytes"] is None:
        of_activations = usage["all_reduces_of_activations"] >= _MIN_ALIKE_RATIO * usage["calls"]
        return bool(of_activations and in_forward >= _MIN_FORWARD_CALLS * usage["places"] and in_forward * 3 >= count)
    outside_backward = in_forward or usage["all_reduces_of_unknown_purpose"]
    is_sure = usage["all_reduces_of_activations"] >= _SURE_RATIO * count
    return bool(
        usage["all_reduces_alike"] >= max(_MIN_CALLS * usage["places"], _MIN_ALIKE_RATIO * count)
        and usage["usual_bytes"] >= (_MIN_SURE_BYTES if is_sure else _MIN_ACTIVATION_BYTES)
        and outside_backward * 3 >= count
    )
