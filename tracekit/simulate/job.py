"""What is simulated: a training job, and its impairments."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tracekit.conventions import strategies
from tracekit.errors import InputError
from tracekit.plan.hardware import Hardware
from tracekit.plan.models import Model
from tracekit.simulate import hybrid
from tracekit.simulate.hybrid import Hybrid

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
            hybrid.require_possible(
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
    def step_tokens(self) -> float:
        """Return the tokens of one step per GPU: those of a pipeline are shared by its GPUs."""
        sharing = 1 if self.hybrid is None else self.gpus // self.hybrid.data_ranks
        return self.tokens * self.micro_batches if sharing == 1 else self.tokens * self.micro_batches / sharing

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
