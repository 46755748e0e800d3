"""This process's rank, its job's world size, and the GPU that it trains on."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from tracekit import conventions

# By torchrun and most launchers; Slurm; Open MPI; MPICH, Intel MPI and others that speak PMI.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WORLD_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_DEFAULT_ROLE = "default"
"""What torchrun writes to ROLE_NAME without --role."""
_HOST_RANKS = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def this_rank() -> int:
    """Rank of this process: of its process group, else by the launcher's environment, else 0."""
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return _from_environment(_RANKS, 0)


def this_world_size() -> int:
    """Number of ranks of the job: by its process group, else by the launcher's environment, else 1."""
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return _from_environment(_WORLD_SIZES, 1)


def this_role() -> str | None:
    """Role of this process in a job of several programs, by TRACEKIT_ROLE or torchrun's --role; None if not stated."""
    role = os.environ.get(conventions.ROLE_VARIABLE) or os.environ.get("ROLE_NAME", _DEFAULT_ROLE)
    return None if role == _DEFAULT_ROLE else role


def ranks_of_host() -> int | None:
    """Number of ranks on this host, by the launcher's environment; None where it does not state it."""
    return _from_environment(_HOST_RANKS, 0) or (1 if this_world_size() == 1 else None)


@dataclass(frozen=True)
class DeviceIdentity:
    """A GPU: its UUID without prefix, and its PCI address, None where torch does not state them."""

    uuid: str | None
    pci: str | None
    is_amd: bool = False


def training_device() -> int:
    """Index of the device on which this process has reserved most memory; the current one if none has.

    A script may train on a device that it never made the current one.
    """
    current: int = torch.cuda.current_device()
    try:
        reserved = [torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())]
    except RuntimeError:  # another allocator than torch's
        return current
    return max(range(len(reserved)), key=lambda index: (reserved[index], index == current), default=current)


def identity(properties: Any, *, is_amd: bool) -> DeviceIdentity:
    """Identity that ``torch.cuda.get_device_properties`` states.

    Neither a device's index nor CUDA_VISIBLE_DEVICES identifies it: the management library has another order.
    """
    uuid = getattr(properties, "uuid", None)
    domain, bus, device = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    pci = None if bus is None or device is None else f"{domain or 0:04x}:{bus:02x}:{device:02x}.0"
    return DeviceIdentity(str(uuid).removeprefix("GPU-") if uuid else None, pci, is_amd)


def this_device() -> DeviceIdentity:
    """Identity of the GPU that this process trains on. Raises RuntimeError if it trains on none."""
    if not torch.cuda.is_initialized():
        raise RuntimeError("this process uses no GPU")
    properties = torch.cuda.get_device_properties(training_device())
    return identity(properties, is_amd=torch.version.hip is not None)


def _from_environment(variables: tuple[str, ...], default: int) -> int:
    values = [os.environ.get(name, "") for name in variables]
    return next((int(number) for number in values if number.isdigit()), default)
