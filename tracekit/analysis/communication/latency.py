"""Latency and bandwidth of each process group, fitted to the run's collectives."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.communication import collective_bursts, collective_instances
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact

COLUMNS = {
    "group": pl.String, "group_size": pl.Int64, "hop_ns": pl.Float64, "bytes_per_ns": pl.Float64,
    "is_fitted": pl.Boolean, "size_ratio": pl.Float64, "sizes": pl.Int64, "overhead_ns": pl.Float64,
}  # fmt: skip
FACTS: tuple[TraceFact, ...] = (collective_bursts.bursts,)
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
_MIN_SIZE_RATIO = 1.25  # sizes must differ by this factor to fit a latency
_MAX_HOP_NS = 200_000.0  # no link in one data center takes longer: the fit is wrong
SLOW_BYTES_PER_NS = 2.0
"""A bandwidth that every link inside a node and most between nodes exceed (PCIe 3.0 x16 moves 12 GB/s)."""
_Floats = npt.NDArray[np.float64]


class RingModel(NamedTuple):
    """The time of a ring: hops times `hop_ns`, plus the bytes that each rank sends over `bytes_per_ns`."""

    hop_ns: float
    bytes_per_ns: float


@run_fact
def by_group(run: Run) -> pl.DataFrame:
    """Return latency and bandwidth of each group's ring collectives; use ``run.run_table``.

    Columns group, group_size, hop_ns (latency of one hop of the ring), bytes_per_ns (sent by each rank), is_fitted
    (hop_ns is null if not: sizes are too close together, or not on a line), size_ratio (largest over smallest size that
    a hop sends), sizes (how many distinct sizes), overhead_ns (of the smallest collective, the time of a hop beyond
    what its bytes need at SLOW_BYTES_PER_NS: latency, unless the link is slower); one row per group. A ring of n
    ranks sends bytes·(n-1)/n in n-1 hops for an all-gather or reduce-scatter, and twice both for an all-reduce
    (nccl-tests). The fit uses the median time of each op and size: of collectives that follow another in a burst,
    because only the first of a burst waits for ranks, and of those the ones without concurrent compute; else the lower
    quartile, from the last known arrival.
    """
    points = _points(run)
    rows = []
    for (group, size), group_points in points.group_by("group", "group_size", maintain_order=True):
        model = fit(*(group_points[name].to_numpy().astype(np.float64) for name in ("hops", "sent_bytes", "took_ns")))
        ends = (None, None) if model is None else model
        hop_bytes = group_points["sent_bytes"] / group_points["hops"]
        size_ratio = hop_bytes.max() / hop_bytes.min()  # type: ignore[operator]
        smallest = group_points.row(int(hop_bytes.arg_min() or 0), named=True)
        overhead_ns = (smallest["took_ns"] - smallest["sent_bytes"] / SLOW_BYTES_PER_NS) / smallest["hops"]
        overhead_ns = min(max(overhead_ns, 0.0), _MAX_HOP_NS)
        rows.append((group, size, *ends, model is not None, size_ratio, group_points.height, overhead_ns))
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def hops() -> pl.Expr:
    """Number of hops of a ring collective; null for other ops."""
    rounds = pl.col("op").replace_strict(_ROUNDS, default=None, return_dtype=pl.Int64)
    return rounds * (pl.col("group_size") - 1)


def ring_bytes() -> pl.Expr:
    """Return the bytes that each rank sends in a ring collective; null for other ops."""
    return hops() * pl.col("bytes") / pl.col("group_size")


def fit(hop_count: _Floats, sent_bytes: _Floats, took_ns: _Floats) -> RingModel | None:
    """Fit the ring model by relative least squares; None where sizes are too close to separate latency and bandwidth.

    Neither part may be negative; latency is at most the duration of the fastest collective.

    >>> fit(np.array([7.0, 7.0]), np.array([1e6, 9e6]), np.array([7e3 + 1e5, 7e3 + 9e5]))
    RingModel(hop_ns=1000.0, bytes_per_ns=10.0)
    """
    is_usable = (hop_count > 0) & (took_ns > 0) & (sent_bytes > 0)
    hop_count, sent_bytes, took_ns = hop_count[is_usable], sent_bytes[is_usable], took_ns[is_usable]
    hop_bytes = sent_bytes / hop_count
    if len(hop_bytes) < 2 or hop_bytes.max() < _MIN_SIZE_RATIO * hop_bytes.min():
        return None
    terms = np.stack((hop_count / took_ns, sent_bytes / took_ns), axis=1)
    (hop_ns, per_byte), *_ = np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)
    fastest_hop_ns = float((took_ns / hop_count).min())
    if hop_ns > _MAX_HOP_NS:
        return None
    hop_ns = min(max(float(hop_ns), 0.0), fastest_hop_ns)
    if per_byte <= 0:
        per_byte = float(np.median((took_ns - hop_ns * hop_count).clip(0) / sent_bytes))
    return RingModel(round(hop_ns, 6), round(1 / float(per_byte), 6)) if per_byte > 0 else None


def _points(run: Run) -> pl.DataFrame:
    """Return the median time of each group, op and size: columns group, group_size, hops, sent_bytes, took_ns."""
    waits = run.table(collective_instances.waits).select("window", "rank", "activity_id", "wait_ns")
    place = ["window", "rank", "activity_id"]
    calls = (
        run.table(collective_bursts.bursts)
        .join(waits.unique(place), on=place, how="left")
        .with_columns(hops().alias("hops"), ring_bytes().alias("sent_bytes"))
    )
    calls = calls.drop_nulls(["hops", "sent_bytes"]).filter(pl.col("sent_bytes") > 0)
    took = pl.col("dur_ns") - pl.col("wait_ns").fill_null(0)
    follows, bare = pl.col("position") > 0, pl.col("exposed_ns") * 10 >= pl.col("dur_ns") * 9
    return (
        calls.group_by("group", "group_size", "hops", "sent_bytes", maintain_order=True)
        .agg(
            took.filter(follows & bare).median().alias("bare_ns"),
            took.filter(follows).median().alias("following_ns"),
            took.quantile(0.25).alias("least_ns"),
        )
        .with_columns(pl.coalesce("bare_ns", "following_ns", "least_ns").alias("took_ns"))
        .filter(pl.col("took_ns") > 0)
        .sort("group", "group_size", "sent_bytes")
    )
