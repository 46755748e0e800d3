"""Recordings of others as jobs that `benchmarks.injected_faults` changes, read once for several tests. Not a test."""

import functools
from pathlib import Path

from benchmarks import perturbation_graph
from benchmarks.perturbation_graph import Job


def job(folder: Path) -> Job:
    """Return the job of a folder without changes. It is the same object each time: use one after the other."""
    recorded = _read(folder)
    recorded.undo_changes()
    return recorded


@functools.lru_cache(maxsize=2)
def _read(folder: Path) -> Job:
    return perturbation_graph.load(folder.glob("*.json.gz"))
