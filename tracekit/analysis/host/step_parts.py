"""Where the time of each step goes, by what a person would change: every moment counts once, so the parts sum to it."""

import polars as pl

from tracekit import conventions
from tracekit.analysis.communication import communication_gap_causes as causes
from tracekit.analysis.compute import step_charges
from tracekit.analysis.host import call_trees
from tracekit.analysis.time import breakdown, host_state
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.trace import Trace

DATA, COMMUNICATION, WAIT, COMPUTE, LAUNCH, ALLOCATOR, COMPILE, GARBAGE_COLLECTION, SAVE, COPY, IDLE = KINDS = (
    "data", "communication", "wait", "compute", "launch", "allocator", "compile", "garbage_collection", "save", "copy",
    "idle",
)  # fmt: skip
"""Waiting for data, exposed communication, waiting for ranks, compute, launch gaps, the allocator, compilation, garbage
collection, saves, exposed copies, and idle time of unknown cause. Only a run with several ranks separates waiting from
communication."""
COLUMNS = schema.columns("step device part name place dur_ns", part=pl.String, place=pl.String)

_BUSY = {
    breakdown.COMPUTE: COMPUTE,
    breakdown.EXPOSED_COMMUNICATION: COMMUNICATION,
    breakdown.EXPOSED_COPY: COPY,
}
_OF_HOST = {
    host_state.DATA: DATA,
    host_state.CHECKPOINT: SAVE,
    host_state.ALLOCATOR: ALLOCATOR,
    host_state.COMPILE: COMPILE,
    host_state.GARBAGE_COLLECTION: GARBAGE_COLLECTION,
}
_NAMED = (COMPUTE, COMMUNICATION, COPY, LAUNCH)


@trace_fact
def step_parts(trace: Trace) -> pl.DataFrame:
    """Time of each step's device window by part and name; the rows of a step and device sum to the window exactly.

    Columns COLUMNS; one row per step, device, part (of KINDS), name and place. The name is the operator that computes,
    communicates or copies; of launch gaps that of the compute which ends the gap; else ''. The place is the function of
    the program that calls the operator, or that the host is in while the device is idle; null without recorded stacks.
    """
    operator_row, launch_row = step_charges.operator_rows(trace)
    launched_ns = trace.ops["start_ns"].gather(launch_row)
    called = call_trees.locations_at(trace, launched_ns.fill_null(-1).to_numpy()).set(launched_ns.is_null(), None)
    operators = trace.activities.select(
        "id", "phase", pl.coalesce(trace.ops["name"].gather(operator_row), "name").alias("name"), called.alias("called")
    )
    parts = [schema.empty(COLUMNS)]
    for device in breakdown.devices(trace):
        windows = step_charges.windows(trace, device)
        if not windows.height:
            continue
        moments = step_charges.charge_moments(trace, device, windows).join(operators, on="id", how="left")
        is_busy = pl.col("part") != step_charges.IDLE
        is_save = is_busy & pl.col("phase").eq_missing(pl.lit(conventions.CHECKPOINT))
        by_host = pl.col("detail").replace_strict(_OF_HOST, default=LAUNCH, return_dtype=pl.String)
        part = (
            pl.when(is_save).then(pl.lit(SAVE))
            .when(is_busy).then(pl.col("part").replace_strict(_BUSY, default=IDLE, return_dtype=pl.String))
            .when(pl.col("cause") == causes.HOST).then(by_host)
            .when(pl.col("cause") == causes.COPY).then(pl.lit(COPY))
            .otherwise(pl.lit(IDLE))
        )  # fmt: skip
        place = pl.when(is_busy).then("called").otherwise(_places(trace, device, moments["gap"]))
        rows = moments.with_columns(part.alias("part"), place.alias("place"))
        name = pl.when(pl.col("part").is_in(_NAMED)).then(pl.col("name").fill_null("")).otherwise(pl.lit(""))
        sums = rows.group_by("step", "part", name.alias("name"), "place").agg(pl.col("dur_ns").sum())
        parts.append(schema.select(sums.with_columns(device=pl.lit(device, pl.Int64)), COLUMNS))
    return pl.concat(parts).sort("step", "device", "part", "name", "place", nulls_last=True)


def _places(trace: Trace, device: int | None, gap: pl.Series) -> pl.Series:
    """Function of the program in the middle of each gap, by its number; null where no gap, or no stack, is recorded."""
    pieces = step_charges.gap_causes(trace, device)
    locations = call_trees.locations_at(trace, (pieces["start_ns"] + pieces["dur_ns"] // 2).to_numpy())
    number = gap.to_numpy()
    return locations.gather(pl.Series(number, dtype=pl.Int64).set(pl.Series(number < 0), None)).alias("place")
