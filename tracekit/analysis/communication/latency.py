"""Latency and bandwidth of each process group, fitted to the run's collectives, and bursts of collectives."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions
from tracekit.analysis.communication import collective_instances, issuers
from tracekit.analysis.time import backward_passes, breakdown, launched_work, trace_columns
from tracekit.model import columns, intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.sync import collective_matching

BURST_COLUMNS = schema.columns(
    "step device phase unit lane op group group_size dtype bytes burst position count pool issuer line in_model "
    "activity_id start_ns dur_ns exposed_ns burst_exposed_ns",
    issuer=pl.String,
    line=pl.String,
    in_model=pl.Boolean,
)
_ALIKE = ("lane", "op", "group", "dtype")

COLUMNS = {
    "group": pl.String, "group_size": pl.Int64, "hop_ns": pl.Float64, "bytes_per_ns": pl.Float64,
    "is_fitted": pl.Boolean, "hop_sensitivity": pl.Float64, "size_ratio": pl.Float64, "sizes": pl.Int64,
    "overhead_ns": pl.Float64,
}  # fmt: skip
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
_MIN_SIZE_RATIO = 1.25  # sizes must differ by this factor to fit a latency
_MIN_HOP_NS = 500.0  # no link is faster: a hop over NVLink takes about a microsecond
_MAX_HOP_NS = 200_000.0  # no link in one data center takes longer: the fit is wrong. Hosts take any time (gloo)
SLOW_BYTES_PER_NS = 2.0
"""A bandwidth that every link inside a node and most between nodes exceed (PCIe 3.0 x16 moves 12 GB/s)."""
_SLOW_HOST_BYTES_PER_NS = 0.1
"""The same for collectives that hosts run, over Ethernet of 1 Gbit/s or more."""
_Floats = npt.NDArray[np.float64]


class RingModel(NamedTuple):
    """The time of a ring: hops times `hop_ns`, plus the bytes that each rank sends over `bytes_per_ns`."""

    hop_ns: float
    bytes_per_ns: float


@trace_fact
def bursts(trace: Trace) -> pl.DataFrame:
    """Return the collectives of training, each with the burst and pool that it belongs to.

    Columns BURST_COLUMNS: position and count in the burst, exposed_ns of the collective, burst_exposed_ns of the burst
    from its first start to its last end; one row per collective. A burst: collectives of one lane, op, group and type
    that the host launched without other compute or collectives in between, so that all data was ready at the first
    launch. A pool: collectives that could be merged although compute runs between them: the gradient reductions of one
    backward pass, op, group and type, which a larger bucket would merge; those of one FSDP pass, which larger units
    would; and those that the optimizer or the program issue between backward and the next forward pass, which one call
    for all tensors would. Null for other collectives. issuer, line and in_model are those of
    `issuers`.
    """
    parts = [schema.empty(BURST_COLUMNS)]
    backward = backward_passes.gradient_reductions(trace).select("activity_id", "backward")
    calls_of = pl.col("issuer").is_in(issuers.BATCHABLE) & ((pl.col("issuer") == issuers.FSDP) | ~pl.col("in_model"))
    # Tensor parallelism issues within the model, where compute needs each result at once.
    place = pl.struct("device", "step", "backward", "phase", "issuer", "op", "group", "dtype")
    for device in breakdown.devices(trace):
        together = _launched_together(trace, device)
        if together.is_empty():
            continue
        compute, _, _ = breakdown.busy(trace, device)
        ids = together["activity_id"].to_numpy()
        issued = issuers.issuers(trace).unique("activity_id", keep="first", maintain_order=True)
        parts_of_calls = [
            columns.rows_or_nulls(table.drop("activity_id"), columns.rows_of(table["activity_id"].to_numpy(), ids))
            for table in (backward, issued)
        ]
        calls = pl.concat([together, *parts_of_calls], how="horizontal").sort("start_ns", "activity_id")
        is_pooled = pl.col("backward").is_not_null() | calls_of
        calls = calls.with_columns(pool=pl.when(is_pooled).then(place.rank("dense").cast(pl.Int64)))
        parts.append(_with_exposed(calls, compute).pipe(schema.select, BURST_COLUMNS))
    return pl.concat(parts)


FACTS: tuple[TraceFact, ...] = (bursts, *collective_instances.PEER_FACTS)


@run_fact
def by_group(run: Run) -> pl.DataFrame:
    """Return latency and bandwidth of each group's ring collectives; use ``run.table``.

    Columns group, group_size, hop_ns (latency of one hop of the ring), bytes_per_ns (sent by each rank), is_fitted
    (hop_ns is null if not: sizes are too close together, or not on a line), hop_sensitivity (relative error of hop_ns
    per relative error of the times that it was fitted to), size_ratio (largest over smallest size that
    a hop sends), sizes (how many distinct sizes), overhead_ns (of the smallest collective, the time of a hop beyond
    what its bytes need at SLOW_BYTES_PER_NS: latency, unless the link is slower); one row per group. A ring of n
    ranks sends bytes·(n-1)/n in n-1 hops for an all-gather or reduce-scatter, and twice both for an all-reduce
    (nccl-tests). The fit uses the median time of each op and size: of collectives that follow another in a burst,
    because only the first of a burst waits for ranks, and of those the ones without concurrent compute; else the median
    from the last arrival; where ranks have no trace, the lower quartile.
    """
    # Median time of each group, op and size: columns group, group_size, hops, sent_bytes, took_ns.
    waits = run.table(collective_instances.waits).select("window", "rank", "activity_id", "wait_ns")
    # Where ranks have no trace, waits for them are part of all times.
    usual = 0.25 if collective_instances.ranks_without_peers(run) else 0.5
    place = ["window", "rank", "activity_id"]
    calls = (
        run.table(bursts)
        .join(waits.unique(place), on=place, how="left")
        .with_columns(hops().alias("hops"), ring_bytes().alias("sent_bytes"))
    )
    calls = calls.drop_nulls(["hops", "sent_bytes"]).filter(pl.col("sent_bytes") > 0)
    took = pl.col("dur_ns") - pl.col("wait_ns").fill_null(0)
    follows, bare = pl.col("position") > 0, pl.col("exposed_ns") * 10 >= pl.col("dur_ns") * 9
    points = (
        calls.group_by("group", "group_size", "hops", "sent_bytes", maintain_order=True)
        .agg(
            took.filter(follows & bare).median().alias("bare_ns"),
            took.filter(follows).median().alias("following_ns"),
            took.quantile(usual).alias("usual_ns"),
            pl.col("device").is_null().all().alias("on_host"),
        )
        .with_columns(pl.coalesce("bare_ns", "following_ns", "usual_ns").alias("took_ns"))
        .filter(pl.col("took_ns") > 0)
        .sort("group", "group_size", "sent_bytes")
    )
    rows = []
    for (group, size), group_points in points.group_by("group", "group_size", maintain_order=True):
        on_host = bool(group_points["on_host"].all())
        most_ns = math.inf if on_host else _MAX_HOP_NS
        hop_count, sent_bytes, took_ns = (
            group_points[name].to_numpy().astype(np.float64) for name in ("hops", "sent_bytes", "took_ns")
        )
        model = fit(hop_count, sent_bytes, took_ns, most_hop_ns=most_ns)
        slow_bytes_per_ns = _SLOW_HOST_BYTES_PER_NS if on_host else SLOW_BYTES_PER_NS
        if model is not None and on_host and model.bytes_per_ns < slow_bytes_per_ns:
            model = None  # no network is this slow: sizes differ in something else, such as who issues them
        ends = (None, None) if model is None else model
        hop_bytes = group_points["sent_bytes"] / group_points["hops"]
        size_ratio = hop_bytes.max() / hop_bytes.min()  # type: ignore[operator]
        smallest = group_points.row(int(hop_bytes.arg_min() or 0), named=True)
        overhead_ns = (smallest["took_ns"] - smallest["sent_bytes"] / slow_bytes_per_ns) / smallest["hops"]
        overhead_ns = min(max(overhead_ns, 0.0), most_ns)
        sensitivity = None if model is None else _hop_sensitivity(hop_count, sent_bytes, took_ns) / model.hop_ns
        rows.append((group, size, *ends, model is not None, sensitivity, size_ratio, group_points.height, overhead_ns))
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


MIN_COUNT = 4
"""Fewer collectives in a row are no burst that is worth to batch."""
_ASSUMED_HOP_NS = 5_000.0  # over NVLink or InfiniBand, where the sizes of a run do not show it
_MIN_SIZE_SPREAD = 4.0  # largest over smallest size; below it, latency cannot be separated from transfer time
_LEAST_BUCKET_BYTES = 1 << 20  # DDP's first bucket (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)
_TRANSFER_PER_LATENCY = 4.0  # transfer time over latency of a large enough collective: latency is a fifth of its time
_BATCH = ("window", "rank", "device", "burst", "pool")


@run_fact
def batchable_calls(run: Run) -> pl.DataFrame:
    """Collectives that could be batched; use ``run.table(batchable_calls)``.

    Columns window, rank, those of BURST_COLUMNS (burst null for pools, pool null for bursts), is_measured (whether the
    run's own times show its latency), latency_ns (at most the call's duration), moving_ns (what remains of it in a
    batch: the time of its bytes), joined (how many collectives replace its batch) and is_merged (whether the call is
    one that batching removes); one row per collective of a burst of MIN_COUNT or more, or of a pool that is mostly
    latency; on hosts (gloo), of a pool only those below a MiB. Latency is that of `by_group`; without a fit it is
    overhead_ns for messages below a MiB, else assumed. Batches of a pool are only so large that latency is a fifth of
    their time, so that they still overlap with compute.
    """
    lines = run.table(by_group).drop("sizes")
    # Where ranks have no trace, waits for them are part of all times.
    is_known = not collective_instances.ranks_without_peers(run)
    is_burst = pl.col("count") >= MIN_COUNT
    is_undersized = ~pl.col("is_fitted") & (pl.col("bytes") < _LEAST_BUCKET_BYTES)
    is_undersized &= (pl.col("pool").is_not_null() | is_burst) & pl.lit(is_known)
    assumed_ns = pl.when(is_undersized).then(pl.max_horizontal("overhead_ns", pl.lit(_ASSUMED_HOP_NS)))
    hop_ns = pl.coalesce("hop_ns", assumed_ns.otherwise(_ASSUMED_HOP_NS)).fill_nan(_ASSUMED_HOP_NS)
    calls = (
        run.table(bursts)
        .join(lines, on=["group", "group_size"], how="left", nulls_equal=True, maintain_order="left")
        .with_columns(hops().alias("hops"), ring_bytes().alias("ring_bytes"))
        .drop_nulls(["hops", "ring_bytes", "is_fitted"])
        .with_columns(pl.min_horizontal(hop_ns * pl.col("hops"), "dur_ns").alias("latency_ns"))
    )
    by_pool = ("window", "rank", "device", "pool")
    is_spread = (pl.col("size_ratio") >= _MIN_SIZE_SPREAD) & pl.col("is_fitted")
    is_measured = is_spread | (is_undersized & (pl.col("overhead_ns") > 0))
    slow_bytes_per_ns = pl.when(pl.col("device").is_null()).then(_SLOW_HOST_BYTES_PER_NS).otherwise(SLOW_BYTES_PER_NS)
    bytes_per_ns = pl.coalesce("bytes_per_ns", pl.when(is_measured).then(slow_bytes_per_ns))
    moving_ns = pl.min_horizontal("dur_ns", pl.col("ring_bytes") / bytes_per_ns)
    moving_ns = pl.when(bytes_per_ns.is_null()).then(pl.col("dur_ns") - pl.col("latency_ns")).otherwise(moving_ns)
    # By the medians: a call of a pool that waits for a late rank, or whose thread is not scheduled, is latency too.
    mostly = pl.col("latency_ns").median().over(by_pool) * 2 > pl.col("dur_ns").median().over(by_pool)
    # Hosts copy and add large messages themselves, at a speed that varies with their load: that is no latency.
    is_small = pl.col("device").is_not_null() | (pl.col("bytes") < _LEAST_BUCKET_BYTES)
    mostly &= is_measured & is_small & pl.col("pool").is_not_null()
    # A burst that is all of its pool becomes one collective. Several of one pool, like the gradients of the layers of a
    # backward pass, are merged across the compute between them, as its other collectives are.
    is_alone = ~mostly | (pl.col("burst").n_unique().over(by_pool) == 1)
    batched = (
        calls.with_columns((pl.col("is_fitted") | is_measured).alias("is_measured"), moving_ns.alias("moving_ns"))
        .with_columns((is_burst & is_alone).alias("as_burst"), mostly.alias("as_pool"))
        .filter(pl.col("as_burst") | pl.col("as_pool"))
        .with_columns(
            pl.when("as_burst").then("burst").alias("burst"), pl.when(~pl.col("as_burst")).then("pool").alias("pool")
        )
        .drop("as_burst", "as_pool")
        .sort("start_ns")
    )
    # A burst can be one collective; others must stay small enough to overlap with compute.
    large_enough = (pl.col("moving_ns").sum() / (_TRANSFER_PER_LATENCY * pl.col("latency_ns").median())).ceil().clip(1)
    joined = pl.when(pl.col("burst").is_null()).then(large_enough.over(_BATCH)).otherwise(1.0)
    # The last ones stay: a batch is sent when its last tensor is there.
    following = (pl.len() - 1 - pl.int_range(pl.len())).over(_BATCH)
    return batched.with_columns(
        pl.min_horizontal(joined, pl.len().over(_BATCH)).cast(pl.Int64).alias("joined")
    ).with_columns((following >= pl.col("joined")).alias("is_merged"))


def hops() -> pl.Expr:
    """Number of hops of a ring collective; null for other ops."""
    rounds = pl.col("op").replace_strict(_ROUNDS, default=None, return_dtype=pl.Int64)
    return rounds * (pl.col("group_size") - 1)


def ring_bytes() -> pl.Expr:
    """Return the bytes that each rank sends in a ring collective; null for other ops."""
    return hops() * pl.col("bytes") / pl.col("group_size")


def fit(
    hop_count: _Floats, sent_bytes: _Floats, took_ns: _Floats, *, most_hop_ns: float = _MAX_HOP_NS
) -> RingModel | None:
    """Fit the ring model by relative least squares; None where sizes are too close to separate latency and bandwidth.

    Latency is at least that of the fastest link, at most the duration of the fastest collective.

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
    if hop_ns > most_hop_ns:
        return None
    hop_ns = min(max(float(hop_ns), min(_MIN_HOP_NS, fastest_hop_ns)), fastest_hop_ns)
    if per_byte <= 0:
        per_byte = float(np.median((took_ns - hop_ns * hop_count).clip(0) / sent_bytes))
    return RingModel(round(hop_ns, 6), round(1 / float(per_byte), 6)) if per_byte > 0 else None


def _hop_sensitivity(hop_count: _Floats, sent_bytes: _Floats, took_ns: _Floats) -> float:
    """Standard error in ns of the hop that `fit` returns, per relative error of independent times.

    Of messages whose latency is a small share of their time, a time that is 5% off, such as by concurrent compute, is
    several times their latency.
    """
    terms = np.stack((hop_count / took_ns, sent_bytes / took_ns), axis=1)
    return float(np.linalg.norm(np.linalg.pinv(terms)[0]))


def _launched_together(trace: Trace, device: int | None) -> pl.DataFrame:
    work, arrays = launched_work.work(trace, device), launched_work.work_columns(trace, device)
    trains = ~columns.flags(work["phase"] == conventions.CHECKPOINT)
    at_ns = arrays.launched_or_start_ns
    # Preparation on the collective's own lane is not compute that it waits for.
    is_compute = arrays.computes & trains & ~columns.flags(work["role"] == "communication")
    rows = np.flatnonzero(arrays.communicates)
    order = np.lexsort((arrays.id[rows], at_ns[rows]))
    order = order[trains[rows[order]]]
    calls = collective_matching.with_groups(trace, launched_work.collectives(trace, device)[order]).drop("members")
    before = np.searchsorted(np.sort(at_ns[is_compute]), at_ns[rows[order]])
    alike = calls.select(pl.struct("step", *_ALIKE, pl.Series("before", before.astype(np.int64))).rle_id())
    burst = alike.to_series().to_numpy().astype(np.int64)
    first, count = np.unique(burst, return_index=True, return_counts=True)[1:]
    bursts = calls.rename({"id": "activity_id", "message_bytes": "bytes"}).hstack(
        [
            pl.Series("burst", burst),
            pl.Series("position", np.arange(len(burst)) - first[burst]),
            pl.Series("count", count[burst]),
        ]
    )
    return columns.where(bursts, trace_columns.in_steps(trace, calls))


def _with_exposed(calls: pl.DataFrame, compute: intervals.Spans) -> pl.DataFrame:
    """Return the collectives with the exposed time of each, and of its burst."""
    spans = intervals.from_table(calls)
    _, burst = np.unique(calls["burst"].to_numpy(), return_inverse=True)
    start, end = np.full(burst.max() + 1, np.iinfo(np.int64).max), np.full(burst.max() + 1, np.iinfo(np.int64).min)
    np.minimum.at(start, burst, spans[:, 0])
    np.maximum.at(end, burst, spans[:, 1])
    burst_spans = np.stack((start, end), axis=1)[burst]
    exposed = [
        pl.Series(name, timed[:, 1] - timed[:, 0] - intervals.coverage(timed, compute))
        for name, timed in (("exposed_ns", spans), ("burst_exposed_ns", burst_spans))
    ]
    return calls.hstack(exposed)
