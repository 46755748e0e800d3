"""One Kineto trace file to one Trace: lanes, ops, steps, activities, collectives, allocations."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from tracekit import conventions, schema
from tracekit.readers import collectives, logs, nesting, stream, work
from tracekit.trace import Trace

_HOST_KINDS = {
    "cpu_op": "cpu_op",
    "operator": "cpu_op",
    "user_annotation": "annotation",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "hip_runtime": "runtime",
    "xpu_runtime": "runtime",
    "runtime": "runtime",
    "python_function": "python",
    "overhead": "overhead",
}
_UNIT_SPAN = r"^(?:FSDP|YaFSDP)::(\w+)"
_UNIT_NAME = r"^(?:FSDP|YaFSDP)::\w+ (?:\((.*)\)|for (.*))$"
_STEP = r"^ProfilerStep#(\d+)$"


def read(path: str, *, rank: int, window: int = 0) -> Trace:
    """Read one trace file and the logs that lie beside it.

    Raises BadTraceError if the file is missing, empty, cut or not a trace.
    """
    events = stream.read_events(path)
    base = int(events.header.get("baseTimeNanoseconds") or 0)
    frame = _with_categories(events.frame, base)
    host, lanes = _lanes(frame)
    ops = _ops(host)
    spans = _steps(ops)
    ops = _with_context(ops, spans)
    device = frame.filter(pl.col("cat").is_in(list(work.DEVICE_KINDS)))
    if device.is_empty():
        activities, sources = work.on_host(ops)
    else:
        lanes = pl.concat([lanes, work.streams(device, len(lanes))], how="diagonal_relaxed")
        activities, sources = work.on_device(device, lanes, ops)
    lanes = lanes.join(work.roles(activities), on="lane", how="left").with_columns(pl.col("role").fill_null("host"))
    ops = ops.rename({"input_dims": "shapes"})
    checkpoints, metrics, doubts = logs.read_beside(path, rank)
    lanes = schema.LANES.conform(lanes)
    activities = schema.ACTIVITIES.conform(activities)
    return Trace(
        rank=rank,
        window=window,
        path=path,
        lanes=lanes,
        steps=schema.STEPS.conform(_windows(spans, activities, lanes)),
        ops=schema.OPS.conform(ops),
        activities=activities,
        collectives=schema.COLLECTIVES.conform(collectives.table(sources)),
        groups=collectives.groups(events.header),
        allocations=schema.ALLOCATIONS.conform(_allocations(frame, ops, lanes, spans)),
        checkpoints=checkpoints,
        metrics=metrics,
        doubts=pl.concat([doubts, _doubts(frame, spans, base)]),
        header=events.header,
    )


def rank_of(header: Mapping[str, Any]) -> int | None:
    """Return the rank that the header of a trace file states; None where it states none."""
    info = header.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) and rank >= 0 else None


def _with_categories(frame: pl.DataFrame, base: int) -> pl.DataFrame:
    lower = pl.col("cat").str.to_lowercase()
    return frame.with_columns(
        pl.when(lower == "memcpy")
        .then(pl.lit("gpu_memcpy"))
        .when(lower == "memset")
        .then(pl.lit("gpu_memset"))
        .otherwise(lower)
        .alias("cat"),
        (pl.col("ts_ns") + base).alias("start_ns"),
        pl.col("dur_ns").fill_null(0),
    )


def _lanes(frame: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the host slices with their lane, and the host lanes."""
    host = frame.filter(
        pl.col("ph") == "X",
        pl.col("cat").is_in(list(_HOST_KINDS)),
        pl.col("start_ns").is_not_null(),
        pl.col("dur_ns") >= 0,
    )
    names = (
        frame.filter(pl.col("ph") == "M", pl.col("name") == "thread_name")
        .group_by("pid", "tid")
        .agg(pl.col("arg_name").last().alias("given"))
    )
    lanes = (
        host.select("pid", "tid")
        .unique(maintain_order=True)
        .with_row_index("lane")
        .join(names, on=["pid", "tid"], how="left", nulls_equal=True, maintain_order="left")
        .with_columns(
            pl.col("lane").cast(pl.Int64),
            pl.lit(None, pl.Int64).alias("device"),
            pl.lit(None, pl.Int64).alias("stream"),
            pl.coalesce("given", pl.format("thread {}", pl.col("tid").fill_null("?"))).alias("name"),
        )
        .drop("given")
    )
    return host.join(lanes.select("pid", "tid", "lane"), on=["pid", "tid"], nulls_equal=True), lanes


def _ops(host: pl.DataFrame) -> pl.DataFrame:
    ops = (
        host.with_columns(
            pl.col("cat").replace_strict(_HOST_KINDS).alias("kind"),
            (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"),
        )
        .sort("lane", "start_ns", "end_ns", descending=[False, False, True], maintain_order=True)
        .with_row_index("id")
        .with_columns(pl.col("id").cast(pl.Int64))
    )
    parent = nesting.parents(ops["lane"].to_numpy(), ops["start_ns"].to_numpy(), ops["end_ns"].to_numpy())
    return ops.select(
        "id",
        pl.Series("parent_id", parent),
        "lane",
        pl.col("name").fill_null("?"),
        "kind",
        "start_ns",
        "dur_ns",
        pl.col("arg_correlation").alias("correlation"),
        pl.col("arg_external_id").alias("external_id"),
        pl.col("arg_input_dims").alias("input_dims"),
        pl.col("arg_input_type").alias("input_type"),
    )


def _steps(ops: pl.DataFrame) -> pl.DataFrame:
    """Return the host windows of the steps: columns step, host_start_ns, host_end_ns, sorted; empty if not marked."""
    marks = ops.filter(pl.col("kind").is_in(["annotation", "cpu_op"]), pl.col("name").str.contains(_STEP))
    return (
        marks.select(
            pl.col("name").str.extract(_STEP).cast(pl.Int64, strict=False).alias("step"),
            pl.col("start_ns").alias("host_start_ns"),
            (pl.col("start_ns") + pl.col("dur_ns")).alias("host_end_ns"),
        )
        .drop_nulls()
        .sort("host_start_ns")
        .unique("step", keep="first", maintain_order=True)
    )


def step_at(steps: pl.DataFrame, at_ns: pl.Series) -> pl.Series:
    """Return the step whose host window holds each moment; null outside all of them."""
    starts, ends = steps["host_start_ns"].to_numpy(), steps["host_end_ns"].to_numpy()
    if not len(starts):
        return pl.Series("step", [None] * len(at_ns), pl.Int64)
    times = at_ns.to_numpy()
    index = np.searchsorted(starts, times, side="right") - 1
    inside = (index >= 0) & (times < ends[np.maximum(index, 0)])
    found = pl.Series("step", steps["step"].to_numpy()[np.maximum(index, 0)])
    return pl.select(pl.when(pl.Series(inside)).then(found).alias("step")).to_series()


def _with_context(ops: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Add step, phase, unit and span to every op."""
    parent = ops["parent_id"].to_numpy()
    is_span = (ops["kind"] == "annotation") & (
        ops["name"].str.contains(_UNIT_SPAN) | ops["name"].str.starts_with("FullyShardedDataParallel.")
    )
    span_of = pl.Series(nesting.nearest(parent, is_span.to_numpy()))
    named = ops.select(
        pl.coalesce(
            pl.col("name").str.extract(_UNIT_SPAN), pl.col("name").str.strip_prefix("FullyShardedDataParallel.")
        ).alias("span"),
        pl.coalesce(
            pl.col("name").str.extract(_UNIT_NAME, 1),
            pl.col("name").str.extract(_UNIT_NAME, 2),
            pl.when(pl.col("name").str.contains(_UNIT_SPAN)).then(pl.lit("")),
        ).alias("unit"),
    )
    picked = named[span_of.clip(0, None)] if len(ops) else named
    held = span_of >= 0
    return ops.with_columns(
        step_at(steps, ops["start_ns"]),
        _phase(ops).alias("phase"),
        pl.when(held).then(picked["unit"]).alias("unit"),
        pl.when(held).then(picked["span"]).alias("span"),
    )


def _phase(ops: pl.DataFrame) -> pl.Series:
    """Return each op's phase: by the recorder's spans around its start on any thread, else by what autograd tells."""
    prefix = conventions.SPAN_PREFIX
    marks = (
        ops.filter(pl.col("name").is_in([conventions.span_name(phase) for phase in conventions.PHASES]))
        .select(
            pl.col("name").str.strip_prefix(prefix).alias("phase"),
            "start_ns",
            (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"),
        )
        .sort("start_ns")
    )
    backward = nesting.nearest(
        ops["parent_id"].to_numpy(), ops["name"].str.starts_with("autograd::engine::").to_numpy()
    )
    optimizer = nesting.nearest(ops["parent_id"].to_numpy(), ops["name"].str.starts_with("Optimizer.step#").to_numpy())
    told = pl.select(
        pl.when(pl.Series(optimizer >= 0))
        .then(pl.lit(conventions.OPTIMIZER))
        .when(pl.Series(backward >= 0))
        .then(pl.lit(conventions.BACKWARD))
        .alias("phase")
    ).to_series()
    if marks.is_empty():
        return told if len(told) == len(ops) else pl.Series("phase", [None] * len(ops), pl.String)
    times = ops["start_ns"].to_numpy()
    index = np.searchsorted(marks["start_ns"].to_numpy(), times, side="right") - 1
    inside = (index >= 0) & (times < marks["end_ns"].to_numpy()[np.maximum(index, 0)])
    by_time = marks["phase"][pl.Series(np.maximum(index, 0))]
    return pl.select(pl.when(pl.Series(inside)).then(by_time).otherwise(told).alias("phase")).to_series()


def _windows(steps: pl.DataFrame, activities: pl.DataFrame, lanes: pl.DataFrame) -> pl.DataFrame:
    """Return the steps with their device windows, one row per step and device."""
    placed = activities.join(lanes.select("lane", "device"), on="lane").with_columns(
        (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns")
    )
    if steps.is_empty():
        whole = placed.group_by("device").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
        return whole.with_columns(pl.lit(None, pl.Int64).alias("step"))
    busiest = (
        placed.filter(pl.col("kind") == "compute")
        .group_by("device", "lane")
        .agg(pl.col("dur_ns").sum())
        .sort("dur_ns", "lane", descending=[True, False])
        .group_by("device", maintain_order=True)
        .first()
    )
    main = placed.join(busiest.select("lane"), on="lane", how="semi")
    starts = main.drop_nulls("step").group_by("step", "device").agg(pl.col("start_ns").min())
    last = placed.drop_nulls("step").group_by("step", "device").agg(pl.col("end_ns").max())
    return (
        steps.join(starts, on="step")
        .join(last, on=["step", "device"], nulls_equal=True)
        .sort("device", "start_ns")
        .with_columns(pl.coalesce(pl.col("start_ns").shift(-1).over("device"), "end_ns").alias("end_ns"))
        .sort("start_ns", "device")
    )


def _allocations(frame: pl.DataFrame, ops: pl.DataFrame, lanes: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    events = frame.filter(pl.col("name") == "[memory]", pl.col("ph") == "i", pl.col("arg_delta_bytes").is_not_null())
    events = events.join(lanes.select("pid", "tid", "lane"), on=["pid", "tid"], how="left", nulls_equal=True).sort(
        "start_ns", maintain_order=True
    )
    table = events.select(
        pl.col("start_ns").alias("at_ns"),
        pl.when(pl.col("arg_device_type") != 0).then(pl.col("arg_device_id")).alias("device"),
        pl.col("arg_address").alias("address"),
        pl.col("arg_delta_bytes").alias("delta_bytes"),
        pl.col("arg_allocated_bytes").alias("allocated_bytes"),
        pl.col("arg_reserved_bytes").alias("reserved_bytes"),
        "lane",
    )
    op = pl.Series("op_id", _enclosing(ops, table["lane"], table["at_ns"]))
    context = ops.select("phase", "unit", "span")
    found = op.is_not_null()
    picked = context[op.fill_null(0)] if len(ops) and len(op) else context.clear()
    if picked.is_empty():
        return table.with_columns(step_at(steps, table["at_ns"]))
    return table.with_columns(
        op,
        step_at(steps, table["at_ns"]),
        *(pl.when(found).then(picked[name]).alias(name) for name in ("phase", "unit", "span")),
    )


def _enclosing(ops: pl.DataFrame, lane: pl.Series, at_ns: pl.Series) -> pl.Series:
    """Return the innermost op on `lane` at each moment; null where there is none."""
    asked = pl.DataFrame({"lane": lane.cast(pl.Int64), "start_ns": at_ns}).with_row_index("asked").sort("start_ns")
    latest = asked.join_asof(
        ops.select("id", "lane", "start_ns").sort("start_ns"), on="start_ns", by="lane", check_sortedness=False
    ).sort("asked")
    current = latest["id"].fill_null(-1).to_numpy().copy()
    ends, parent = (ops["start_ns"] + ops["dur_ns"]).to_numpy(), ops["parent_id"].to_numpy()
    times = at_ns.to_numpy()
    while len(ends):
        late = (current >= 0) & (ends[np.maximum(current, 0)] < times)
        if not late.any():
            break
        current[late] = parent[current[late]]
    return pl.Series("id", current).replace(-1, None)


def _doubts(frame: pl.DataFrame, steps: pl.DataFrame, base: int) -> pl.DataFrame:
    rows = []
    if steps.is_empty():
        rows.append(
            (
                "no_steps",
                "No ProfilerStep marks: the trace is one window without steps; call profiler.step() once a step.",
                0.0,
            )
        )
    if not base and (frame["ts_ns"] > 2**53).any():
        rows.append(
            (
                "clock_resolution",
                "Times are epoch microseconds in JSON numbers, so they resolve only 0.25 µs.",
                0.0,
            )
        )
    broken = frame.filter(pl.col("ph") == "X", pl.col("start_ns").is_null() | (pl.col("dur_ns") < 0)).height
    if broken:
        rows.append(
            ("bad_times", f"{broken} events have no usable time and were left out.", broken / max(frame.height, 1))
        )
    return pl.DataFrame(rows, schema=schema.DOUBTS.schema, orient="row")
