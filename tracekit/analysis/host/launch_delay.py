"""Launch delay: compute gaps caused by the host, its state in them, and reads of device values."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.communication import communication_gap_causes
from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.host import stacks
from tracekit.analysis.time import breakdown, host_state, launches, trace_columns
from tracekit.model import schema, sweep_line
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

GAP_COLUMNS = schema.columns(
    "gap device step phase unit name nth detail synced start_ns dur_ns stack", synced=pl.Boolean, stack=pl.String
)
WAIT_COLUMNS = schema.columns("device step start_ns dur_ns")
READ_COLUMNS = schema.columns("step phase unit name start_ns dur_ns")
_KEY = ("gap", "detail")


def host_gaps(trace: Trace) -> pl.DataFrame:
    """Return the time of compute gaps that the host causes, by its state.

    Columns gap, device, step, phase, unit (as `gaps.compute_gaps`), name (of the compute that ends the gap), nth (its
    number among those of that name in its step, from 0, to find the same place in other steps), detail
    (`host_state.HOST_STATES`), synced (the device became idle while the host waited for it, rate limiters excluded),
    start_ns (of the first piece), dur_ns, stack (the function of the program in the middle of that time; null without
    recorded stacks); one row per gap and detail, two where a part is synced. By as much as the host had waited in the
    step, it could have launched earlier: what gaps last beyond that is not synced.
    """
    pieces = compute_gap_causes.compute_gap_causes(trace)
    late = pieces.filter(pl.col("cause") == communication_gap_causes.HOST)
    if late.is_empty():
        return schema.empty(GAP_COLUMNS)
    waits, place = pl.col("detail") == host_state.SYNCHRONIZE, ("device", "step", "phase", "unit")
    return (
        late.with_columns(waits.any().over("gap").alias("waits"))
        .group_by(*_KEY, maintain_order=True)
        .agg(pl.col(*place, "activity_id", "waits", "start_ns").first(), pl.col("dur_ns").sum())
        .join(_before(trace, pieces), on="gap", how="left", maintain_order="left")
        .join(places(trace), on="activity_id", how="left", maintain_order="left")
        .with_columns((pl.col("waits") | pl.col("dry")).alias("synced"))
        .pipe(lambda rows: _split_by_wait(rows) if trace.on_device and rows["synced"].any() else rows)
        .pipe(lambda rows: rows.with_columns(_locations(trace, rows)))
        .pipe(schema.select, GAP_COLUMNS)
    )


def _before(trace: Trace, pieces: pl.DataFrame) -> pl.DataFrame:
    """Return, for each gap, whether the device became idle while the host waited for it, and for how long it had.

    Columns gap, dry, before_ns.
    """
    gap, first = np.unique(pieces["gap"].to_numpy(), return_index=True)  # pieces of a gap are in order of time
    idle_ns = pieces["start_ns"].to_numpy()[first]
    dry = host_state.state_at(trace, idle_ns - 1) == host_state.HOST_STATES.index(host_state.SYNCHRONIZE)
    return pl.DataFrame({"gap": gap, "dry": dry, "before_ns": host_state.waited_ns(trace, idle_ns)})


def _split_by_wait(rows: pl.DataFrame) -> pl.DataFrame:
    """Return synced gaps in two parts: what the host's waits explain, and what lasts beyond.

    Without its waits (before_ns, and in the gap) the host would be ahead by their sum over the step so far, less what
    earlier gaps have used of it.
    """
    is_wait = pl.col("detail") == host_state.SYNCHRONIZE
    waited_ns = pl.col("before_ns").first() + pl.col("dur_ns").filter(is_wait).sum()
    gaps = rows.filter("synced").group_by("gap").agg(
        pl.col("device", "step").first(), pl.col("start_ns").min(), waited_ns.alias("waited_ns"), pl.col("dur_ns").sum()
    )  # fmt: skip
    ahead_ns = (pl.col("waited_ns") - pl.col("dur_ns")).cum_sum()
    left_ns = ahead_ns - pl.min_horizontal(ahead_ns.cum_min(), 0)
    used_ns = left_ns.shift(1, fill_value=0) + pl.col("waited_ns") - left_ns
    explained = gaps.sort("start_ns").select("gap", used_ns.over("device", "step").alias("explained_ns"))
    ordered = rows.sort("gap", is_wait, "start_ns", descending=[False, True, False])
    before_ns = pl.col("dur_ns").cum_sum().over("gap") - pl.col("dur_ns")
    explained_ns = pl.min_horizontal((pl.col("explained_ns").fill_null(0) - before_ns).clip(0), "dur_ns")
    split = ordered.join(explained, on="gap", how="left", maintain_order="left").with_columns(synced_ns=explained_ns)
    synced = split.filter(pl.col("synced_ns") > 0).with_columns(dur_ns="synced_ns")
    beyond = split.with_columns(
        pl.col("start_ns") + pl.col("synced_ns"), pl.col("dur_ns") - pl.col("synced_ns"), synced=pl.lit(value=False)
    ).filter(pl.col("dur_ns") > 0)
    return pl.concat([synced, beyond]).sort("gap", "start_ns", maintain_order=True)


def data_waits(trace: Trace) -> pl.DataFrame:
    """Return the time in which the host loads data, within the device windows of the steps.

    The first window begins with the recording: a rank that loads data then is late for its first collective. Columns
    device, step, start_ns, dur_ns; one row per span. The device may be busy with queued work meanwhile.
    """
    if not host_state.has_state(trace, host_state.DATA):
        return schema.empty(WAIT_COLUMNS)
    windows = trace.steps.drop_nulls(["start_ns", "end_ns"])
    is_first = pl.col("start_ns") == pl.col("start_ns").min().over("device")
    begin_ns = trace.ops["start_ns"].filter(pl.Series(host_state.is_launching(trace))).min()
    windows = windows.with_columns(
        pl.when(is_first)
        .then(pl.min_horizontal("start_ns", pl.lit(begin_ns, pl.Int64)))
        .otherwise("start_ns")
        .alias("start_ns")
    )
    parts = [schema.empty(WAIT_COLUMNS)]
    for (device,), own in windows.group_by("device", maintain_order=True):
        spans = own.sort("start_ns").select("start_ns", "end_ns").to_numpy().astype(np.int64)
        pieces = sweep_line.pieces(spans, host_state.state_changes(trace))
        loads = host_state.state_at(trace, pieces.start_ns) == host_state.HOST_STATES.index(host_state.DATA)
        found = (
            own.sort("start_ns")[pieces.of[loads]]
            .select("step")
            .with_columns(
                pl.lit(device, pl.Int64).alias("device"),
                pl.Series("start_ns", pieces.start_ns[loads], pl.Int64),
                pl.Series("dur_ns", (pieces.end_ns - pieces.start_ns)[loads], pl.Int64),
            )
        )
        parts.append(schema.select(found, WAIT_COLUMNS))
    return pl.concat(parts)


def device_reads(trace: Trace) -> pl.DataFrame:
    """Return the ops of forward and backward that read a device value onto the host, such as aten::item.

    Columns step, phase, unit, name, start_ns, dur_ns; one row per outermost such op of a thread that launches work.
    """
    reads = trace_columns.is_kind(trace, "cpu_op") & trace_columns.is_named(trace, host_state.SYNCHRONIZING)
    passes = trace_columns.is_phase(trace, conventions.FORWARD) | trace_columns.is_phase(trace, conventions.BACKWARD)
    rows = np.flatnonzero(reads & passes & host_state.is_launching(trace))
    if not len(rows):
        return schema.empty(READ_COLUMNS)
    ops = trace.ops[rows].filter(trace.in_steps)
    inner = ops.join(ops.select(pl.col("id").alias("parent_id")), on="parent_id", how="semi")
    return ops.join(inner.select("id"), on="id", how="anti").select(*READ_COLUMNS)


@memoize
def places(trace: Trace) -> pl.DataFrame:
    """Return the name of each compute activity, and its number among those of its name in its step."""
    nth = pl.int_range(pl.len()).over("step", "lane", "name").cast(pl.Int64)
    work = [launches.work(trace, device).filter(pl.col("kind") == "compute") for device in breakdown.devices(trace)]
    none = schema.columns("name activity_id nth", name=pl.String)
    return pl.concat([schema.empty(none), *(part.select("name", activity_id="id", nth=nth) for part in work)])


def _locations(trace: Trace, rows: pl.DataFrame) -> pl.Series:
    return stacks.locations_at(trace, (rows["start_ns"] + rows["dur_ns"] // 2).to_numpy())
