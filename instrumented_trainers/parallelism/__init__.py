"""Ways to train a model over ranks, one module each: ``shard(model, mesh, options) -> model``.

A model is any module with `layers`, an nn.ModuleList; it knows nothing of parallelism. Here is also
what else a loop needs, the same for all strategies.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from instrumented_trainers.parallelism import ddp, fsdp1, fsdp2, yafsdp, zero1
from instrumented_trainers.parallelism.combined_optimizer import CombinedOptimizer
from instrumented_trainers.parallelism.gradient_sync import accumulate, clip_grad_norm
from instrumented_trainers.parallelism.mesh import axis_mesh, data_mesh, make_mesh
from instrumented_trainers.parallelism.meta_init import SHARDS_ON_META, materialize
from instrumented_trainers.parallelism.model_axes import ModelAxes
from instrumented_trainers.parallelism.options import ShardOptions
from instrumented_trainers.parallelism.pipeline import PipelineModel, PipelinePlan, ReplicatedPart, Zero1Part
from instrumented_trainers.parallelism.state import checkpoint_state, make_optimizer, restore_state

__all__ = [
    "SHARDS_ON_META",
    "STAGE_STRATEGIES",
    "STRATEGIES",
    "CombinedOptimizer",
    "ModelAxes",
    "PipelineModel",
    "PipelinePlan",
    "ShardOptions",
    "accumulate",
    "axis_mesh",
    "checkpoint_state",
    "clip_grad_norm",
    "data_mesh",
    "make_mesh",
    "make_optimizer",
    "materialize",
    "restore_state",
]

STRATEGIES: Mapping[str, Callable[[nn.Module, DeviceMesh, ShardOptions], nn.Module]] = MappingProxyType(
    {
        "ddp": ddp.shard,
        "zero1": zero1.shard,
        "fsdp1": fsdp1.shard,
        "fsdp2": fsdp2.shard,
        "yafsdp": yafsdp.shard,
    }
)
STAGE_STRATEGIES: Mapping[str, Callable[[nn.Module, DeviceMesh, ShardOptions], nn.Module]] = MappingProxyType(
    {"ddp": ReplicatedPart, "zero1": Zero1Part, "fsdp2": fsdp2.shard, "yafsdp": yafsdp.shard}
)
"""The ways to train a stage of a pipeline over ranks."""
