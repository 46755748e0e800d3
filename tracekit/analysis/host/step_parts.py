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
FASTEST_COLUMNS = schema.columns(
    "part name operator number fastest_ns even_ns odd_ns", part=pl.String, operator=pl.String
)

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
    moments = _moments(trace)
    return moments.group_by("step", "device", "part", "name", "place").agg(pl.col("dur_ns").sum()).pipe(
        schema.select, COLUMNS
    ).sort("step", "device", "part", "name", "place", nulls_last=True)  # fmt: skip


@trace_fact
def fastest_calls(trace: Trace) -> pl.DataFrame:
    """Time of each call of the step where it is fastest, on a CPU: what other programs take comes in some steps only.

    Columns FASTEST_COLUMNS; one row per part, name, operator and number of the operator's call in the step (the idle
    time before it is a part of its own), of calls that half of the steps have. The times are the least of all steps, of
    the even and of the odd ones (that of all steps where these lack it).
    """
    moments = _moments(trace).filter(pl.col("device").is_null())
    step = (pl.col("step").rank("dense").cast(pl.Int64) - 1).fill_null(0)
    cells = moments.group_by("part", "name", "operator", "number", step.alias("step")).agg(pl.col("dur_ns").sum())
    time_ns, is_even = pl.col("dur_ns"), pl.col("step") % 2 == 0
    calls = cells.group_by("part", "name", "operator", "number").agg(
        time_ns.min().alias("fastest_ns"),
        time_ns.filter(is_even).min().alias("even_ns"),
        time_ns.filter(~is_even).min().alias("odd_ns"),
        pl.len().alias("steps"),
    )
    common = calls.filter(2 * pl.col("steps") >= moments["step"].n_unique())
    halves = [pl.coalesce(half, "fastest_ns").alias(half) for half in ("even_ns", "odd_ns")]
    return common.with_columns(halves).pipe(schema.select, FASTEST_COLUMNS).sort("part", "name", "operator", "number")


def _moments(trace: Trace) -> pl.DataFrame:
    """Charge each moment of the steps' windows to a part, and to the call that runs or ends the gap.

    Columns step, device, part, name, place, operator, number (of its call in the step), dur_ns.
    """
    operator_row, launch_row = step_charges.operator_rows(trace)
    launched_ns = trace.ops["start_ns"].gather(launch_row)
    called = call_trees.locations_at(trace, launched_ns.fill_null(-1).to_numpy()).set(launched_ns.is_null(), None)
    operator = pl.coalesce(trace.ops["name"].gather(operator_row), "name").alias("operator")
    operators = trace.activities.select("id", "phase", operator, called.alias("called"), "step", "start_ns").select(
        pl.exclude("step", "start_ns"),
        (pl.col("start_ns").rank("ordinal").over("step", "operator") - 1).cast(pl.Int64).alias("number"),
    )
    tables = []
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
        name = pl.when(pl.col("part").is_in(_NAMED)).then(pl.col("operator").fill_null("")).otherwise(pl.lit(""))
        rows = moments.with_columns(part.alias("part"), place.alias("place"))
        tables.append(rows.with_columns(name.alias("name"), pl.lit(device, pl.Int64).alias("device")))
    columns = {**COLUMNS, "operator": pl.String, "number": pl.Int64}
    return pl.concat([schema.empty(columns), *(schema.select(table, columns) for table in tables)])


def _places(trace: Trace, device: int | None, gap: pl.Series) -> pl.Series:
    """Function of the program in the middle of each gap, by its number; null where no gap, or no stack, is recorded."""
    pieces = step_charges.gap_causes(trace, device)
    locations = call_trees.locations_at(trace, (pieces["start_ns"] + pieces["dur_ns"] // 2).to_numpy())
    number = gap.to_numpy()
    return locations.gather(pl.Series(number, dtype=pl.Int64).set(pl.Series(number < 0), None)).alias("place")
