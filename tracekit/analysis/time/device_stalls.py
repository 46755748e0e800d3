"""Device stalls: a device that runs nothing although work is queued, or that pauses the kernel that it runs.

Another process has the device meanwhile (time slices), it is throttled, or it starts each kernel late. Neither the host
nor another rank causes that time.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.time import breakdown, launched_work, trace_columns
from tracekit.model import columns, intervals, schema, sweep_line
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import Trace, TraceFact

IDLE, PAUSED, GAP = KINDS = ("idle", "paused", "gap")
"""The device is idle before the next work on any stream; a kernel takes longer by as much as such idle times; or the
device is idle for a short time between most kernels of a stream."""

MIN_STALL_NS = 500_000
"""A kernel starts some µs after its launch. NVIDIA's driver gives each process slices of 1,024 µs or more (Volta and
later: the default time slice of a channel group in open-gpu-kernel-modules); half a slice can be recognised."""
MIN_STALLS = 5  # fewer may be the program's own
USUAL_GAP_NS = 3_000
"""Queued kernels of a stream follow each other after 0.4 to 3 µs (median; 90% after 0.7 to 5 µs) in recordings of V100,
A100, H100 and H200, after 4 µs (4 to 5 µs) in one of MI300X."""
MIN_GAP_NS = 6_000
_MIN_GAPS = 30
_LEAST_GAPS_RATIO = 0.01
"""Gaps that take a smaller share of the device's time are no rows: there may be one for each kernel."""
COLUMNS = schema.columns(
    "device activity_id name step lane kind is_recurring start_ns dur_ns usual_ns", is_recurring=pl.Boolean
)
ALIKE_RATIO = 0.25
"""Lengths are alike if they differ by at most this share."""
_MOSTLY = 0.5
_MIN_SAMPLES = 3
_SPREADS = 3
_TO_HOST = r"(?i)DtoH|DeviceToHost"
_LAUNCH = r"^(cuda|hip|cu)(Graph|Module|Ext|Cooperative|Coop)?Launch"

DURATION_COLUMNS = schema.columns("device kernel nth low_ns middle_ns", kernel=pl.UInt64)
KERNEL_COLUMNS = schema.columns("device activity_id name step lane kernel nth start_ns dur_ns", kernel=pl.UInt64)
_LEAST_NS = 100_000
"""The usual duration of shorter kernels matters little next to a time slice."""
_OTHER_RANKS = 2
_WINDOW, _PLACE = ["window", "rank"], ["kernel", "nth"]
_OF_SLICES = pl.col("is_recurring") & (pl.col("kind") != GAP)


@trace_fact
@memoize
def device_stalls(trace: Trace) -> pl.DataFrame:
    """Spans in which each device did not run the work that was queued.

    Columns device, activity_id, name, lane (of the work that runs next, or that is paused), step (whose device window
    the stall begins in), kind (of KINDS), is_recurring, start_ns, dur_ns, usual_ns (of a paused kernel, how long it
    takes else; null otherwise); one row per stall of MIN_STALL_NS or more. A `paused` one starts at its kernel's usual
    end.

    An `idle` stall lasts from the launch of the work that runs next, or from the end of all work before, to the start
    of that work. All devices of the trace are idle then, so an event of another stream can't be what it waits for. A
    wait that is not recorded (a host function, a memory operation, kernels of a CUDA graph that the profiler lost) has
    its place in the program: before the same kernels each time. Whoever takes the device away does not know the
    program: stalls are taken for that (is_recurring) if there are MIN_STALLS of them outside CUDA graphs, at places
    that the program passes without one at least as often. Others are listed with is_recurring false.

    A `paused` stall is a kernel that takes longer than the same kernel else, by about the length of an idle stall, or a
    multiple of it. These count if most such excesses on the device have one length.

    A `gap` is idle time of MIN_GAP_NS or more, but shorter than a stall, less the first USUAL_GAP_NS: the device takes
    that long to start work. It counts in streams on which most kernels that are queued behind another start as late, if
    gaps take 1% of the device's time. Where another stream is busy, only gaps of the stream's usual length count.
    """
    if trace_columns.has_issue(trace, "sampled") or not trace.on_device:
        return schema.empty(COLUMNS)
    parts = [_of_device(trace, device) for device in breakdown.devices(trace) if device is not None]
    return schema.concat(parts, COLUMNS)


@memoize
def recurring_spans(trace: Trace, device: int | None) -> Spans:
    """Spans in which one device is idle although work is queued, for a cause outside the program."""
    return _idle_spans(trace, device, pl.col("is_recurring"))


@memoize
def unexplained_spans(trace: Trace, device: int | None) -> Spans:
    """Spans in which one device is idle although work is queued, for an unknown cause."""
    return _idle_spans(trace, device, ~pl.col("is_recurring"))


def _idle_spans(trace: Trace, device: int | None, which: pl.Expr) -> Spans:
    if device_stalls(trace).is_empty():
        return intervals.EMPTY
    on_device = pl.col("device").eq_missing(pl.lit(device, pl.Int64))
    return intervals.from_table(device_stalls(trace).filter(on_device, pl.col("kind") != PAUSED, which))


@dataclass(frozen=True)
class _Stalls:
    """Stalls of one device: the row of `work`, start, end, and whether the place is passed without one elsewhere."""

    row: Ints
    spans: Spans
    is_whole: Flags
    """Whether the work had been launched when the device became idle: then the length is that of the cause."""
    is_unusual: Flags
    is_usual: Flags
    """Whether each pass of its place, of several, has such a stall: a wait of the program."""
    in_graph: Flags
    """Whether a CUDA graph may run then."""

    @property
    def dur_ns(self) -> Ints:
        return self.spans[:, 1] - self.spans[:, 0]


_NO_FLAGS: Flags = np.zeros(0, np.bool_)
_NONE = _Stalls(np.zeros(0, np.int64), intervals.EMPTY, _NO_FLAGS, _NO_FLAGS, _NO_FLAGS, _NO_FLAGS)


def _of_device(trace: Trace, device: int) -> pl.DataFrame:
    work = launched_work.work(trace, device)
    idle, paused = _idle(trace, device), _paused_kernels(trace, device)
    slice_ns = common_length(np.concatenate((idle.dur_ns[idle.is_whole & idle.is_unusual], paused.dur_ns)))
    if slice_ns is not None:  # a kernel that is paused half of the time has no usual median
        paused = _paused_kernels(trace, device, slice_ns)
    alike = _is_multiple(paused.dur_ns, slice_ns)
    recurs = (idle.is_unusual.sum() + alike.sum()) >= MIN_STALLS
    of_cause = idle.is_unusual | (idle.is_whole & ~idle.in_graph & _is_multiple(idle.dur_ns, slice_ns))
    if slice_ns is not None:  # work that is launched while another process has the device waits for the rest of a slice
        is_rest = ~idle.is_whole & (idle.dur_ns <= (1 + ALIKE_RATIO) * slice_ns)
        of_cause |= is_rest & ~idle.in_graph & ~idle.is_usual
    usual_ns = np.where(alike, work["dur_ns"].to_numpy()[paused.row] - paused.dur_ns, 0)
    if not recurs:
        alike[:] = False
    gap_rows, gap_spans = _gaps(trace, device)
    counts = len(idle.row), int(alike.sum()), len(gap_rows)
    rows = np.concatenate((idle.row, paused.row[alike], gap_rows))
    if not len(rows):
        return schema.empty(COLUMNS)
    spans = np.concatenate((idle.spans, paused.spans[alike], gap_spans))
    certain = np.concatenate((of_cause & recurs, np.ones(counts[1] + counts[2], np.bool_)))
    usual = np.concatenate((np.full(counts[0], -1), usual_ns[alike], np.full(counts[2], -1)))
    windows = trace_columns.windows(trace).filter(pl.col("device") == device)
    window_spans = intervals.from_columns(windows["start_ns"], windows["end_ns"] - windows["start_ns"])
    return (
        work.select("device", pl.col("id").alias("activity_id"), "name", "lane")[rows]
        .with_columns(
            columns.values_at(windows["step"], sweep_line.running(window_spans, spans[:, 0])).alias("step"),
            pl.Series("kind", np.repeat(np.array(KINDS, object), counts), pl.String),
            pl.Series("is_recurring", certain, pl.Boolean),
            pl.Series("start_ns", spans[:, 0], pl.Int64),
            pl.Series("dur_ns", spans[:, 1] - spans[:, 0], pl.Int64),
            pl.Series("usual_ns", usual, pl.Int64),
        )
        .with_columns(pl.when(pl.col("kind") == PAUSED).then("usual_ns").alias("usual_ns"))
        .sort("start_ns")
        .pipe(schema.select, COLUMNS)
    )


def common_length(lengths_ns: Ints) -> float | None:
    """Length that most stalls have, None if they differ or are few; sums of several slices are left out."""
    if len(lengths_ns) < MIN_STALLS:
        return None
    middle = float(np.median(lengths_ns))
    near = lengths_ns[np.abs(lengths_ns - middle) <= ALIKE_RATIO * middle]
    return float(np.median(near)) if len(near) > _MOSTLY * len(lengths_ns) else None


@run_fact
def paused_kernels(run: Run) -> pl.DataFrame:
    """Spans in which devices did not run the work that was queued. Columns window, rank, those of `device_stalls`.

    On devices with recurring stalls of one length, gaps aside, a kernel is paused, too, if it takes longer than the
    same kernel in another step or on other ranks by that length or a multiple of it. The same kernel has the same
    `kernel_ids` and number within its step. The other ranks must agree by a fraction of the length; all their durations
    are multiplied by how much slower the rank typically is.
    """
    of_traces = run.table(device_stalls)
    # Length that most stalls of a device have: window, rank, slice_ns; none where they differ.
    rows = [
        (*key, length_ns)
        for key, rank_stalls in of_traces.filter(_OF_SLICES).group_by(*_WINDOW, maintain_order=True)
        if (length_ns := common_length(rank_stalls["dur_ns"].to_numpy())) is not None
    ]
    lengths = pl.DataFrame(rows, schema={**dict.fromkeys(_WINDOW, pl.Int64), "slice_ns": pl.Float64}, orient="row")
    if lengths.is_empty():
        return of_traces
    places = _usual_durations(run.table(kernel_durations), lengths)
    kernels = run.table(long_kernels).join(places, on=[*_WINDOW, *_PLACE], nulls_equal=True)
    excess_ns = pl.col("dur_ns") - pl.col("usual_ns")
    times = (excess_ns / pl.col("slice_ns")).alias("times")
    is_multiple = (pl.col("times").round() >= 1) & ((pl.col("times") - pl.col("times").round()).abs() <= ALIKE_RATIO)
    recorded = of_traces.filter(pl.col("kind") == PAUSED).select(*_WINDOW, "activity_id")
    paused = (
        kernels.with_columns(times)
        .filter(is_multiple, excess_ns >= MIN_STALL_NS)
        .join(recorded, on=recorded.columns, how="anti")
        .with_columns(
            pl.lit(PAUSED).alias("kind"),
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
    """Compute kernels that are as long as a stall, on devices with recurring stalls.

    Columns KERNEL_COLUMNS; one row per kernel.
    """
    stalled = device_stalls(trace).filter(_OF_SLICES)["device"]
    if stalled.is_empty():
        return schema.empty(KERNEL_COLUMNS)
    is_long = pl.col("dur_ns") >= MIN_STALL_NS
    return schema.select(_kernels(trace).filter(is_long, pl.col("device").is_in(stalled.implode())), KERNEL_COLUMNS)


def _is_multiple(lengths_ns: Ints, slice_ns: float | None) -> Flags:
    """Mask of the lengths that are about that of a time slice, or of several; all false where that is not known."""
    if slice_ns is None:
        return np.zeros(len(lengths_ns), np.bool_)
    times = lengths_ns / slice_ns
    return np.asarray(np.abs(times - np.maximum(np.round(times), 1)) <= ALIKE_RATIO, np.bool_)


def _idle(trace: Trace, device: int) -> _Stalls:
    """Stalls in which nothing runs on any device of the trace, although the work that runs next had been launched."""
    spans = launched_work.work_columns(trace, device).spans
    start, end = spans[:, 0], spans[:, 1]
    busy = intervals.union(spans)
    idle = np.stack((busy[:-1, 1], busy[1:, 0]), axis=1)
    idle = idle[idle[:, 1] - idle[:, 0] >= MIN_STALL_NS]
    if not len(idle):
        return _NONE
    row = np.searchsorted(start, idle[:, 1], side="left")
    work, queued = launched_work.work(trace, device), _queued_ns(trace, device)
    spans = np.stack((np.maximum(idle[:, 0], queued[row]), idle[:, 1]), axis=1)
    before = np.searchsorted(np.sort(end), idle[:, 0], side="left")
    since = np.minimum(queued[np.argsort(end, kind="stable")[np.minimum(before, len(end) - 1)]], queued[row])
    is_long = (spans[:, 1] - spans[:, 0] >= MIN_STALL_NS) & ~_has_other_cause(trace, work, spans, since)
    if not is_long.any():
        return _NONE
    place = _codes(launched_work.kernel_places(work))
    unusual = _is_unusual(place, row[is_long])
    stalled, seen = (
        np.bincount(place[rows], minlength=place.max() + 1)[place[row[is_long]]] for rows in (row[is_long], slice(None))
    )
    in_graph = intervals.coverage(spans[is_long], _graph_spans(trace, work)) > 0
    is_whole = queued[row] <= idle[:, 0]
    is_usual = (stalled > 1) & (stalled == seen)
    return _Stalls(row[is_long], spans[is_long], is_whole[is_long], unusual & ~in_graph, is_usual, in_graph)


def _gaps(trace: Trace, device: int) -> tuple[Ints, Spans]:
    """Row of the work that starts late on each stream that starts most of it late, and the gap; see `device_stalls`."""
    work = launched_work.work_columns(trace, device)
    spans, queued_ns = work.spans, _queued_ns(trace, device)
    busy = intervals.union(spans)
    if not len(busy):  # work without durations
        return np.zeros(0, np.int64), intervals.EMPTY
    stretch = np.searchsorted(busy[:, 0], spans[:, 0], side="right") - 1
    idle_since = np.append(busy[:, 1], 0)[stretch - 1]
    stream_end = _previous_ends(spans, work.lane)
    is_first = (stretch > 0) & (busy[stretch, 0] == spans[:, 0])
    lengths = spans[:, 0] - np.maximum(queued_ns, np.where(is_first, idle_since, stream_end))
    is_gap = (stretch > 0) & ~work.communicates & (queued_ns != _LATER) & (lengths >= 0) & (lengths < MIN_STALL_NS)
    # It can wait for no event of another stream if its own stream was the last to end.
    is_typical = is_gap & is_first & (queued_ns <= idle_since) & (stream_end == idle_since) & (lengths > 0)
    is_late = np.zeros(len(lengths), np.bool_)
    for lane in np.unique(work.lane):
        typical = lengths[is_typical & (work.lane == lane)]
        if len(typical) >= _MIN_GAPS and (usual_ns := float(np.median(typical))) >= MIN_GAP_NS:
            is_alike = is_first | (np.abs(lengths - usual_ns) <= ALIKE_RATIO * usual_ns)
            is_late |= is_gap & is_alike & (work.lane == lane) & (lengths >= MIN_GAP_NS)
    rows = np.flatnonzero(is_late)
    gaps = np.stack((spans[rows, 0] - lengths[rows] + USUAL_GAP_NS, spans[rows, 0]), axis=1)
    if (gaps[:, 1] - gaps[:, 0]).sum() < _LEAST_GAPS_RATIO * (busy[-1:, 1] - busy[:1, 0]).sum():
        return rows[:0], intervals.EMPTY
    is_alone = ~_has_other_cause(trace, launched_work.work(trace, device), gaps, gaps[:, 0] - USUAL_GAP_NS)
    return rows[is_alone], gaps[is_alone]


def _previous_ends(spans: Spans, lane: Ints) -> Ints:
    """End of the work before on the same stream; NEVER for the first, in ns, shape (n,)."""
    order = np.lexsort((spans[:, 0], lane))
    before = np.full(len(lane), sweep_line.NEVER, np.int64)
    before[order[1:]] = np.where(lane[order[1:]] == lane[order[:-1]], spans[order[:-1], 1], sweep_line.NEVER)
    return before


def _is_unusual(place: Ints, row: Ints) -> Flags:
    """Mask of the stalls at a place that the program also passes without one; all false if that is not as frequent."""
    stalled, seen = np.bincount(place[row], minlength=1), np.bincount(place, minlength=1)
    passed = np.flatnonzero((stalled > 0) & (seen[: len(stalled)] > stalled))
    if seen[passed].sum() < stalled[passed].sum() / _MOSTLY:
        return np.zeros(len(row), np.bool_)
    return np.isin(place[row], passed)


def _graph_spans(trace: Trace, work: pl.DataFrame) -> Spans:
    """Span in which each launched CUDA graph may run: between the work before and after it on its stream.

    Profilers can lose kernels of a graph, so an idle device says little then.
    """
    is_graph = trace_columns.is_named(trace, "GraphLaunch")
    if not is_graph.any():
        return intervals.EMPTY
    graphs = pl.DataFrame({"launch_id": trace.ops["id"].filter(pl.Series(is_graph))})
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    order = work.sort("lane", "start_ns", "id").with_columns(
        end_ns.shift(1).over("lane").fill_null(sweep_line.NEVER).alias("from_ns"),
        pl.col("start_ns").shift(-1).over("lane").fill_null(_LATER).alias("until_ns"),
    )
    of_graph = order.join(graphs, on="launch_id", how="semi").group_by("lane", "launch_id")
    return of_graph.agg(pl.col("from_ns").min(), pl.col("until_ns").max()).select("from_ns", "until_ns").to_numpy()


def _codes(ids: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> Ints:
    return np.unique(ids, return_inverse=True)[1].astype(np.int64)


def _queued_ns(trace: Trace, device: int) -> Ints:
    """Return since when each piece of work was queued; far in the future where its launch is not recorded.

    A copy to pageable memory returns after it has run: it was queued when it was called.
    """
    work = launched_work.work_columns(trace, device)
    queued = np.where(work.launched_ns == sweep_line.NEVER, _LATER, work.launched_ns)
    if not trace_columns.is_activity_named(trace, _TO_HOST).any():
        return queued
    table = launched_work.work(trace, device)
    to_host = columns.flags((table["kind"] == "memcpy") & table["name"].str.contains(_TO_HOST))
    called = sweep_line.at(trace.ops["start_ns"].to_numpy(), work.call, _LATER)
    return np.where(to_host, np.minimum(called, work.spans[:, 0]), queued)


_LATER = np.iinfo(np.int64).max // 2


def _has_other_cause(trace: Trace, work: pl.DataFrame, spans: Spans, since_ns: Ints) -> Flags:
    """Mask of the idle times that something else may explain.

    Another device of the process is busy, the profiler itself works, or kernels were launched between the work before
    and the work after that were not recorded: they may have run then.
    """
    device = work["device"][0]
    other_devices = [other for other in breakdown.devices(trace) if other not in (None, device)]
    other_work = np.concatenate(
        [intervals.EMPTY, *(launched_work.work_columns(trace, other).spans for other in other_devices)]
    )
    profiler = trace_columns.spans(trace)[trace_columns.is_kind(trace, "overhead")]
    lengths = spans[:, 1] - spans[:, 0]
    in_profiler = intervals.coverage(spans, profiler) > _MOSTLY * lengths
    calls = np.flatnonzero(trace_columns.is_kind(trace, "runtime") & trace_columns.is_named(trace, _LAUNCH))
    launched = np.isin(trace.ops["id"].to_numpy()[calls], trace.activities["launch_id"].drop_nulls().to_numpy())
    lost = np.sort(trace_columns.spans(trace)[calls[~launched], 0])
    some = np.searchsorted(lost, spans[:, 1]) > np.searchsorted(lost, since_ns)
    return np.asarray((intervals.coverage(spans, other_work) > 0) | in_profiler | some, np.bool_)


def _paused_kernels(trace: Trace, device: int, slice_ns: float | None = None) -> _Stalls:
    """Compute kernels that take longer than the same kernel usually does, each since its usual end.

    The kernel must be much more regular than that, or take longer by `slice_ns` or a multiple of it. No work of another
    stream may run meanwhile, unless that can't slow it as much.
    """
    work = launched_work.work_columns(trace, device)
    compute = np.flatnonzero(work.computes)
    start, dur = work.spans[compute, 0], (work.spans[:, 1] - work.spans[:, 0])[compute]
    code = _codes(launched_work.kernel_ids_anywhere(trace, device)[compute])
    place = _codes(launched_work.kernel_ids(trace, device)[compute])
    usual = _usual_ns(code, dur, slice_ns)
    # A kernel that always takes longer at this place of the program has more to do there.
    place_low_ns = _quartiles(place, dur)[0]
    usual = np.where(place_low_ns - usual <= _MOSTLY * (dur - usual), usual, _LATER)
    usual = np.where(usual == _LATER, _usual_ns(place, dur, slice_ns), usual)
    spans = np.stack((np.minimum(start + np.minimum(usual, dur), start + dur), start + dur), axis=1)
    lengths = spans[:, 1] - spans[:, 0]
    # Where the kernels around it are slower, too, all are: a lower clock, or other work on the device.
    slower_ns = usual * (_slowdown_around(code, dur) - 1)
    lengths = np.where(slower_ns < _MOSTLY * lengths, lengths, 0)
    # Of lanes with equal compute, the one with the highest number is the main one.
    lanes, lane_code = np.unique(work.lane[compute], return_inverse=True)
    main = int(lanes[np.lexsort((lanes, np.bincount(lane_code, dur)))[-1]]) if len(lanes) else -1
    other_ns = intervals.coverage(spans, work.spans[work.lane != main])
    is_alone = other_ns <= launched_work.ALONE_RATIO * lengths
    rows = np.flatnonzero((lengths >= MIN_STALL_NS) & (is_alone | (lengths > _FAR * usual)))
    yes, no = np.ones(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
    return _Stalls(compute[rows], spans[rows], yes, yes, no, no)


def _slowdown_around(code: Ints, dur_ns: Ints) -> npt.NDArray[np.float64]:
    """How many times as long as usual the kernels around each one take: the median of the nearest, itself left out."""
    if not len(code):
        return np.ones(0)
    ratio = dur_ns / np.maximum(_quartiles(code, dur_ns)[0], 1)
    many = np.bincount(code, minlength=1)[code] >= _MIN_SAMPLES
    padded = np.pad(np.where(many, ratio, np.nan), _AROUND, constant_values=np.nan)
    near = np.lib.stride_tricks.sliding_window_view(padded, 2 * _AROUND + 1)
    others = np.delete(near, _AROUND, axis=1)
    return np.where(np.isnan(others).all(axis=1), 1.0, np.nanmedian(np.nan_to_num(others, nan=1.0), axis=1))


_AROUND = 10
"""How many kernels before and after one are around it."""


def _usual_ns(code: Ints, dur_ns: Ints, slice_ns: float | None) -> Ints:
    """Usual duration of the same kernel where it takes much longer than that; _LATER otherwise.

    That is the median, or the lower quartile where that differs by `slice_ns` or a multiple of it.
    """
    low, middle, high = _quartiles(code, dur_ns)
    count = np.bincount(code, minlength=1)[code]
    many = (count >= _MIN_SAMPLES) & (dur_ns - middle >= MIN_STALL_NS)
    usual = np.where(many & (dur_ns - middle > _SPREADS * (high - low)), middle, _LATER)
    if slice_ns is None:
        return usual
    times = (dur_ns - low) / slice_ns
    exact = (np.abs(times - np.round(times)) <= _EXACT_RATIO) & (np.round(times) >= 1)
    return np.where((usual == _LATER) & (count >= _MIN_SAMPLES) & exact, low, usual)


_EXACT_RATIO = 0.1
_FAR = 4
"""Concurrent work slows a kernel down a few times at most."""


def _quartiles(code: Ints, values: Ints) -> tuple[Ints, Ints, Ints]:
    """Quartiles of the values with the same code, for each value."""
    if not len(values):
        return values, values, values
    order = np.lexsort((values, code))
    many = np.bincount(code, minlength=1)
    first = np.cumsum(many) - many
    quartiles = [values[order[np.minimum(first + (many - 1) * quarter // 4, len(order) - 1)]] for quarter in (1, 2, 3)]
    return quartiles[0][code], quartiles[1][code], quartiles[2][code]


FACTS: tuple[TraceFact, ...] = (device_stalls, kernel_durations, long_kernels)
"""What `paused_kernels` reads."""


@memoize
def _kernels(trace: Trace) -> pl.DataFrame:
    parts = [schema.empty(KERNEL_COLUMNS)]
    for device in breakdown.devices(trace) if trace.on_device else ():
        arrays = launched_work.work_columns(trace, device)
        rows = np.flatnonzero(arrays.computes)
        rows = rows[np.lexsort((arrays.id[rows], arrays.launched_ns[rows]))]
        work = launched_work.work(trace, device).select(
            "device", "name", "step", "lane", "start_ns", "dur_ns", activity_id="id"
        )
        kernel = launched_work.kernel_ids(trace, device)[rows]
        is_long = work["dur_ns"].to_numpy()[rows] >= _LEAST_NS
        long = np.flatnonzero(np.isin(kernel, kernel[is_long]))  # others have no row in any table here
        compute = work[rows[long]].hstack([pl.Series("kernel", kernel[long])])
        nth = pl.int_range(pl.len(), dtype=pl.Int64).over("step", "kernel").alias("nth")
        parts.append(schema.select(compute.with_columns(nth), KERNEL_COLUMNS))
    return pl.concat(parts)


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
        near_ns = ALIKE_RATIO * slice_ns
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
