"""Exposed communication of training, saves excluded: transfer and waiting that no compute hides."""

import polars as pl

from tracekit import conventions
from tracekit.analysis.communication import collective_instances
from tracekit.analysis.time import breakdown
from tracekit.model import columns, intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace

COLUMNS = schema.columns("activity_id step device lane name op dtype unit phase start_ns dur_ns exposed_ns")
SPAN_COLUMNS = {"device": pl.Int64, "start_ns": pl.Int64, "dur_ns": pl.Int64}
STEP_COLUMNS = schema.columns("window rank") | dict(breakdown.BREAKDOWN.schema) | schema.columns("exposed_ns waited_ns")
_OF = ("window", "rank", "device")


@trace_fact
def exposed_calls(trace: Trace) -> pl.DataFrame:
    """Return every communication activity of training with its exposed time.

    Columns COLUMNS; one row per activity.
    Concurrent collectives each count the same exposed time, so sums over activities may exceed the breakdown's.
    """
    all_calls = breakdown.communication(trace)
    training = columns.where(all_calls, ~columns.flags(all_calls["phase"] == conventions.CHECKPOINT))
    calls = breakdown.with_exposure(trace, training)
    row = columns.rows_of(trace.collectives["activity_id"].to_numpy(), calls["id"].to_numpy())
    details = columns.rows_or_nulls(trace.collectives[["op", "dtype"]], row)
    return schema.select(calls.hstack([calls["id"].alias("activity_id"), *details]), COLUMNS)


@run_fact
def exposed_transfers(run: Run) -> pl.DataFrame:
    """Return `exposed_calls` for the whole run without the time waiting for other ranks; use ``run.table``.

    Columns window, rank, those of `exposed_calls`, waited_ns (from its start to the last known arrival, hidden or not);
    exposed_ns is that of the rest.
    """
    key = ["window", "rank", "activity_id"]
    waits = run.table(collective_instances.waits).select(*key, pl.col("wait_ns").alias("waited_ns")).unique(key)
    calls = run.table(exposed_calls).join(waits, on=key, how="left", maintain_order="left")
    calls = calls.with_columns(pl.min_horizontal(pl.col("waited_ns").fill_null(0), "dur_ns").alias("waited_ns"))
    exposed_spans = exposed_on_devices(run)
    parts = []
    for place, device_calls in calls.partition_by(_OF, as_dict=True).items():
        exposed_ns = intervals.coverage(transfer_spans(device_calls), exposed_spans.get(place, intervals.EMPTY))
        parts.append(device_calls.with_columns(pl.Series("exposed_ns", exposed_ns, pl.Int64)))
    return pl.concat(parts) if parts else calls


@run_fact
def exposed_by_step(run: Run) -> pl.DataFrame:
    """Return the breakdown of each step with exposed communication split into transfer and waiting; a run table.

    Columns STEP_COLUMNS: exposed_ns, in which no compute runs and some collective has all its ranks, and waited_ns, in
    which every running collective waits for a rank; they sum to exposed_communication_ns. Where traces or clocks are
    missing, waiting cannot be separated and counts as exposed_ns.
    """
    calls = run.table(exposed_transfers).partition_by(_OF, as_dict=True)
    saves = run.table(save_collectives).partition_by(_OF, as_dict=True)
    exposed_spans = exposed_on_devices(run)
    parts = []
    for place, steps in run.table(breakdown.by_step).partition_by(_OF, as_dict=True).items():
        call_spans = [transfer_spans(calls[place])] if place in calls else []
        call_spans += [intervals.from_table(saves[place])] if place in saves else []
        windows = intervals.from_columns(steps["start_ns"], steps["duration_ns"])
        spans = intervals.intersect(exposed_spans.get(place, intervals.EMPTY), intervals.union(*call_spans))
        exposed_ns = pl.Series("exposed_ns", intervals.coverage(windows, spans), pl.Int64)
        parts.append(steps.with_columns(exposed_ns))
    table = pl.concat(parts) if parts else run.table(breakdown.by_step).with_columns(exposed_ns=pl.lit(0, pl.Int64))
    waited_ns = (pl.col("exposed_communication_ns") - pl.col("exposed_ns")).alias("waited_ns")
    return table.with_columns(waited_ns).select(*STEP_COLUMNS)


@run_fact
def by_rank(run: Run) -> pl.DataFrame:
    """Return each rank's communication in steps: hidden, exposed transfer and exposed waiting; use ``run.table``.

    Columns rank, duration_ns (of its steps), communication_ns and its parts, which sum to it: hidden_ns (compute runs
    meanwhile), exposed_ns and waited_ns (as `exposed_by_step`). Several devices are summed.
    """
    steps = run.table(exposed_by_step)
    times = pl.col("duration_ns", "communication_ns", "hidden_ns", "exposed_ns", "waited_ns").sum()
    return steps.rename({"overlapped_ns": "hidden_ns"}).group_by("rank").agg(times).sort("rank")


@run_fact
def spread(run: Run) -> pl.DataFrame:
    """Compare each rank's steps with those of the other ranks; use ``run.table``.

    Columns window, step, rank, start_ns, duration_ns (of its slowest device), median_ns (over ranks), longer_ratio
    (duration over that median, less 1), exposed_ratio and waited_ratio (exposed transfer and waiting as shares of the
    step); one row per step and rank.
    """
    slowest = pl.col("duration_ns").arg_max()
    steps = run.table(exposed_by_step).drop_nulls("step").filter(pl.col("duration_ns") > 0)
    rank_steps = steps.group_by("window", "step", "rank").agg(
        pl.col("start_ns", "duration_ns", "exposed_ns", "waited_ns").get(slowest)
    )
    median = pl.col("duration_ns").median().over("window", "step")
    place = ("window", "step", "rank", "start_ns", "duration_ns")
    table = rank_steps.select(
        *place,
        median_ns=median.round().cast(pl.Int64),
        longer_ratio=pl.col("duration_ns") / median - 1,
        exposed_ratio=pl.col("exposed_ns") / pl.col("duration_ns"),
        waited_ratio=pl.col("waited_ns") / pl.col("duration_ns"),
    )
    return table.sort("window", "step", "rank")


@trace_fact
def save_collectives(trace: Trace) -> pl.DataFrame:
    """Return the collectives of checkpoint saves: columns device, start_ns, dur_ns."""
    all_calls = breakdown.communication(trace)
    return columns.where(all_calls[list(SPAN_COLUMNS)], columns.flags(all_calls["phase"] == conventions.CHECKPOINT))


def exposed_on_devices(run: Run) -> dict[tuple[object, ...], intervals.Spans]:
    """Spans of exposed communication by window, rank and device."""
    is_exposed = pl.col("part") == breakdown.EXPOSED_COMMUNICATION
    spans = run.scan(breakdown.spans).filter(is_exposed).select(*_OF, "start_ns", "dur_ns").collect()
    # The rows of a device follow each other. Slices, unlike partitions, are no second copy of a table of all ranks.
    places = spans.select(pl.struct(_OF).rle().alias("run")).unnest("run")
    by_device, first = {}, 0
    for place, length in zip(places["value"], places["len"], strict=True):
        by_device[tuple(place.values())] = intervals.from_table(spans.slice(first, length))
        first += length
    return by_device


def transfer_spans(calls: pl.DataFrame) -> intervals.Spans:
    """Span in which each collective (a table with waited_ns) has all its known ranks; one per row.

    Where waited_ns is null, because no other rank of the collective is known, that is its whole duration.
    """
    waited_ns = calls["waited_ns"].fill_null(0)
    return intervals.from_columns(calls["start_ns"] + waited_ns, calls["dur_ns"] - waited_ns)
