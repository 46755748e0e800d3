"""Device stalls of a run: those of each trace, and kernels that are paused by the durations on other ranks.

In a window of few steps, a device that another process takes often may pause a kernel in most of them, so that its own
steps do not show how long it usually takes. The other ranks run the same kernels.
"""

import numpy as np
import polars as pl

from tracekit.analysis.time import breakdown, device_stalls, launches
from tracekit.model import schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact

DURATION_COLUMNS = schema.columns("device kernel nth low_ns middle_ns", kernel=pl.UInt64)
KERNEL_COLUMNS = schema.columns("device activity_id name step lane kernel nth start_ns dur_ns", kernel=pl.UInt64)
_LEAST_NS = 100_000
"""The usual duration of shorter kernels matters little next to a time slice."""
_OTHER_RANKS = 2
_WINDOW, _PLACE = ["window", "rank"], ["kernel", "nth"]


@run_fact
def stalls(run: Run) -> pl.DataFrame:
    """Spans in which devices did not run the work that was queued. Columns window, rank, those of `device_stalls`.

    On devices with recurring stalls of one length, a kernel is paused, too, if it takes longer than the same kernel in
    another step or on other ranks by that length or a multiple of it. The same kernel has the same `kernel_ids` and
    number within its step. The other ranks must agree by a fraction of the length; all their durations are multiplied
    by how much slower the rank typically is.
    """
    of_traces = run.table(device_stalls.device_stalls)
    lengths = _lengths(of_traces.filter("is_recurring"))
    if lengths.is_empty():
        return of_traces
    places = _usual_durations(run.table(kernel_durations), lengths)
    kernels = run.table(long_kernels).join(places, on=[*_WINDOW, *_PLACE], nulls_equal=True)
    excess_ns = pl.col("dur_ns") - pl.col("usual_ns")
    times = (excess_ns / pl.col("slice_ns")).alias("times")
    is_multiple = (pl.col("times").round() >= 1) & (
        (pl.col("times") - pl.col("times").round()).abs() <= device_stalls.ALIKE_RATIO
    )
    recorded = of_traces.filter(pl.col("kind") == device_stalls.PAUSED).select(*_WINDOW, "activity_id")
    paused = (
        kernels.with_columns(times)
        .filter(is_multiple, excess_ns >= device_stalls.MIN_STALL_NS)
        .join(recorded, on=recorded.columns, how="anti")
        .with_columns(
            pl.lit(device_stalls.PAUSED).alias("kind"),
            pl.lit(value=True).alias("is_recurring"),
            pl.col("start_ns") + pl.col("usual_ns"),
            excess_ns.alias("dur_ns"),
        )
    )
    return pl.concat([of_traces, paused.select(of_traces.columns)]).sort(*_WINDOW, "start_ns")


@trace_fact
def kernel_durations(trace: Trace) -> pl.DataFrame:
    """Durations of compute kernels over the steps, those of 0.1 ms or more.

    Columns device, kernel and nth (`kernel_ids`, and the number of such a kernel within its step), low_ns and middle_ns
    (quartile and median); one row per device, kernel and number.
    """
    by_place = _kernels(trace).group_by("device", *_PLACE, maintain_order=True)
    sums = by_place.agg(
        pl.col("dur_ns").quantile(0.25, "lower").cast(pl.Int64).alias("low_ns"),
        pl.col("dur_ns").median().round().cast(pl.Int64).alias("middle_ns"),
    )
    return schema.select(sums.filter(pl.col("low_ns") >= _LEAST_NS), DURATION_COLUMNS)


@trace_fact
def long_kernels(trace: Trace) -> pl.DataFrame:
    """Return the compute kernels that are as long as a stall, on devices with recurring stalls.

    Columns KERNEL_COLUMNS; one row per kernel.
    """
    stalled = device_stalls.device_stalls(trace).filter("is_recurring")["device"]
    if stalled.is_empty():
        return schema.empty(KERNEL_COLUMNS)
    is_long = pl.col("dur_ns") >= device_stalls.MIN_STALL_NS
    return schema.select(_kernels(trace).filter(is_long, pl.col("device").is_in(stalled.implode())), KERNEL_COLUMNS)


FACTS: tuple[TraceFact, ...] = (device_stalls.device_stalls, kernel_durations, long_kernels)
"""What `stalls` reads."""


@memoize
def _kernels(trace: Trace) -> pl.DataFrame:
    parts = [schema.empty(KERNEL_COLUMNS)]
    for device in breakdown.devices(trace) if trace.on_device else ():
        arrays = launches.work_columns(trace, device)
        rows = np.flatnonzero(arrays.computes)
        rows = rows[np.lexsort((arrays.id[rows], arrays.launched_ns[rows]))]
        work = launches.work(trace, device).select(
            "device", "name", "step", "lane", "start_ns", "dur_ns", activity_id="id"
        )
        kernel = launches.kernel_ids(trace, device)[rows]
        is_long = work["dur_ns"].to_numpy()[rows] >= _LEAST_NS
        long = np.flatnonzero(np.isin(kernel, kernel[is_long]))  # others have no row in any table here
        compute = work[rows[long]].hstack([pl.Series("kernel", kernel[long])])
        nth = pl.int_range(pl.len(), dtype=pl.Int64).over("step", "kernel").alias("nth")
        parts.append(schema.select(compute.with_columns(nth), KERNEL_COLUMNS))
    return pl.concat(parts)


def _lengths(recurring: pl.DataFrame) -> pl.DataFrame:
    """Return the length that most stalls of a device have: window, rank, slice_ns; none where they differ."""
    rows = [
        (*key, length_ns)
        for key, rank_stalls in recurring.group_by(*_WINDOW, maintain_order=True)
        if (length_ns := device_stalls.common_length(rank_stalls["dur_ns"].to_numpy())) is not None
    ]
    return pl.DataFrame(rows, schema={**dict.fromkeys(_WINDOW, pl.Int64), "slice_ns": pl.Float64}, orient="row")


def _usual_durations(durations: pl.DataFrame, lengths: pl.DataFrame) -> pl.DataFrame:
    """Usual durations of the kernels of stalled ranks: window, rank, kernel, nth, slice_ns, usual_ns.

    That is the shortest of the rank's own steps if it is no longer than on the other ranks, else what it takes there.
    """
    parts = [pl.DataFrame(schema={**dict.fromkeys(_WINDOW, pl.Int64), "kernel": pl.UInt64, "nth": pl.Int64,
                                  "slice_ns": pl.Float64, "usual_ns": pl.Int64})]  # fmt: skip
    for window, rank, slice_ns in lengths.iter_rows():
        window_rows = durations.filter(pl.col("window") == window)
        other_ranks = window_rows.filter(pl.col("rank") != rank).group_by(*_PLACE).agg(
            pl.col("middle_ns").median().alias("there_ns"),
            (pl.col("middle_ns").max() - pl.col("middle_ns").min()).alias("spread_ns"),
            pl.col("rank").n_unique().alias("ranks"),
        )  # fmt: skip
        rank_rows = window_rows.filter(pl.col("rank") == rank).join(other_ranks, on=_PLACE, maintain_order="left")
        slower = (rank_rows["low_ns"] / rank_rows["there_ns"]).median()
        near_ns = device_stalls.ALIKE_RATIO * slice_ns
        there_ns = pl.col("there_ns") * (slower if isinstance(slower, float) else 1.0)
        usual_ns = pl.when(pl.col("low_ns") <= there_ns + near_ns).then("low_ns").otherwise(there_ns)
        agreed = rank_rows.filter(pl.col("ranks") >= _OTHER_RANKS, pl.col("spread_ns") <= near_ns)
        parts.append(
            agreed.select(
                *_WINDOW, *_PLACE,
                pl.lit(slice_ns).alias("slice_ns"), usual_ns.round().cast(pl.Int64).alias("usual_ns"),
            )
        )  # fmt: skip
    return pl.concat(parts)
