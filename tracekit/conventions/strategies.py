"""The ways to train one model on many ranks: what each rank stores per parameter and communicates per step.

This table is the only place that states it. The trainers' memory report, `tracekit plan`, the simulator, the what-if
replay and the detection of a trace's strategy ask it, each in its own layer. It imports the standard library only.

Sources: ZeRO's stages, their memory and traffic: arXiv 1910.02054, sections 5 and 7. DDP, FSDP1 and FSDP2: the PyTorch
documentation (torch.nn.parallel.DistributedDataParallel, torch.distributed.fsdp). ZeRO-1 in PyTorch:
torch.distributed.optim.ZeroRedundancyOptimizer, and a recording of it on two gloo ranks. YaFSDP:
https://github.com/yandex/YaFSDP. Rings: nccl-tests, doc/PERFORMANCE.md.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST = "all_gather", "reduce_scatter", "all_reduce", "broadcast"
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
FORWARD, BACKWARD, AFTER_OPTIMIZER = "forward", "backward", "after the optimizer's step"
PP, DP_REPLICATE, DP_SHARD, CP, EP, TP = "pp", "dp_replicate", "dp_shard", "cp", "ep", "tp"
AXES = (PP, DP_REPLICATE, DP_SHARD, CP, TP)
"""The axes of the mesh, outermost first: consecutive ranks differ in tp. ep is none: it divides dp_shard × cp."""

GATHERED_BYTES, REDUCED_BYTES = 2, 4
"""Per parameter of mixed precision: weights are gathered in 16 bits, gradients reduced in 32."""

RING_PASSES: Mapping[str, int] = {ALL_GATHER: 1, REDUCE_SCATTER: 1, ALL_REDUCE: 2, BROADCAST: 1}
"""How often a ring passes a message around: an all-reduce is a reduce-scatter and an all-gather."""


@dataclass(frozen=True)
class Layout:
    """The mesh: how many ranks lie along each of its axes. The product is the world size.

    `ep` is no axis of it: the ranks of dp_shard × cp (with the same pp, dp_replicate and tp) are divided into groups of
    `ep` that share the experts.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        wrong = [f"{axis} = {size}" for axis, size in asdict(self).items() if size < 1]
        if wrong:
            raise ValueError(f"every mesh axis needs 1 rank or more, not {', '.join(wrong)}")
        if self.dp_shard * self.cp % self.ep:
            raise ValueError(f"ep = {self.ep} does not divide dp_shard × cp = {self.dp_shard * self.cp}")

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the ranks along each axis of the mesh, outermost first; without ep, which is no axis of it."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def data_ranks(self) -> int:
        """Return the number of batches that the ranks train on at a time: pp, cp and tp divide the work on one."""
        return self.dp_replicate * self.dp_shard

    def coordinate(self, rank: int) -> Mapping[str, int]:
        """Return the place of a rank along each axis of the mesh.

        >>> Layout(pp=2, dp_shard=2, tp=2).coordinate(5)
        {'pp': 1, 'dp_replicate': 0, 'dp_shard': 0, 'cp': 0, 'tp': 1}
        """
        places = {}
        for axis in reversed(AXES):
            rank, places[axis] = divmod(rank, self.sizes[axis])
        return {axis: places[axis] for axis in AXES}

    def data_rank(self, rank: int) -> int:
        """Return the number of a rank's batch among the `data_ranks` ones.

        >>> [Layout(pp=2, dp_shard=2, tp=2).data_rank(rank) for rank in range(8)]
        [0, 0, 1, 1, 0, 0, 1, 1]
        """
        place = self.coordinate(rank)
        return place[DP_REPLICATE] * self.dp_shard + place[DP_SHARD]

    def groups(self, axis: str) -> list[list[int]]:
        """Return the ranks of each group along an axis, or of each group that shares the experts.

        >>> Layout(pp=2, dp_shard=2).groups("pp"), Layout(dp_shard=4, tp=2, ep=2).groups("ep")
        ([[0, 2], [1, 3]], [[0, 2], [1, 3], [4, 6], [5, 7]])
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = dict(self.coordinate(rank))
            if axis == EP:
                place[EP] = (place.pop(DP_SHARD) * self.cp + place.pop(CP)) // self.ep
            else:
                place.pop(axis)
            groups.setdefault(tuple(place.values()), []).append(rank)
        return sorted(groups.values())


@dataclass(frozen=True)
class Collective:
    """A collective of each unit: of a unit's weights or gradients, or of a rank's shard of them, in one pass."""

    op: str
    tensor: str
    when: str
    axis: str = DP_SHARD
    of_shard: bool = False

    @property
    def traffic_factor(self) -> int:
        """Return the bytes that a rank sends per byte of the message; (n − 1)/n is taken as 1."""
        return RING_PASSES[self.op]


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of weights, gradients and optimizer state, before they are divided among ranks."""

    parameters: int
    gradients: int
    optimizer: int


MIXED_ADAM = StateBytes(parameters=2, gradients=2, optimizer=12)
"""Mixed-precision Adam: 2-byte weights and gradients; 4-byte master weights and both moments."""
FP32_SHARDS_ADAM = StateBytes(parameters=6, gradients=4, optimizer=8)
"""4-byte weights and a 2-byte copy to send, 4-byte gradients, both moments."""


@dataclass(frozen=True)
class Strategy:
    """One way to train in parallel.

    `sharded` names the state that is divided among ranks, out of PARAMETERS, GRADIENTS and OPTIMIZER; the rest is
    replicated. `weight_buffers` and `gradient_buffers` are allocated once, each as large as the largest unit; 0 means
    that each unit allocates its own. `span_prefix` starts the names of the spans that only this strategy records.
    `trained`, `simulated` and `replayed` say where it is implemented: the trainers, `tracekit simulate`, what-if.
    """

    name: str
    label: str
    sharded: frozenset[str]
    collectives: tuple[Collective, ...]
    state_bytes: StateBytes = MIXED_ADAM
    weight_buffers: int = 0
    gradient_buffers: int = 0
    high_priority: bool = False
    """Whether communication runs on streams of high priority."""
    span_prefix: str = ""
    aliases: tuple[str, ...] = ()
    trained: bool = True
    simulated: bool = True
    replayed: bool = False

    @property
    def shards_parameters(self) -> bool:
        """Return whether weights are gathered before use."""
        return PARAMETERS in self.sharded

    @property
    def is_hybrid(self) -> bool:
        """Return whether shards are replicated, and all-reduced among their replicas."""
        return any(collective.of_shard for collective in self.collectives)

    def traffic_factor(self, micro_batches: int = 1) -> int:
        """Units' sizes that a rank sends in a step: 2 for DDP and the stages ZeRO-1 and 2, 3 for ZeRO-3.

        What is divided among ranks is not stored whole between micro-batches: m of them send m + 1 under ZeRO-2, and
        3 m under ZeRO-3, with a pipeline as without.
        """
        return sum(
            collective.traffic_factor * (micro_batches if self.is_repeated(collective) else 1)
            for collective in self.collectives
            if not collective.of_shard
        )

    def sent_bytes(
        self,
        parameters: float,
        *,
        ranks: int,
        micro_batches: int = 1,
        reduces_each: bool = True,
        still_gathered: float = 0.0,
        replicas: int = 1,
        gathered_bytes: int = GATHERED_BYTES,
        reduced_bytes: int = REDUCED_BYTES,
    ) -> float:
        """Bytes that a rank sends in a step over rings, (n − 1)/n of a message per pass among n ranks.

        `ranks` divide the parameters, or replicate them; shards are all-reduced over `replicas`. `still_gathered`
        parameters need no second gather for backward: those of the root, which stays gathered, and of the layers whose
        weights the buffers still have. Sharded gradients are reduced in each micro-batch, or after the last one.
        """
        sent = 0.0
        for collective in self.collectives:
            is_gradient = collective.tensor == GRADIENTS
            is_second_gather = not is_gradient and collective.when == BACKWARD
            elements = parameters - still_gathered if is_second_gather else parameters
            members = replicas if collective.of_shard else ranks
            if collective.of_shard:
                elements /= ranks
            is_repeated = self.is_repeated(collective) and (reduces_each or not is_gradient)
            messages_bytes = elements * (reduced_bytes if is_gradient else gathered_bytes)
            times = micro_batches if is_repeated else 1
            sent += messages_bytes * collective.traffic_factor * times * (members - 1) / members
        return sent

    def is_repeated(self, collective: Collective) -> bool:
        """Whether a collective runs for every micro-batch: that of weights or gradients that ranks divide."""
        return collective.when != AFTER_OPTIMIZER and collective.tensor in self.sharded

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of all buffers that are allocated once, per parameter of the largest unit."""
        return GATHERED_BYTES * self.weight_buffers + REDUCED_BYTES * self.gradient_buffers

    def per_rank(self, kind: str, parameters: float, ranks: int) -> float:
        """Return the elements of PARAMETERS, GRADIENTS or OPTIMIZER that each of `ranks` stores."""
        return parameters / ranks if kind in self.sharded else parameters


DP = "dp"
"""Data parallelism, where the name does not say whether parameters are sharded."""

_BY_MESH_NAME = {
    "pp": PP, "pipe": PP, "pipeline": PP, "tp": TP, "tensor": TP, "model": TP, "cp": CP, "context": CP, "ep": EP,
    "expert": EP, "dp": DP, "data": DP, "ddp": DP, "fsdp": DP_SHARD, "shard": DP_SHARD, "dp_shard": DP_SHARD,
    "replicate": DP_REPLICATE, "dp_replicate": DP_REPLICATE, "etp": TP, "efsdp": "dp_expert", "ep_shard": "dp_expert",
    "dp_shard_in_ep": "dp_expert", "dp_shard_mod_ep": "dp_expert", "dp_shard_of_experts": "dp_expert",
    "loss": "dp_cp", "loss_mesh": "dp_cp",
}  # fmt: skip
_UNNAMED = re.compile(r"^(dim_\d+|default)$")
"""What stands after "mesh_" where a mesh has no names of dims, or a dim is all ranks."""
_BY_MEGATRON_NAME = (
    (r"embedding", "embedding"),
    (r"expert_(tensor_and_model|tensor_model_pipeline)", "ep_tp"),
    (r"expert_data|data_modulo_expert", "dp_expert"),
    (r"expert_tensor", TP),
    (r"expert_model", EP),
    (r"tensor_and_data|tensor_data", "dp_tp"),
    (r"tensor_and_context", "cp_tp"),
    (r"pipeline_model_parallel|pipe_parallel", PP),
    (r"tensor_model_parallel", TP),
    (r"context_parallel", CP),
    (r"data_parallel", DP),
    (r"^model_parallel", "mp"),
)
JOINT = frozenset({"batch", "embedding", "ep_tp", "dp_expert", "dp_cp", "dp_tp", "cp_tp", "mp"})
"""Names of groups that are no axis of the mesh: over several axes, or over a part of one."""


def ring_hops(op: str, ranks: int) -> int:
    """Return the hops of a ring; per hop it carries 1/ranks of the message.

    >>> ring_hops("all_gather", 8), ring_hops("all_reduce", 8)
    (7, 14)
    """
    return RING_PASSES[op] * (ranks - 1)


def axis_of_description(description: str | None) -> str | None:
    """Return the axis that a group's description names; None if it names none.

    >>> axis_of_description("mesh_dp_shard"), axis_of_description("TENSOR_MODEL_PARALLEL_GROUP")
    ('dp_shard', 'tp')
    >>> axis_of_description("mesh_efsdp"), axis_of_description("mesh_dim_0")
    ('dp_expert', None)
    """
    text = (description or "").lower()
    if text.startswith("mesh_"):
        name = text.removeprefix("mesh_")
        return None if _UNNAMED.match(name) else _BY_MESH_NAME.get(name, name)
    if text in _BY_MESH_NAME:
        return _BY_MESH_NAME[text]
    return next((axis for pattern, axis in _BY_MEGATRON_NAME if re.search(pattern, text)), None)


_ALL = frozenset({PARAMETERS, GRADIENTS, OPTIMIZER})
_GATHER_TWICE = (
    Collective(ALL_GATHER, PARAMETERS, FORWARD),
    Collective(ALL_GATHER, PARAMETERS, BACKWARD),
    Collective(REDUCE_SCATTER, GRADIENTS, BACKWARD),
)
_ZERO = (Collective(REDUCE_SCATTER, GRADIENTS, BACKWARD), Collective(ALL_GATHER, PARAMETERS, AFTER_OPTIMIZER))
DDP = Strategy(
    "ddp",
    "weights on every rank, gradients all-reduced layer by layer",
    frozenset(),
    (Collective(ALL_REDUCE, GRADIENTS, BACKWARD, DP_REPLICATE),),
    span_prefix="DistributedDataParallel.",
    aliases=("zero0", "DDPStrategy"),
)
ZERO1 = Strategy(
    "zero1",
    "DDP whose optimizer state is sharded, by whole parameters: torch's ZeroRedundancyOptimizer",
    frozenset({OPTIMIZER}),
    (*DDP.collectives, Collective(BROADCAST, PARAMETERS, AFTER_OPTIMIZER, DP_REPLICATE)),
    simulated=False,
)
# As the paper, DeepSpeed and Megatron do it; torch all-reduces gradients although a rank needs only a part of them.
ZERO1_SCATTERED = Strategy(
    "zero1-scattered",
    "ZeRO-1 whose gradients are reduce-scattered to the ranks that step them",
    frozenset({OPTIMIZER}),
    _ZERO,
    trained=False,
    simulated=False,
)
ZERO2 = Strategy(
    "zero2",
    "ZeRO-1 whose gradients are sharded, too",
    frozenset({GRADIENTS, OPTIMIZER}),
    _ZERO,
    trained=False,
    simulated=False,
)
FSDP1 = Strategy(
    "fsdp1",
    "FullyShardedDataParallel: gradients prepared on the stream that reduces them",
    _ALL,
    _GATHER_TWICE,
    span_prefix="FullyShardedDataParallel.",
    aliases=("FSDPStrategy",),
)
FSDP2 = Strategy(
    "fsdp2",
    "fully_shard: gradients packed on the compute stream, the host never blocked",
    _ALL,
    _GATHER_TWICE,
    high_priority=True,
    span_prefix="FSDP::",
    aliases=("zero3",),
    replayed=True,
)
# The trainers' fsdp2, fsdp1 and yafsdp with --replicate; a trace of it has FSDP2's spans.
HSDP = Strategy(
    "hsdp",
    "fully_shard inside a node, all-reduce across nodes",
    _ALL,
    (*_GATHER_TWICE, Collective(ALL_REDUCE, GRADIENTS, BACKWARD, DP_REPLICATE, of_shard=True)),
    high_priority=True,
    trained=False,
    replayed=True,
)
YAFSDP = Strategy(
    "yafsdp",
    "this project's YaFSDP: double-buffered weights and gradients, gradients prepared on the compute stream",
    _ALL,
    _GATHER_TWICE,
    FP32_SHARDS_ADAM,
    weight_buffers=2,
    gradient_buffers=2,
    high_priority=True,
    span_prefix="YaFSDP::",
    replayed=True,
)
YAFSDP_V1 = replace(
    YAFSDP,
    name="yafsdp-v1",
    label="YaFSDP as published in May 2024: deferred reduce-scatters, the cast on the communication stream",
    span_prefix="",
    trained=False,
    replayed=False,
)
STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy for strategy in (DDP, ZERO1, ZERO1_SCATTERED, ZERO2, FSDP1, FSDP2, HSDP, YAFSDP, YAFSDP_V1)
}
ZERO_STAGES = (DDP, ZERO1_SCATTERED, ZERO2, FSDP2)
"""By ZeRO stage, 0 to 3."""
ALIASES: Mapping[str, Strategy] = {alias: strategy for strategy in STRATEGIES.values() for alias in strategy.aliases}
