"""The first fully sharded data parallel of PyTorch: flat parameters per layer, wrapped modules."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from instrumented_trainers.parallelism.options import ShardOptions, device_of

# By the number of the mesh's dims (two: replicate × shard), and by whether weights are resharded after forward.
_SHARDING = {
    (1, True): ShardingStrategy.FULL_SHARD,
    (1, False): ShardingStrategy.SHARD_GRAD_OP,
    (2, True): ShardingStrategy.HYBRID_SHARD,
    (2, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
}


def shard(model: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> nn.Module:
    """Wrap each of ``model.layers``, then the model, over the mesh's ranks; of two dims the first replicates.

    Raises NotImplementedError where `options` ask for what FSDP1 has no setting for.
    """
    if not isinstance(options.reshard_after_forward, bool):
        raise NotImplementedError("fsdp1 cannot reshard to groups of ranks; fsdp2 can")
    if options.prefetch:
        raise NotImplementedError("fsdp1 has no prefetch depth: it gathers one layer ahead, or none")
    if options.offload:
        raise NotImplementedError("fsdp1 is not offloaded here; fsdp2, yafsdp and zero1 are")
    layers = {id(layer) for layer in model.layers}
    prefetches = options.prefetch != 0
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        device_id=device_of(mesh),
        sharding_strategy=_SHARDING[mesh.ndim, options.reshard_after_forward],
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in layers),
        mixed_precision=_precision(options),
        forward_prefetch=prefetches,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE if prefetches else None,
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
