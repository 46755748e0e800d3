"""Where each rank's step goes, pipeline bubbles and waits for other ranks apart: the parts of a step sum to it."""

from collections.abc import Mapping

import polars as pl

from tracekit.analysis.communication import communication_gap_causes, exposed_communication
from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.parallelism import pipeline_bubbles, pipeline_stages
from tracekit.analysis.parallelism.pipeline_actions import POINT_TO_POINT
from tracekit.analysis.time import breakdown, host_state, launched_work, trace_columns
from tracekit.model import intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.intervals import Spans
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.sync import alignment

COMPUTE, COMMUNICATION, WAIT, BUBBLE, LAUNCH, COMPILE, GARBAGE_COLLECTION, DATA, SAVE, COPY, IDLE = PARTS = (
    "compute", "communication", "wait", "bubble", "launch", "compile", "garbage_collection", "data", "save", "copy",
    "idle",
)  # fmt: skip
"""Compute; exposed communication, without waits; waiting for ranks in collectives; pipeline bubbles, with the transfers
between stages; launch gaps and other time of the host; compilation; garbage collection; waiting for data; saves;
exposed copies; idle of other causes.
"""
COLUMNS = schema.columns(" ".join(["window rank device step duration_ns", *(f"{part}_ns" for part in PARTS)]))

_OF = ("window", "rank", "device")
_Place = tuple[object, ...]
_SPANS = schema.columns("device part start_ns dur_ns", part=pl.String)
_OF_HOST = {
    host_state.DATA: DATA,
    host_state.CHECKPOINT: SAVE,
    host_state.COMPILE: COMPILE,
    host_state.GARBAGE_COLLECTION: GARBAGE_COLLECTION,
}


@trace_fact
def idle_spans(trace: Trace) -> pl.DataFrame:
    """Spans in which a device is idle within its steps, by what it waits for: disjoint.

    Columns device, part (launch, idle, or one of the host), start_ns, dur_ns.
    """
    pieces = compute_gap_causes.compute_gap_causes(trace)
    of_host = pieces.filter(pl.col("cause") == communication_gap_causes.HOST).with_columns(
        pl.col("detail").replace_strict(_OF_HOST, default=LAUNCH, return_dtype=pl.String).alias("part")
    )
    windows = trace_columns.windows(trace)
    parts = [schema.empty(_SPANS)]
    for device in breakdown.devices(trace):
        of_steps = windows.filter(pl.col("device").eq_missing(pl.lit(device, pl.Int64)))
        within = intervals.union(of_steps.select("start_ns", "end_ns").to_numpy())
        rest = intervals.subtract(within, intervals.union(*breakdown.busy(trace, device)))
        caused = launched_work.on_device(trace, of_host, device)
        for part in (LAUNCH, *_OF_HOST.values()):
            spans = intervals.union(intervals.from_table(caused.filter(pl.col("part") == part)))
            parts.append(_rows(device, part, intervals.intersect(rest, spans)))
            rest = intervals.subtract(rest, spans)
        parts.append(_rows(device, IDLE, rest))
    return pl.concat(parts)


FACTS: tuple[TraceFact, ...] = (
    breakdown.by_step,
    breakdown.spans,
    idle_spans,
    exposed_communication.exposed_calls,
    exposed_communication.save_collectives,
    *pipeline_bubbles.FACTS,
)
"""The facts that `time_by_part` reads."""


@run_fact
def time_by_part(run: Run) -> pl.DataFrame:
    """Time of each step's device window by part; use ``run.table``.

    Columns COLUMNS; one row per window, rank, device and step; the parts sum to duration_ns exactly. Where a rank of a
    pipeline runs none of its actions because the input of the next one is not complete, it is idle, or in an exposed
    wait, in a bubble; so are its exposed sends and receives.
    """
    calls = run.table(exposed_communication.exposed_transfers).partition_by(_OF, as_dict=True)
    saves = run.table(exposed_communication.save_collectives).partition_by(_OF, as_dict=True)
    idle = run.table(idle_spans).partition_by(_OF, as_dict=True)
    exposed = exposed_communication.exposed_on_devices(run)
    bubbles = _bubbles(run)
    parts = [schema.empty(COLUMNS)]
    for place, steps in run.table(breakdown.by_step).partition_by(_OF, as_dict=True, maintain_order=True).items():
        bubble = bubbles.get(place[:2], intervals.EMPTY)
        sets = _of_communication(
            exposed.get(place, intervals.EMPTY), calls.get(place), saves.get(place), bubble, is_pipelined=bool(bubbles)
        )
        for (part,), rows in idle[place].partition_by("part", as_dict=True).items() if place in idle else ():
            spans = intervals.from_table(rows)
            sets.append((BUBBLE, intervals.intersect(spans, bubble)))
            sets.append((str(part), intervals.subtract(spans, bubble)))
        parts.append(_sums(steps, sets))
    return pl.concat(parts)


def _rows(device: int | None, part: str, spans: Spans) -> pl.DataFrame:
    times = pl.DataFrame({"start_ns": spans[:, 0], "dur_ns": spans[:, 1] - spans[:, 0]})
    return times.with_columns(device=pl.lit(device, pl.Int64), part=pl.lit(part)).pipe(schema.select, _SPANS)


def _bubbles(run: Run) -> Mapping[_Place, Spans]:
    """Spans in which no action of a rank runs and the input of the next one is not complete, by window and rank.

    On the clocks of the traces; {} without a pipeline.
    """
    if not pipeline_stages.is_pipelined(run):
        return {}
    gaps = run.table(pipeline_bubbles.idle_gaps).with_columns(pl.col("end_ns") - pl.col("late_ns"))
    waits = alignment.on_trace_clock(gaps, run.offsets, ("start_ns", "end_ns"))
    by_rank = waits.partition_by("window", "rank", as_dict=True)
    return {
        place: intervals.union(intervals.from_columns(rows["start_ns"], rows["end_ns"] - rows["start_ns"]))
        for place, rows in by_rank.items()
    }


def _of_communication(
    exposed: Spans, calls: pl.DataFrame | None, saves: pl.DataFrame | None, bubble: Spans, *, is_pipelined: bool
) -> list[tuple[str, Spans]]:
    """Disjoint spans of exposed communication by part: transfers, saves, bubbles, waits."""
    between_stages = transfers = intervals.EMPTY
    if calls is not None:
        is_send = pl.col("op").is_in(POINT_TO_POINT).fill_null(value=False) & is_pipelined
        between_stages = intervals.union(intervals.from_table(calls.filter(is_send)))
        transfers = intervals.union(exposed_communication.transfer_spans(calls.filter(~is_send)))
    of_saves = intervals.EMPTY if saves is None else intervals.union(intervals.from_table(saves))
    sets, rest = [], exposed
    for part, spans in (
        (COMMUNICATION, transfers),
        (SAVE, of_saves),
        (BUBBLE, intervals.union(between_stages, bubble)),
    ):
        sets.append((part, intervals.intersect(rest, spans)))
        rest = intervals.subtract(rest, spans)
    return [*sets, (WAIT, rest)]


def _sums(steps: pl.DataFrame, sets: list[tuple[str, Spans]]) -> pl.DataFrame:
    windows = intervals.from_columns(steps["start_ns"], steps["duration_ns"])
    sums = {f"{part}_ns": pl.Series(f"{part}_ns", [0] * steps.height, pl.Int64) for part in PARTS}
    sums |= {"compute_ns": steps["compute_ns"], "copy_ns": steps["exposed_copy_ns"].alias("copy_ns")}
    for part, spans in sets:
        sums[f"{part}_ns"] += pl.Series(intervals.coverage(windows, spans), dtype=pl.Int64)
    return schema.select(steps.select(*_OF, "step", "duration_ns").hstack(list(sums.values())), COLUMNS)
