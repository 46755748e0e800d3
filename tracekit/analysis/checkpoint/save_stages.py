"""Checkpoint saves and restores: the time of each stage on each rank, costs, and which spans of a trace are saves."""

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import breakdown, host_state
from tracekit.model import columns, intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact

COLUMNS = (
    "checkpoint", "step", "stage", "start_ns", "dur_ns", "bytes", "blocking", "files", "calls", "path", "call",
    "worker", "durable", "cpu_ns", "run_delay_ns", "whole_bytes",
)  # fmt: skip
SPAN_COLUMNS = schema.columns(
    "step name start_ns dur_ns copied_ns pageable_bytes collective_ns idle_ns write_ns fsync_ns"
)

_WRITE_FUNCTION = r"built-in method write of _?io\.|<built-in method write\b|BufferedWriter.*\bwrite\b"
_FSYNC_FUNCTION = r"\bfsync\b"

RESTORE_COLUMNS = schema.columns(
    "checkpoint window rank step start_ns dur_ns ranks read_bytes unique_bytes amplification", amplification=pl.Float64
)
_FILE_CALLS = (conventions.TORCH_LOAD, conventions.SAFETENSORS_LOAD)

COST_COLUMNS = schema.columns("window saves blocked_ns lost_ns window_ns steps reference_ns")
"""The facts of a rule that reads steps without saves."""
PLACE = ("window", "rank", "step", "device")


@trace_fact
def saves(trace: Trace) -> pl.DataFrame:
    """Stages of this rank's saves from the checkpoint log.

    Columns COLUMNS of `schema.CHECKPOINTS`; one row per save, worker and stage. The log covers the whole run, so every
    window of a rank returns the same rows.
    """
    is_save = columns.flags(trace.checkpoints["operation"] == conventions.SAVE)
    return columns.where(trace.checkpoints[list(COLUMNS)], is_save)


@trace_fact
def loads(trace: Trace) -> pl.DataFrame:
    """Stages of this rank's loads, with the columns of `saves`."""
    is_load = columns.flags(trace.checkpoints["operation"] == conventions.LOAD)
    return columns.where(trace.checkpoints[list(COLUMNS)], is_load)


@trace_fact
def step_times(trace: Trace) -> pl.DataFrame:
    """Step times of the metrics log. Columns step, step_time_ns; one row per step."""
    return trace.metrics.filter(pl.col("name") == conventions.STEP_TIME_METRIC).select("step", step_time_ns="value")


@trace_fact
@memoize
def save_spans(trace: Trace) -> pl.DataFrame:
    """Spans of the trace that are saves: the recorder's own, and others recognized by name.

    Columns SPAN_COLUMNS; one row per span of time that the host spends in saves, named after its first slice. `step` is
    the step in whose host window it begins; null outside steps. The trace shows copies from the device (`copied_ns`,
    and `pageable_bytes` of those into pageable memory) and idle time of the device, both null on a CPU run;
    collectives; and Python's write and fsync calls, null in traces without stacks. It never shows serialization.
    """
    rows = np.flatnonzero(host_state.is_save(trace))
    if not len(rows):
        return schema.empty(SPAN_COLUMNS)
    slices = trace.ops[rows].filter(pl.col("dur_ns") > 0).sort("start_ns", "dur_ns", descending=[False, True])
    merged = intervals.union(intervals.from_table(slices))
    if not len(merged):
        return schema.empty(SPAN_COLUMNS)
    first = np.searchsorted(slices["start_ns"].to_numpy(), merged[:, 0], side="left")
    dur_ns = pl.Series("dur_ns", merged[:, 1] - merged[:, 0], pl.Int64)
    work, name, kind = trace.activities, pl.col("name"), pl.col("kind")
    from_device = work.filter((kind == "memcpy") & name.str.contains("DtoH", literal=True))
    pageable = from_device.filter(name.str.contains("Pageable", literal=True))
    span_row = np.searchsorted(merged[:, 0], pageable["start_ns"].to_numpy(), side="right") - 1
    within = (span_row >= 0) & (pageable["start_ns"].to_numpy() < merged[np.maximum(span_row, 0), 1])
    sizes = np.bincount(span_row[within], pageable["bytes"].fill_null(0).to_numpy()[within], minlength=len(merged))
    python = trace.ops.filter(kind == "python")

    def coverage_ns(rows: pl.DataFrame) -> npt.NDArray[np.int64]:
        return intervals.coverage(merged, intervals.from_table(rows))

    inside = (
        ("copied_ns", coverage_ns(from_device), trace.on_device),
        ("pageable_bytes", sizes.astype(np.int64), trace.on_device),
        ("collective_ns", coverage_ns(work.filter(kind == "communication")), True),
        ("idle_ns", merged[:, 1] - merged[:, 0] - coverage_ns(work), trace.on_device),
        ("write_ns", coverage_ns(python.filter(name.str.contains(_WRITE_FUNCTION))), python.height > 0),
        ("fsync_ns", coverage_ns(python.filter(name.str.contains(_FSYNC_FUNCTION))), python.height > 0),
    )
    columns_inside = [
        pl.Series(label, values if is_known else [None] * len(merged), pl.Int64) for label, values, is_known in inside
    ]
    return slices[first].select("step", "name", "start_ns", dur_ns, *columns_inside)


@run_fact
def restores(run: Run) -> pl.DataFrame:
    """Loads of a run, each over all its ranks; one row per load, in order of time. Columns RESTORE_COLUMNS.

    `rank` is the slowest, `dur_ns` its time. `unique_bytes` is the size of the checkpoint: for a single file the most
    that a rank reads of it, else the size in its metadata; null where neither is known. `amplification` is what all
    ranks read over that.
    """
    lines = run.table(loads)
    lines = lines.unique(lines.columns[1:], keep="first", maintain_order=True)
    stage, size = pl.col("stage"), pl.col("bytes")
    by_rank = lines.group_by("checkpoint", "path", "rank", maintain_order=True).agg(
        pl.col("window", "step", "start_ns").min(),
        pl.col("dur_ns").filter(stage == conventions.TOTAL).sum(),
        size.filter(stage == conventions.READ).sum().alias("read_bytes"),
        pl.col("whole_bytes").max(),
        pl.col("call").is_in(_FILE_CALLS).any().alias("one_file"),
    )
    longest = by_rank.sort("dur_ns", "rank", descending=[True, False])
    of_file = pl.when(pl.col("one_file").any()).then(pl.col("read_bytes").max())
    read = pl.col("read_bytes").sum()
    unique = of_file.otherwise(pl.col("whole_bytes").max()).alias("unique_bytes")
    table = longest.group_by("checkpoint", "path", maintain_order=True).agg(
        pl.col("window", "rank", "dur_ns").first(),
        pl.col("step", "start_ns").min(),
        pl.col("rank").n_unique().alias("ranks"),
        read,
        unique,
    )
    has_size = pl.col("unique_bytes") > 0
    amplification = pl.when(has_size).then(pl.col("read_bytes") / pl.col("unique_bytes")).alias("amplification")
    return table.with_columns(amplification).pipe(schema.select, RESTORE_COLUMNS).sort("start_ns", "checkpoint")


@run_fact
def save_costs(run: Run) -> pl.DataFrame:
    """Costs of the saves of each window, by spans of the trace; use ``run.table``.

    Columns COST_COLUMNS: saves and blocked_ns (of the rank that saves longest), lost_ns, window_ns and steps (of the
    profiled steps; a window without marked steps is one), reference_ns (a step without a save: the median over ranks
    and steps; null where unknown); one row per window with saves in its steps. On a device, lost_ns is what the steps
    of saves and those after them take longer than the others, at least the device's idle time inside the spans and at
    most blocked_ns: work that was queued runs on during a save. On a CPU run it is blocked_ns.
    """
    spans = run.table(save_spans)
    rows = []
    for (window,), of_window in spans.group_by("window", maintain_order=True):
        # Duration of each marked step, or of the window (step null) that has none: the median over ranks.
        steps = run.table(breakdown.by_step).filter(pl.col("window") == window, pl.col("duration_ns") > 0)
        marked = steps.drop_nulls("step")
        of_rank = (marked if marked.height else steps).group_by("rank", "step").agg(pl.col("duration_ns").max())
        medians = of_rank.group_by("step").agg(pl.col("duration_ns").median().cast(pl.Int64)).sort("step")
        lengths = dict(medians.iter_rows())
        in_steps = of_window.filter(pl.col("step").is_not_null() | (None in lengths))
        if in_steps.is_empty() or not lengths:
            continue
        by_rank = in_steps.group_by("rank").agg(pl.len(), pl.col("dur_ns", "idle_ns").sum()).sort("dur_ns", "rank")
        _, saves, blocked_ns, idle_ns = by_rank.row(-1)
        saving = set(in_steps["step"].drop_nulls().to_list())
        reference_ns = _reference_ns(lengths, saving)
        lost_ns = blocked_ns
        if in_steps["idle_ns"].is_not_null().any():
            after = saving | {step + 1 for step in saving}
            longer = (max(0, ns - (reference_ns or ns)) for step, ns in lengths.items() if step in after)
            lost_ns = min(blocked_ns, max(sum(longer), idle_ns))
        rows.append((window, saves, blocked_ns, lost_ns, sum(lengths.values()), len(lengths), reference_ns))
    return pl.DataFrame(rows, schema=COST_COLUMNS, orient="row")


FACTS: tuple[TraceFact, ...] = (breakdown.by_step, save_spans)


def steps(run: Run) -> pl.DataFrame:
    """Breakdown of the steps without saves: columns window, rank and those of `breakdown.by_step`.

    A trace without marked steps is one step, null.
    """
    return without_saves(run, run.table(breakdown.by_step).filter(pl.col("duration_ns") > 0))


def without_saves(run: Run, rows: pl.DataFrame) -> pl.DataFrame:
    """Rows (with columns window and step) of steps in which no rank saves."""
    saving = run.table(save_spans)
    if saving.is_empty():
        return rows
    return rows.join(saving, on=["window", "step"], how="anti", nulls_equal=True, maintain_order="left")


def representative_step(run: Run, rows: pl.DataFrame | None = None) -> dict[str, int | None] | None:
    """Step of a run to look at first, a row of `rows`; None where there are no steps.

    Of the slowest rank, it is the step nearest to its median, without steps that save unless all of them do. `rows`, by
    default the marked steps of the breakdown, has the columns of `breakdown.representative_step`, and window.
    """
    table = run.table(breakdown.by_step).drop_nulls("step") if rows is None else rows
    rest = without_saves(run, table)
    return breakdown.representative_step(rest if rest.height else table)


def losses(run: Run, rows: pl.DataFrame, column: str) -> pl.DataFrame:
    """Loss of each step without saves: the sum of `column` of `rows`, in ns, 0 where there are none.

    A trace without marked steps is one step, null, also with a save in it.

    Columns PLACE, start_ns, duration_ns, lost_ns, lost_ratio (of the step); one row per step, rank and device.
    """
    steps = _times_without_saves(run)
    if rows.is_empty():
        return steps.with_columns(lost_ns=pl.lit(0, rows.schema[column]), lost_ratio=pl.lit(0.0))
    sums = rows.lazy().group_by(PLACE).agg(pl.col(column).sum().alias("lost_ns"))
    return (
        steps.lazy()
        .join(sums, on=PLACE, how="left", nulls_equal=True, maintain_order="left")
        .with_columns(pl.col("lost_ns").fill_null(0))
        .with_columns((pl.col("lost_ns") / pl.col("duration_ns")).alias("lost_ratio"))
        .collect()
    )


def _reference_ns(lengths: dict[int | None, int], saving: set[int]) -> int | None:
    """Median of the steps without saves, if possible without those after saves; never of the first step."""
    marked = {step: ns for step, ns in lengths.items() if step is not None}
    for left_out in (saving | {step + 1 for step in saving}, saving):
        plain_ns = sorted(ns for step, ns in marked.items() if step not in left_out and step != min(marked))
        if plain_ns:
            return plain_ns[(len(plain_ns) - 1) // 2]
    return None


@memoize
def _times_without_saves(run: Run) -> pl.DataFrame:
    """These columns of the steps without saves: many rules read them, and of many ranks the whole table is in files."""
    steps = run.scan(breakdown.by_step).filter(pl.col("duration_ns") > 0)
    times = steps.select(*PLACE, "start_ns", "duration_ns").collect()
    saving = run.table(save_spans).select("window", "step").drop_nulls("step")
    return times.join(saving, on=["window", "step"], how="anti", nulls_equal=True, maintain_order="left")
