"""YaFSDP: fully sharded data parallelism with preallocated double buffers. Our own implementation.

Each unit, usually a layer, is one flat tensor cut into shards; all units share two weight and two gradient buffers
(double buffering); one communication lane runs all collectives and nothing else: copies, casts and divisions run on the
compute stream. https://github.com/yandex/YaFSDP describes the technique.
"""

import functools
from collections import Counter

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from instrumented_trainers.parallelism.options import ShardOptions
from instrumented_trainers.parallelism.yafsdp.api import fully_shard, register_forward_method
from instrumented_trainers.parallelism.yafsdp.meta_init import materialize
from instrumented_trainers.parallelism.yafsdp.mixed_precision import MixedPrecisionPolicy
from instrumented_trainers.parallelism.yafsdp.module import CommunicationBuffers, YaFSDPModule
from instrumented_trainers.parallelism.yafsdp.pretrained import load_pretrained
from instrumented_trainers.parallelism.yafsdp.rank_programs import set_patience
from instrumented_trainers.parallelism.yafsdp.whole_tensor_optimizer import WholeTensorOptimizer

__all__ = [
    "CommunicationBuffers",
    "MixedPrecisionPolicy",
    "WholeTensorOptimizer",
    "YaFSDPModule",
    "fully_shard",
    "load_pretrained",
    "materialize",
    "register_forward_method",
    "set_patience",
    "shard",
]

_LARGE_NUMEL = 1 << 20  # below that, what a collective costs whatever its size outweighs what is gained


def shard(model: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> nn.Module:
    """Shard each of ``model.layers``, then the other large children, then the rest, over the mesh's ranks.

    A large head is a unit of its own, so that the first layer does not wait for the all-gather of the head's weights.
    """
    policy = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype)
    offload = CPUOffloadPolicy() if options.offload else OffloadPolicy()
    unit = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, buffers=options.buffers, offload_policy=offload)
    for layer in model.layers:
        ignored = _vectors(layer) if options.gather_norms_once else ()
        unit(layer, reshard_after_forward=options.reshard_after_forward, left_out=ignored)
    for part in _large_parts(model):
        unit(part, reshard_after_forward=False)
    return unit(model)


def _vectors(layer: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of at most one dim: those of norms, and biases."""
    return [parameter for parameter in layer.parameters() if parameter.dim() < 2]


def _large_parts(model: nn.Module) -> list[nn.Module]:
    """Return the large children other than the layers that share no parameter with another child."""
    children = [child for child in model.children() if child is not model.layers]
    count = Counter(parameter for child in children for parameter in child.parameters())
    return [
        child
        for child in children
        if sum(parameter.numel() for parameter in child.parameters()) >= _LARGE_NUMEL
        and all(count[parameter] == 1 for parameter in child.parameters())
    ]
