"""The second fully sharded data parallel of PyTorch: each parameter a DTensor cut along its first dim."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from instrumented_trainers.strategies.options import ShardOptions


def shard(model: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> nn.Module:
    """Shard each of ``model.layers``, then the rest of the model, over the mesh's ranks."""
    policy = MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=options.reshard_after_forward)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
