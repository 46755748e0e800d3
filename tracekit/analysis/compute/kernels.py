"""Device activities by name, launching op and more (on a CPU run, the compute of threads), and CUDA graph replays."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import polars as pl

from tracekit.analysis.compute import call_paths
from tracekit.analysis.time import breakdown, trace_columns
from tracekit.errors import ConfigError
from tracekit.model import nesting
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.nesting import Ints
from tracekit.model.run import OnTrace, Run
from tracekit.model.trace import Trace, TraceFact

_DURATIONS = "durations_ns"
MEASURES = ("count", "total_ns", "mean_ns", "p50_ns", "p95_ns", "max_ns", "spread_ratio", "most_rank")

KEYS = ("name", "op", "shapes", "module", "unit", "phase", "span", "step", "device", "stream", "rank")
"""Keys to group kernels by; kind is always one, so that work of two kinds is never merged."""
OpColumns: TypeAlias = Callable[[Trace, Sequence[str]], Sequence[pl.Series]]
"""What names operator, shapes of its inputs and module of each activity: those columns of REPLAY_COLUMNS by name."""

_GRAPH_LAUNCH = "GraphLaunch"  # cudaGraphLaunch, hipGraphLaunch, cuGraphLaunch
REPLAY_COLUMNS = ("op", "shapes", "module")


@dataclass(frozen=True, eq=False)
class EagerTwin:
    """A run of the same program without CUDA graphs: operators and modules of its kernels, in the order of streams."""

    run: Run
    _traces: dict[int, Trace] = field(default_factory=dict)

    def op_columns(self, trace: Trace, names: Sequence[str] = ("op", "shapes")) -> list[pl.Series]:
        """Return columns of each activity as `recorded_ops`, of replayed ones by the twin where known."""
        work = trace.activities.select(activity_id="id")
        captured = captured_ops(trace, self.of_rank(trace.rank)).with_columns(is_known=pl.col("op").is_not_null())
        joined = work.join(captured, on="activity_id", how="left", maintain_order="left")
        recorded = joined.with_columns(
            column.alias(f"recorded_{name}") for name, column in zip(names, recorded_ops(trace, names), strict=True)
        )
        known = {"module": pl.col("module").is_not_null()}  # the module of a compiled kernel has no operator
        return recorded.select(
            pl.when(known.get(name, pl.col("is_known"))).then(name).otherwise(f"recorded_{name}").alias(name)
            for name in names
        ).get_columns()

    def of_rank(self, rank: int) -> Trace:
        """Twin's trace of a rank, or of its first rank where it has no such rank."""
        twin_rank = rank if rank in self.run.ranks else self.run.ranks[0]
        if twin_rank not in self._traces:
            self._traces[twin_rank] = self.run.trace(twin_rank)
        return self._traces[twin_rank]


def recorded_ops(trace: Trace, names: Sequence[str] = ("op", "shapes")) -> list[pl.Series]:
    """Return columns of REPLAY_COLUMNS for each activity; null where unknown.

    `op` and `shapes` are those of the innermost op around the launch, `module` that of `call_paths`.
    """
    op, shapes = launching_op_columns(trace, ("name", "shapes"))
    columns = {"op": op, "shapes": shapes}
    if "module" in names:  # slow: only where it is shown
        columns["module"] = call_paths.activity_modules(trace)
    return [columns[name].alias(name) for name in names]


def kernels(
    run: Run, by: Sequence[str] = ("name",), *, ops: OpColumns = recorded_ops, on_progress: OnTrace | None = None
) -> pl.DataFrame:
    """Activities of a run summed by kind and `by` (of KEYS), most total time first.

    Columns by, kind, `MEASURES` and time_ratio: total_ns over the device time of all ranks, first activity to last.
    Concurrent kernels on two streams both count. `op` and `shapes` are those of `ops`, by default of the innermost op
    around the launch, `module` is as in `call_paths`. One row per combination; names are never cut or merged. Raises
    ConfigError on an unknown key.
    """
    require_known("--by", by, KEYS)
    keys = tuple(dict.fromkeys((*by, "kind")))
    fact = Durations(tuple(key for key in keys if key != "rank"), ops)
    run.measure((fact, breakdown.by_rank), on_progress)
    device_ns = run.table(breakdown.by_rank)["duration_ns"].sum()
    table = merge_durations(run.table(fact), keys, ranks=run.ranks)
    time_ratio = pl.col("total_ns") / device_ns if device_ns else pl.lit(None, pl.Float64)
    return table.with_columns(time_ratio.alias("time_ratio"))


def with_launch_delays(
    run: Run, by: Sequence[str] = ("name",), *, ops: OpColumns = recorded_ops, on_progress: OnTrace | None = None
) -> pl.DataFrame:
    """Return `kernels` with the columns delay_p50_ns and delay_p95_ns of `launch_delays`, if any launch is known."""
    require_known("--by", by, KEYS)
    keys = tuple(key for key in dict.fromkeys((*by, "kind")) if key != "rank")
    run.measure(
        (Durations(keys, ops), Delays(keys, ops), breakdown.by_rank), on_progress
    )  # in one pass over the traces
    table, delays = kernels(run, by, ops=ops), launch_delays(run, by, ops)
    if delays.is_empty():
        return table
    shared = [name for name in table.columns if name in (*by, "kind")]
    return table.join(delays.drop("launched"), on=shared, how="left", nulls_equal=True, maintain_order="left")


def launch_delays(run: Run, by: Sequence[str] = ("name",), ops: OpColumns = recorded_ops) -> pl.DataFrame:
    """Time from launch to start of the activities of `kernels`.

    Columns by, kind, launched (how many have a recorded launch), delay_p50_ns and delay_p95_ns: median and 95th
    percentile of the time from the end of the launching runtime call to the start. Short delays mean that the device
    waited for the host, long ones that work was queued. One row per combination with a known launch; empty on a CPU
    run. Raises ConfigError on an unknown key.
    """
    require_known("--by", by, KEYS)
    keys = tuple(dict.fromkeys((*by, "kind")))
    fact = Delays(tuple(key for key in keys if key != "rank"), ops)
    ordered = pl.col("delay_ns").sort()
    return (
        run.table(fact)
        .select(*keys, "delay_ns")
        .explode("delay_ns")
        .group_by(keys)
        .agg(
            pl.len().cast(pl.Int64).alias("launched"),
            *(
                ordered.get((pl.len() * share).ceil().cast(pl.Int64) - 1).alias(f"delay_{name}_ns")
                for name, share in (("p50", 0.5), ("p95", 0.95))
            ),
        )
        .sort(keys)
    )


@dataclass(frozen=True)
class Durations:
    """Fact of a trace: the durations of its activities by `keys`, as `collect_durations`."""

    keys: tuple[str, ...]
    ops: OpColumns = recorded_ops

    def __call__(self, trace: Trace) -> pl.DataFrame:
        """Measure a trace."""
        return collect_durations(_with_keys(trace, self.keys, self.ops), self.keys)


@dataclass(frozen=True)
class Delays:
    """Fact of a trace: the times from launch to start of its activities, lists delay_ns by `keys`."""

    keys: tuple[str, ...]
    ops: OpColumns = recorded_ops

    def __call__(self, trace: Trace) -> pl.DataFrame:
        """Measure a trace."""
        work = _with_keys(trace, self.keys, self.ops)
        launched_ns = (pl.col("start_ns") + pl.col("dur_ns")).alias("launched_ns")
        calls = trace.ops.select(pl.col("id").alias("launch_id"), launched_ns)
        launched = work.clear() if not trace.on_device else work.drop_nulls("launch_id")
        delayed = launched.join(calls, on="launch_id", maintain_order="left").with_columns(
            (pl.col("start_ns") - pl.col("launched_ns")).clip(0).alias("delay_ns")
        )
        return delayed.group_by(self.keys, maintain_order=True).agg("delay_ns")


BY_NAME: tuple[TraceFact, ...] = (Durations(("name", "kind")), Delays(("name", "kind")))
"""What `by_name` reads."""


def activity_count(run: Run) -> int:
    """Return how many activities the traces of a run have."""
    counts = run.scan(BY_NAME[0]).select(pl.col(_DURATIONS).list.len().sum())
    return int(counts.collect().item())


@run_fact
def by_name(run: Run) -> pl.DataFrame:
    """Kernels by name, the first view of them, with the delays of `with_launch_delays`; use ``run.table``.

    Delays are null where no launch is known, as on a CPU run.
    """
    table = with_launch_delays(run)
    missing = [name for name in ("delay_p50_ns", "delay_p95_ns") if name not in table.columns]
    return table.with_columns(pl.lit(None, pl.Int64).alias(name) for name in missing)


def _with_keys(trace: Trace, keys: Sequence[str], ops: OpColumns) -> pl.DataFrame:
    """Activities with whatever of the keys is not a column of theirs."""
    work = trace.activities
    if "stream" in keys or "device" in keys:
        lanes = trace.lanes.select("lane", "device", stream="name")
        work = work.join(lanes, on="lane", maintain_order="left")
    names = tuple(name for name in REPLAY_COLUMNS if name in keys)
    return work.with_columns(ops(trace, names)) if names else work


def launching_op_columns(trace: Trace, columns: Sequence[str]) -> list[pl.Series]:
    """Return, for each activity, columns of the innermost op around its launch, named op_…; null where unknown."""
    row = pl.Series(innermost_op(trace))
    row = row.set(row < 0, None)
    return [trace.ops[name].gather(row).alias(f"op_{name}") for name in columns]


@memoize
def innermost_op(trace: Trace) -> nesting.Ints:
    """Return, for each activity, the row in ops of the innermost dispatcher op around its launch; -1 for none."""
    launch = trace.activities["launch_id"].fill_null(-1).to_numpy()
    if not trace.ops.height:
        return np.full(len(launch), -1, np.int64)
    of_slice = nesting.nearest(trace_columns.parent_ids(trace), trace_columns.is_kind(trace, "cpu_op"))
    is_known = (launch >= 0) & (launch < len(of_slice))
    return np.where(is_known, of_slice[np.where(is_known, launch, 0)], -1)


def collect_durations(work: pl.DataFrame, keys: Sequence[str], sums: Sequence[str] = ()) -> pl.DataFrame:
    """Return one trace's durations by `keys`: columns keys, durations_ns (a list) and the sum of each of `sums`.

    `work` needs the keys, dur_ns and `sums`. One row per combination of keys that occurs, a null being a value too.
    """
    return work.group_by(*keys, maintain_order=True).agg(
        pl.col("dur_ns").alias(_DURATIONS), *(pl.col(name).sum() for name in sums)
    )


def merge_durations(
    parts: pl.DataFrame, keys: Sequence[str], *, ranks: Sequence[int], sums: Sequence[str] = ()
) -> pl.DataFrame:
    """Merge the tables that `collect_durations` returned: one row per combination of keys, most total time first.

    `parts` has columns window and rank too; `rank` may be one of the keys. Columns keys, MEASURES and `sums`: count,
    total_ns, mean_ns (rounded), p50_ns, p95_ns (the shortest recorded duration that at least 50 and 95% do not exceed),
    max_ns, spread_ratio (largest less smallest total over ranks, over the mean of `ranks`; a rank without any counts as
    0), most_rank (the rank with the largest total). The last two are null for a single rank.
    """
    ordered = pl.col("dur_ns").sort()
    merged = (
        parts.select(*keys, pl.col(_DURATIONS).alias("dur_ns"))
        .explode("dur_ns")
        .group_by(*keys)
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("dur_ns").sum().alias("total_ns"),
            pl.col("dur_ns").mean().round().cast(pl.Int64).alias("mean_ns"),
            *(ordered.get((pl.len() * share).ceil().cast(pl.Int64) - 1).alias(name) for name, share in _SHARES),
            pl.col("dur_ns").max().alias("max_ns"),
        )
    )
    summed = parts.group_by(*keys).agg(pl.col(name).sum() for name in sums)
    return (
        merged.join(_spread(parts, keys, ranks), on=keys, nulls_equal=True)
        .join(summed, on=keys, nulls_equal=True)
        .sort("total_ns", *keys, descending=[True, *(False for _ in keys)])
        .select(*keys, *MEASURES, *sums)
    )


_SHARES = (("p50_ns", 0.5), ("p95_ns", 0.95))


def require_known(option: str, names: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise ConfigError where an option has no names, or one that is not `allowed`."""
    unknown = next((name for name in names if name not in allowed), None)
    if unknown is not None or not names:
        raise ConfigError(f"{option} {unknown or ''}: expected some of {', '.join(allowed)}".replace(" :", ":"))


def is_replayed(trace: Trace) -> pl.Series:
    """Return, for each activity, whether the launch of a CUDA or HIP graph launched it."""
    calls = trace.ops.filter(pl.col("name").str.contains(_GRAPH_LAUNCH, literal=True))["id"]
    return trace.activities["launch_id"].is_in(calls.implode()).fill_null(value=False)


def captured_ops(trace: Trace, twin: Trace) -> pl.DataFrame:
    """Operators and modules that launched the replayed kernels of a trace when they were captured.

    The kernels that one graph launch puts on a stream are looked up in the twin: as a run of kernels of the same names
    in the same order on one stream. Where several runs of the twin match, only what they agree on is taken. Columns
    activity_id, op, shapes and module, null where unknown; one row per replayed activity.
    """
    work = trace.activities.filter(is_replayed(trace)).sort("launch_id", "lane", "start_ns", "id")
    streams = _streams(twin)
    ops_of_names: dict[tuple[str, ...], list[tuple[str | None, ...]]] = {}
    rows: list[tuple[object, ...]] = []
    for _, stream_work in work.group_by("launch_id", "lane", maintain_order=True):
        names = tuple(stream_work["name"].to_list())
        if names not in ops_of_names:
            ops_of_names[names] = list(_look_up_ops(streams, names))
        rows += [(number, *ops) for number, ops in zip(stream_work["id"], ops_of_names[names], strict=True)]
    types = {"activity_id": pl.Int64, **dict.fromkeys(REPLAY_COLUMNS, pl.String)}
    return pl.DataFrame(rows, types, orient="row")


@dataclass(frozen=True, eq=False)
class _Streams:
    """Kernels by stream and start: the code of each name, its stream, and columns REPLAY_COLUMNS."""

    codes: dict[str, int]
    tokens: Ints
    lanes: Ints
    ops: pl.DataFrame


@memoize
def _streams(twin: Trace) -> _Streams:
    work = twin.activities.with_columns(recorded_ops(twin, REPLAY_COLUMNS)).filter(~is_replayed(twin))
    work = work.sort("lane", "start_ns", "id")
    names = work["name"].unique(maintain_order=True)
    codes = {name: code for code, name in enumerate(names)}
    tokens = work["name"].replace_strict(codes, return_dtype=pl.Int64).to_numpy()
    return _Streams(codes, tokens, work["lane"].to_numpy(), work.select(REPLAY_COLUMNS))


def _look_up_ops(streams: _Streams, names: tuple[str, ...]) -> Iterator[tuple[str | None, ...]]:
    """Yield the columns of each of these kernels in the twin, None where unknown or not the same everywhere."""
    # Rows at which a run of kernels with these names begins.
    codes = [streams.codes.get(name, -1) for name in names]
    starts: Ints = np.flatnonzero(streams.tokens[: len(streams.tokens) - len(names) + 1] == codes[0])
    starts = starts[streams.lanes[starts] == streams.lanes[starts + len(names) - 1]]
    for offset, code in enumerate(codes):
        starts = starts[streams.tokens[starts + offset] == code]
    for offset in range(len(names)):
        same = streams.ops[starts + offset]
        agreed = [same[name].unique() for name in REPLAY_COLUMNS]
        yield tuple(values.item() if len(values) == 1 else None for values in agreed)


@trace_fact
def attributed_kernels(trace: Trace) -> pl.DataFrame:
    """Kernels of a trace: columns kernels, in_modules (whose module is known), replayed (by CUDA graphs); one row."""
    is_kernel = trace.activities["kind"].is_in(["compute", "communication"])
    in_modules = call_paths.activity_modules(trace).is_not_null() & is_kernel
    counts = (int(is_kernel.sum()), int(in_modules.sum()), int((is_replayed(trace) & is_kernel).sum()))
    return pl.DataFrame([counts], schema=dict.fromkeys(("kernels", "in_modules", "replayed"), pl.Int64), orient="row")


def missing_modules(run: Run) -> str | None:
    """Why no kernel of a run has a module, and what to record; None where some have, or there are none."""
    sums = run.table(attributed_kernels).select(pl.exclude("window", "rank").sum())
    kernel_count, in_modules, replayed = sums.select("kernels", "in_modules", "replayed").row(0)
    if not kernel_count or in_modules:
        return None
    record = "tracekit record --modules, or the profiler with with_stack=True"
    if not replayed:
        return f"no call of a module was recorded; record them: {record}"
    return (
        f"{replayed:,} of {kernel_count:,} kernels run in CUDA graphs, whose modules ran when these were captured; "
        f"record the same program without CUDA graphs and with modules ({record}), and name it: --eager-twin RUN; or "
        "let torch annotate the graphs: torch.cuda.graph(..., enable_annotations=True)"
    )


def replay_attribution(run: Run, twin: EagerTwin) -> tuple[int, int]:
    """Count the kernels that CUDA graphs replayed in a run, and those of which the twin names the operator."""
    captured = [captured_ops(trace, twin.of_rank(trace.rank)) for trace in run.traces()]
    return sum(ops.height for ops in captured), sum(ops["op"].count() for ops in captured)


def _spread(parts: pl.DataFrame, keys: Sequence[str], ranks: Sequence[int]) -> pl.DataFrame:
    if len(ranks) < 2 or "rank" in keys:
        return parts.select(
            *keys, pl.lit(None, pl.Float64).alias("spread_ratio"), pl.lit(None, pl.Int64).alias("most_rank")
        ).unique(keys)
    rank_total_ns = pl.col("rank_total_ns")
    least_ns = pl.when(pl.len() < len(ranks)).then(0).otherwise(rank_total_ns.min())
    spread_ns, mean_ns = rank_total_ns.max() - least_ns, rank_total_ns.sum() / len(ranks)
    return (
        parts.group_by(*keys, "rank")
        .agg(pl.col(_DURATIONS).list.sum().sum().alias("rank_total_ns"))
        .sort("rank")
        .group_by(*keys)
        .agg(
            pl.when(mean_ns > 0).then(spread_ns / mean_ns).otherwise(0.0).alias("spread_ratio"),
            pl.col("rank").get(rank_total_ns.arg_max()).alias("most_rank"),
        )
    )
