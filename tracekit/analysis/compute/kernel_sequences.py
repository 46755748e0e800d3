"""Kernel sequences: which kernels follow each other again and again, and what lies between them."""

import functools

import numpy as np
import polars as pl

from tracekit.analysis.time import breakdown, trace_columns
from tracekit.errors import ConfigError
from tracekit.model import nesting, repetitions, schema
from tracekit.model.fact import trace_fact
from tracekit.model.nesting import Ints
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact

LONGEST = 8
"""Kernels of the longest sequence in the table `kernel_sequences`."""
_MAX_LENGTH = 256
_MEASURED = (
    schema.column("length", "Kernels in the sequence."),
    schema.column("kernels", "Their names, in order.", pl.List(pl.String())),
    schema.column("count", "How often it occurs; no two occurrences of the table's rows have a kernel in common."),
    schema.column("steps", "Steps in which it occurs; 1 where the trace has no steps."),
    schema.column("total_ns", "Time of its kernels, summed."),
    schema.column("gap_ns", "Time between the kernels of one occurrence, summed."),
    schema.column("launches", "Launching calls, summed: a CUDA graph needs one; null where no launch is recorded."),
    schema.column("first_id", "activities.id of the first kernel of the first occurrence."),
)
SEQUENCES = schema.table(
    "kernel_sequences",
    "sequence of kernels, copies and memory sets that recurs on a device stream",
    schema.column("device", "Device index; null on a CPU run."),
    schema.column("stream", "Stream number; null on a CPU run."),
    schema.column("name", "Name of the stream, or of the thread on a CPU run.", pl.String()),
    *_MEASURED,
)
_OF_CALLS = schema.columns(
    "op kernels count length steps total_ns gap_ns op_ns", op=pl.String, kernels=pl.List(pl.String)
)


@trace_fact(table=SEQUENCES)
def kernel_sequences(trace: Trace) -> pl.DataFrame:
    """Sequences of 2 to LONGEST kernels that recur on each stream within steps: columns as SEQUENCES.

    Work outside of steps is left out if the trace has steps. They are chosen as by `repetitions.recurring_runs`: the
    one that covers most kernels first, then among the others. One row per stream and sequence, most covered kernels
    first; at most 1,000 sequences of a stream.
    """
    return _stream_sequences(trace, LONGEST)


def by_sequence(run: Run, longest: int) -> pl.DataFrame:
    """Sequences of 2 to `longest` kernels of all ranks, most time first.

    Columns kernels, length, count, per_step (count over the steps of all ranks), total_ns, gap_ns, launches and
    time_ratio (total_ns over the device time of all ranks). Raises ConfigError on a length below 2 or above 256.
    """
    if not 2 <= longest <= _MAX_LENGTH:
        raise ConfigError(f"--sequences {longest}: a sequence has 2 to {_MAX_LENGTH} kernels")
    fact = _sequences_fact(longest)
    run.measure((fact, breakdown.by_rank, breakdown.by_step))
    sums = [pl.col(name).sum() for name in ("count", "total_ns", "gap_ns")]
    launches = pl.when(pl.col("launches").is_not_null().any()).then(pl.col("launches").sum())
    return _with_shares(run, run.table(fact).group_by("kernels", "length").agg(*sums, launches))


def by_call(run: Run, op: str) -> pl.DataFrame:
    """Sequences of kernels that the calls of operators launch whose names contain `op`, most time first.

    Of nested calls the outermost counts; those that launch fewer than two kernels are left out. Columns op, kernels (by
    start, on all streams), length, count, per_step, total_ns, gap_ns, op_ns (time of the calls on the host) and
    time_ratio, as `by_sequence`. Raises ConfigError if no call has such a name.
    """
    fact = _launched_by(op)
    run.measure((fact, breakdown.by_rank, breakdown.by_step))
    sequences = run.table(fact)
    if sequences.is_empty():
        raise ConfigError(f"--launched-by {op}: no operator whose name contains it launches two kernels or more")
    sums = [pl.col(name).sum() for name in ("count", "total_ns", "gap_ns", "op_ns")]
    return _with_shares(run, sequences.group_by("op", "kernels", "length").agg(*sums))


def _with_shares(run: Run, sequences: pl.DataFrame) -> pl.DataFrame:
    steps = run.table(breakdown.by_step).n_unique(["window", "rank", "step"])
    device_ns = run.table(breakdown.by_rank)["duration_ns"].sum()
    per_step = (pl.col("count") / max(steps, 1)).alias("per_step")
    ratio = (pl.col("total_ns") / device_ns if device_ns else pl.lit(None, pl.Float64)).alias("time_ratio")
    names = pl.col("kernels").list.join("\n")
    keys = [name for name in ("op", "kernels", "length", "count") if name in sequences.columns]
    rest = [name for name in sequences.columns if name not in keys]
    ordered = sequences.sort("total_ns", "count", names, descending=[True, True, False])
    return ordered.select(*keys, per_step, *rest, ratio)


@functools.cache
def _sequences_fact(longest: int) -> TraceFact:
    return kernel_sequences if longest == LONGEST else functools.partial(_stream_sequences, longest=longest)


def _stream_sequences(trace: Trace, longest: int) -> pl.DataFrame:
    work = _work(trace)
    lanes = trace.lanes.select("lane", "device", "stream", "name")
    rows = [
        {"lane": lane} | row
        for (lane,), lane_work in work.group_by("lane", maintain_order=True)
        for row in _lane_sequences(lane_work, longest)
    ]
    if not rows:
        return SEQUENCES.empty()
    types = {"lane": pl.Int64(), **{column.name: column.dtype for column in _MEASURED}}
    sequences = pl.DataFrame(rows, types).join(lanes, on="lane", maintain_order="left")
    return SEQUENCES.conform(sequences.sort("device", "stream", "lane", maintain_order=True))


def _work(trace: Trace) -> pl.DataFrame:
    """Activities of steps, or all where none is in a step, by lane and start, with the code of each name."""
    columns = ("id", "launch_id", "lane", "name", "start_ns", "dur_ns", "step")
    work = trace.activities.select(columns)
    in_steps = work.drop_nulls("step")
    work = (in_steps if in_steps.height else work).sort("lane", "start_ns", "id")
    return work.with_columns(pl.col("name").rank("dense").cast(pl.Int64).alias("code"))


def _lane_sequences(work: pl.DataFrame, longest: int) -> list[dict[str, object]]:
    step = work["step"].fill_null(-1).to_numpy()
    part = np.cumsum(np.diff(step, prepend=step[:1]) != 0)
    runs = repetitions.recurring_runs(work["code"].to_numpy(), part, longest=longest)
    busy, gaps, calls = _running_sums(work)
    names, ids = work["name"], work["id"]
    rows = []
    for run in runs:
        first, inner, end = run.starts, run.starts + 1, run.starts + run.length
        rows.append(
            {
                "length": run.length,
                "kernels": names.slice(int(first[0]), run.length).to_list(),
                "count": len(first),
                "steps": len(np.unique(step[first])),
                "total_ns": int((busy[end] - busy[first]).sum()),
                "gap_ns": int((gaps[end] - gaps[inner]).sum()),
                "launches": None if calls is None else int((calls[end] - calls[inner] + 1).sum()),
                "first_id": ids[int(first[0])],
            }
        )
    return rows


def _running_sums(work: pl.DataFrame) -> tuple[Ints, Ints, Ints | None]:
    """Return sums of durations, of the gaps before each kernel, and of changes of the launch, up to each kernel."""
    start, dur = work["start_ns"].to_numpy(), work["dur_ns"].to_numpy()
    gap = np.maximum(start[1:] - np.maximum.accumulate(start + dur)[:-1], 0)
    launch = work["launch_id"]
    changes = launch.ne_missing(launch.shift(1)) | launch.is_null()
    calls = None if launch.null_count() == len(launch) else _cumulative_sum(changes.to_numpy().astype(np.int64))
    return _cumulative_sum(dur), _cumulative_sum(np.concatenate(([0], gap))), calls


def _cumulative_sum(values: Ints) -> Ints:
    return np.concatenate(([0], np.cumsum(values)))


@functools.cache
def _launched_by(op: str) -> TraceFact:
    def fact(trace: Trace) -> pl.DataFrame:
        call = _outermost_call(trace, op)
        launched = _work(trace).join(call, left_on="id", right_on="activity_id").sort("call_id", "start_ns", "id")
        before_ns = (pl.col("start_ns") + pl.col("dur_ns")).cum_max().shift(1).over("call_id")
        gap = (pl.col("start_ns") - before_ns).clip(0).fill_null(0).alias("gap_ns")
        calls = (
            launched.with_columns(gap)
            .group_by("call_id", maintain_order=True)
            .agg(pl.col("name").alias("kernels"), pl.col("step").first(), pl.col("dur_ns", "gap_ns").sum())
            .filter(pl.col("kernels").list.len() > 1)
            .join(trace.ops.select(call_id="id", op="name", op_ns="dur_ns"), on="call_id", maintain_order="left")
        )
        sequences = calls.group_by("op", "kernels", maintain_order=True).agg(
            pl.len().alias("count"),
            pl.col("kernels").first().list.len().alias("length"),
            pl.col("step").n_unique().alias("steps"),
            pl.col("dur_ns").sum().alias("total_ns"),
            pl.col("gap_ns", "op_ns").sum(),
        )
        return schema.select(sequences, _OF_CALLS)

    return fact


def _outermost_call(trace: Trace, op: str) -> pl.DataFrame:
    """Outermost call around the launch of each activity whose name contains `op`: activity_id, call_id."""
    parent = trace_columns.parent_ids(trace)
    is_named = trace.ops["name"].str.contains(op, literal=True).to_numpy()
    around = np.append(nesting.nearest(parent, is_named), -1)[parent]
    outermost = nesting.nearest(parent, is_named & (around < 0))
    linked = trace.activities.select("id", "launch_id").drop_nulls()
    call = pl.Series("call_id", outermost[linked["launch_id"].to_numpy()] if linked.height else [], pl.Int64)
    return linked.select(activity_id="id").with_columns(call).filter(pl.col("call_id") >= 0)
