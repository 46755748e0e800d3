"""Where the time of each step goes, by operator: every moment is charged once, so the charges of a step sum to it."""

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import call_paths, compute_gap_causes, flops, kernels
from tracekit.analysis.memory import allocations
from tracekit.analysis.time import breakdown, launched_work, trace_columns
from tracekit.model import intervals, nesting, schema, sweep_line
from tracekit.model.fact import trace_fact
from tracekit.model.intervals import Spans
from tracekit.model.trace import Trace

IDLE = "idle"
PARTS = (*breakdown.PARTS, IDLE)
KEYS = ("part", "operator", "kernel", "module", "path", "shapes")
COLUMNS = schema.columns(
    "step device part operator kernel module path shapes extent chain line cause detail order_ns calls count work_ns "
    "dur_ns",
    **dict.fromkeys((*KEYS, "extent", "chain", "line", "cause", "detail"), pl.String),
)
SEGMENT_COLUMNS = COLUMNS | {"segment": pl.Int64}
_PARAMETERS = "record_param_comms"
"""The profiler's own operator inside that of a collective."""
_PART_OF_KIND = {
    "compute": breakdown.COMPUTE,
    "communication": breakdown.EXPOSED_COMMUNICATION,
    **dict.fromkeys(breakdown.COPY_KINDS, breakdown.EXPOSED_COPY),
}
_PART = pl.col("kind").replace_strict(_PART_OF_KIND, return_dtype=pl.String)
"""The part of the breakdown that an activity belongs to by its kind."""
_PLACE = ("step", "device", *KEYS, "extent", "cause", "detail")

UNIT_COLUMNS = {"unit": pl.String, "step": pl.Int64, "metric": pl.String, "value": pl.Float64}
UNIT_METRICS = {"compute_ns": True, "exposed_communication_ns": True}
"""Metrics of a unit, and whether lower is better."""
WORK_COLUMNS = {"kind": pl.String, "phase": pl.String, "name": pl.String, "amount": pl.Float64}
FLOPS, SENT, ALLOCATED, SAVE = "flops", "sent", "allocated", "save"


@trace_fact
def step_charges(trace: Trace) -> pl.DataFrame:
    """Charge each moment of the device window of each step to a part, operator and kernel.

    Columns COLUMNS; one row per step, device, part (of PARTS), operator, kernel (name of the activity), module, call
    path, shapes and extent (grid and block of a kernel, else its bytes; null where not known). The operator is the
    innermost one around the launch, of a collective its own and not ``record_param_comms``; path, shapes and chain (see
    `call_paths`) are its own. The line is the innermost frame of the user's code around the launch, of the first row.
    Idle time has cause and detail as in `compute_gap_causes`; its operator to extent are those of the compute that ends
    the gap. dur_ns sums to the window exactly, and each part to that of
    `breakdown.by_step`: where several activities run, the part is the breakdown's, and the one on the lane with most
    work of its kind counts. count and work_ns are of the activities that the step launched, hidden ones included; calls
    of those that are the first of their operator's call. order_ns is the time from the start of the window to the first
    of them.
    """
    return _charges(trace, COLUMNS)


@trace_fact
def segment_charges(trace: Trace) -> pl.DataFrame:
    """Rows of `step_charges` by segment: how many collectives of the step the program launched before.

    Columns those of `step_charges` and segment (null for the idle time after the last compute).
    """
    return _charges(trace, SEGMENT_COLUMNS)


def operator_rows(trace: Trace) -> tuple[pl.Series, pl.Series]:
    """Return, for each activity, the row in ops of its operator, and of its launch; null where not known."""
    launch = trace.activities["launch_id"]
    op_row = launch.set(((launch < 0) | (launch >= trace.ops.height)).fill_null(value=True), None)
    if trace.ops.is_empty():
        return op_row, op_row
    is_operator = (trace.ops["kind"] == "cpu_op") & (trace.ops["name"] != _PARAMETERS)
    outer = nesting.nearest(trace_columns.parent_ids(trace), is_operator.to_numpy())
    operator = pl.Series(outer).gather(op_row)
    inner = pl.Series(kernels.innermost_op(trace))
    op = operator.zip_with((operator >= 0).fill_null(value=False), inner)
    return op.set(op < 0, None), op_row


def windows(trace: Trace, device: int | None) -> pl.DataFrame:
    """Device windows of the steps, by start: rows of `schema.STEPS`."""
    on_device = pl.col("device").eq_missing(pl.lit(device, pl.Int64))
    return (
        trace.steps.drop_nulls(["start_ns", "end_ns"])
        .filter(on_device, pl.col("end_ns") > pl.col("start_ns"))
        .sort("start_ns")
    )


def charge_moments(trace: Trace, device: int | None, step_windows: pl.DataFrame) -> pl.DataFrame:
    """Charge each moment of the windows to one activity, or to a gap.

    Columns step, part, id (of the activity, or of the compute that ends the gap), cause, detail, gap (the row of
    `gap_causes`, -1 for none), dur_ns.
    """
    # Lanes in the order in which they count: by part, then by time, the longest first.
    work = _activities(trace, device).filter(pl.col("dur_ns") > 0).with_columns(_PART.alias("part"))
    lanes = work.partition_by("part", "lane")
    lanes.sort(key=lambda rows: (PARTS.index(rows["part"][0]), -rows["dur_ns"].sum()))
    lane_spans = [intervals.from_table(rows) for rows in lanes]
    causes = gap_causes(trace, device)
    gaps = intervals.from_table(causes)
    spans = step_windows.select("start_ns", "end_ns").to_numpy()
    pieces = sweep_line.pieces(spans, *(lane.ravel() for lane in lane_spans), gaps.ravel())
    # The activity (its id) that each moment is charged to, -1 for none, and the part.
    owner = np.full(len(pieces.start_ns), -1, np.int64)
    part = np.full(len(owner), PARTS.index(IDLE), np.int64)
    for rows, busy in zip(lanes, lane_spans, strict=True):
        free = np.flatnonzero(owner < 0)
        running = sweep_line.running(busy, pieces.start_ns[free])
        charged = free[running >= 0]
        owner[charged] = rows["id"].to_numpy()[running[running >= 0]]
        part[charged] = PARTS.index(rows["part"][0])
    moments = pl.DataFrame(
        {
            "step": step_windows["step"].gather(pieces.span),
            "part": pl.Series(PARTS, dtype=pl.String).gather(part),
            "owner": owner,
            "gap": np.where(owner < 0, sweep_line.running(gaps, pieces.start_ns), -1),
            "dur_ns": pieces.end_ns - pieces.start_ns,
        }
    )
    sums = moments.group_by("step", "part", "owner", "gap", maintain_order=True).agg(pl.col("dur_ns").sum())
    number = pl.int_range(pl.len()).cast(pl.Int64).alias("gap")
    caused = sums.join(causes.select(number, "activity_id", "cause", "detail"), on="gap", how="left")
    activity_id = pl.when(pl.col("owner") >= 0).then("owner").otherwise("activity_id").alias("id")
    return caused.select("step", "part", activity_id, "cause", "detail", "gap", "dur_ns")


def gap_causes(trace: Trace, device: int | None) -> pl.DataFrame:
    """Pieces of the compute gaps of one device with their causes, as `compute_gap_causes`."""
    return compute_gap_causes.compute_gap_causes(trace).filter(pl.col("device").eq_missing(pl.lit(device, pl.Int64)))


@trace_fact
def unit_samples(trace: Trace) -> pl.DataFrame:
    """Time of each FSDP unit's work in each step.

    Columns unit, step, metric, value; one row per unit, step and metric: `compute_ns`, in which any compute of the unit
    ran, and `exposed_communication_ns`, in which its communication ran and no compute of the rank. A unit's work is
    that of FSDP's own spans, and of forward and backward where these are known.
    """
    work = trace.activities.filter(
        pl.col("unit").is_not_null(), pl.col("step").is_not_null(), pl.col("kind").is_in(("compute", "communication"))
    )
    keyed = work.with_columns(pl.struct("unit", "step", "kind").rank("dense").cast(pl.Int64).alias("key"))
    keys = keyed.select("key", "unit", "step", "kind").unique("key").sort("key")
    spans, key = _union_by_key(intervals.from_table(keyed), keyed["key"].to_numpy() - 1)
    compute = intervals.union(*(breakdown.busy(trace, device)[0] for device in breakdown.devices(trace)))
    hidden_ns = intervals.coverage(spans, compute)
    length_ns = spans[:, 1] - spans[:, 0]
    is_compute = (keys["kind"] == "compute").to_numpy()
    own_ns = np.where(is_compute[key], length_ns, length_ns - hidden_ns) if len(spans) else length_ns
    sums = np.bincount(key, own_ns, minlength=keys.height)
    metric = pl.col("kind").replace_strict(["compute", "communication"], list(UNIT_METRICS), return_dtype=pl.String)
    samples = keys.with_columns(metric.alias("metric"), pl.Series("value", sums, pl.Float64))
    return schema.select(samples, UNIT_COLUMNS).sort("unit", "metric", "step")


@trace_fact
def work(trace: Trace) -> pl.DataFrame:
    """Rank's work in the median step by name, saves excluded.

    Columns kind, phase, name, amount; one row per kind, phase and name. For activities (compute, communication, memcpy,
    memset) the amount is time in ns, by activity name; for `flops` the operations of `flops.flops`, by op; for `sent`
    the bytes that collectives send, by op; for `allocated` the bytes allocated in the memory of the trace's work, by
    unit ('' where unknown). It is the median over all steps, 0 in a step without it.
    """
    in_training = pl.col("step").is_not_null() & pl.col("phase").ne_missing(conventions.CHECKPOINT)
    activities = trace.activities.filter(in_training)
    sent = trace.collectives.select(pl.col("activity_id").alias("id"), "op", "sent_bytes").join(
        activities.select("id", "step", "phase"), on="id"
    )
    allocated = trace.allocations.filter(in_training, allocations.of_training(trace), pl.col("delta_bytes") > 0)
    allocated = allocated.filter(~allocations.in_collectives(trace, allocated["at_ns"]))
    computed = flops.flops(trace)
    parts = [
        computed.select("phase", "name", "step", kind=pl.lit(FLOPS), amount=pl.col("flops").cast(pl.Int64)),
        activities.select("phase", "name", "step", kind="kind", amount="dur_ns"),
        sent.select("phase", name="op", step="step", kind=pl.lit(SENT), amount="sent_bytes"),
        allocated.select("phase", name="unit", step="step", kind=pl.lit(ALLOCATED), amount="delta_bytes"),
    ]
    return _typical(pl.concat(parts), max(1, trace.steps["step"].drop_nulls().n_unique()))


@trace_fact
def save_work(trace: Trace) -> pl.DataFrame:
    """Stages of the rank's median blocking save. Columns as `work`, kind `save`.

    The amount is in ns, the median over saves; everything saved after one step is one save.
    """
    rows = trace.checkpoints.filter(
        pl.col("operation") == conventions.SAVE, "blocking", pl.col("stage") != conventions.TOTAL
    )
    step = pl.coalesce(pl.col("step").cast(pl.String), "checkpoint")
    stages = rows.select(
        kind=pl.lit(SAVE), phase=pl.lit(None, pl.String), name="stage", step=step, amount=pl.col("dur_ns")
    )
    return _typical(stages, max(1, stages["step"].n_unique()))


def _lines(trace: Trace, launch: pl.Series) -> pl.Series:
    """Innermost frame of the user's code around each launch, or around its call in the forward pass; null without."""
    ids = trace.ops["id"].gather(launch).alias("op_id")
    stacks = allocations.code_locations(trace, ids).select("op_id", line="stack")
    return ids.to_frame().join(stacks, on="op_id", how="left", maintain_order="left")["line"]


def _extents(trace: Trace) -> pl.Series:
    """What shows the size of each activity where shapes are not recorded: grid and block, else its bytes."""
    work = trace.activities.select("id", "grid", "block", "bytes")
    sent = launched_work.messages(trace).select("id", "message_bytes")
    sized = work.join(sent, on="id", how="left", maintain_order="left")
    size = pl.coalesce("bytes", "message_bytes").cast(pl.String)
    of_grid = pl.concat_str("grid", pl.lit(" of "), pl.col("block").fill_null("?"))
    return sized.select(pl.coalesce(of_grid, size).alias("extent")).to_series()


def _activities(trace: Trace, device: int | None) -> pl.DataFrame:
    lanes = trace.lanes.filter(pl.col("device").eq_missing(pl.lit(device, pl.Int64))).select("lane")
    return trace.activities.join(lanes, on="lane", how="semi", maintain_order="left")


def _typical(rows: pl.DataFrame, steps: int) -> pl.DataFrame:
    place = ["kind", "phase", "name"]
    sums = rows.with_columns(pl.col("name").fill_null("")).group_by(*place, "step").agg(pl.col("amount").sum())
    # Steps without it have amount 0 and sort first.
    middle = [(pl.len() - steps + rank) for rank in ((steps - 1) // 2, steps // 2)]
    amounts = pl.col("amount").sort()
    pair = [pl.when(index >= 0).then(amounts.get(index.clip(0), null_on_oob=True)).otherwise(0) for index in middle]
    medians = sums.group_by(place).agg(((pair[0] + pair[1]) / 2).alias("amount"))
    return (
        schema.select(medians, WORK_COLUMNS)
        .filter(pl.col("amount") > 0)
        .sort("kind", "amount", *place[1:], descending=[False, True, False, False])
    )


def _union_by_key(spans: Spans, key: npt.NDArray[np.int64]) -> tuple[Spans, npt.NDArray[np.int64]]:
    """Spans of each key, disjoint within it, and the key of each; keys are numbered from 0."""
    if not len(spans):
        return intervals.EMPTY, np.empty(0, np.int64)
    origin_ns = int(spans[:, 0].min())
    # Shift each key's spans to a time range of its own, so that one union keeps them separate.
    stretch_ns = int(spans[:, 1].max()) - origin_ns + 1
    if (int(key.max()) + 1) * stretch_ns >= 1 << 62:
        parts = [intervals.union(spans[key == number]) for number in range(int(key.max()) + 1)]
        return np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    disjoint = intervals.union(spans - origin_ns + (key * stretch_ns)[:, None])
    span_key = disjoint[:, 0] // stretch_ns
    return disjoint - (span_key * stretch_ns)[:, None] + origin_ns, span_key


def _charges(trace: Trace, columns: schema.ColumnTypes) -> pl.DataFrame:
    """Charges by these of SEGMENT_COLUMNS."""
    op, launch = operator_rows(trace)
    described = trace.activities.select(
        "id",
        _PART.alias("own_part"),
        pl.coalesce(trace.ops["name"].gather(op), "name").alias("operator"),
        pl.col("name").alias("kernel"),
        call_paths.activity_modules(trace),
        call_paths.call_paths(trace).gather(launch).alias("path"),
        trace.ops["shapes"].gather(op).alias("shapes"),
        _extents(trace),
        (op.is_null() | pl.struct(op.alias("op"), _PART).is_first_distinct()).cast(pl.Int64).alias("calls"),
        call_paths.dispatch_chains(trace).gather(op).alias("chain"),
        _lines(trace, launch),
        _segments(trace, launch),
    )
    place = [*_PLACE, *(name for name in columns if name == "segment")]
    parts = [schema.empty(columns)]
    for device in breakdown.devices(trace):
        step_windows = windows(trace, device)
        if step_windows.height:
            # Activities that each step launched: columns step, id, order_ns, count, work_ns.
            begun = step_windows.select("step", begun_ns="start_ns").unique("step", keep="first")
            work = _activities(trace, device).join(begun, on="step", nulls_equal=True)
            order_ns = (pl.col("start_ns") - pl.col("begun_ns")).alias("order_ns")
            rows = pl.concat(
                [
                    charge_moments(trace, device, step_windows),
                    work.select(
                        "step", "id", order_ns, pl.lit(1, pl.Int64).alias("count"), pl.col("dur_ns").alias("work_ns")
                    ),
                ],
                how="diagonal",
            )
            rows = rows.join(described, on="id", how="left", maintain_order="left").with_columns(
                calls=pl.when(pl.col("count") == 1).then("calls")
            )
            charged = rows.with_columns(pl.lit(device, pl.Int64).alias("device")).with_columns(
                pl.coalesce("part", "own_part").alias("part")
            )
            sums = charged.group_by(place, maintain_order=True).agg(
                pl.col("order_ns").min(),
                pl.col("chain", "line").first(),
                pl.col("calls", "count", "work_ns", "dur_ns").sum(),
            )
            parts.append(schema.select(sums, columns).sort("step", "order_ns", nulls_last=True, maintain_order=True))
    return pl.concat(parts)


def _segments(trace: Trace, launch: pl.Series) -> pl.Series:
    """How many collectives of its step were launched before each activity: the program's order, alike on all ranks."""
    launched_ns = trace.ops["start_ns"].gather(launch).alias("launched_ns")
    rows = trace.activities.select("step", "kind", "start_ns").with_columns(
        pl.coalesce(launched_ns, "start_ns").alias("launched_ns")
    )
    is_collective = (pl.col("kind") == "communication").cast(pl.Int64)
    in_order = rows.with_row_index("row").sort("launched_ns", maintain_order=True)
    before = in_order.with_columns((is_collective.cum_sum() - is_collective).over("step").alias("segment"))
    return before.sort("row")["segment"]
