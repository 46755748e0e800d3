"""Read facts of a recorded run. Not a test."""

import json
from pathlib import Path
from typing import Any

import polars as pl

from tracekit import conventions
from tracekit.model.run import Run


def metrics(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return the lines of a rank's metrics log."""
    path = run / conventions.rank_file(rank, conventions.METRICS_SUFFIX)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def steps(run: Run) -> dict[int, list[int]]:
    """Return the profiled steps by rank."""
    return {trace.rank: trace.steps["step"].to_list() for trace in run.traces()}


def spans(run: Run, rank: int = 0) -> dict[int, dict[str, int]]:
    """Return by step, and by name without prefix, how many spans of ours a rank's trace has."""
    counts: dict[int, dict[str, int]] = {}
    for trace in run.traces():
        if trace.rank == rank:
            name = pl.col("name").str.strip_prefix(conventions.SPAN_PREFIX)
            ours = trace.ops.filter(
                pl.col("name").str.starts_with(conventions.SPAN_PREFIX), pl.col("step").is_not_null()
            )
            for step, span, count in ours.group_by("step", name).len().iter_rows():
                counts.setdefault(step, {})[span] = count
    return counts
