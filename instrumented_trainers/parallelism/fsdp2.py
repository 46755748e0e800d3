"""The second fully sharded data parallel of PyTorch: each parameter a DTensor cut along its first dim."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from instrumented_trainers.parallelism import expert
from instrumented_trainers.parallelism.options import ShardOptions


def shard(model: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> nn.Module:
    """Shard each of ``model.layers``, then the rest of the model, over the mesh's ranks.

    Of two dims of the mesh the first replicates.

    Raises NotImplementedError if weights are to be resharded to groups that do not divide the ranks.
    """
    _refuse_uneven_groups(mesh, options.reshard_after_forward)
    policy = MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if options.offload else OffloadPolicy()
    unit = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for layer in model.layers:
        for _, experts in expert.divided_experts(layer):
            unit(experts.router, reshard_after_forward=options.reshard_after_forward)
            unit(experts, mesh=experts.replicas, reshard_after_forward=True)
        unit(layer, reshard_after_forward=options.reshard_after_forward)
    unit(model)
    if options.prefetch is not None:
        _prefetch(model, list(model.layers), mesh, options.prefetch)
    return model


@torch.no_grad()
def materialize(model: nn.Module, reset: Callable[[nn.Module], None], device: torch.device, *, offload: bool) -> None:
    """Draw the weights of a model that was sharded on the meta device; each rank keeps its shards.

    `reset` is called with each module that has parameters of its own, while these are whole and on `device`; it must
    fill them, with the same values on every rank.
    """
    model.to_empty(device=torch.device("cpu") if offload else device)
    for module in model.modules():
        shards = {name: parameter for name, parameter in module._parameters.items() if isinstance(parameter, DTensor)}
        for name, shard_ in shards.items():
            module._parameters[name] = nn.Parameter(torch.empty(shard_.shape, dtype=shard_.dtype, device=device))
        if shards:
            reset(module)
        for name, shard_ in shards.items():
            weight = module._parameters[name]
            assert weight is not None
            local = distribute_tensor(weight.detach(), shard_.device_mesh, shard_.placements, src_data_rank=None)
            shard_.to_local().copy_(local.to_local())
            module._parameters[name] = shard_  # type: ignore[assignment]


def _refuse_uneven_groups(mesh: DeviceMesh, reshard_to: bool | int) -> None:
    ranks = mesh.size(-1)
    if not isinstance(reshard_to, bool) and (not 1 < reshard_to < ranks or ranks % reshard_to):
        raise NotImplementedError(f"fsdp2 reshards {ranks} ranks' weights to groups that divide them, not {reshard_to}")


def _prefetch(root: FSDPModule, layers: Sequence[FSDPModule], mesh: DeviceMesh, depth: int) -> None:
    """Have each layer, in forward and backward, gather the `depth` layers that run after it; none if that is 0.

    The root gathers for the first layer. In backward it has none to gather for: its own ends after the layers'.
    """
    # An empty list would bring FSDP2's own prefetching back; a module without parameters has nothing to gather.
    nothing = [fully_shard(nn.Identity(), mesh=mesh)]
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(list(layers[index + 1 : index + 1 + depth]) or nothing)
        layer.set_modules_to_backward_prefetch(list(reversed(layers[max(0, index - depth) : index])) or nothing)
    root.set_modules_to_forward_prefetch(list(layers[:depth]) or nothing)
    root.set_modules_to_backward_prefetch(list(reversed(layers[-depth:] if depth else [])) or nothing)
    if depth and mesh.device_type == "cpu":
        # Streams let gathers run ahead on GPUs; on the CPU only an asynchronous call does.
        root._set_unshard_async_op(True)
