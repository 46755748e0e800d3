"""What a recorded training shows of its strategy: how much communication was hidden, and who allocated."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tracekit.analysis.time import breakdown
from tracekit.conventions.strategies import STRATEGIES
from tracekit.ingest.loader import load
from tracekit.model.trace import Trace

LARGE_BYTES = 1_000_000
MAKERS = ("engine", "backend", "rest")
"""Who allocates: FSDP's or YaFSDP's own code, the library that runs the collectives, all else (model, autograd)."""

_ALLOCATION_COLUMNS = {"step": pl.Int64, "maker": pl.String, "bytes": pl.Int64}
_CONFIDENCE = 0.95

_ENGINE_PREFIXES = tuple(strategy.span_prefix for strategy in STRATEGIES.values() if strategy.span_prefix)


@dataclass(frozen=True)
class Measured:
    """One recorded training."""

    overlap_ratio: float
    """Share of the time in which collectives ran, over ranks and profiled steps, that compute overlapped."""
    communication_ns: float
    """That time, per rank and profiled step."""
    large_allocations: dict[str, float]
    """By maker, allocations of at least LARGE_BYTES per rank and profiled step."""
    large_bytes: dict[str, float]
    """What these come to, in bytes."""


def measure(folder: Path) -> Measured:
    """Measure the run in a folder."""
    run = load(folder)
    steps = run.table(breakdown.by_step)
    overlapped_ns, communication_ns = steps["overlapped_ns"].sum(), steps["communication_ns"].sum()
    allocations = run.table(large_allocations)
    by_maker = {maker: allocations.filter(pl.col("maker") == maker)["bytes"] for maker in MAKERS}
    return Measured(
        overlap_ratio=overlapped_ns / communication_ns,
        communication_ns=communication_ns / steps.height,
        large_allocations={maker: len(sizes) / steps.height for maker, sizes in by_maker.items()},
        large_bytes={maker: sizes.sum() / steps.height for maker, sizes in by_maker.items()},
    )


def large_allocations(trace: Trace) -> pl.DataFrame:
    """Return the allocations of at least LARGE_BYTES in profiled steps. Columns step, maker, bytes; one row each.

    An allocation is the backend's if a collective is around it on its thread, else the engine's if one of the engine's
    spans is.
    """
    name = pl.col("name")
    mark = (
        pl.when(name.str.contains(r"^(c10d::|gloo:|nccl:)"))
        .then(pl.lit("backend"))
        .when(pl.any_horizontal(name.str.starts_with(prefix) for prefix in _ENGINE_PREFIXES))
        .then(pl.lit("engine"))
    )
    marks = dict(trace.ops.select("id", mark.alias("mark")).drop_nulls().iter_rows())
    parents = dict(trace.ops.select("id", "parent_id").drop_nulls().iter_rows())
    large = trace.allocations.filter(pl.col("delta_bytes") >= LARGE_BYTES, pl.col("step").is_not_null())
    makers = [_maker(op, marks, parents) for op in large["op_id"]]
    return large.select(
        "step", pl.Series("maker", makers, pl.String).alias("maker"), pl.col("delta_bytes").alias("bytes")
    ).cast(_ALLOCATION_COLUMNS)  # type: ignore[arg-type]


def median_with_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the median and its interval of at least 95% confidence; None, None where there are too few values.

    The interval's ends are two of the values, chosen by the binomial distribution alone (Conover, Practical
    Nonparametric Statistics, 1999, section 3.2), so it assumes nothing of how the values are distributed.

    >>> median_with_interval([3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    (5.5, 2.0, 9.0)
    """
    ordered, count = sorted(values), len(values)
    outside = 0.0  # probability that the median lies outside of the interval, on one side
    inner = None
    for index in range(count // 2):
        outside += math.comb(count, index) / 2**count
        if 2 * outside > 1 - _CONFIDENCE:
            break
        inner = index
    if inner is None:
        return statistics.median(ordered), None, None
    return statistics.median(ordered), ordered[inner], ordered[count - 1 - inner]


def _maker(op: int | None, marks: dict[int, str], parents: dict[int, int]) -> str:
    maker = "rest"
    while op is not None:
        mark = marks.get(op)
        if mark == "backend":
            return mark
        maker = mark or maker
        op = parents.get(op)
    return maker
