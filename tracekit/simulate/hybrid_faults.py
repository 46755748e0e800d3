"""The faults of hybrid jobs: along an axis of the mesh, in a stage, in the experts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tracekit.conventions import pipeline_schedules
from tracekit.conventions.strategies import DP_REPLICATE, DP_SHARD, EP, PP, TP
from tracekit.simulate import engine, fault_registry
from tracekit.simulate.fault_registry import Fault, impair, on_hardware, register
from tracekit.simulate.job import Impairments, Job, move_layers

FAULTS: dict[str, Fault] = {}
_fault = partial(register, FAULTS, plain=False, hybrid=True)


def _slow_ranks(job: Job) -> tuple[int, ...]:
    return tuple(sorted(job.impairments.slow_ranks))


def _largest_stage(job: Job) -> tuple[int, ...]:
    layers = job.mesh.stage_layers
    return (max(range(len(layers)), key=lambda stage: layers[stage]),)


@_fault(
    "slow-stage", "PIPE002", "[:STAGE[:FACTOR]]",
    "kernels of the ranks that run a stage (the second) take FACTOR times as long (1.5)", axis=PP, ranks=_slow_ranks,
    stages=lambda job: job.mesh.stages_of(_slow_ranks(job)[0]),
)  # fmt: skip
def _slow_stage(job: Job, args: Sequence[str]) -> Job:
    ranks = job.mesh.ranks_of(_stage(job, args, 1))
    return _slow_down(job, ranks, fault_registry.factor(args, 1, 1.5))


@_fault(
    "unbalanced-stages", "PIPE002", "[:STAGE[:LAYERS]]",
    "a stage (the second) has LAYERS more layers (1), taken from the others", axis=PP,
    ranks=lambda job: tuple(job.mesh.ranks_of(_largest_stage(job)[0])), stages=_largest_stage,
)  # fmt: skip
def _unbalanced_stages(job: Job, args: Sequence[str]) -> Job:
    layers = int(fault_registry.argument(args, 1, 1))
    return replace(job, hybrid=move_layers(job.mesh, stage=_stage(job, args, 1), layers=layers))


@_fault(
    "few-micro-batches", "PIPE003", "[:COUNT]",
    "the tokens of a step are divided into COUNT micro-batches (as many as --pp)", axis=PP,
)  # fmt: skip
def _few_micro_batches(job: Job, args: Sequence[str]) -> Job:
    count = fault_registry.count(args, lambda: job.mesh.layout.pp)
    _require_pipeline(job)
    if count >= job.micro_batches or job.micro_batches % count:
        raise ValueError(f"{count} is not a smaller number that divides --micro-batches {job.micro_batches}")
    return replace(job, micro_batches=count, batch=job.batch * job.micro_batches // count)


@_fault(
    "sharded-micro-batches", "PIPE004", "",
    "fsdp2 gathers weights for each action and reduces gradients for each micro-batch, as ZeRO stage 3", axis=DP_SHARD,
)  # fmt: skip
def _sharded_micro_batches(job: Job, args: Sequence[str]) -> Job:
    if args:
        raise ValueError("it takes no arguments")
    _require_pipeline(job)
    if not job.gathers_weights:
        raise ValueError("it needs --strategy fsdp2 and 2 or more ranks of data parallelism")
    return impair(job, gathers_every_micro_batch=True, reduces_every_micro_batch=True)


@_fault(
    "slow-pipeline-link", "PIPE005", "[:STAGE[:FACTOR]]",
    "transfers between a stage (the first) and the next one take FACTOR times as long (20)", axis=PP,
    ranks=lambda job: tuple(sorted(rank for stage in _boundary(job) for rank in job.mesh.ranks_of(stage))),
    stages=lambda job: _boundary(job),
)  # fmt: skip
def _slow_pipeline_link(job: Job, args: Sequence[str]) -> Job:
    stage = _stage(job, args, 0)
    if stage >= job.mesh.layout.pp - 1:
        raise ValueError(f"{stage} is not a stage with a next one on other ranks")
    return impair(job, slow_boundaries={stage: fault_registry.factor(args, 1, 20.0)})


@_fault(
    "slow-pipeline-links", "PIPE001", "[:FACTOR]",
    "transfers between all stages take FACTOR times as long (20), as without RDMA", axis=PP,
)  # fmt: skip
def _slow_pipeline_links(job: Job, args: Sequence[str]) -> Job:
    _require_pipeline(job)
    factor = fault_registry.factor(args, 0, 20.0)
    return impair(job, slow_boundaries=dict.fromkeys(range(job.mesh.layout.pp), factor))


@_fault(
    "read-each-action", "PIPE001", "[:DURATION]",
    "the host reads the result of each action of the schedule (.item()), which waits for the device, and processes it "
    "for DURATION (a quarter of a step over its actions) before it launches the next one",
    axis=PP,
)  # fmt: skip
def _read_each_action(job: Job, args: Sequence[str]) -> Job:
    _require_pipeline(job)
    return impair(job, action_read_ns=fault_registry.duration(args, lambda: _mean_action_ns(job) // 4))


@_fault(
    "slow-tensor-link", "TP002", "[:FACTOR]", "collectives of tensor parallelism take FACTOR times as long (6)", axis=TP
)
def _slow_tensor_link(job: Job, args: Sequence[str]) -> Job:
    _require_ranks(job.mesh.layout.tp, "--tp")
    return impair(job, slow_axes={TP: fault_registry.factor(args, 0, 6.0)})


@_fault("tp-across-nodes", "TP001", "", "nodes have half as many GPUs as --tp, so its groups span two nodes", axis=TP)
def _tp_across_nodes(job: Job, args: Sequence[str]) -> Job:
    if args:
        raise ValueError("it takes no arguments")
    ranks = job.mesh.layout.tp
    _require_ranks(ranks, "--tp")
    if ranks > job.hardware.gpus_per_node:
        raise ValueError("--tp spans nodes already")
    # Each GPU keeps its share of its node's network.
    share = job.hardware.network_bytes_per_s / job.hardware.gpus_per_node
    return on_hardware(job, gpus_per_node=ranks // 2, network_bytes_per_s=share * (ranks // 2))


@_fault(
    "hot-expert", "EP001", "[:EXPERT[:FACTOR]]",
    "an expert (the first) gets FACTOR times as many tokens as each other one (4)", axis=EP,
    ranks=lambda job: _ranks_of_hot_expert(job),
)  # fmt: skip
def _hot_expert(job: Job, args: Sequence[str]) -> Job:
    _require_ranks(job.mesh.layout.ep, "--ep")
    assert job.model.experts is not None
    expert = int(fault_registry.argument(args, 0, 0))
    if not 0 <= expert < job.model.experts.count:
        raise ValueError(f"{expert} is not one of {job.model.experts.count} experts")
    return impair(job, hot_expert=(expert, fault_registry.factor(args, 1, 4.0)))


@_fault(
    "late-node", "RANK004", "[:NODE[:FACTOR]]",
    "kernels of all ranks of a node (the second) take FACTOR times as long (1.3)", ranks=_slow_ranks,
)  # fmt: skip
def _late_node(job: Job, args: Sequence[str]) -> Job:
    nodes = job.gpus // job.node
    _require_ranks(nodes, "nodes")
    node = _number_argument(args, 1, nodes, "node")
    return _slow_down(job, range(node * job.node, (node + 1) * job.node), fault_registry.factor(args, 1, 1.3))


@_fault(
    "late-replica", "RANK004", "[:REPLICA[:FACTOR]]",
    "kernels of all ranks of a replica of the model (the second) take FACTOR times as long (1.3)", axis=DP_REPLICATE,
    ranks=_slow_ranks,
)  # fmt: skip
def _late_replica(job: Job, args: Sequence[str]) -> Job:
    layout = job.mesh.layout
    _require_ranks(layout.data_ranks, "data parallelism")
    replica = _number_argument(args, 1, layout.data_ranks, "replica")
    ranks = [rank for rank in range(job.gpus) if layout.data_rank(rank) == replica]
    return _slow_down(job, ranks, fault_registry.factor(args, 1, 1.3))


def _slow_down(job: Job, ranks: Sequence[int], factor: float) -> Job:
    return impair(job, slow_ranks={**job.impairments.slow_ranks, **dict.fromkeys(ranks, (factor, 0))})


def _stage(job: Job, args: Sequence[str], default: int) -> int:
    _require_pipeline(job)
    return _number_argument(args, default, job.mesh.stages, "stage")


def _number_argument(args: Sequence[str], default: int, count: int, what: str) -> int:
    text = fault_registry.argument(args, 0, default)
    if not text.isdecimal() or int(text) >= count:
        raise ValueError(f"{text!r} is not a {what} of {count}")
    return int(text)


def _require_pipeline(job: Job) -> None:
    _require_ranks(job.mesh.layout.pp, "--pp")


def _require_ranks(count: int, what: str) -> None:
    if count < 2:
        raise ValueError(f"it needs {what} of 2 or more")


def _mean_action_ns(job: Job) -> int:
    """Return the mean time of an action of the schedule, without faults."""
    healthy = replace(job, impairments=Impairments(), steps=1)
    actions = pipeline_schedules.order(job.mesh.schedule, job.mesh.shape(job.micro_batches), 0)
    return engine.total_ns(healthy) // len(actions)


def _boundary(job: Job) -> tuple[int, ...]:
    stage = next(iter(job.impairments.slow_boundaries))
    return stage, stage + 1


def _ranks_of_hot_expert(job: Job) -> tuple[int, ...]:
    assert job.model.experts is not None
    assert job.impairments.hot_expert is not None
    layout = job.mesh.layout
    index = job.impairments.hot_expert[0] // (job.model.experts.count // layout.ep)
    return tuple(sorted(ranks[index] for ranks in layout.groups(EP)))
