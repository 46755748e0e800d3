"""Distributed data parallel: every rank has the whole model, gradients are averaged in buckets during backward."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from instrumented_trainers.parallelism import expert
from instrumented_trainers.parallelism.options import ShardOptions, device_of


def shard(model: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> nn.Module:
    """Replicate the model over the mesh's ranks. Lower precision is autocast's; gradients keep the weights' dtype.

    Raises NotImplementedError for another `reduce_dtype`, a mesh of more than one dim, or offloading.
    """
    if options.offload:
        raise NotImplementedError(
            "ddp has no optimizer state to offload by rank; zero1, fsdp2 and yafsdp offload theirs"
        )
    return AutocastDataParallel(*replica_setup(model, mesh, options))


def replica_setup(
    model: nn.Module, mesh: DeviceMesh, options: ShardOptions
) -> tuple[nn.Module, DeviceMesh, torch.dtype | None]:
    """Return the model on this rank's device, the mesh to replicate it over, and what to compute in."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if options.reduce_dtype is not None and dtypes != {options.reduce_dtype}:
        raise NotImplementedError(f"ddp reduces gradients in the weights' own dtype, not in {options.reduce_dtype}")
    if mesh.ndim != 1:
        raise NotImplementedError("ddp replicates over all ranks: it has no groups to shard in")
    # Experts that are divided over ranks have other replicas: `accumulate` averages their gradients.
    if ignored := list(expert.expert_parameters(model)):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return model.to(device_of(mesh)), mesh, options.param_dtype


class AutocastDataParallel(DistributedDataParallel):
    """DDP whose forward computes in a lower precision where that is safe, if a `dtype` is given."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        super().__init__(module, process_group=mesh.get_group(), gradient_as_bucket_view=True)
        self._autocast = mesh.device_type, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device_type, dtype = self._autocast
        if dtype is None:
            return super().forward(*args, **kwargs)
        with torch.autocast(device_type, dtype):
            return super().forward(*args, **kwargs)
