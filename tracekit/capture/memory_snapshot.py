"""The CUDA allocator's own history of a window of steps, as torch writes it."""

import contextlib
from pathlib import Path

import torch

from tracekit.capture import atomic_files

_MOST_EVENTS = 1_000_000


def begin(device: str) -> None:
    """Start the allocator's history. Raises RuntimeError where there is no CUDA allocator."""
    if device != "cuda":
        raise RuntimeError("memory snapshots need the CUDA allocator, but this training runs on the CPU")
    torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)


def end(path: Path) -> None:
    """Write the allocator's history, and stop it."""
    try:
        with atomic_files.atomic_write(path) as partial:
            torch.cuda.memory._dump_snapshot(str(partial))
    finally:
        with contextlib.suppress(Exception):
            torch.cuda.memory._record_memory_history(enabled=None)
