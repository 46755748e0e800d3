"""The critical path of an open run, as `tracekit whatif --critical-path` gives it. Each raises TracekitError."""

import polars as pl

from dashboard.run_store import OpenRun
from tracekit.replay.graph.critical_path import path
from tracekit.replay.graph.critical_path.path import CriticalPath

__all__ = ["CriticalPath"]


def explain(run: OpenRun, step: int | None = None) -> CriticalPath:
    """Return the critical path of a step, by default of the representative one."""
    return run.remember(("critical path", step), lambda run: path.critical_path(run, step))


def placed_parts(run: OpenRun, result: CriticalPath) -> pl.DataFrame:
    """Return the compact parts of a path with window and trace_start_ns, their start on the clock of their trace."""
    return run.compute(lambda run: path.placed_parts(run, result))
