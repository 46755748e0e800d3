"""YaFSDP: fully sharded data parallelism in buffers that are allocated once. Our own implementation of the technique.

Whole layers are one flat shard; two weight and two gradient buffers serve all layers in turn; every collective runs on
one lane, and nothing but collectives does: copies and casts belong to the computing stream, and gradients are divided
once, after backward. https://github.com/yandex/YaFSDP describes the technique.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from instrumented_trainers.strategies.options import ShardOptions
from instrumented_trainers.strategies.yafsdp.api import fully_shard
from instrumented_trainers.strategies.yafsdp.materialize import materialize
from instrumented_trainers.strategies.yafsdp.module import CommunicationBuffers, YaFSDPModule
from instrumented_trainers.strategies.yafsdp.policy import MixedPrecisionPolicy

__all__ = ["CommunicationBuffers", "MixedPrecisionPolicy", "YaFSDPModule", "fully_shard", "materialize", "shard"]


def shard(model: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> nn.Module:
    """Shard each of ``model.layers``, then the rest of the model, over the mesh's ranks."""
    policy = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype)
    for layer in model.layers:
        fully_shard(
            layer,
            mesh,
            mp_policy=policy,
            reshard_after_forward=options.reshard_after_forward,
            buffers=options.buffers,
        )
    return fully_shard(model, mesh, mp_policy=policy, buffers=options.buffers)
