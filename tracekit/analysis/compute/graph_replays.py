"""CUDA graph replays: which operators launched the kernels of a graph when it was captured, by an eager twin."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from tracekit.analysis.compute import kernels
from tracekit.model.memoize import memoize
from tracekit.model.nesting import Ints
from tracekit.model.run import Run
from tracekit.model.trace import Trace

_GRAPH_LAUNCH = "GraphLaunch"  # cudaGraphLaunch, hipGraphLaunch, cuGraphLaunch
COLUMNS = ("op", "shapes")


@dataclass(frozen=True, eq=False)
class EagerTwin:
    """A run of the same program without CUDA graphs: the operators of its kernels, in the order of each stream."""

    run: Run
    _traces: dict[int, Trace] = field(default_factory=dict)

    def op_columns(self, trace: Trace) -> list[pl.Series]:
        """Return op and shapes of each activity as `kernels.recorded_ops`, of replayed ones by the twin where known."""
        work = trace.activities.select(activity_id="id")
        captured = captured_ops(trace, self.of_rank(trace.rank)).with_columns(is_known=pl.col("op").is_not_null())
        joined = work.join(captured, on="activity_id", how="left", maintain_order="left")
        recorded = joined.with_columns(
            column.alias(f"recorded_{name}") for name, column in zip(COLUMNS, kernels.recorded_ops(trace), strict=True)
        )
        return recorded.select(
            pl.when("is_known").then(name).otherwise(f"recorded_{name}").alias(name) for name in COLUMNS
        ).get_columns()

    def of_rank(self, rank: int) -> Trace:
        """Return the twin's trace of a rank, or of its first rank where it has no such rank."""
        twin_rank = rank if rank in self.run.ranks else self.run.ranks[0]
        if twin_rank not in self._traces:
            self._traces[twin_rank] = self.run.trace(twin_rank)
        return self._traces[twin_rank]


def is_replayed(trace: Trace) -> pl.Series:
    """Return, for each activity, whether the launch of a CUDA or HIP graph launched it."""
    calls = trace.ops.filter(pl.col("name").str.contains(_GRAPH_LAUNCH, literal=True))["id"]
    return trace.activities["launch_id"].is_in(calls.implode()).fill_null(value=False)


def captured_ops(trace: Trace, twin: Trace) -> pl.DataFrame:
    """Return the operators that launched the replayed kernels of a trace when they were captured.

    The kernels that one graph launch puts on a stream are looked up in the twin: as a run of kernels of the same names
    in the same order on one stream. Where several runs of the twin match, only what they agree on is taken. Columns
    activity_id, op and shapes, null where unknown; one row per replayed activity.
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
    types = {"activity_id": pl.Int64, "op": pl.String, "shapes": pl.String}
    return pl.DataFrame(rows, types, orient="row")


@dataclass(frozen=True, eq=False)
class _Streams:
    """Kernels by stream and start: the code of each name, its stream, and columns op and shapes."""

    codes: dict[str, int]
    tokens: Ints
    lanes: Ints
    ops: pl.DataFrame

    def places(self, names: tuple[str, ...]) -> Ints:
        """Rows at which a run of kernels with these names begins."""
        codes = [self.codes.get(name, -1) for name in names]
        starts: Ints = np.flatnonzero(self.tokens[: len(self.tokens) - len(names) + 1] == codes[0])
        starts = starts[self.lanes[starts] == self.lanes[starts + len(names) - 1]]
        for offset, code in enumerate(codes):
            starts = starts[self.tokens[starts + offset] == code]
        return starts


@memoize
def _streams(twin: Trace) -> _Streams:
    op, shapes = kernels.launching_op_columns(twin, ("name", "shapes"))
    work = twin.activities.with_columns(op=op, shapes=shapes).filter(~is_replayed(twin))
    work = work.sort("lane", "start_ns", "id")
    names = work["name"].unique(maintain_order=True)
    codes = {name: code for code, name in enumerate(names)}
    tokens = work["name"].replace_strict(codes, return_dtype=pl.Int64).to_numpy()
    return _Streams(codes, tokens, work["lane"].to_numpy(), work.select(COLUMNS))


def _look_up_ops(streams: _Streams, names: tuple[str, ...]) -> Iterator[tuple[str | None, ...]]:
    """Yield op and shapes of each of these kernels in the twin, None where unknown or not the same everywhere."""
    starts = streams.places(names)
    for offset in range(len(names)):
        same = streams.ops[starts + offset]
        agreed = [same[name].unique() for name in COLUMNS]
        yield tuple(values.item() if len(values) == 1 else None for values in agreed)


def attribution(run: Run, twin: EagerTwin) -> tuple[int, int]:
    """Count the kernels that CUDA graphs replayed in a run, and those of which the twin names the operator."""
    captured = [captured_ops(trace, twin.of_rank(trace.rank)) for trace in run.traces()]
    return sum(ops.height for ops in captured), sum(ops["op"].count() for ops in captured)
