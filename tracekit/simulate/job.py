"""What is simulated: a training job, its layout on the ranks, and its impairments."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from tracekit.conventions import pipeline_schedules, strategies
from tracekit.conventions.strategies import AXES, DP_REPLICATE, DP_SHARD, EP, PP, TP, Layout
from tracekit.errors import InputError
from tracekit.plan.hardware import Hardware
from tracekit.plan.models import Model

HYBRID_STRATEGIES = tuple(strategy.name for strategy in (strategies.DDP, strategies.ZERO1, *strategies.ZERO_STAGES[1:]))
"""Data parallelism of each stage: ZeRO's stages 0 to 3, and torch's form of stage 1."""
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


STRATEGIES: Mapping[str, str] = {
    strategy.name: strategy.label for strategy in strategies.STRATEGIES.values() if strategy.simulated
}
DDP, FSDP1, FSDP2, HSDP, YAFSDP, YAFSDP_V1 = STRATEGIES


@dataclass(frozen=True)
class Impairments:
    """Faults of a job beyond its strategy's own cost. The default is none.

    Factors are 1 where nothing is slower; times are in ns; steps count from 0.
    """

    slow_ranks: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    """By rank: how many times as long its kernels take, and from which step on."""
    throttled_ranks: tuple[int, ...] = ()
    """Slow ranks whose GPU runs at a lower clock; the others have more work."""
    slow_links: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    """By rank: how many times as long the collectives through its network link take, and from which step on."""
    launch_delay_ns: int = 0
    """Host time lost in Python before each layer's forward pass."""
    host_read_ns: int | None = None
    """Host time to process each layer's output, after a read that waits for the device; None: no read."""
    action_read_ns: int | None = None
    """With a pipeline: host time to process the result of each action, after a read that waits for the device, and
    before the next action is launched; None: no read."""
    data_stall_ns: int = 0
    """Wait for each batch, during which nothing is launched."""
    host_stalls: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By rank: in which step its host stops once, between forward and backward, and for how long."""
    stalled_collective: tuple[int, int] | None = None
    """The step whose first collective takes longer although all ranks have arrived, and by how much."""
    save_ns: int = 0
    """How long a checkpoint blocks training after `save_step`."""
    save_step: int = 0
    retry_steps: tuple[int, ...] = ()
    """Steps in which the allocator frees its cache and allocates memory again."""
    retry_cuda_calls: int = 24
    prefetches: bool = True
    shares_queue: bool = False
    """Whether all streams are fed by one queue, so that no kernel starts before all launched earlier have started."""
    collectives_per_unit: int = 1
    reduces_every_micro_batch: bool = False
    gathers_every_micro_batch: bool = False
    """With a layout: whether sharded weights are freed after each action and gathered again for the next one."""
    prepares_on_communication: bool = False
    """Whether gradients are cast and divided on the communication stream where the strategy doesn't do so."""
    ideal_links: bool = False
    """Whether collectives take no time: to find what communication costs."""
    ideal_host: bool = False
    """Whether the host takes no time: to find what launching late costs."""
    extra_checkpointed_layers: int = 0
    """Layers that recompute although their activations fit into memory."""
    slow_boundaries: Mapping[int, float] = field(default_factory=dict)
    """By stage: how many times as long the transfers between it and the next one take."""
    slow_axes: Mapping[str, float] = field(default_factory=dict)
    """By mesh axis: how many times as long its collectives take."""
    hot_expert: tuple[int, float] | None = None
    """An expert, and how many times as many tokens as the others it gets."""


@dataclass(frozen=True)
class Job:
    """A training job: `batch` sequences of `seq` tokens per GPU and micro-batch, in `steps` recorded steps.

    Raises InputError for an invalid job, or one that does not fit into memory.
    """

    strategy: str
    model: Model
    hardware: Hardware
    gpus: int
    seq: int
    batch: int = 1
    micro_batches: int = 1
    checkpoint_layers: int = 0
    steps: int = 3
    seed: int = 0
    ranks_written: int = 8
    step_overhead_ns: int = 0
    """Additional device time of every step: logging, clipping, optimizer launches."""
    impairments: Impairments = field(default_factory=Impairments)
    device_metrics: bool = False
    """Whether the metrics log has counters of the GPUs."""
    hybrid: Hybrid | None = None
    """How pipeline, tensor and expert parallelism are laid out; None: data parallelism only."""

    def __post_init__(self) -> None:
        if self.hybrid is None and self.strategy not in STRATEGIES:
            raise InputError(f"{self.strategy!r} is not a strategy; known: {', '.join(STRATEGIES)}")
        if not self.model.is_plain and (self.hybrid is None or not self.model.has_simulated_layers):
            raise InputError(f"{self.model.name} cannot be simulated: only Llama-style models without experts can")
        for name in ("gpus", "seq", "batch", "micro_batches", "steps", "ranks_written"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be 1 or more")
        if self.gpus < 2:
            raise InputError("--gpus is 1; a sharded step needs 2 or more")
        if not 0 <= self.checkpoint_layers <= self.model.layers:
            raise InputError(f"--checkpoint-layers is {self.checkpoint_layers}; there are {self.model.layers} layers")
        if self.strategy == HSDP and (self.gpus % self.node or self.gpus == self.node):
            raise InputError(
                f"--strategy hsdp needs several full nodes of {self.hardware.gpus_per_node} GPUs; --gpus is {self.gpus}"
            )
        if self.hybrid is not None:
            require_possible(
                self.hybrid,
                model=self.model,
                strategy=self.strategy,
                gpus=self.gpus,
                micro_batches=self.micro_batches,
                checkpoint_layers=self.checkpoint_layers,
            )

    @property
    def mesh(self) -> Hybrid:
        """Return the layout of a job that has one."""
        assert self.hybrid is not None
        return self.hybrid

    @property
    def tokens(self) -> int:
        """Return the tokens of one micro-batch on one GPU."""
        return self.batch * self.seq

    @property
    def step_tokens(self) -> int:
        """Return the tokens of one step, all GPUs together: those along other axes than data share a batch."""
        data_ranks = self.gpus if self.hybrid is None else self.hybrid.data_ranks
        return self.tokens * self.micro_batches * data_ranks

    @property
    def node(self) -> int:
        """Return the number of GPUs of a node that the job uses."""
        return min(self.hardware.gpus_per_node, self.gpus)

    @property
    def shards(self) -> int:
        """Return over how many ranks a unit is sharded: 1 for DDP."""
        strategy = strategies.STRATEGIES[self.strategy]
        if not strategy.shards_parameters:
            return 1
        return self.node if strategy.is_hybrid else self.gpus

    @property
    def gathers_weights(self) -> bool:
        """Return whether, with a layout, a rank keeps shards of its stages' weights only, and gathers them to use."""
        sharded = strategies.STRATEGIES[self.strategy].shards_parameters
        return self.hybrid is not None and sharded and self.hybrid.data_ranks > 1

    @property
    def recomputed_layers(self) -> int:
        """Return the number of layers that recompute their activations, counted from the first."""
        return min(self.checkpoint_layers + self.impairments.extra_checkpointed_layers, self.model.layers)

    @property
    def simulated_ranks(self) -> tuple[int, ...]:
        """Return the ranks that are simulated one by one: those written, and those with impairments.

        The others are assumed to be as fast as the fastest of these: no rank waits for them. With a layout, all are
        simulated.
        """
        if self.hybrid is not None:
            return tuple(range(self.gpus))
        impaired = {*self.impairments.slow_ranks, *self.impairments.slow_links}
        return tuple(sorted({*range(min(self.ranks_written, self.gpus)), *impaired}))

    @property
    def written_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose traces are written."""
        return tuple(range(min(self.ranks_written, self.gpus))) if self.hybrid is not None else self.simulated_ranks


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
        (
            strategy not in HYBRID_STRATEGIES,
            f"--strategy {strategy} with a layout; use one of: {', '.join(HYBRID_STRATEGIES)}",
        ),
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
        # The ranks that hold the same experts: at the same place of their groups of experts.
        by_place: dict[tuple[int, ...], list[int]] = {}
        for members in layout.groups(EP):
            for index, rank in enumerate(members):
                place = layout.coordinate(rank)
                by_place.setdefault((place[PP], place[DP_REPLICATE], place[TP], index), []).append(rank)
        by_axis[EXPERT_DATA] = list(by_place.values())
    return {axis: groups for axis, groups in by_axis.items() if len(groups[0]) > 1}


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
