"""The host time of a part of the timeline by call path: what its flame graph draws."""

import polars as pl

from tracekit.analysis.host import call_trees
from tracekit.model.intervals import Window
from tracekit.model.run import Run
from tracekit.report.timeline.scene import Scene
from tracekit.sync import alignment


def call_paths(run: Run, scene: Scene, rank: int, window: Window, lane: int | None = None) -> pl.DataFrame:
    """Return the host time of a rank in a window on the run's clock by call path; reads the rank's trace.

    Columns `call_trees.WINDOW_TREE`; of one `lane` of the trace, or of all host threads. Raises KeyError if the rank
    has no trace in the scene's window, BadTraceError if it cannot be read.
    """
    edges = pl.DataFrame({"window": [scene.window] * 2, "rank": [rank] * 2, "edge_ns": window})
    begin_ns, end_ns = alignment.on_trace_clock(edges, scene.offsets, ("edge_ns",))["edge_ns"]
    return call_trees.of_window(run.trace(rank, scene.window), (begin_ns, end_ns), lane)
