"""Overlap of a ring of context parallelism: how much of its sends and receives compute hides."""

import polars as pl

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.parallelism import axis_communication
from tracekit.conventions.strategies import CP
from tracekit.model import intervals, schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.sync.collective_matching import PAIRED

RINGS = schema.table(
    "ring_overlap",
    "rank and step of a ring of context parallelism",
    schema.column("window", "Profiled window of the run, from 0."),
    schema.column("rank", "Global rank of the process."),
    schema.column("step", "Training step; null where none are marked."),
    schema.column("calls", "Sends and receives along axis cp."),
    schema.column("bytes", "Sum of their sizes; null where none is known."),
    schema.column("communication_ns", "Time in which at least one of them is under way."),
    schema.column("hidden_ns", "The part of it in which the rank computes: attention to the block at hand."),
    schema.column("exposed_communication_ns", "The rest."),
    schema.column("waited_ns", "The part of the rest before the peer has begun; null where no peer is known."),
    schema.Column("hidden_ratio", pl.Float64(), "ratio", "hidden_ns over communication_ns."),
)
_PLACE = ["window", "rank", "step"]


@run_fact(table=RINGS)
def ring_overlap(run: Run) -> pl.DataFrame:
    """Share of a ring's transfers that compute hides; use ``run.table``. Columns as RINGS.

    A transfer is under way from its issue to its completion: on a device its kernel, under gloo from the call to the
    end of the wait. Empty without sends and receives along axis cp.
    """
    if not axis_communication.has_calls(run, CP):
        return RINGS.empty()
    ring_calls = run.table(axis_communication.calls).filter(
        pl.col("axis") == CP, pl.col("op").is_in([PAIRED, "send", "recv"])
    )
    compute, rows = axis_communication.compute_spans(run), []
    for place, calls in _with_waits(run, ring_calls).partition_by(_PLACE, as_dict=True, maintain_order=True).items():
        spans = intervals.union(calls.select("start_ns", "end_ns").to_numpy())
        busy = compute.get(place[:2], intervals.EMPTY)
        timed = calls.drop_nulls("present_ns")
        waits = intervals.union(timed.select("start_ns", "present_ns").to_numpy())
        total_ns, hidden_ns = intervals.length(spans), intervals.length(intervals.intersect(spans, busy))
        waited_ns = intervals.length(waits) - intervals.length(intervals.intersect(waits, busy))
        sizes = calls["bytes"].drop_nulls()
        row = dict(zip(_PLACE, place, strict=True)) | {"calls": calls.height, "communication_ns": total_ns}
        row |= {"hidden_ns": hidden_ns, "exposed_communication_ns": total_ns - hidden_ns}
        row |= {"waited_ns": waited_ns if timed.height else None, "bytes": sizes.sum() if len(sizes) else None}
        rows.append(row | {"hidden_ratio": hidden_ns / total_ns if total_ns else None})
    return RINGS.conform(pl.DataFrame(rows, RINGS.schema)).sort(_PLACE, nulls_last=True)


def _with_waits(run: Run, calls: pl.DataFrame) -> pl.DataFrame:
    """Return calls with present_ns: when both ranks have begun, on the rank's clock; null where the peer is unknown."""
    waits = run.table(collective_instances.waits).select("window", "rank", "activity_id", "wait_ns")
    joined = calls.join(waits, on=["window", "rank", "activity_id"], how="left")
    return joined.with_columns((pl.col("start_ns") + pl.col("wait_ns")).alias("present_ns"))
