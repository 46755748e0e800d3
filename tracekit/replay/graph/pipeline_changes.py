"""Predictions of other pipelines: more micro-batches, another schedule, layers moved between stages."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import polars as pl

from tracekit.analysis.communication import collective_instances, latency
from tracekit.analysis.parallelism import group_axes, pipeline_stages, rank_places, tensor_parallel
from tracekit.conventions import pipeline_schedules
from tracekit.conventions.strategies import AXES, CP, DP, DP_REPLICATE, DP_SHARD, EP, PP, TP
from tracekit.errors import InputError
from tracekit.model.run import Run
from tracekit.replay.graph import pipeline_timing, savings, strategies
from tracekit.replay.graph.group_spans import Span, recorded_span, span_at_stride
from tracekit.replay.graph.pipeline_timing import PipelineTiming
from tracekit.replay.graph.strategies import Prediction, axes_text
from tracekit.sync import alignment, collective_matching

_ASSUMED = "mean time of each stage's actions"
_OUTSIDE = "time outside the pipeline unchanged (optimizer); reduction of gradients in proportion to a rank's weights"
_PLACE = ["window", "rank"]


@dataclass(frozen=True)
class PipelineChange:
    """What to change in the pipeline of a run; None and 0: nothing."""

    micro_batches: int | None = None
    schedule: str | None = None
    virtual_stages: int = 0
    stage_layers: str | None = None
    axes: tuple[tuple[str, float], ...] = ()
    """Mesh axes and how many times as fast their links are."""

    @property
    def is_none(self) -> bool:
        """Return whether nothing changes."""
        return self == PipelineChange()


_LARGE_BYTES = 1 << 20
"""From which size on the bandwidth of a message counts, as for TP001."""


def predict(run: Run, change: PipelineChange) -> Prediction:
    """Return the predicted step time with another pipeline: the recorded one, and what the schedule's time changes by.

    Raises InputError for a run without a pipeline, or a change that is not possible.
    """
    before = pipeline_timing.recorded_timing(run)
    timing = before
    for axis, times in change.axes:
        timing = with_faster_axis(run, timing, axis, times)
    after = _with_schedule(timing, change.schedule or timing.schedule, change.virtual_stages)
    if change.micro_batches is not None:
        if change.micro_batches < 1:
            raise InputError(f"--micro-batches is {change.micro_batches}; it must be 1 or more")
        after = after.with_micro_batches(change.micro_batches)
    if change.stage_layers is not None:
        after = after.with_layers(pipeline_timing.parsed_layers(change.stage_layers, after))
    if refusal := pipeline_schedules.refusal(after.schedule, after.shape):
        raise InputError(refusal)
    replayed = savings.replayed_steps(run)
    if replayed.is_empty():
        raise InputError(f"{run.path}: no step can be replayed")
    step_ns = savings.total_ns(replayed, "duration_ns") // replayed.select("window", "step").n_unique()
    predicted_ns = step_ns + round(after.duration_ns() - before.duration_ns())
    faster = [strategies.axis_text(axis, times) for axis, times in change.axes]
    name = ", ".join([*_names(before, after), *faster]) or "the same pipeline"
    return Prediction(name, step_ns, predicted_ns, _assumptions(before, after))


def predict_axes(run: Run, axes: Mapping[str, float]) -> Prediction:
    """Return the predicted step time with the links of mesh axes at so many times their bandwidth.

    Within a pipeline (pp, tp, cp, ep) its actions are scheduled again; data parallelism is replayed on the graph, and
    the two changes add up. Raises InputError where the run has no collective of an axis.
    """
    for times in axes.values():
        strategies.checked_times(times, "--axis-times")
    is_pipelined = pipeline_stages.is_pipelined(run)
    within = tuple((axis, times) for axis, times in axes.items() if is_pipelined and axis in _WITHIN)
    replayed = {axis: times for axis, times in axes.items() if axis not in dict(within)}
    parts = [predict(run, PipelineChange(axes=within))] if within else []
    parts += [strategies.predict_axes(run, replayed)] if replayed else []
    first = parts[0]
    assumed = dict.fromkeys(text for part in parts for text in part.assumptions if text != _OUTSIDE or not replayed)
    return replace(
        first,
        name=", ".join(part.name for part in parts),
        predicted_ns=first.step_ns + sum(part.predicted_ns - part.step_ns for part in parts),
        assumptions=tuple(assumed),
    )


_WITHIN = (PP, TP, CP, EP)


def with_faster_axis(run: Run, timing: PipelineTiming, axis: str, times: float) -> PipelineTiming:
    """Return the timing with the links of an axis at `times` their bandwidth.

    A stage's actions get shorter by what the transfers within them do; a collective's transfer is its shortest duration
    over the ranks. Raises InputError where the run has no collective of the axis.
    """
    if axis == PP:
        return timing.with_transfers(1 / times)
    saved = _transfers_by_action(run, axis)
    kinds = pipeline_timing.KINDS
    saved_ns = {(stage, kinds[action]): (1 - 1 / times) * ns for stage, action, ns in saved.iter_rows()}
    return timing.shorten(saved_ns)


def predict_rank_order(run: Run, text: str, node_bytes_per_s: float | None = None) -> Prediction:
    """Return the predicted step time with ranks numbered, and so placed on nodes, in another order of the mesh's axes.

    `text` names the axes, the first one being that of consecutive ranks, such as "tp-dp-pp" (as Megatron-LM's
    rank orders). The bus bandwidth of an axis across nodes is that of a rank's share of its node's network times the
    ranks of a group on a node; inside nodes it is that of other groups there, else `node_bytes_per_s`, else that of the
    devices' links. Raises InputError where axes, nodes or bandwidths are not known, or where no axis moves.
    """
    sizes = _sizes(run)
    order = _order(text, sizes)
    node_of = rank_places.node_of_rank(run)
    if not node_of:
        raise InputError(f"--rank-order: the nodes of {run.path}'s ranks are not known, or all ranks are on one")
    node = max(Counter(node_of.values()).values())
    groups = {
        axis: sets for axis, sets in rank_places.groups_of(run.manifest).items() if axis in (*sizes, EP) and all(sets)
    }
    before = {axis: recorded_span(sets, node_of) for axis, sets in groups.items()}
    after = {axis: _new_span(axis, len(sets[0]), order, sizes, node) for axis, sets in groups.items()}
    moved = {axis: after[axis] for axis in before if before[axis] != after[axis]}
    rates = _Rates(run, node_of, node_bytes_per_s)
    times = {axis: ratio for axis, span in moved.items() if (ratio := rates.times(axis, span)) is not None}
    if not times:
        raise InputError(f"--rank-order {text}: no axis moves into nodes or out of them; links stay as they are")
    for axis, ratio in times.items():
        if not strategies.SLOWEST <= ratio <= 1 / strategies.SLOWEST:
            raise InputError(
                f"--rank-order {text}: links of {axis} would be {ratio:.3g} times as fast; no more than "
                f"{1 / strategies.SLOWEST:g} times, or {strategies.SLOWEST:g}, is predicted"
            )
    prediction = predict_axes(run, times)
    links = (f"{axis} {'inside nodes' if moved[axis].is_inside else 'across nodes'}" for axis in times)
    name = f"ranks in the order {'-'.join(order)} ({', '.join(links)})"
    return replace(
        prediction,
        name=name,
        assumptions=(
            *prediction.assumptions,
            "messages of the same sizes; a node's network shared by its ranks as before",
        ),
    )


def _with_schedule(before: PipelineTiming, schedule: str, virtual_stages: int) -> PipelineTiming:
    if schedule not in pipeline_schedules.SCHEDULES:
        raise InputError(
            f"--schedule is {schedule!r}; one of {', '.join(pipeline_schedules.SCHEDULES)} can be predicted"
        )
    usual = pipeline_schedules.usual_stages_per_rank(schedule)
    if schedule == pipeline_schedules.INTERLEAVED:
        usual = max(usual, before.shape.virtual_stages)
    stages = virtual_stages or usual
    total, count = sum(before.layers), stages * before.shape.ranks
    if count > total:
        raise InputError(f"{count} stages need a layer each; there are {total} layers")
    if count == before.stages:
        return before.with_schedule(schedule)
    return before.with_layers(tuple(pipeline_timing.equal_layers(total, count)), schedule, stages)


def _names(before: PipelineTiming, after: PipelineTiming) -> list[str]:
    parts = []
    if (before.schedule, before.stages) != (after.schedule, after.stages):
        stages = f" with {after.shape.virtual_stages} stages per rank" if after.shape.virtual_stages > 1 else ""
        parts.append(f"schedule {after.schedule}{stages}")
    if before.shape.micro_batches != after.shape.micro_batches:
        parts.append(f"{after.shape.micro_batches} micro-batches")
    if before.stages == after.stages and before.layers != after.layers:
        parts.append(f"stages of {', '.join(map(str, after.layers))} layers")
    return parts


def _assumptions(before: PipelineTiming, after: PipelineTiming) -> tuple[str, ...]:
    assumptions = [_ASSUMED, _OUTSIDE]
    if before.shape.micro_batches != after.shape.micro_batches:
        assumptions.append(
            "the same tokens per step: the time of an action proportional to the tokens of a micro-batch"
        )
    if before.layers != after.layers:
        assumptions.append("layers take equally long on a rank; the head as many layers as its weights are")
    if after.schedule in pipeline_schedules.SPLIT_BACKWARD and before.schedule not in pipeline_schedules.SPLIT_BACKWARD:
        assumptions.append("weight gradients take as long as forward without attention")
    if after.shape.micro_batches > before.shape.micro_batches:
        assumptions.append("kernels as efficient on smaller micro-batches")
    return tuple(assumptions)


def _transfers_by_action(run: Run, axis: str) -> pl.DataFrame:
    """Return the time of an axis' transfers in an action. Columns stage, action, ns: means over the actions."""
    actions = run.table(pipeline_stages.staged_actions)
    axes = run.table(group_axes.group_axes)
    groups = axes.filter(pl.col("axis") == axis).select("group", "members")
    if groups.is_empty():
        raise InputError(f"--axis-times {axis}: no collective of this axis; the run has {axes_text(axes)}")
    matched = run.table(collective_matching.matched_calls).join(groups, on=["group", "members"], how="semi")
    on_clock = alignment.on_run_clock(matched, run.offsets, ("start_ns", "end_ns"))
    took_ns = pl.col("end_ns") - pl.col("start_ns")
    shortest = pl.when(pl.col("instance").is_null()).then(took_ns).otherwise(took_ns.min().over("window", "instance"))
    calls = on_clock.select(*_PLACE, at_ns="start_ns", ns=shortest).sort("at_ns")
    begun = actions.select(*_PLACE, "stage", "action", "start_ns", until_ns="end_ns").sort("start_ns")
    inside = calls.join_asof(begun, left_on="at_ns", right_on="start_ns", by=_PLACE, check_sortedness=False)
    sums = inside.filter(pl.col("at_ns") <= pl.col("until_ns")).group_by("stage", "action").agg(pl.col("ns").sum())
    counts = actions.group_by("stage", "action").len()
    return sums.join(counts, on=["stage", "action"]).select("stage", "action", pl.col("ns") / pl.col("len"))


class _Call(NamedTuple):
    """A message of a group: its hops, the bytes that each rank sends, and how long it takes in ns."""

    ranks: tuple[int, ...]
    hops: int
    moved: float
    ns: int


class _Rates:
    """Latencies and bus bandwidths of a run's groups inside nodes and across them, in bytes/s."""

    def __init__(self, run: Run, node_of: Mapping[int, str], inside: float | None) -> None:
        self._run = run
        calls = run.table(collective_matching.matched_calls).filter(pl.col("bytes") >= _LARGE_BYTES)
        # The last rank to arrive waits for nobody: the shortest duration is the transfer's, whatever the clocks.
        shortest = (pl.col("end_ns") - pl.col("start_ns")).min()
        instances = (
            calls.drop_nulls("instance")
            .group_by("window", "instance")
            .agg(
                pl.col("rank").unique().sort().alias("ranks"),
                pl.col("op", "group_size", "bytes").first(),
                shortest.alias("ns"),
            )
        )
        moved_bytes = pl.col("bytes") * collective_instances.bus_factor()
        timed = instances.filter(pl.col("ranks").list.len() > 1, pl.col("ns") > 0, moved_bytes > 0)
        rows = timed.select("ranks", latency.hops().fill_null(1), moved_bytes.alias("moved"), "ns").drop_nulls()
        self._calls = [_Call(tuple(ranks), *numbers) for ranks, *numbers in rows.iter_rows()]
        fitted = self._fitted_hops(node_of)
        self._hop_ns = {
            inside: _median(ns for is_inside, ns in fitted if is_inside == inside) for inside in (True, False)
        }
        spans = [(recorded_span([call.ranks], node_of), call) for call in self._calls]
        self._inside = inside or _median(self._rate(call, True) for span, call in spans if span.is_inside)
        self._share = _median(
            self._rate(call, False) / span.ranks_per_node for span, call in spans if not span.is_inside
        )

    def times(self, axis: str, span: Span) -> float | None:
        """Speed-up of an axis' large messages if its groups lie so; None where it has none.

        A message takes the latency of its hops, where that is known for such links, and its bytes over the bandwidth.
        """
        calls = self._of_groups(axis)
        if not calls:
            return None
        rate = self._bandwidth(span) / collective_instances.SECOND_NS
        after_ns = sum(call.hops * (self._hop_ns[span.is_inside] or 0.0) + call.moved / rate for call in calls)
        return sum(call.ns for call in calls) / after_ns

    def _rate(self, call: _Call, is_inside: bool) -> float:
        """Return the bus bandwidth of a message without the latency of its hops, in bytes/s."""
        hops_ns = min(call.hops * (self._hop_ns[is_inside] or 0.0), call.ns / 2)
        return call.moved * collective_instances.SECOND_NS / (call.ns - hops_ns)

    def _fitted_hops(self, node_of: Mapping[int, str]) -> list[tuple[bool, float]]:
        """Return the latency of a hop of each group for which it is known, and whether the group is inside a node."""
        fits = self._run.table(latency.by_group).drop_nulls("hop_ns")
        ranks = self._run.table(group_axes.group_axes).select("group", "ranks").unique("group")
        rows = fits.join(ranks, on="group").select("ranks", "hop_ns").iter_rows()
        return [(recorded_span([members], node_of).is_inside, hop_ns) for members, hop_ns in rows if len(members) > 1]

    def _bandwidth(self, span: Span) -> float:
        """Return the bandwidth of groups that lie so on nodes, in bytes/s. Raises InputError where it is not known."""
        if not span.is_inside:
            if self._share is None:
                raise InputError("--rank-order: no group of the run spans nodes; the network's bandwidth is not known")
            return self._share * span.ranks_per_node
        bandwidth = self._inside or tensor_parallel.link_bandwidth(self._run, span.ranks_per_node)
        if bandwidth is None:
            raise InputError(
                "--rank-order: no group of the run lies inside a node; give its bus bandwidth by --node-bandwidth"
            )
        return bandwidth

    def _of_groups(self, axis: str) -> list[_Call]:
        groups = [frozenset(ranks) for ranks in rank_places.groups_of(self._run.manifest)[axis]]
        entire = set(groups)
        pairs = axis == PP
        return [
            call
            for call in self._calls
            if frozenset(call.ranks) in entire or (pairs and any(frozenset(call.ranks) <= group for group in groups))
        ]


def _median(rates: Iterable[float]) -> float | None:
    all_rates = list(rates)
    return statistics.median(all_rates) if all_rates else None


def _sizes(run: Run) -> dict[str, int]:
    """Return the ranks along each axis of the mesh. Raises InputError where run.json states none."""
    groups = rank_places.groups_of(run.manifest)
    sizes = {axis: len(groups[axis][0]) for axis in AXES if groups.get(axis) and all(groups[axis])}
    if not sizes or math.prod(sizes.values()) != len(run.ranks):
        raise InputError(f"--rank-order: run.json of {run.path} does not state the mesh of its {len(run.ranks)} ranks")
    return sizes


def _order(text: str, sizes: Mapping[str, int]) -> list[str]:
    """Return the axes from the innermost one on; dp stands for dp_shard and dp_replicate."""
    parts = [part for part in re.split(r"[-,]", text.lower()) if part]
    named_axes = [axis for part in parts for axis in ((DP_SHARD, DP_REPLICATE) if part == DP else (part,))]
    order = [axis for axis in named_axes if axis in sizes]
    unknown = [axis for axis in named_axes if axis not in AXES]
    if unknown or sorted(order) != sorted(sizes):
        axes = dict.fromkeys(
            DP if axis in (DP_SHARD, DP_REPLICATE) else axis for axis in reversed(AXES) if axis in sizes
        )
        raise InputError(f"--rank-order is {text!r}; it must name each axis of the mesh once, such as {'-'.join(axes)}")
    return order


def _new_span(axis: str, size: int, order: Sequence[str], sizes: Mapping[str, int], node: int) -> Span:
    """Span of groups of `size` ranks along an axis, on nodes of consecutive ranks numbered in an order."""
    along = next(name for name in order if name in (DP_SHARD, CP, DP_REPLICATE)) if axis == EP else axis
    stride = math.prod(sizes[name] for name in order[: order.index(along)])
    return span_at_stride(size, stride, node)
