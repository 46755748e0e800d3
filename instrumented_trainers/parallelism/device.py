"""Where the ranks of a mesh compute."""

import torch
from torch.distributed.device_mesh import DeviceMesh


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device: the current one for CUDA, so set it before."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)
