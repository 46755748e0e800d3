"""Exposed communication of runs with a pipeline: its sends and receives are waiting for other stages."""

import polars as pl

from tracekit.analysis.communication import exposed_communication
from tracekit.analysis.parallelism import pipeline_stages
from tracekit.analysis.parallelism.pipeline_actions import POINT_TO_POINT
from tracekit.model import intervals
from tracekit.model.fact import run_fact
from tracekit.model.run import Run

_OF = ("window", "rank", "device")


@run_fact
def exposed_by_step(run: Run) -> pl.DataFrame:
    """Return `exposed_communication.exposed_by_step` with the sends and receives of a pipeline in waited_ns."""
    steps = run.table(exposed_communication.exposed_by_step)
    if not pipeline_stages.is_pipelined(run):
        return steps
    calls = run.table(exposed_communication.exposed_transfers)
    sends = _spans_of(calls.filter(_is_send()))
    other_spans = _spans_of(calls.filter(~_is_send()))
    exposed = exposed_communication.exposed_on_devices(run)
    parts = [steps.clear()]
    for place, device_steps in steps.partition_by(_OF, as_dict=True, maintain_order=True).items():
        only = intervals.subtract(sends.get(place, intervals.EMPTY), other_spans.get(place, intervals.EMPTY))
        moved = intervals.intersect(only, exposed.get(place, intervals.EMPTY))
        windows = intervals.from_columns(device_steps["start_ns"], device_steps["duration_ns"])
        moved_ns = pl.Series(intervals.coverage(windows, moved), dtype=pl.Int64)
        parts.append(device_steps.with_columns(pl.col("exposed_ns") - moved_ns, pl.col("waited_ns") + moved_ns))
    return pl.concat(parts)


@run_fact
def exposed_transfers(run: Run) -> pl.DataFrame:
    """Return `exposed_communication.exposed_transfers` without the sends and receives of a pipeline."""
    calls = run.table(exposed_communication.exposed_transfers)
    return calls.filter(~_is_send()) if pipeline_stages.is_pipelined(run) else calls


def _is_send() -> pl.Expr:
    return pl.col("op").is_in(POINT_TO_POINT).fill_null(value=False)


def _spans_of(calls: pl.DataFrame) -> dict[tuple[object, ...], intervals.Spans]:
    by_place = calls.partition_by(_OF, as_dict=True)
    return {place: intervals.union(exposed_communication.transfer_spans(rows)) for place, rows in by_place.items()}
