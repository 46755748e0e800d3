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
        known = rank if rank in self.run.ranks else self.run.ranks[0]
        if known not in self._traces:
            self._traces[known] = self.run.trace(known)
        return self._traces[known]


def replayed(trace: Trace) -> pl.Series:
    """Return, for each activity, whether the launch of a CUDA or HIP graph launched it."""
    calls = trace.ops.filter(pl.col("name").str.contains(_GRAPH_LAUNCH, literal=True))["id"]
    return trace.activities["launch_id"].is_in(calls.implode()).fill_null(value=False)


def captured_ops(trace: Trace, twin: Trace) -> pl.DataFrame:
    """Return the operators that launched the replayed kernels of a trace when they were captured.

    The kernels that one graph launch puts on a stream are looked up in the twin: as a run of kernels of the same names
    in the same order on one stream. Where several runs of the twin match, only what they agree on is taken. Columns
    activity_id, op and shapes, null where unknown; one row per replayed activity.
    """
    work = trace.activities.filter(replayed(trace)).sort("launch_id", "lane", "start_ns", "id")
    known = _streams(twin)
    found: dict[tuple[str, ...], list[tuple[str | None, ...]]] = {}
    rows: list[tuple[object, ...]] = []
    for _, own in work.group_by("launch_id", "lane", maintain_order=True):
        names = tuple(own["name"].to_list())
        if names not in found:
            found[names] = list(_looked_up(known, names))
        rows += [(number, *ops) for number, ops in zip(own["id"], found[names], strict=True)]
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
        """Return where a run of kernels with these names begins."""
        codes = [self.codes.get(name, -1) for name in names]
        at: Ints = np.flatnonzero(self.tokens[: len(self.tokens) - len(names) + 1] == codes[0])
        at = at[self.lanes[at] == self.lanes[at + len(names) - 1]]
        for offset, code in enumerate(codes):
            at = at[self.tokens[at + offset] == code]
        return at


@memoize
def _streams(twin: Trace) -> _Streams:
    op, shapes = kernels.launching_op_columns(twin, ("name", "shapes"))
    work = twin.activities.with_columns(op=op, shapes=shapes).filter(~replayed(twin))
    work = work.sort("lane", "start_ns", "id")
    names = work["name"].unique(maintain_order=True)
    codes = {name: code for code, name in enumerate(names)}
    tokens = work["name"].replace_strict(codes, return_dtype=pl.Int64).to_numpy()
    return _Streams(codes, tokens, work["lane"].to_numpy(), work.select(COLUMNS))


def _looked_up(known: _Streams, names: tuple[str, ...]) -> Iterator[tuple[str | None, ...]]:
    """Yield op and shapes of each of these kernels in the twin, None where unknown or not the same everywhere."""
    at = known.places(names)
    for offset in range(len(names)):
        same = known.ops[at + offset]
        agreed = [same[name].unique() for name in COLUMNS]
        yield tuple(values.item() if len(values) == 1 else None for values in agreed)


def attribution(run: Run, twin: EagerTwin) -> tuple[int, int]:
    """Return how many kernels CUDA graphs replayed in a run, and of how many the twin names the operator."""
    found = [captured_ops(trace, twin.of_rank(trace.rank)) for trace in run.traces()]
    return sum(each.height for each in found), sum(each["op"].count() for each in found)
