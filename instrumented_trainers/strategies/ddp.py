"""Distributed data parallel: every rank has the whole model, gradients are averaged in buckets during backward."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from instrumented_trainers.strategies.options import ShardOptions
from instrumented_trainers.strategies.placement import device_of


def shard(model: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> nn.Module:
    """Replicate the model over the mesh's ranks. Lower precision is autocast's; gradients keep the weights' dtype.

    Raises NotImplementedError if another `reduce_dtype` is asked for.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if options.reduce_dtype is not None and dtypes != {options.reduce_dtype}:
        raise NotImplementedError(f"ddp reduces gradients in the weights' own dtype, not in {options.reduce_dtype}")
    model = model.to(device_of(mesh))
    wrapped = {"process_group": mesh.get_group(), "gradient_as_bucket_view": True}
    if options.param_dtype is None:
        return DistributedDataParallel(model, **wrapped)
    return _AutocastDataParallel(model, mesh.device_type, options.param_dtype, **wrapped)


class _AutocastDataParallel(DistributedDataParallel):
    """DDP whose forward computes in a lower precision where that is safe."""

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype, **wrapped: Any) -> None:
        super().__init__(module, **wrapped)
        self._autocast = device_type, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device_type, dtype = self._autocast
        with torch.autocast(device_type, dtype):
            return super().forward(*args, **kwargs)
