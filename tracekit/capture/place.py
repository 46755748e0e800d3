"""Where this process stands in its job."""

import os

from torch import distributed


def this_rank() -> int:
    """Return the rank of this process: of its process group, else by the launcher's environment, else 0."""
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def this_world_size() -> int:
    """Return how many ranks the job has: by its process group, else by the launcher's environment, else 1."""
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1"))
