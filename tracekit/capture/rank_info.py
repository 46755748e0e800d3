"""This process's rank and its job's world size."""

import os

from torch import distributed

# By torchrun and most launchers; Slurm; Open MPI; MPICH, Intel MPI and others that speak PMI.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WORLD_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def this_rank() -> int:
    """Return the rank of this process: of its process group, else by the launcher's environment, else 0."""
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return _from_environment(_RANKS, 0)


def this_world_size() -> int:
    """Return the number of ranks of the job: by its process group, else by the launcher's environment, else 1."""
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return _from_environment(_WORLD_SIZES, 1)


def _from_environment(variables: tuple[str, ...], default: int) -> int:
    values = [os.environ.get(name, "") for name in variables]
    return next((int(number) for number in values if number.isdigit()), default)
