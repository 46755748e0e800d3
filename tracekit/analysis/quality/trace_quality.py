"""Data-quality issues of a trace, each with the share of time that it affects, and the steps that it cuts."""

import re
import statistics
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.host import host_stalls
from tracekit.analysis.parallelism import workload
from tracekit.analysis.time import breakdown, trace_columns
from tracekit.model import columns, environment, schema, units
from tracekit.model.fact import trace_fact
from tracekit.model.sweep_line import Ints, at
from tracekit.model.trace import Trace

CUT_COLUMNS = schema.columns("step part missing_ratio duration_ns steps", part=pl.String)
OPTIMIZER, TAIL = PARTS = ("optimizer", "tail")
"""What is recorded of a cut step: only the optimizer, or what follows a part of its forward pass."""
_BACKWARD = r"Backward\d*$"
_MIN_OPTIMIZER_RATIO = 0.9
"""Share of the launched device work above which a step without backward has nothing but the optimizer."""
_MIN_MISSING_RATIO = 0.25
"""Share of backward ops without a recorded forward op. Less is usual: pipelined trainers run a part of the forward
pass, such as the lookup of embeddings, one step ahead."""

_Row: TypeAlias = tuple[str, str, float]

TIMES_COLUMNS = {"activities": pl.Int64, "times_hash": pl.UInt64}
_BEFORE_LAUNCH_NS = 50_000  # less changes no verdict; 17 µs occur in traces of V100s
_LAUNCH = r"(?i)^(cuda|hip|cu)(Graph|Module|Ext|Cooperative|Coop)?Launch|^(cuda|hip)Mem(cpy|set)"
_ISSUES = "^c10d::"
_LEAST_LOST, _LEAST_LOST_RATIO, _MOST_NAMES = 2, 0.1, 3
"""Fewer may have been issued as the recording stopped."""
_DROPPED = re.compile(r"(?i)dropped (\d{1,15}) (activity )?records|exceeded max gpu buffer count")
_CUT_OFF = 0.9  # of the launches without device activity: then they are not lost one by one
_CUT_OFF_LEAST = 0.2  # of all launches: fewer may be queued when the recording stops
WARM_UP_RATIO = 2.0  # times the median of the other steps: only a first step takes that long
MORE_OPS_RATIO = 1.5  # times the median of the other steps: the step does other work, such as an evaluation


@trace_fact(table=schema.DATA_QUALITY)
def data_quality(trace: Trace) -> pl.DataFrame:
    """Return the reasons to doubt this trace: those of its reading, and those that its tables show.

    Columns of `schema.DATA_QUALITY`; one row per reason, however small its share.
    """
    checks = (_nothing, _unrecorded_collectives, _launches, _overlaps, _dropped_records, _warm_up, _cut)
    rows = [row for check in checks for row in check(trace)]
    measured = pl.DataFrame(rows, schema=schema.DATA_QUALITY.schema, orient="row")
    return pl.concat([trace.data_quality, measured])


@trace_fact
def recorded_times(trace: Trace) -> pl.DataFrame:
    """Identity of a recording. Columns activities (number of rows), times_hash; one row.

    Two processes never start and end each activity in the same nanosecond: equal values are copies of one recording.
    """
    activities = trace.activities
    times = activities.select(
        pl.struct(pl.col("start_ns") - pl.col("start_ns").min(), "dur_ns").hash(seed=0)
    ).to_series()
    return pl.DataFrame(
        [(activities.height, int(times.to_numpy().sum(dtype=np.uint64)))], schema=TIMES_COLUMNS, orient="row"
    )


@trace_fact
def cut_steps(trace: Trace) -> pl.DataFrame:
    """Return the steps of which only a part was recorded.

    Columns CUT_COLUMNS: part (of PARTS), missing_ratio (share of the step's backward ops whose forward op was not
    recorded; 1 without any), duration_ns (of the step's device window, the longest), steps (how many the trace has);
    one row per cut step, null for a window without marks. A step between marks of the profiler is whole unless it has
    only the optimizer; the first one that ends at an optimizer step may have begun before the recording.
    """
    has_forward_ids, issue = trace.ops["forward_id"].null_count() < trace.ops.height, trace_columns.has_issue
    may_be_tail = has_forward_ids and issue(trace, "steps_from_optimizer") and not issue(trace, "sampled")
    if not may_be_tail and not _may_be_optimizer(trace):
        return schema.empty(CUT_COLUMNS)
    # Share of each step's launched work that the optimizer launched. Columns step, optimizer_ratio.
    work = trace.activities.filter(pl.col("launch_id").is_not_null(), pl.col("dur_ns") > 0)
    of_optimizer = pl.col("dur_ns").filter(pl.col("phase").eq_missing(conventions.OPTIMIZER)).sum()
    parts = _backward(trace).join(
        work.group_by("step").agg((of_optimizer / pl.col("dur_ns").sum()).alias("optimizer_ratio")),
        on="step",
        how="full",
        nulls_equal=True,
        coalesce=True,
    )
    lengths = breakdown.by_step(trace).group_by("step").agg(pl.col("duration_ns").max())
    counted = lengths.with_columns(pl.len().cast(pl.Int64).alias("steps"))
    table = counted.join(parts, on="step", how="left", nulls_equal=True).with_columns(
        pl.col("backward_ops", "known_ops").fill_null(0), pl.col("optimizer_ratio").fill_null(0.0)
    )
    has_backward = bool(parts["backward_ops"].sum())
    is_optimizer = (pl.col("optimizer_ratio") >= _MIN_OPTIMIZER_RATIO) & (pl.col("backward_ops") == 0)
    missing_ratio = pl.when(pl.col("backward_ops") > 0).then(1 - pl.col("known_ops") / pl.col("backward_ops"))
    is_tail = (pl.col("step") == pl.col("step").min()) & pl.lit(may_be_tail and has_backward)
    return (
        table.with_columns(missing_ratio.otherwise(1.0).alias("missing_ratio"))
        .with_columns(
            pl.when(is_optimizer)
            .then(pl.lit(OPTIMIZER))
            .when(is_tail & (pl.col("missing_ratio") >= _MIN_MISSING_RATIO))
            .then(pl.lit(TAIL))
            .alias("part")
        )
        .drop_nulls("part")
        .pipe(schema.select, CUT_COLUMNS)
        .sort("step")
    )


def _nothing(trace: Trace) -> Iterator[_Row]:
    """Traces without any work, and those of a GPU training without its kernels."""
    if trace.activities.is_empty():
        yield "no_work", "No compute, communication or copy was recorded, so nothing can be measured.", 1.0
        return
    if trace.on_device:
        return
    if not (trace.activities["kind"] == "compute").any():
        message = "Collectives were recorded, but no operator: what the host computes, and how long, is not known."
        yield "no_operators", message, 1.0
    if trace_columns.has_issue(trace, "device_times"):
        return
    devices = environment.device_names(trace.header)
    launches = _launch_calls(trace).height
    if launches:
        on = f" on {devices}" if devices else ""
        yield (
            "no_device_activity",
            f"The host launched {launches:,} kernels and copies{on}, but no device activity was recorded, or it was "
            "cut off: times are of the host.",
            1.0,
        )
    elif (used := _device_use(trace)) is not None:
        on = f" ({devices})" if devices else ""
        yield (
            "no_device_activity",
            f"The training ran on a device{on}: {used}. Neither kernels nor launches were recorded: times are of the "
            "host.",
            1.0,
        )
    elif devices:
        message = f"The machine has {devices}, but only host activity was recorded: it is read as training on the CPU."
        yield "host_only", message, 0.0


def _unrecorded_collectives(trace: Trace) -> Iterator[_Row]:
    """Collectives that operators of a CPU run issued, without the slices in which the backend runs them."""
    if trace.on_device:
        return
    is_waiting = trace_columns.is_named(trace, r"barrier|monitored")  # backends run no slice for these
    is_issuing = trace_columns.is_kind(trace, "cpu_op") & trace_columns.is_named(trace, _ISSUES) & ~is_waiting
    issued = columns.where(trace.ops[["id", "name"]], is_issuing)
    communication = trace.activities.filter(pl.col("kind") == "communication")
    lost = issued.filter(~pl.col("id").is_in(communication["launch_id"].drop_nulls().implode()))
    lost_count = min(lost.height, issued.height - communication.height)
    if lost_count < max(_LEAST_LOST, _LEAST_LOST_RATIO * issued.height):
        return
    names = ", ".join(lost["name"].unique().sort().head(_MOST_NAMES))
    message = (
        f"Operators issued {issued.height:,} collectives, but only {issued.height - lost_count:,} that ran were "
        f"recorded; the others were issued by {names}."
    )
    yield "unrecorded_collectives", message, lost_count / issued.height


def _device_use(trace: Trace) -> str | None:
    """Sign that a trace without device activity is of training on a device; None without one."""
    info = trace.header.get("distributedInfo")
    if isinstance(info, Mapping) and info.get("backend") == "nccl":
        return "its collectives run over NCCL"
    if trace.allocations["device"].is_not_null().any():
        return "it allocates device memory"
    return None


def _launches(trace: Trace) -> Iterator[_Row]:
    """Device work without a launch, device work launched outside steps, and launches without device work."""
    has_launches = not any(
        trace_columns.has_issue(trace, kind) for kind in (schema.COLLECTIVES_ONLY, schema.COMPILED_PROGRAM)
    )
    if not trace.on_device or not has_launches:
        return
    work = trace.activities
    total_ns = max(int(work["dur_ns"].sum()), 1)
    if work["launch_id"].is_null().all() and _lacks_launch_calls(trace):
        unknown = "step, phase and cause" if work["step"].is_null().all() else "the launch"
        message = f"The device's profiler recorded no launch calls: {unknown} of device work is not known."
        yield "no_launch_calls", message, 1.0
        return
    if work["launch_id"].is_null().all():
        yield (
            "no_host_activity",
            f"{_unrecorded_launches(trace)}: step, phase and cause of device work are unknown.",
            1.0,
        )
        return
    without_calls = _devices_without_calls(trace)
    if without_calls:
        is_without = work["lane"].is_in(trace.lanes.filter(pl.col("device").is_in(without_calls))["lane"].implode())
        share = int(work.filter(is_without)["dur_ns"].sum()) / total_ns
        message = (
            f"{units.share(share)} of device time, all work of {units.numbers('device', without_calls)}, has no "
            "recorded launch call, so its cause is not known."
        )
        yield "unlaunched_device", message, share
        work = work.filter(~is_without)
    yield from _missing_launches(work, total_ns)
    stepless_ns = _stepless_ns(work)
    has_steps = not trace.steps["step"].is_null().all()
    # Outside iterations that were found is a prefill, set-up or a cut iteration: the issue on them states the share.
    if stepless_ns and has_steps and not trace_columns.has_issue(trace, "steps_from_repetition"):
        share = stepless_ns / total_ns
        yield "outside_steps", f"{units.share(share)} of device time was launched outside the profiled steps.", share
    yield from _before_launch(trace, total_ns)
    yield from _idle_launches(trace)


def _lacks_launch_calls(trace: Trace) -> bool:
    """Whether the host was recorded, and a device that is none of CUDA or HIP, whose profiler may write no launches.

    Kineto lists the devices of CUDA and HIP in its header, and lists none where it was built without either.
    """
    is_known = not trace_columns.has_issue(trace, "unknown_device") and trace.header.get("deviceProperties") != []
    return not is_known and trace.ops["kind"].is_in(["cpu_op", "python"]).any()


def _devices_without_calls(trace: Trace) -> list[int]:
    """Devices of whose work no launch is recorded, though work of others is launched meanwhile.

    What was queued before the recording began runs at its start only.
    """
    starts = trace.activities.join(trace.lanes.select("lane", "device"), on="lane").drop_nulls("device")
    middle_ns = starts.filter(pl.col("launch_id").is_not_null())["start_ns"].median()
    devices = starts.group_by("device").agg(pl.col("launch_id").count().alias("launched"), pl.col("start_ns").max())
    is_without = (pl.col("launched") == 0) & (pl.col("start_ns") > pl.lit(middle_ns))
    return devices.filter(is_without)["device"].sort().to_list()


def _stepless_ns(work: pl.DataFrame) -> int:
    if not work["step"].null_count():
        return 0
    return int(work.filter(pl.col("launch_id").is_not_null(), pl.col("step").is_null())["dur_ns"].sum())


def _unrecorded_launches(trace: Trace) -> str:
    recorded = trace.ops.filter(pl.col("kind").is_in(["cpu_op", "python", "runtime"]))["kind"].unique().to_list()
    if "runtime" in recorded:
        return "No launch call could be matched to device activity"
    if recorded:
        return "Launch calls (CUDA or HIP runtime) were not recorded"
    return "CPU activity was not recorded, neither operators nor launches"


def _missing_launches(work: pl.DataFrame, total_ns: int) -> Iterator[_Row]:
    """Work without a launch: queued before the recording if its stream has no launched work before it, else lost."""
    if not work["launch_id"].null_count():
        return
    is_linked = columns.to_ints(work["launch_id"], -1) >= 0
    lane, start, dur, id_ = (work[name].to_numpy() for name in ("lane", "start_ns", "dur_ns", "id"))
    order = np.lexsort((id_, start, lane))
    _, first_of_lane = np.unique(lane[order], return_index=True)
    linked_before: Ints = np.cumsum(is_linked[order]) - is_linked[order]
    of_lane = np.searchsorted(first_of_lane, np.arange(len(order)), side="right") - 1
    after_linked = np.empty(len(order), np.bool_)
    after_linked[order] = linked_before > linked_before[first_of_lane[of_lane]]
    queued, lost = ~is_linked & ~after_linked, ~is_linked & after_linked
    if (share := int(dur[queued].sum()) / total_ns) > 0:
        first = units.duration(int((start + dur)[queued].max()) - int(start.min()))
        yield (
            "unlinked",
            f"{units.share(share)} of device time, all in the first {first}, was launched before the recording began, "
            "so its step and cause are not known.",
            share,
        )
    if (share := int(dur[lost].sum()) / total_ns) > 0:
        yield (
            "lost_launches",
            f"{units.share(share)} of device time has no recorded launch, though earlier work on the same stream has "
            "one, so its step and cause are not known.",
            share,
        )


def _before_launch(trace: Trace, total_ns: int) -> Iterator[_Row]:
    """Work that begins before the call that launches it."""
    launch = columns.to_ints(trace.activities["launch_id"], -1)
    call = columns.rows_of(trace.ops["id"].to_numpy(), launch)
    start, dur = (trace.activities[name].to_numpy() for name in ("start_ns", "dur_ns"))
    early_ns = np.where((launch >= 0) & (call >= 0), at(trace.ops["start_ns"].to_numpy(), call, 0) - start, 0)
    is_early = early_ns > _BEFORE_LAUNCH_NS
    if not is_early.any():
        return
    share = int(dur[is_early].sum()) / total_ns
    yield (
        "device_clock",
        f"{int(is_early.sum()):,} activities of the device, {units.share(share)} of its time, begin before the call "
        f"that launches them, by up to {units.duration(int(early_ns.max()))}: the clocks of host and device differ, or "
        "launches are recorded with the numbers of other work.",
        share,
    )


def _idle_launches(trace: Trace) -> Iterator[_Row]:
    """Launches without device work: cut off before the first or behind the last device activity, or lost one by one."""
    launched = _launch_calls(trace)
    has_work = np.isin(launched["id"].to_numpy(), trace.activities["launch_id"].drop_nulls().to_numpy())
    if has_work.all():
        return
    start, idle = launched["start_ns"].to_numpy(), int((~has_work).sum())
    share = idle / launched.height
    later = int((start[~has_work] > start[has_work].max()).sum()) if has_work.any() else 0
    sooner = int((start[~has_work] < start[has_work].min()).sum()) if has_work.any() else 0
    if sooner >= _CUT_OFF * idle:
        missing_ns = int(start[has_work].min() - start.min())
        message = (
            f"The first {sooner:,} of {launched.height:,} launches have no device activity: the profiler recorded the "
            f"device only from {units.duration(missing_ns)} after the first launch on."
        )
    elif later < _CUT_OFF * idle or share < _CUT_OFF_LEAST:
        counts = {"before the first": sooner, "between others": idle - sooner - later, "behind the last": later}
        places = ", ".join(f"{count:,} {place}" for place, count in counts.items() if count)
        is_left_out = any(trace_columns.has_issue(trace, kind) for kind in ("bad_times", "bad_durations"))
        left_out = "its time or duration is wrong, " if is_left_out else ""
        message = (
            f"{idle:,} of {launched.height:,} launches have no device activity ({places} of those that have): "
            f"{left_out}the profiler dropped it, or it ran after recording stopped."
        )
    else:
        devices = environment.device_names(trace.header)
        on = f" of {devices}" if devices else ""
        message = (
            f"The kernels{on} are cut off: {later:,} of {launched.height:,} launches follow the last one whose device "
            "activity was recorded. Only the work before it was judged."
        )
    yield "dropped_events", message, share


def _launch_calls(trace: Trace) -> pl.DataFrame:
    calls = trace_columns.is_kind(trace, "runtime") & trace_columns.is_named(trace, _LAUNCH)
    return columns.where(trace.ops[["id", "start_ns"]], calls)


def _overlaps(trace: Trace) -> Iterator[_Row]:
    """Slices that overlap on one stream, which runs one thing at a time."""
    lanes = columns.where(trace.lanes[["lane"]], columns.to_ints(trace.lanes["device"], -1) >= 0)
    # Whether any work begins before the one before it on its lane has ended, on one of these lanes.
    lane, start = trace.activities["lane"].to_numpy(), trace.activities["start_ns"].to_numpy()
    order = np.lexsort((trace.activities["id"].to_numpy(), start, lane))
    lane, start, end = lane[order], start[order], (start + trace.activities["dur_ns"].to_numpy())[order]
    overlaps = (lane[1:] == lane[:-1]) & (start[1:] < end[:-1])
    if not np.isin(lane[1:][overlaps], lanes["lane"].to_numpy()).any():
        return
    work = trace.activities.join(lanes, on="lane").sort("lane", "start_ns", "id")
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    reach_ns = end_ns.cum_max().shift(1).over("lane").fill_null(pl.col("start_ns"))
    shared = work.select(
        (pl.min_horizontal(reach_ns, end_ns) - pl.col("start_ns")).clip(lower_bound=0).alias("ns"), "dur_ns"
    )
    count, overlapped_ns = shared.filter(pl.col("ns") > 0).height, int(shared["ns"].sum())
    if count:
        share = overlapped_ns / max(int(work["dur_ns"].sum()), 1)
        yield (
            "overlapping_slices",
            f"{count:,} slices overlap another on their stream, by {units.duration(overlapped_ns)} in total: sums of "
            "their durations count that twice.",
            share,
        )


def _dropped_records(trace: Trace) -> Iterator[_Row]:
    """Records that the profiler reports as dropped, in the header's warnings."""
    listed = [lines for name in ("WARNING", "ERROR") if isinstance(lines := trace.header.get(name), list)]
    warnings = [str(line) for lines in listed for line in lines]
    lost = [match for line in warnings if (match := _DROPPED.search(line))]
    if not lost:
        return
    count = sum(int(match[1] or 0) for match in lost)
    share = count / max(count + trace.activities.height, 1)
    what = f"{count:,} activity records" if count else "device activity once its buffers were full"
    yield "dropped_events", f"The profiler reports that it dropped {what}.", share


def _warm_up(trace: Trace) -> Iterator[_Row]:
    saving = set(save_stages.save_spans(trace)["step"].to_list())
    steps: dict[int | None, list[tuple[int, int]]] = {}
    of_devices = breakdown.by_step(trace)[["step", "duration_ns", "device"]].rows()
    for step, duration_ns, device in sorted(row for row in of_devices if row[0] is not None):
        steps.setdefault(device, []).append((step, duration_ns))
    for device_steps in steps.values():
        (step, duration_ns), *rest = device_steps
        other_ns = [step_ns for number, step_ns in rest if number not in saving]
        if len(other_ns) < _FEWEST_OTHERS or step in saving or _has_more_work(trace, step, device):
            continue
        median_ns = float(statistics.median(other_ns))
        is_longer = duration_ns > WARM_UP_RATIO * median_ns
        if is_longer and (_has_first_uses(trace, step) or _is_unusual(duration_ns, other_ns)):
            yield (
                "warm_up_inside",
                f"The first profiled step ({step}) takes {units.duration(duration_ns)} and "
                f"the median of the others {units.duration(median_ns)}: it looks like warm-up.",
                duration_ns / sum(step_ns for _, step_ns in device_steps),
            )


def _has_first_uses(trace: Trace, step: int) -> bool:
    """Return whether the host does things in a step that a training does once: loading, allocating, compiling."""
    stalls = host_stalls.host_stalls(trace)
    return stalls.filter(pl.col("cause").is_in(host_stalls.FIRST_USE), step=step).height > 0


def _is_unusual(duration_ns: int, other_ns: list[int]) -> bool:
    """Return whether the first step is longer than each of many others, or the first of steps that become shorter.

    One comparison, with the median of slow, fast, slow and fast steps, shows no warm-up.
    """
    excess_ns = duration_ns - statistics.median(other_ns)
    recurs = max(other_ns) - statistics.median(other_ns) >= _RECURRING_RATIO * excess_ns
    falls = sorted(other_ns, reverse=True) == other_ns and other_ns[0] > _FALLING_RATIO * other_ns[-1]
    return falls or (not recurs and len(other_ns) >= _MANY_OTHERS)


def _has_more_work(trace: Trace, step: int, device: int | None) -> bool:
    """Return whether a step has far more work than the others: evaluations and prefills are no warm-up.

    It runs more operators, or as many on larger inputs, so that what it is longer is time in which the device computes.
    """
    counts = dict(breakdown.ops_by_step(trace).iter_rows())
    other_counts = [count for other, count in counts.items() if other != step]
    if other_counts and counts.get(step, 0) >= MORE_OPS_RATIO * statistics.median(other_counts):
        return True
    # A CPU computes for longer when its caches are cold, a device when it tries algorithms. Steps of a training
    # have equal inputs, those of a generation do not.
    marks = workload.marks(trace)
    is_inference = bool(marks["host_ops"].item() and not marks["training_marks"].item())
    if device is None or not is_inference or _has_first_uses(trace, step):
        return False
    of_device = breakdown.by_step(trace).filter(pl.col("device") == device, pl.col("step").is_not_null())
    usual = of_device.filter(pl.col("step") != step).select(pl.col("duration_ns", "compute_ns").median())
    excess = of_device.filter(step=step).select(pl.col(name) - usual[name].item() for name in usual.columns)
    return bool((excess["compute_ns"] >= _MIN_COMPUTED_RATIO * excess["duration_ns"]).all())


def _cut(trace: Trace) -> Iterator[_Row]:
    """Steps that were recorded in part."""
    total_ns = max(int(breakdown.by_step(trace)["duration_ns"].sum()), 1)
    for row in cut_steps(trace).iter_rows(named=True):
        which = "The window" if row["step"] is None else f"Step {row['step']}"
        what = (
            f"{which} has only the optimizer: its forward and backward pass were not recorded."
            if row["part"] == OPTIMIZER
            else f"{which} began before the recording: the forward ops of {units.share(row['missing_ratio'])} of its "
            "backward ops were not recorded."
        )
        yield "cut_step", what, min(1.0, row["duration_ns"] / total_ns)


_MIN_COMPUTED_RATIO = 0.5
"""Share of a longer step's excess in which the device computes from which on the step has more work, as the larger part
decides: what else makes first steps longer, loading, allocating and compiling, leaves the device idle."""
_FEWEST_OTHERS = 2
_MANY_OTHERS = 3
_RECURRING_RATIO = 0.5
"""Another step that takes this share of the first one's excess, too: it recurs."""
_FALLING_RATIO = 1.2


def _may_be_optimizer(trace: Trace) -> bool:
    """Return whether the optimizer launched nearly all work of any step, work without a launch excluded."""
    step = trace_columns.activity_steps(trace)
    of_optimizer = columns.flags(trace.activities["phase"] == conventions.OPTIMIZER)
    launched_ns = np.where(trace_columns.launch_ids(trace) >= 0, trace.activities["dur_ns"].to_numpy(), 0)
    _, code = np.unique(step, return_inverse=True)
    optimizer_ns, total_ns = np.bincount(code, launched_ns * of_optimizer), np.bincount(code, launched_ns)
    return bool((optimizer_ns >= _MIN_OPTIMIZER_RATIO * total_ns)[total_ns > 0].any())


def _backward(trace: Trace) -> pl.DataFrame:
    """Return the backward ops of each step. Columns step, backward_ops, known_ops (with a recorded forward op)."""
    backward = trace_columns.is_kind(trace, "cpu_op") & trace_columns.is_named(trace, _BACKWARD)
    ops = trace.ops.select("step", "forward_id").filter(pl.Series(backward))
    known_ops = pl.col("forward_id").is_not_null().sum().cast(pl.Int64)
    return ops.group_by("step").agg(pl.len().cast(pl.Int64).alias("backward_ops"), known_ops.alias("known_ops"))
