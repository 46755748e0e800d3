"""The layout of a hybrid job: its mesh, its pipeline's stages, and what is refused."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from tracekit.conventions import pipeline_schedules, strategies
from tracekit.conventions.strategies import AXES, DP_REPLICATE, DP_SHARD, EP, PP, TP, Layout
from tracekit.errors import InputError
from tracekit.plan.models import Model

STRATEGIES = tuple(strategy.name for strategy in (strategies.DDP, strategies.ZERO1, strategies.FSDP2))
"""Data parallelism of each stage."""
EXPERT_DATA = "dp_shard_of_experts"
"""The axis of the ranks that hold the same experts."""


@dataclass(frozen=True)
class Hybrid:
    """How a job is laid out on its ranks.

    `stage_layers` are the numbers of layers of each stage; which place of the pp axis runs which stages,
    the schedule says.
    """

    layout: Layout
    schedule: str = pipeline_schedules.ONE_F_ONE_B
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] = ()
    sequence_parallel: bool = False
    rank_order: tuple[str, ...] = ()
    """Axes by which ranks are placed on nodes, innermost first; the rest follow as ranks are numbered. Such a job is
    simulated, but not written: traces say that consecutive ranks share a node."""

    @cached_property
    def data_axis(self) -> str:
        """Return the mesh axis of data parallelism."""
        return DP_SHARD if self.layout.dp_shard > 1 else DP_REPLICATE

    @property
    def data_ranks(self) -> int:
        """Return the ranks along the axis of data parallelism."""
        return self.layout.dp_shard * self.layout.dp_replicate

    @property
    def stages(self) -> int:
        """Return the stages of the pipeline."""
        return self.layout.pp * self.virtual_stages

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank runs."""
        place = self.layout.coordinate(rank)[PP]
        return pipeline_schedules.stages_at(self.schedule, self.stages, self.layout.pp, place)

    def layers_of(self, stage: int) -> range:
        """Return the layers of a stage."""
        first = sum(self.stage_layers[:stage])
        return range(first, first + self.stage_layers[stage])

    def ranks_of(self, stage: int) -> list[int]:
        """Return the ranks that run a stage."""
        place = self._place_of(stage)
        return [rank for rank in range(self.layout.world_size) if self.layout.coordinate(rank)[PP] == place]

    def peer(self, rank: int, stage: int) -> int:
        """Return the rank that runs another stage of the same micro-batches: it is at the same place otherwise."""
        inner = self.layout.world_size // self.layout.pp
        return self._place_of(stage) * inner + rank % inner

    def slot(self, rank: int) -> int:
        """Return the number of a rank's GPU, nodes having consecutive ones."""
        number, stride, places = 0, 1, self.layout.coordinate(rank)
        for axis in dict.fromkeys((*self.rank_order, *reversed(AXES))):
            number += stride * places[axis]
            stride *= self.layout.sizes[axis]
        return number

    def _place_of(self, stage: int) -> int:
        return pipeline_schedules.place_of(self.schedule, stage, self.layout.pp)

    def shape(self, micro_batches: int) -> pipeline_schedules.Shape:
        """Return the size of the pipeline."""
        return pipeline_schedules.Shape(self.layout.pp, self.virtual_stages, micro_batches)


def equal_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage: the first stages have one more where they cannot be equal.

    >>> equal_stages(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(layers // stages + (1 if stage < layers % stages else 0) for stage in range(stages))


def laid_out(
    *,
    gpus: int,
    model: Model,
    pp: int = 1,
    tp: int = 1,
    ep: int = 1,
    shards_data: bool = False,
    schedule: str = pipeline_schedules.ONE_F_ONE_B,
    virtual_stages: int | None = None,
    sequence_parallel: bool = False,
) -> Hybrid:
    """Return the layout of so many GPUs, with equal stages; what pp and tp leave is data parallelism.

    By default a rank has as many stages as its schedule needs.

    Raises InputError where the sizes do not divide.
    """
    if gpus % (pp * tp) or min(pp, tp, ep) < 1:
        raise InputError(f"--pp {pp} × --tp {tp} does not divide --gpus {gpus}")
    data = gpus // (pp * tp)
    if data % ep:
        raise InputError(f"--ep {ep} does not divide the {data} ranks of data parallelism (--gpus / (--pp × --tp))")
    on_shards = shards_data or ep > 1
    layout = Layout(pp=pp, tp=tp, ep=ep, dp_shard=data if on_shards else 1, dp_replicate=1 if on_shards else data)
    stages = virtual_stages or pipeline_schedules.usual_stages_per_rank(schedule)
    return Hybrid(layout, schedule, stages, equal_stages(model.layers, pp * stages), sequence_parallel)


def require_possible(
    hybrid: Hybrid, *, model: Model, strategy: str, gpus: int, micro_batches: int, checkpoint_layers: int
) -> None:
    """Raise InputError where a layout is not possible, or is not simulated."""
    layout, experts = hybrid.layout, model.experts
    shards_weights = strategy == strategies.FSDP2.name
    refusal = pipeline_schedules.refusal(hybrid.schedule, hybrid.shape(micro_batches))
    checks: Sequence[tuple[bool, str]] = (
        (strategy not in STRATEGIES, f"--strategy {strategy} with a layout; use one of: {', '.join(STRATEGIES)}"),
        (
            shards_weights and hybrid.schedule in pipeline_schedules.SPLIT_BACKWARD,
            f"--strategy fsdp2 with --schedule {hybrid.schedule} is not simulated: trained so, gradients are wrong",
        ),
        (
            shards_weights and layout.dp_replicate > 1,
            "--strategy fsdp2 needs the ranks of data parallelism on the axis dp_shard",
        ),
        (layout.world_size != gpus, f"the layout has {layout.world_size} ranks; --gpus is {gpus}"),
        (layout.cp > 1, "context parallelism is not simulated"),
        (checkpoint_layers > 0, "--checkpoint-layers is not simulated with --pp, --tp or --ep"),
        (hybrid.virtual_stages > 1 and layout.pp == 1, f"--schedule {hybrid.schedule} needs --pp 2 or more"),
        (refusal is not None, refusal or ""),
        (
            len(hybrid.stage_layers) != hybrid.stages or min(hybrid.stage_layers, default=0) < 1,
            f"{hybrid.stages} stages need a layer each; there are {model.layers} layers",
        ),
        (model.heads % layout.tp > 0, f"--tp is {layout.tp}; {model.name} has {model.heads} heads"),
        (layout.ep > 1 and experts is None, f"--ep is {layout.ep}; {model.name} has no experts"),
        (
            experts is not None and experts.count % layout.ep > 0,
            f"--ep {layout.ep} does not divide the experts of {model.name}",
        ),
        (hybrid.sequence_parallel and layout.tp == 1, "--sequence-parallel needs --tp 2 or more"),
    )
    for is_wrong, message in checks:
        if is_wrong:
            raise InputError(message)


def groups_of(hybrid: Hybrid) -> dict[str, list[list[int]]]:
    """Return the ranks of each group with more than one rank, by axis, those that share experts included."""
    layout = hybrid.layout
    by_axis = {axis: layout.groups(axis) for axis in (*AXES, EP)}
    if layout.ep > 1:
        by_axis[EXPERT_DATA] = _same_experts(layout)
    return {axis: groups for axis, groups in by_axis.items() if len(groups[0]) > 1}


def _same_experts(layout: Layout) -> list[list[int]]:
    """Return the ranks that hold the same experts: at the same place of their groups of experts."""
    by_place: dict[tuple[int, ...], list[int]] = {}
    for members in layout.groups(EP):
        for index, rank in enumerate(members):
            place = layout.coordinate(rank)
            by_place.setdefault((place[PP], place[DP_REPLICATE], place[TP], index), []).append(rank)
    return list(by_place.values())


def manifest(hybrid: Hybrid, micro_batches: int) -> dict[str, Any]:
    """Return the fields of run.json about a layout, as the trainers write it."""
    layout = hybrid.layout
    sizes = {axis: size for axis, size in layout.sizes.items() if size > 1} or {DP_REPLICATE: 1}
    stated: dict[str, Any] = {
        "mesh": {"axes": list(sizes), "shape": list(sizes.values())},
        "layout": asdict(layout),
        "groups": {axis: groups for axis, groups in groups_of(hybrid).items() if axis != EXPERT_DATA},
    }
    if layout.pp > 1:
        stated["pipeline"] = {
            "schedule": hybrid.schedule,
            "stages": hybrid.stages,
            "virtual_stages": hybrid.virtual_stages,
            "micro_batches": micro_batches,
            "stage_ranks": [hybrid.ranks_of(stage) for stage in range(hybrid.stages)],
            "stage_layers": [list(hybrid.layers_of(stage)) for stage in range(hybrid.stages)],
        }
    return stated


def move_layers(hybrid: Hybrid, *, stage: int, layers: int) -> Hybrid:
    """Return the layout with `layers` more layers in a stage, one from each of the others in turn, the last first.

    Raises ValueError where the others have not as many to give.
    """
    counts = list(hybrid.stage_layers)
    for _ in range(layers):
        giver = max((other for other in range(len(counts)) if other != stage), key=lambda other: (counts[other], other))
        if counts[giver] < 2:
            raise ValueError(f"no stage has a layer to give to stage {stage}")
        counts[giver] -= 1
        counts[stage] += 1
    return replace(hybrid, stage_layers=tuple(counts))
