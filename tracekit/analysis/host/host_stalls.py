"""Host stalls: single long gaps in compute that the host causes, what the host did in each, and its calls on files."""

from collections.abc import Iterator

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.communication import communication_gap_causes
from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.host import launch_delay
from tracekit.analysis.time import breakdown, host_state, launched_work, trace_columns
from tracekit.ingest.readers.normalize.name_patterns import COMPILER
from tracekit.model import columns, intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.sweep_line import Flags, distinct
from tracekit.model.trace import Trace

(
    PROFILER, COMPILE, AUTOTUNE, GRAPH_CAPTURE, KERNEL_LOADING, GARBAGE_COLLECTION, RETRY, ALLOCATION, SAVE, DATA,
    LAUNCH, SYNC, OTHER,
) = CAUSES = (
    "profiler", "compile", "autotune", "graph_capture", "kernel_loading", "garbage_collection", "retry", "allocation",
    "save", "data", "launch", "synchronize", "other",
)  # fmt: skip
"""What the host did: of those that cover most of a stall the first counts; `other` is Python and ops of any kind."""
PREPARATION = (AUTOTUNE, GRAPH_CAPTURE, KERNEL_LOADING)
"""Causes that prepare kernels and graphs for later launches: once, unless their sizes or code change."""
FIRST_USE = (COMPILE, *PREPARATION, ALLOCATION)
"""Causes that a training has when it does something for the first time."""

COLUMNS = schema.columns(
    "step gap_step device place nth cause detail name start_ns dur_ns evidence_ns is_last", place=pl.String
)
MIN_STALL_NS = 1_000_000
_MAX_STALLS = 200
_MIN_COVERED = 0.5
_LONG_LAUNCH_NS = 1_000_000

_STALL = ("step", "gap_step", "device", "place", "nth", "detail", "start_ns", "dur_ns")
_STALL_COLUMNS = schema.columns(f"{' '.join(_STALL)} is_last", place=pl.String)

_PATTERNS = {
    # Kineto's overhead events and what the profiler itself calls.
    PROFILER: r"^(CUPTI|Buffer Flush|Activity Buffer|Instrumentation|Resource$|Overhead)|cupti",
    COMPILE: COMPILER,
    AUTOTUNE: r"(?i)autotun|do_bench\b|cudnnFind|miopenFind|FindConvolution",
    KERNEL_LOADING: r"^(cu|hip)(Module|Library|Func)(Load|Unload|Get|Set)|^cuKernel[GS]et|"
    r"^(cuda|hip)(Func[GS]et|GetFuncBy|Occupancy|ModuleLoad|LibraryLoad)|(?i)lazy function loading",
    GARBAGE_COLLECTION: host_state.COLLECTOR,
    ALLOCATION: r"^(cuda|hip)(Malloc|Free|HostAlloc|FreeHost|MallocHost|HostMalloc|HostFree|MemCreate|MemMap|MemUnmap)|"
    r"^cuMem(Create|Map|Unmap|Release|SetAccess)",
    DATA: r"^enumerate\(DataLoader\)",
    LAUNCH: r"^(cuda|hip|cu)(Graph|Module|Ext|Cooperative|Coop)?Launch",
    SYNC: host_state.SYNCHRONIZING,
}
_CAPTURE_BEGINS, _CAPTURE_ENDS = r"^(cuda|hip|cu)StreamBeginCapture", r"^(cuda|hip|cu)StreamEndCapture"
_INSTANTIATES = r"^(cuda|hip|cu)GraphInstantiate"
_FREE = r"^(cuda|hip)Free$"
_MALLOC = r"^(cuda|hip)Malloc$"
_MIN_FREES = 2  # in a retry the allocator frees its whole cache

SILENCE_COLUMNS = schema.columns("start_ns dur_ns name", name=pl.String)
_MIN_SILENCE_NS = 500_000
_MAX_SILENCES = 500
_COMPUTES = r"^aten::"

IO_COLUMNS = schema.columns(f"step {' '.join(column.name for column in schema.IO_CALLS.columns)}")
BY_FILE_COLUMNS = schema.columns(
    "rank kind file calls bytes busy_ns moved_bytes_per_s longest_ns longest_call",
    longest_call=pl.String,
    file=pl.String,
)


@trace_fact
def host_stalls(trace: Trace) -> pl.DataFrame:
    """Longest gaps in compute that the host causes, with what it did.

    So is the time from a device's last work to the end of the last step on the host, in which nothing follows.

    Columns COLUMNS: step (that launched the compute which ends the gap), gap_step (whose device window the gap is in),
    place and nth (name of that compute, and its number among those of that name in its step), cause (of CAUSES), detail
    (the host's state for most of the time, of `host_state.HOST_STATES`), name (of the innermost slice that covers half
    of the stall; null if none does), evidence_ns (time in slices that show the cause), is_last (after the last work;
    place and nth are then those of the first compute of the last step); one row per gap of MIN_STALL_NS or more, by
    start.
    """
    stalls = pl.concat([_stalls(trace), *_after_last_work(trace)])
    if stalls.is_empty():
        return schema.empty(COLUMNS)
    spans = intervals.from_table(stalls)
    inside = intervals.coverage(trace_columns.spans(trace), intervals.union(spans)) > 0
    during = inside & (host_state.is_launching(trace) | trace_columns.is_kind(trace, "overhead"))
    ops = trace_columns.spans(trace)
    covered = {cause: intervals.coverage(spans, ops[during & _shows(trace, cause)]) for cause in _PATTERNS}
    covered[GRAPH_CAPTURE] = intervals.coverage(spans, _graph_captures(trace))
    covered[SAVE] = intervals.coverage(spans, intervals.from_table(save_stages.save_spans(trace)))
    # Mark the spans in which the allocator freed its cache and allocated again.
    calls = during & trace_columns.is_kind(trace, "runtime")
    counts = []
    for pattern in (_FREE, _MALLOC):
        starts = np.sort(trace_columns.spans(trace)[calls & trace_columns.is_named(trace, pattern), 0])
        bounds = np.searchsorted(starts, spans[:, [0, 1]])
        counts.append(bounds[:, 1] - bounds[:, 0])
    covered[RETRY] = np.where((counts[0] >= _MIN_FREES) & (counts[1] >= 1), covered[ALLOCATION], 0)
    lengths = spans[:, 1] - spans[:, 0]
    order = [cause for cause in CAUSES if cause != OTHER]
    shares = np.stack([covered[cause] for cause in order]) >= _MIN_COVERED * lengths
    cause = np.where(shares.any(axis=0), shares.argmax(axis=0), len(order))
    evidence_ns = np.stack([*(covered[name] for name in order), np.zeros_like(lengths)])[cause, np.arange(len(spans))]
    return stalls.with_columns(
        pl.Series("cause", [CAUSES[index] if index < len(order) else OTHER for index in cause.tolist()], pl.String),
        pl.Series("evidence_ns", evidence_ns, pl.Int64),
        pl.Series("name", _innermost(trace, spans, during), pl.String),
    ).pipe(schema.select, COLUMNS)


def is_first_use() -> pl.Expr:
    """Return whether a row of `host_stalls` shows a first use, or the long first launch of a kernel in its step."""
    first_launch = (pl.col("cause") == LAUNCH) & (pl.col("nth") == 0)
    return pl.col("cause").is_in(FIRST_USE) | first_launch


@trace_fact
def host_silences(trace: Trace) -> pl.DataFrame:
    """Longest times in which no slice begins or ends on any thread of the process.

    Columns SILENCE_COLUMNS: name (on a CPU run, of an op that computes all the time; null where there is none); one row
    per silence of 0.5 ms or more, by start. A process whose threads all wait is silent, too.
    """
    # Times at which slices begin or end; on a CPU run, activities too.
    spans = [trace_columns.spans(trace)]
    if not trace.on_device:
        spans.append(intervals.from_table(trace.activities))
    at_ns = distinct(np.concatenate(spans))
    if len(at_ns) < 2:
        return schema.empty(SILENCE_COLUMNS)
    length_ns = np.diff(at_ns)
    longest = np.argsort(-length_ns, kind="stable")[:_MAX_SILENCES]
    silences = np.sort(longest[length_ns[longest] >= _MIN_SILENCE_NS])
    start, end = at_ns[silences], at_ns[silences + 1]
    names: list[str | None] = [None] * len(start)
    if not trace.on_device:
        # The innermost op that computes during each silence.
        ops = trace_columns.spans(trace)
        waits = trace_columns.is_named(trace, host_state.SYNCHRONIZING)
        dur_ns = ops[:, 1] - ops[:, 0]
        is_long = dur_ns >= _MIN_SILENCE_NS  # a shorter one is around no silence
        computes = np.flatnonzero(trace_columns.is_named(trace, _COMPUTES) & ~waits & is_long)
        computes = computes[np.argsort(dur_ns[computes], kind="stable")]
        for index, (start_ns, end_ns) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
            around = computes[(ops[computes, 0] <= start_ns) & (ops[computes, 1] >= end_ns)]
            names[index] = trace.ops["name"][int(around[0])] if len(around) else None
    silence_rows = pl.DataFrame({"start_ns": start, "dur_ns": end - start})
    return schema.select(silence_rows.with_columns(pl.Series("name", names, pl.String)), SILENCE_COLUMNS)


@trace_fact
def io_calls(trace: Trace) -> pl.DataFrame:
    """File system calls of a trace, with the step in whose time on the host each began; by start.

    Columns IO_COLUMNS; step is null for calls between and outside the recorded steps.
    """
    if trace.io_calls.is_empty():
        return schema.empty(IO_COLUMNS)
    steps = trace.steps.select("step", "host_start_ns", "host_end_ns").drop_nulls().unique().sort("host_start_ns")
    begun = trace.io_calls.sort("start_ns").join_asof(
        steps, left_on="start_ns", right_on="host_start_ns", strategy="backward", check_sortedness=False
    )
    is_inside = pl.col("start_ns") < pl.col("host_end_ns")
    return schema.select(begun.with_columns(pl.when(is_inside).then("step").alias("step")), IO_COLUMNS)


@run_fact
def io_calls_of_run(run: Run) -> pl.DataFrame:
    """File system calls of all ranks, once each: columns rank and IO_COLUMNS, by rank and start.

    A log covers the whole process, so each window of a rank has the same calls; the step is that of any window.
    """
    key = ["rank", "start_ns", "dur_ns", "name", "file", "process", "thread", "bytes"]
    rows = run.table(io_calls).drop("window", strict=False)
    return rows.sort(*key, "step", nulls_last=True).unique(key, keep="first", maintain_order=True)


def io_by_file(run: Run) -> pl.DataFrame:
    """Calls of each rank by kind and file, the longest first. Columns BY_FILE_COLUMNS.

    `busy_ns` is the time in which any of the calls ran, `moved_bytes_per_s` the bytes over that time (null for calls
    that move none), `longest_call` the function of the longest call.
    """
    key = ["rank", "kind", "file"]
    ordered = run.table(io_calls_of_run).sort(*key, "start_ns")
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    before_ns = end_ns.cum_max().shift(1).over(key)
    new_ns = (end_ns - pl.max_horizontal("start_ns", before_ns)).clip(0)
    longest = pl.col("dur_ns").arg_max()
    sums = (
        ordered.with_columns(new_ns.alias("new_ns"))
        .group_by(key, maintain_order=True)
        .agg(
            pl.len().cast(pl.Int64).alias("calls"),
            pl.when(pl.col("bytes").is_not_null().any()).then(pl.col("bytes").sum()).alias("bytes"),
            pl.col("new_ns").sum().alias("busy_ns"),
            pl.col("dur_ns").max().alias("longest_ns"),
            pl.col("name").get(longest).alias("longest_call"),
        )
    )
    rate = pl.when(pl.col("busy_ns") > 0).then(pl.col("bytes") * 1e9 / pl.col("busy_ns")).alias("moved_bytes_per_s")
    files = sums.with_columns(rate).sort("busy_ns", *key, descending=[True, False, False, False])
    return schema.select(files, BY_FILE_COLUMNS)


def io_during(rows: pl.DataFrame, spans: intervals.Spans) -> pl.DataFrame:
    """Calls that overlap any of the spans, shape (n, 2) in ns, with column overlap_ns; the longest first."""
    overlap_ns = intervals.coverage(intervals.from_table(rows), intervals.union(spans))
    overlapping = rows.with_columns(pl.Series("overlap_ns", overlap_ns, pl.Int64)).filter(pl.col("overlap_ns") > 0)
    return overlapping.sort("overlap_ns", "start_ns", descending=[True, False])


def io_covered_ns(overlapping: pl.DataFrame, spans: intervals.Spans) -> int:
    """Time of the spans that any of the calls covers, in ns."""
    ran = intervals.union(intervals.from_table(overlapping))
    return int(np.sum(intervals.coverage(intervals.union(spans), ran)))


def _stalls(trace: Trace) -> pl.DataFrame:
    """Host's part of each compute gap: columns step, device, detail, start_ns, dur_ns; the longest ones."""
    # The pieces that the host causes, of compute gaps with MIN_STALL_NS or more of them.
    pieces = compute_gap_causes.compute_gap_causes(trace)
    is_host = (pieces["cause"] == communication_gap_causes.HOST).to_numpy()
    _, gap = np.unique(pieces["gap"].to_numpy(), return_inverse=True)
    host_ns = np.bincount(gap, np.where(is_host, pieces["dur_ns"].to_numpy(), 0))[gap]
    pieces = pieces.filter(pl.Series(is_host & (host_ns >= MIN_STALL_NS)))
    by_state = pieces.group_by("gap", "detail").agg(
        pl.col("step", "device", "activity_id").first(), pl.col("start_ns").min(), pl.col("dur_ns").sum()
    )
    longest = by_state.sort("dur_ns", "detail", descending=[True, False]).group_by("gap", maintain_order=True)
    stalls = longest.agg(
        pl.col("step", "device", "activity_id", "detail").first(), pl.col("start_ns").min(), pl.col("dur_ns").sum()
    )
    stalls = stalls.filter(pl.col("dur_ns") >= MIN_STALL_NS)
    stalls = stalls.sort("dur_ns", "start_ns", descending=[True, False]).head(_MAX_STALLS)
    if stalls.is_empty():
        return schema.empty(_STALL_COLUMNS)
    ended_by, places = columns.to_ints(stalls["activity_id"], -1), launch_delay.places(trace)
    launched_by = columns.rows_of(trace.activities["id"].to_numpy(), ended_by)
    launched_in = columns.values_at(trace.activities["step"], launched_by).alias("launched_in")
    place = columns.rows_or_nulls(places[["name", "nth"]], columns.rows_of(places["activity_id"].to_numpy(), ended_by))
    located = stalls.hstack([launched_in, *place]).with_columns(
        pl.coalesce("launched_in", "step").alias("step"),
        gap_step="step", place="name", is_last=pl.lit(value=False),
    )  # fmt: skip
    return schema.select(located.sort("start_ns", "device"), _STALL_COLUMNS)


def _after_last_work(trace: Trace) -> Iterator[pl.DataFrame]:
    """Yield the time from the last work of each device to the end of the last step on the host, if it is a stall."""
    ended = (
        trace.steps.drop_nulls(["step", "start_ns", "host_end_ns"])
        .sort("step")
        .unique("device", keep="last", maintain_order=True)
    )
    for step in ended.sort("device").iter_rows(named=True):
        busy = intervals.union(*breakdown.busy(trace, step["device"]))
        idle_ns = step["host_end_ns"] - int(busy[-1, 1]) if len(busy) else 0
        if idle_ns < MIN_STALL_NS or _is_cut_off(trace, step["device"], int(busy[-1, 1])):
            continue
        middle = np.array([int(busy[-1, 1]) + idle_ns // 2])
        row = {"step": step["step"], "gap_step": step["step"], "device": step["device"], "start_ns": int(busy[-1, 1])}
        row |= {"dur_ns": idle_ns, "detail": host_state.HOST_STATES[int(host_state.state_at(trace, middle)[0])]}
        # Place of the first compute that a step launched on a device: its columns place and nth, and is_last. In other
        # steps, what the host does at the end of a step is before that of the next one.
        lanes = trace.lanes.filter(pl.col("device").eq_missing(pl.lit(step["device"], pl.Int64)))
        first = (
            trace.activities.filter(pl.col("step") == step["step"], pl.col("kind") == "compute")
            .join(lanes, on="lane", how="semi")
            .sort("start_ns", "id")
            .head(1)
            .join(launch_delay.places(trace), left_on="id", right_on="activity_id", suffix="_of")
        )
        name, nth = first.select("name_of", "nth").row(0) if first.height else (None, None)
        yield pl.DataFrame([row | {"place": name, "nth": nth, "is_last": True}], schema=_STALL_COLUMNS)


def _is_cut_off(trace: Trace, device: int | None, end_ns: int) -> bool:
    """Whether kernels were launched after the last work of a device that was recorded, and none of theirs is."""
    after = np.array([[end_ns, np.iinfo(np.int64).max]])
    return bool(launched_work.known_until(trace, device, after, after[:, 1])[0] < after[0, 1])


def _shows(trace: Trace, cause: str) -> Flags:
    """Mark the ops that show a cause; shape (ops,)."""
    matching = trace_columns.is_named(trace, _PATTERNS[cause])
    if cause == PROFILER:
        matching = matching & trace_columns.is_kind(trace, "overhead")
    elif cause == LAUNCH:
        # Launches take microseconds: many short ones are a busy host, one long one is a stall.
        is_long = trace.ops["dur_ns"].to_numpy() >= _LONG_LAUNCH_NS
        matching = matching & trace_columns.is_kind(trace, "runtime") & is_long
    elif cause == ALLOCATION:
        matching = matching & trace_columns.is_kind(trace, "runtime")
    elif cause == DATA:
        matching = matching | trace_columns.is_phase(trace, conventions.DATA)
    return matching


def _graph_captures(trace: Trace) -> intervals.Spans:
    """Spans in which a launching thread records its calls as a graph, which launches none, or instantiates one."""
    ops, lane = trace_columns.spans(trace), trace.ops["lane"].to_numpy()
    is_call = trace_columns.is_kind(trace, "runtime") & host_state.is_launching(trace)
    begins, ends, instantiates = (
        np.flatnonzero(is_call & trace_columns.is_named(trace, pattern))
        for pattern in (_CAPTURE_BEGINS, _CAPTURE_ENDS, _INSTANTIATES)
    )
    captures = [ops[instantiates]]
    for thread in np.unique(lane[begins]):
        begin_ns, end_ns = np.sort(ops[begins[lane[begins] == thread], 0]), np.sort(ops[ends[lane[ends] == thread], 1])
        end = np.searchsorted(end_ns, begin_ns)
        has_end = end < len(end_ns)
        captures.append(np.stack([begin_ns[has_end], end_ns[end[has_end]]], axis=1))
    return intervals.union(np.concatenate(captures))


def _innermost(trace: Trace, spans: intervals.Spans, during: Flags) -> list[str | None]:
    """Name of the shortest slice that covers half of each span."""
    ops, lengths = trace_columns.spans(trace), trace.ops["dur_ns"].to_numpy()
    long = np.flatnonzero(during & (lengths >= int(_MIN_COVERED * (spans[:, 1] - spans[:, 0]).min())))
    long = long[np.lexsort((trace.ops["id"].to_numpy()[long], lengths[long]))]
    starts, ends, names = ops[long, 0], ops[long, 1], trace.ops["name"]
    slice_names: list[str | None] = []
    for start, end in spans.tolist():
        covers = np.minimum(ends, end) - np.maximum(starts, start) >= _MIN_COVERED * (end - start)
        slice_names.append(names[int(long[covers.argmax()])] if covers.any() else None)
    return slice_names
