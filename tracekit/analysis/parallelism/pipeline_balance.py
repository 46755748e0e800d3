"""The balance of pipeline stages: how long each takes, and how layers could be divided among them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.parallelism import (
    axis_communication,
    expert_load,
    late_groups,
    late_ranks,
    pipeline_bubbles,
    pipeline_communication,
    pipeline_stages,
    rank_places,
    stragglers,
)
from tracekit.analysis.parallelism.pipeline_stages import PIPELINE, Floats
from tracekit.model import intervals
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.sync import collective_matching


@dataclass(frozen=True)
class Balance:
    """The stages of a pipeline: median times, layers now and in a better division, and what that saves per step.

    `layer_ns` is the time of a layer on each stage, `rank_of` the place of its rank in the pipeline; `layers` and
    `better_layers` are empty where the manifest states none. `saved_ns` is what the step is shorter with the better
    division, `slow_saved_ns` if the layers of the slowest stage, and of others on its rank, took as long as those of
    other stages; both by the schedule, without links. `duration_ns` is the recorded step, median of passes and ranks.
    """

    stage_ns: tuple[int, ...]
    layer_ns: tuple[float, ...]
    rank_of: tuple[int, ...]
    layers: tuple[int, ...]
    better_layers: tuple[int, ...]
    saved_ns: int
    slow_saved_ns: int
    duration_ns: int

    @property
    def slowest(self) -> int:
        """Return the stage to look at: the longest on a rank that gives layers away, else that with the slowest layers.

        Of several stages on an overloaded rank, another than the longest may give the layer.
        """
        moved = list(zip(self.rank_of, self.better_layers, self.layers, strict=False))
        giving = {rank for rank, better, layers in moved if better < layers}
        stages = [stage for stage, rank in enumerate(self.rank_of) if rank in giving]
        if stages:
            return max(stages, key=lambda stage: self.stage_ns[stage])
        return max(range(len(self.layer_ns)), key=lambda stage: self.layer_ns[stage])

    def of_same_rank(self, stage: int) -> list[int]:
        """Return the stages that run on the same rank, the given one included."""
        return [other for other, rank in enumerate(self.rank_of) if rank == self.rank_of[stage]]

    def ratio(self, stage: int) -> float:
        """Return the time of a stage over the median of the others."""
        return self.stage_ns[stage] / max(1.0, float(np.median(_without(self.stage_ns, stage))))

    def slowdown(self, stage: int) -> float:
        """Return the time of a layer of a stage over the median of the others."""
        return self.layer_ns[stage] / max(1.0, float(np.median(_without(self.layer_ns, stage))))


@run_fact
def stage_times(run: Run) -> pl.DataFrame:
    """Return the time of each stage in each step: columns window, step, stage, stage_ns; use ``run.table``.

    It is the median over replicas of its forwards and backwards, without idle time in collectives for late ranks, and
    without replicas of late ranks: a replica that is slow alone is a straggler.
    """
    rows = _without_late_replicas(run, run.table(pipeline_bubbles.pipeline_bubbles))
    key = [*PIPELINE, "rank", "stage"]
    idle = run.table(own_times).group_by(key).agg(pl.col("idle_ns").sum())
    joined = rows.join(idle, on=key, how="left", nulls_equal=True)
    taken_ns = pl.col("forward_ns") + pl.col("backward_ns") - pl.col("idle_ns").fill_null(0)
    medians = joined.with_columns(taken_ns.alias("stage_ns")).group_by("window", "step", "iteration", "stage")
    return medians.agg(pl.col("stage_ns").median().round().cast(pl.Int64)).sort("window", "step", "iteration", "stage")


@run_fact
def own_times(run: Run) -> pl.DataFrame:
    """Return `pipeline_stages.staged_actions` with own_ns and idle_ns, which sum to their time; use ``run.table``.

    idle_ns is the time without compute in which the rank waits in collectives for late ranks, or in which weights are
    gathered and gradients scattered: a stage whose first forward contains the only gather of a step is not slow. Ranks
    whose experts get more tokens than the mean of their group are judged as if they got the mean (EP001 reports them):
    own_ns is shorter for them, and longer for the others. Where ranks of a stage have no trace, the others' waits for
    them are not known: then all time in collectives without compute is idle_ns, on every rank, so that stages compare.
    """
    actions = run.table(pipeline_stages.staged_actions)
    sharded = pipeline_communication.exposed_spans(run)
    waits = _collectives(run) if collective_instances.ranks_without_peers(run) else _waits_within_stages(run)
    compute = axis_communication.compute_spans(run)
    loads = run.table(expert_load.expert_load).partition_by("window", "rank", as_dict=True)
    parts = [actions.clear().with_columns(idle_ns=pl.lit(0, pl.Int64))]
    for place, rows in actions.partition_by("window", "rank", as_dict=True, maintain_order=True).items():
        waited = intervals.subtract(waits.get(place, intervals.EMPTY), compute.get(place, intervals.EMPTY))
        idle = intervals.union(waited, sharded.get(place, intervals.EMPTY))
        spans = intervals.from_columns(rows["trace_start_ns"], rows["end_ns"] - rows["start_ns"])
        idle_ns = intervals.coverage(spans, idle)
        if place in loads:
            idle_ns = idle_ns + _overload_ns(spans, loads[place])
        parts.append(rows.with_columns(pl.Series("idle_ns", idle_ns, pl.Int64)))
    return pl.concat(parts).with_columns((pl.col("end_ns") - pl.col("start_ns") - pl.col("idle_ns")).alias("own_ns"))


def balance(run: Run) -> Balance | None:
    """Return the balance of the stages over all steps; None without a pass through two stages or more that compute."""
    times = run.table(stage_times).group_by("stage").agg(pl.col("stage_ns").median()).sort("stage")
    passes = run.table(pipeline_bubbles.pipeline_bubbles)
    stages = times.height
    if stages < 2 or passes.is_empty() or times["stage"].to_list() != list(range(stages)):
        return None
    stage_ns = times["stage_ns"].to_list()
    if min(stage_ns) <= 0:  # waits that are longer than what contains them
        return None
    counts = [len(layers) for layers in rank_places.pipeline_of(run.manifest).stage_layers]
    counts = counts if len(counts) == stages and all(counts) else []
    extra = head_layers(run.manifest)
    layer_ns = _layer_times(stage_ns, counts or [1] * stages, extra)
    if extra is None and stage_ns[-1] > (1 + _EQUAL_LAYERS) * float(np.median(stage_ns[:-1])):
        # An output layer adds kernels, and makes none of the others slower.
        slower_ns = layer_ns[-1] * uniform_slowdown(run, stages - 1)
        layer_ns[-1] = min(stage_ns[-1] / (counts or [1])[-1], slower_ns)
    example = _representative_actions(run, stages)
    if example is None:
        return None
    rank_of = dict(example.select("stage", "rank").unique().iter_rows())
    places = tuple(rank_of[stage] for stage in range(stages))
    better = _divide_layers(counts, layer_ns, extra, places)
    scale = [
        _stage_ns(n, stage, layer_ns, extra) / _stage_ns(m, stage, layer_ns, extra)
        for stage, (n, m) in enumerate(zip(better, counts, strict=True))
    ]
    saved_ns = _saved_ns(example, scale) if better != counts else 0
    result = Balance(
        tuple(map(round, stage_ns)),
        tuple(layer_ns),
        places,
        tuple(counts),
        tuple(better),
        saved_ns=saved_ns,
        slow_saved_ns=0,
        duration_ns=round(float(str(passes["duration_ns"].median() or 0))),
    )
    slow = result.of_same_rank(result.slowest)
    usual = [1 / max(1.0, result.slowdown(stage)) if stage in slow else 1.0 for stage in range(stages)]
    return replace(result, slow_saved_ns=_saved_ns(example, usual))


def uniform_slowdown(run: Run, stage: int) -> float:
    """How many times as long all kernels of a stage take as those of the others; 1 where not all are slower alike."""
    excess = late_ranks.excess_of_stages(run, [stage])
    return excess.slowdown if excess is not None and excess.is_uniform else 1.0


def _waits_within_stages(run: Run) -> dict[tuple[object, ...], intervals.Spans]:
    """Spans in which ranks wait in collectives for late ranks, by window and rank, on the clock of the rank's trace.

    In collectives of several stages the order of the stages decides who waits.
    """
    waits = run.table(stragglers.late_calls)
    within = waits.join(late_groups.across_stages(run), on=["window", "instance"], how="anti")
    of_rank = within.partition_by("window", "rank", as_dict=True)
    return {
        place: intervals.union(intervals.from_columns(calls["start_ns"], calls["wait_ns"]))
        for place, calls in of_rank.items()
    }


def _collectives(run: Run) -> dict[tuple[object, ...], intervals.Spans]:
    """Spans in which ranks are in collectives, by window and rank, on the clock of the rank's trace."""
    calls = run.table(collective_matching.calls).filter(~pl.col("op").is_in(collective_instances.MESSAGES))
    of_rank = calls.partition_by("window", "rank", as_dict=True)
    return {
        place: intervals.union(intervals.from_columns(rows["start_ns"], rows["end_ns"] - rows["start_ns"]))
        for place, rows in of_rank.items()
    }


def _overload_ns(spans: intervals.Spans, loads: pl.DataFrame) -> npt.NDArray[np.int64]:
    """Extra time of a rank's experts in each of its actions, beyond that with their group's mean load."""
    extra_ns = (loads["expert_ns"] - loads["balanced_ns"]).to_numpy()
    order = np.argsort(spans[:, 0], kind="stable")
    position = np.searchsorted(spans[order, 0], loads["start_ns"].to_numpy(), side="right") - 1
    is_within = (position >= 0) & (loads["start_ns"].to_numpy() < spans[order[position], 1])
    overload_ns = np.zeros(len(spans), np.int64)
    np.add.at(overload_ns, order[position[is_within]], extra_ns[is_within])
    return overload_ns


def _without_late_replicas(run: Run, rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows of pipelines that have no late rank; all, if each has one."""
    actions = run.table(pipeline_stages.staged_actions).filter(pl.col("rank").is_in(late_ranks.latest(run)))
    late = actions.select("window", "pipeline").unique()
    on_time = rows.join(late, on=["window", "pipeline"], how="anti")
    return rows if on_time.is_empty() else on_time


def _without(values: Sequence[float], index: int) -> list[float]:
    return [value for other, value in enumerate(values) if other != index]


def _layer_times(stage_ns: Sequence[float], counts: Sequence[int], extra: float | None) -> list[float]:
    """Return the time of a layer on each stage. Without a known size of the output layer, the last is as the others."""
    times = [ns / count for ns, count in zip(stage_ns, counts, strict=True)]
    if extra is None:
        return [*times[:-1], min(times[-1], float(np.median(times[:-1])))]
    return [*times[:-1], stage_ns[-1] / (counts[-1] + extra)]


def _stage_ns(count: int, stage: int, layer_ns: Sequence[float], extra: float | None) -> float:
    return layer_ns[stage] * (count + (extra or 0.0 if stage == len(layer_ns) - 1 else 0.0))


def head_layers(manifest: Mapping[str, Any]) -> float | None:
    """Return the output layer's parameters over those of a layer, as far as the manifest states the model."""
    model = manifest.get("model")
    model = model if isinstance(model, dict) else {}
    numbers = [model.get(name) for name in ("vocabulary", "width", "layers", "parameters")]
    if not all(isinstance(number, (int, float)) and number > 0 for number in numbers):
        return None
    vocabulary, width, layers, parameters = (float(number or 0) for number in numbers)
    head = vocabulary * width
    layer = (parameters - head * (1 if model.get("tied") else 2)) / layers
    return head / layer if layer > 0 else None


def _divide_layers(
    counts: Sequence[int], layer_ns: Sequence[float], extra: float | None, rank_of: Sequence[int]
) -> list[int]:
    """Return layers per stage such that the slowest rank takes least: from where they are, one layer at a time.

    Stages of one rank should be alike, too: an interleaved schedule waits for the longest of them.
    """
    better = list(counts)
    # Times of equal layers differ by noise, which must not decide between stages of one rank.
    usual_ns = float(np.median(layer_ns))
    of_layer = [_round_ratio(ns / usual_ns) for ns in layer_ns]

    def slowest(division: Sequence[int]) -> tuple[float, float, float]:
        stages = [_stage_ns(count, stage, of_layer, extra) for stage, count in enumerate(division)]
        loads: dict[int, float] = {}
        for rank, load in zip(rank_of, stages, strict=True):
            loads[rank] = loads.get(rank, 0.0) + load
        of_ranks, of_stages = (round(sum(load * load for load in times), 6) for times in (loads.values(), stages))
        return round(max(loads.values()), 6), of_ranks, of_stages

    while better:
        moves = [
            [count + {source: -1, target: 1}.get(stage, 0) for stage, count in enumerate(better)]
            for source in range(len(better))
            for target in range(len(better))
            if source != target and better[source] > 1
        ]
        best = min(moves, key=slowest, default=better)
        if slowest(best) >= slowest(better):
            break
        better = best
    return better


def _round_ratio(ratio: float) -> float:
    """Return the time of a layer over the median: in steps, and 1 for what differs from it by noise."""
    return 1.0 if abs(ratio - 1) <= _EQUAL_LAYERS else round(ratio / _LAYER_STEP) * _LAYER_STEP


_LAYER_STEP = 0.05
_EQUAL_LAYERS = 0.075


def _representative_actions(run: Run, stages: int) -> pl.DataFrame | None:
    """Return the actions of the pass whose schedule takes the median time, of replicas without late ranks.

    None if no pass has all stages: ranks may mark different steps.
    """
    complete = run.table(own_times).group_by(PIPELINE).agg(pl.col("stage").n_unique()).filter(stage=stages)
    cases = _without_late_replicas(run, run.table(pipeline_bubbles.schedule_cases))
    cases = cases.unique(PIPELINE).join(complete, on=PIPELINE, how="semi", nulls_equal=True)
    if cases.is_empty():
        return None
    cases = cases.sort("stages_duration_ns", *PIPELINE)
    row = cases.row((cases.height - 1) // 2, named=True)
    is_own = pl.all_horizontal(pl.col(name).eq_missing(pl.lit(row[name], pl.Int64)) for name in PIPELINE)
    return run.table(own_times).filter(is_own).sort("rank", "start_ns")


def _saved_ns(actions: pl.DataFrame, scale: Sequence[float]) -> int:
    """Time saved in a pass if the actions of each stage take `scale` times as long."""
    place = (pl.col("rank").rank("dense") - 1).cast(pl.Int64)
    order = tuple(actions.select(place, "stage", "micro_batch", "action").iter_rows())
    schedule = pipeline_stages.schedule_graph(order)
    if schedule is None:
        return 0
    means: Floats = actions.select(pl.col("own_ns").mean().over("stage", "action")).to_series().to_numpy()
    factors = np.array([scale[stage] for _, stage, _, _ in order])
    ends = pipeline_stages.end_times(schedule, np.stack([means, means * factors], axis=1)).max(axis=0)
    return max(0, round(float(ends[0] - ends[1])))
