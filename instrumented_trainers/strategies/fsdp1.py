"""The first fully sharded data parallel of PyTorch: flat parameters per layer, wrapped modules."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from instrumented_trainers.strategies.options import ShardOptions
from instrumented_trainers.strategies.placement import device_of


def shard(model: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> nn.Module:
    """Wrap each of ``model.layers``, then the model, over the mesh's ranks."""
    layers = {id(layer) for layer in model.layers}
    full, gradients_only = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        device_id=device_of(mesh),
        sharding_strategy=full if options.reshard_after_forward else gradients_only,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in layers),
        mixed_precision=_precision(options),
        forward_prefetch=True,
        use_orig_params=True,
    )


def _precision(options: ShardOptions) -> MixedPrecision | None:
    if options.param_dtype is None and options.reduce_dtype is None:
        return None
    return MixedPrecision(
        param_dtype=options.param_dtype,
        reduce_dtype=options.reduce_dtype,
        cast_forward_inputs=True,
        cast_root_forward_inputs=True,
    )
