"""The actions of a recorded pipeline run again in any order: with other times, micro-batches, stages or links."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from tracekit.analysis.parallelism import (
    pipeline_actions,
    pipeline_balance,
    pipeline_bubbles,
    pipeline_communication,
    pipeline_stages,
    rank_places,
)
from tracekit.conventions import pipeline_schedules
from tracekit.conventions.pipeline_schedules import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Shape
from tracekit.errors import InputError
from tracekit.model import intervals, units
from tracekit.model.run import Run

KINDS = {
    pipeline_actions.FORWARD: FORWARD,
    pipeline_actions.BACKWARD: BACKWARD,
    pipeline_actions.INPUT_GRADIENT: INPUT_GRADIENT,
    pipeline_actions.WEIGHT_GRADIENT: WEIGHT_GRADIENT,
}
"""The schedule's name of each recorded action."""
_ATTENTION_BACKWARD = 0.5
"""Flash attention takes 2.5 times as long backward as forward, everything else twice."""


@dataclass(frozen=True)
class PipelineTiming:
    """What decides how long a step of a pipeline takes.

    `forward_ns`, `input_ns` and `weight_ns` are times of an action by stage: a whole backward pass is the sum of the
    latter two. `transfer_ns` is what a transfer between two ranks takes, by their places in the pipeline: first the
    sender's; of other links it is the median. A link carries one transfer after the other in each direction.
    """

    schedule: str
    shape: Shape
    layers: tuple[int, ...]
    forward_ns: tuple[float, ...]
    input_ns: tuple[float, ...]
    weight_ns: tuple[float, ...]
    transfer_ns: Mapping[tuple[int, int], float]
    head_layers: float = 0.0
    """How many layers the last stage's head takes as long as."""
    forward_gather_ns: tuple[float, ...] = ()
    backward_gather_ns: tuple[float, ...] = ()
    forward_exposed_ns: tuple[float, ...] = ()
    backward_exposed_ns: tuple[float, ...] = ()
    """Collectives that each action has for the weights, by stage and whatever its tokens: the time in which the rank
    gathers before it can start, and the exposed time within the action. Empty: none."""
    reduction_ns: tuple[float, ...] = ()
    """Exposed collectives of data parallelism after the last action of each place, in proportion to its weights."""
    host_ns: tuple[float, ...] = ()
    """How long after an action each place's host launches the next one, whose input is there: such as by a read that
    waits for the device. The receive for the action after that is posted then, too. Empty: no time."""

    @property
    def stages(self) -> int:
        """Return the stages of the pipeline."""
        return self.shape.ranks * self.shape.virtual_stages

    def duration_ns(self) -> float:
        """Return the time from the first action to the end of the last reduction, if each starts as soon as it can.

        A receive is posted when the action before the one that needs it starts.
        """
        done: dict[Action, float] = {}
        link_free_ns: dict[tuple[int, int], float] = {}
        orders = [pipeline_schedules.order(self.schedule, self.shape, rank) for rank in range(self.shape.ranks)]
        turn, free_ns, posted_ns = [0] * len(orders), [0.0] * len(orders), [0.0] * len(orders)
        while any(index < len(order) for index, order in zip(turn, orders, strict=True)):
            before = sum(turn)
            for rank, order in enumerate(orders):
                while turn[rank] < len(order) and (made_ns := self._made_ns(order[turn[rank]], done)) is not None:
                    action = order[turn[rank]]
                    arrived_ns = self._arrived_ns(action, max(made_ns, posted_ns[rank]), link_free_ns)
                    launched_ns = free_ns[rank] + (self.host_ns[rank] if self.host_ns and turn[rank] else 0.0)
                    gathered_ns = launched_ns + self._gather_ns(action)
                    posted_ns[rank] = launched_ns
                    free_ns[rank] = done[action] = max(gathered_ns, arrived_ns, made_ns) + self._takes_ns(action)
                    turn[rank] += 1
            assert sum(turn) > before, "a schedule whose actions wait for each other"
        return max(map(sum, zip(free_ns, self.reduction_ns or [0.0] * len(orders), strict=True)))

    def with_micro_batches(self, count: int) -> "PipelineTiming":
        """Return the timing with the tokens of a step divided into another number of micro-batches."""
        ratio = self.shape.micro_batches / count
        scaled = {name: tuple(ratio * ns for ns in getattr(self, name)) for name in _TIMES}
        shape = self.shape._replace(micro_batches=count)
        return replace(self.with_transfers(ratio), shape=shape, **scaled)  # type: ignore[arg-type]

    def with_transfers(self, ratio: float) -> "PipelineTiming":
        """Return the timing with transfers between stages that take `ratio` times as long."""
        return replace(self, transfer_ns={link: ratio * ns for link, ns in self.transfer_ns.items()})

    def with_schedule(self, schedule: str) -> "PipelineTiming":
        """Return the timing under a schedule with as many stages per rank."""
        after = replace(self, schedule=schedule)
        moves = any(self._place(stage) != after._place(stage) for stage in range(self.stages))
        return self.with_layers(self.layers, schedule) if moves else after

    def with_layers(
        self, layers: Sequence[int], schedule: str | None = None, virtual_stages: int | None = None
    ) -> "PipelineTiming":
        """Return the timing with so many layers per stage; the head stays in the last stage."""
        shape = self.shape._replace(virtual_stages=virtual_stages or self.shape.virtual_stages)
        divided = replace(self, schedule=schedule or self.schedule, shape=shape, layers=tuple(layers))
        weights = [divided._weight(stage, count) for stage, count in enumerate(layers)]
        scaled = {}
        for name in (*_TIMES, *(name for name in _EXPOSED if getattr(self, name))):
            layer_ns = self._layer_ns(getattr(self, name))
            scaled[name] = tuple(weight * layer_ns[divided._place(stage)] for stage, weight in enumerate(weights))
        for name in (name for name in _GATHERS if getattr(self, name)):
            # An action waits for its first layer; the others are gathered meanwhile.
            mean = [
                statistics.mean(getattr(self, name)[stage] for stage in stages) for stages in self._stages_of_ranks()
            ]
            scaled[name] = tuple(mean[divided._place(stage)] for stage in range(divided.stages))
        if self.reduction_ns:
            changes = zip(self.reduction_ns, self._parameters(), divided._parameters(), strict=True)
            scaled["reduction_ns"] = tuple(ns * after / before for ns, before, after in changes)
        return replace(divided, **scaled)  # type: ignore[arg-type]

    def shorten(self, saved_ns: Mapping[tuple[int, str], float]) -> "PipelineTiming":
        """Return the timing with actions shorter by so much, by stage and kind; a whole backward counts as input's.

        A stage can have both whole and divided backwards (dualpipev): what they save is taken as equal.
        """

        def without(times: Sequence[float], *kinds: str) -> tuple[float, ...]:
            by_stage = ([saved_ns.get((stage, kind)) for kind in kinds] for stage in range(self.stages))
            saved = (statistics.mean([ns for ns in by_kind if ns is not None] or [0.0]) for by_kind in by_stage)
            return tuple(max(0.0, ns - less) for ns, less in zip(times, saved, strict=True))

        return replace(
            self,
            forward_ns=without(self.forward_ns, FORWARD),
            input_ns=without(self.input_ns, INPUT_GRADIENT, BACKWARD),
            weight_ns=without(self.weight_ns, WEIGHT_GRADIENT),
        )

    def balanced_layers(self) -> tuple[int, ...]:
        """Return the layers per stage with which the busiest rank has least to do: one at a time to the least busy."""
        total = [sum(ns) for ns in zip(self.forward_ns, self.input_ns, self.weight_ns, strict=True)]
        layer_ns = self._layer_ns(total)
        counts, stages_of = [1] * self.stages, self._stages_of_ranks()

        def load_ns(stage: int) -> float:
            rank = self._place(stage)
            return layer_ns[rank] * (1 + sum(self._weight(other, counts[other]) for other in stages_of[rank]))

        for _ in range(sum(self.layers) - self.stages):
            counts[min(range(self.stages), key=lambda stage: (load_ns(stage), counts[stage], stage))] += 1
        return tuple(counts)

    def _weight(self, stage: int, layers: int) -> float:
        return layers + (self.head_layers if stage == self.stages - 1 else 0.0)

    def _layer_ns(self, times: Sequence[float]) -> list[float]:
        """Return the time of a layer on each rank."""
        return [
            sum(times[stage] for stage in stages) / weight
            for stages, weight in zip(self._stages_of_ranks(), self._rank_weights(), strict=True)
        ]

    def _rank_weights(self) -> list[float]:
        """Layer count of each rank, the head counted as the layers that take as long."""
        return [sum(self._weight(stage, self.layers[stage]) for stage in stages) for stages in self._stages_of_ranks()]

    def _parameters(self) -> list[float]:
        """Return the weights of each rank in layers: the first stage has an embedding as large as the head."""
        first = self._place(0)
        return [
            weight + (self.head_layers if rank == first else 0.0) for rank, weight in enumerate(self._rank_weights())
        ]

    def _place(self, stage: int) -> int:
        return pipeline_schedules.place_of(self.schedule, stage, self.shape.ranks)

    def _stages_of_ranks(self) -> list[tuple[int, ...]]:
        ranks = self.shape.ranks
        return [pipeline_schedules.stages_at(self.schedule, self.stages, ranks, rank) for rank in range(ranks)]

    def _made_ns(self, action: Action, done: Mapping[Action, float]) -> float | None:
        """Time when an action's input is computed; None while what makes it has not run."""
        source = self._source(action)
        if source is None:
            return 0.0
        kinds = (FORWARD,) if action.kind == FORWARD else (BACKWARD, INPUT_GRADIENT)
        times = (done.get(Action(source, kind, action.micro_batch)) for kind in kinds)
        return next((ns for ns in times if ns is not None), None)

    def _arrived_ns(self, action: Action, begun_ns: float, link_free_ns: dict[tuple[int, int], float]) -> float:
        """Arrival of an action's input, whose transfer can begin at `begun_ns`; notes when the link is free."""
        source = self._source(action)
        link = (-1 if source is None else self._place(source)), self._place(action.stage)
        if source is None or link[0] == link[1]:
            return 0.0
        usual_ns = statistics.median(self.transfer_ns.values()) if self.transfer_ns else 0.0
        arrived_ns = max(begun_ns, link_free_ns.get(link, 0.0)) + self.transfer_ns.get(link, usual_ns)
        link_free_ns[link] = arrived_ns
        return arrived_ns

    def _source(self, action: Action) -> int | None:
        """Return the stage whose result an action needs, if another one's."""
        source = action.stage + (-1 if action.kind == FORWARD else 1)
        return source if action.kind != WEIGHT_GRADIENT and 0 <= source < self.stages else None

    def _takes_ns(self, action: Action) -> float:
        stage = action.stage
        if action.kind == WEIGHT_GRADIENT:
            return self.weight_ns[stage]
        parts = {FORWARD: self.forward_ns[stage], INPUT_GRADIENT: self.input_ns[stage]}
        own_ns = parts.get(action.kind, self.input_ns[stage] + self.weight_ns[stage])
        exposed_ns = self.forward_exposed_ns if action.kind == FORWARD else self.backward_exposed_ns
        return own_ns + (exposed_ns[stage] if exposed_ns else 0.0)

    def _gather_ns(self, action: Action) -> float:
        """Time from the end of the action before it until an action has its weights."""
        if action.kind == WEIGHT_GRADIENT:
            return 0.0
        gather_ns = self.forward_gather_ns if action.kind == FORWARD else self.backward_gather_ns
        return gather_ns[action.stage] if gather_ns else 0.0


_TIMES = ("forward_ns", "input_ns", "weight_ns")
_GATHERS = ("forward_gather_ns", "backward_gather_ns")
_EXPOSED = ("forward_exposed_ns", "backward_exposed_ns")


def recorded_timing(run: Run) -> PipelineTiming:
    """Return the timing of a run's pipeline: means over steps, replicas and micro-batches.

    Raises InputError for a run without a pipeline, of an unknown schedule, or without numbers of layers.
    """
    stated = rank_places.pipeline_of(run.manifest)
    actions = run.table(pipeline_stages.staged_actions)
    if actions.is_empty():
        raise InputError(f"{run.path}: the traces have no actions of a pipeline schedule")
    if stated.schedule not in pipeline_schedules.SCHEDULES or not stated.stage_layers:
        schedules = ", ".join(pipeline_schedules.SCHEDULES)
        raise InputError(f"{run.path}: run.json does not state the layers of stages and a schedule out of {schedules}")
    ranks = actions.filter(pl.col("pipeline") == actions["pipeline"].min())["rank"].n_unique()
    stages = len(stated.stage_layers)
    shape = Shape(ranks, stages // ranks, int(actions["micro_batch"].n_unique()))
    if stages % ranks:
        raise InputError(f"{run.path}: run.json states {stages} stages; the traces have {ranks} ranks of a pipeline")
    if refusal := pipeline_schedules.refusal(stated.schedule, shape):
        raise InputError(f"{run.path}: {refusal}")
    mean = _mean_times(run)
    own_ns, gather, exposed = (
        {(stage, KINDS[action]): ns for stage, action, ns in mean.select("stage", "action", name).iter_rows()}
        for name in ("own_ns", "gather_ns", "exposed_ns")
    )
    backwards = {stage for stage, kind in own_ns if kind in (BACKWARD, INPUT_GRADIENT)}
    if missing := [stage for stage in range(stages) if (stage, FORWARD) not in own_ns or stage not in backwards]:
        raise InputError(f"{run.path}: the traces have no forward and backward of stage {units.ranges(missing)}")
    forward = tuple(own_ns[stage, FORWARD] for stage in range(stages))
    inputs, weights = zip(*(_backward(own_ns, stage) for stage in range(stages)), strict=True)

    per_action = [
        tuple(next(times[stage, kind] for kind in kinds if (stage, kind) in times) for stage in range(stages))
        for times in (gather, exposed)
        for kinds in ((FORWARD,), (BACKWARD, INPUT_GRADIENT))
    ]

    def place_of(stage: int) -> int:
        return pipeline_schedules.place_of(stated.schedule or "", stage, ranks)  # known: see above

    places = _places(run, place_of)
    return PipelineTiming(
        stated.schedule,
        shape,
        tuple(len(layers) for layers in stated.stage_layers),
        forward,
        inputs,
        weights,
        _transfer_ns(run, places),
        pipeline_balance.head_layers(run.manifest) or 0.0,
        **dict(zip((*_GATHERS, *_EXPOSED), per_action, strict=True)),
        reduction_ns=_reduction_ns(run, places, ranks),
        host_ns=_host_ns(run, places, ranks),
    )


def _places(run: Run, place_of: Callable[[int], int]) -> dict[int, int]:
    """Return the place in the pipeline of each rank."""
    stages = run.table(pipeline_stages.staged_actions).group_by("rank").agg(pl.col("stage").min())
    return {rank: place_of(stage) for rank, stage in stages.iter_rows()}


def _reduction_ns(run: Run, places: Mapping[int, int], ranks: int) -> tuple[float, ...]:
    """Return the exposed time of data-parallel collectives after the last action, by place: medians over steps."""
    key = ["window", "rank", "step"]
    actions = run.table(pipeline_stages.staged_actions)
    end_ns = pl.col("trace_start_ns") + pl.col("end_ns") - pl.col("start_ns")
    last = actions.group_by(key).agg(end_ns.max().alias("last_ns"))
    calls = run.table(pipeline_communication.data_parallel_calls)
    calls = calls.join(last, on=key, nulls_equal=True).filter(pl.col("end_ns") > pl.col("last_ns"))
    sums = last.join(calls.group_by(key).agg(pl.col("exposed_ns").sum()), on=key, how="left", nulls_equal=True)
    place = pl.col("rank").replace_strict(places, return_dtype=pl.Int64).alias("place")
    by_place = dict(sums.group_by(place).agg(pl.col("exposed_ns").fill_null(0).median()).iter_rows())
    return tuple(by_place.get(rank, 0.0) for rank in range(ranks))


def _mean_times(run: Run) -> pl.DataFrame:
    """Return the mean own_ns of each stage's actions, and what collectives add: gather_ns before, exposed_ns within.

    These two are medians: what a step gathers once shows at one micro-batch only.
    """
    return (
        _with_collectives(run)
        .group_by("stage", "action")
        .agg(
            ((pl.col("end_ns") - pl.col("start_ns")).mean() - pl.col("exposed_ns").median()).alias("own_ns"),
            pl.col("gather_ns", "exposed_ns").median(),
        )
    )


def _with_collectives(run: Run) -> pl.DataFrame:
    """Return the actions with previous_ns, the end of the rank's action before; null for the first of a step.

    And with idle_ns from then to the action, gather_ns and exposed_ns: see `_mean_times`.
    """
    previous_ns = pl.col("end_ns").shift().over("window", "rank", "step", "iteration", order_by="start_ns")
    actions = run.table(pipeline_stages.staged_actions).with_columns(previous_ns.alias("previous_ns"))
    idle_ns = actions.select((pl.col("start_ns") - pl.col("previous_ns")).clip(0).fill_null(0)).to_series()
    exposed = pipeline_communication.exposed_spans(run)
    gather_ns, exposed_ns = pipeline_communication.exposed_around(actions, idle_ns, exposed)
    return actions.with_columns(
        idle_ns.alias("idle_ns"), pl.Series("gather_ns", gather_ns), pl.Series("exposed_ns", exposed_ns)
    )


def _host_ns(run: Run, places: Mapping[int, int], ranks: int) -> tuple[float, ...]:
    """Return by place how long after an action the next one starts whose input is there: medians, without gathers.

    An input is there if the rank receives nothing meanwhile, but for the receives that it posts for later actions.
    """
    spans = run.table(pipeline_bubbles.transfer_spans).filter(pl.col("op") != "send")
    received = {
        key: intervals.from_table(table) for key, table in spans.partition_by("window", "rank", as_dict=True).items()
    }
    actions = _with_collectives(run)
    received_ns, _ = pipeline_communication.exposed_around(actions, actions["idle_ns"], received)
    is_there = pl.Series(received_ns) <= _POSTED_RATIO * actions["idle_ns"]
    place = pl.col("rank").replace_strict(places, return_dtype=pl.Int64).alias("place")
    late_ns = (pl.col("idle_ns") - pl.col("gather_ns")).clip(0).median()
    medians = actions.filter(is_there).drop_nulls("previous_ns").group_by(place).agg(late_ns)
    by_place = dict(medians.iter_rows())
    return tuple(by_place.get(rank, 0.0) for rank in range(ranks))


def _backward(times: Mapping[tuple[int, str], float], stage: int) -> tuple[float, float]:
    """Return the times of a stage's input and weight gradients; of a whole backward pass by what its products take."""
    if (stage, WEIGHT_GRADIENT) in times:
        return times[stage, INPUT_GRADIENT], times[stage, WEIGHT_GRADIENT]
    forward, both = times[stage, FORWARD], times[stage, BACKWARD]
    attention = max(0.0, both - 2 * forward) / _ATTENTION_BACKWARD
    weight = min(max(forward - attention, 0.2 * both), 0.5 * both)
    return both - weight, weight


_POSTED_RATIO = 0.1
"""Share of the time between two actions in which receives for later actions may be under way already."""
_ALONE = 0.1
"""This quantile of transfers had their link alone: activations and gradients share it where stages form a V."""


def _transfer_ns(run: Run, places: Mapping[int, int]) -> dict[tuple[int, int], float]:
    """Return the time of a transfer from a place to another: the shorter of a send and its receive."""
    spans = run.table(pipeline_bubbles.transfer_spans)
    sends, receives = (
        spans.filter(pl.col("op") == op).with_columns(
            number=pl.int_range(pl.len()).over("window", "rank", "peer", "step", order_by="start_ns")
        )
        for op in ("send", "recv")
    )
    pairs = sends.join(
        receives.select("window", "step", "number", rank="peer", peer="rank", other_ns="dur_ns"),
        on=["window", "step", "number", "rank", "peer"],
    )
    ends = [pl.col(end).replace_strict(places, default=None, return_dtype=pl.Int64) for end in ("rank", "peer")]
    of_link = (
        pairs.with_columns(ends).group_by("rank", "peer").agg(pl.min_horizontal("dur_ns", "other_ns").quantile(_ALONE))
    )
    return {(sender, receiver): ns for sender, receiver, ns in of_link.drop_nulls().iter_rows()}


def parsed_layers(text: str, timing: PipelineTiming) -> tuple[int, ...]:
    """Return the layers per stage that a text such as "3,3,2" or "balanced" gives. Raises InputError for others."""
    if text == "balanced":
        return timing.balanced_layers()
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(f"--stage-layers is {text!r}; it must be numbers such as 3,3,2, or balanced")
    layers = tuple(map(int, parts))
    if len(layers) != timing.stages or sum(layers) != sum(timing.layers):
        raise InputError(
            f"--stage-layers {text}: the run has {timing.stages} stages with {sum(timing.layers)} layers in all"
        )
    return layers


def equal_layers(total: int, stages: int) -> Iterator[int]:
    """Yield layers per stage, the first stages one more where they cannot be equal."""
    yield from (total // stages + (stage < total % stages) for stage in range(stages))
