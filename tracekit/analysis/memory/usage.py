"""Allocated bytes over time by owner, their growth from step to step, and block lifetimes by size."""

import math

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions
from tracekit.analysis.memory import allocations
from tracekit.analysis.memory.allocations import live_bytes_at
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace

OWNER_COLUMNS = schema.columns("device owner_kind owner at_ns bytes live_bytes reserved_bytes", owner=pl.String)
LIFETIME_COLUMNS = schema.columns("device low_bytes high_bytes low_ns high_ns count bytes op")
EARLIER, OTHERS = "from before", "others"
_NO_OWNER = {"phase": "outside phases", "unit": "outside units", "op": "outside ops"}
_ROOT = "root"
_MOST_OWNERS = 9
_SPANS = 300
_SIZE_EDGES = 1 << np.arange(62)
_TIME_EDGES = np.concatenate(([0], np.outer(10 ** np.arange(3, 15), (1, 3)).ravel()))

GROWTH_COLUMNS = {
    "device": pl.Int64, "source": pl.String, "steps": pl.Int64, "first_step": pl.Int64, "last_step": pl.Int64,
    "first_bytes": pl.Int64, "last_bytes": pl.Int64, "slope_bytes": pl.Float64, "low_bytes": pl.Float64,
    "high_bytes": pl.Float64, "spread_bytes": pl.Float64,
}  # fmt: skip
LEAST_STEPS = 5
_MOST_STEPS = 1500  # 1.1 million pairs
_DEVIATIONS = 2.5758293  # 99%

_UNATTRIBUTED = "(allocated earlier, or without a stack)"
CATEGORY_CHANGE_COLUMNS = schema.columns("category bytes against_bytes change_bytes", category=pl.String)
OWNER_CHANGE_COLUMNS = schema.columns("op count against_count bytes against_bytes change_bytes", op=pl.String)


@trace_fact
def over_time(trace: Trace) -> pl.DataFrame:
    """Allocated bytes of each owner over the window.

    Columns OWNER_COLUMNS: owner_kind is phase, unit or op, live_bytes that of all owners; one row per device, kind of
    owner, time and owner. There are at most 600 times, the maximum and minimum of each time span, so that no peak is
    lost. The owner is the allocating phase, unit or op; owners beyond the nine largest are merged, and so is memory
    from before the window. At each time the owners of one kind add up to live_bytes.
    """
    return usage_by_owner(allocations.blocks(trace), allocations.live(trace), by=("phase", "unit", "op"))


@trace_fact
def lifetimes(trace: Trace) -> pl.DataFrame:
    """Return block lifetimes by size.

    Columns device, low_bytes, high_bytes, low_ns, high_ns (null: blocks that outlive the window), count, bytes, op
    (with most of the bytes); one row per device and cell of the grid: sizes by powers of two, lifetimes by 1 and 3
    times powers of ten. Blocks from before the window are left out.
    """
    return lifetime_histogram(allocations.blocks(trace))


def usage_by_owner(blocks: pl.DataFrame, live: pl.DataFrame, *, by: tuple[str, ...]) -> pl.DataFrame:
    """Table of `over_time` from blocks and live bytes."""
    parts = [schema.empty(OWNER_COLUMNS)]
    for (device,), of_device in live.group_by("device", maintain_order=True):
        # Maximum and minimum of live bytes in each of _SPANS equal time spans, in order.
        span_ns = pl.col("at_ns").max() - pl.col("at_ns").min() + 1
        place = (pl.col("at_ns") - pl.col("at_ns").min()) * _SPANS // span_ns
        spans = of_device.with_columns(place=place).group_by("place")
        picked = spans.agg(
            pl.col("event").get(pl.col("live_bytes").arg_max()), low=pl.col("event").get(pl.col("live_bytes").arg_min())
        )
        events = pl.concat(
            [picked["event"], picked["low"], of_device["event"].head(1), of_device["event"].tail(1)]
        ).unique()
        moments = of_device.filter(pl.col("event").is_in(events.implode())).sort("event")
        device_blocks = blocks.filter(
            pl.col("device").eq_missing(pl.lit(device, pl.Int64)), pl.col("start_event").is_not_null()
        )
        parts += [_by_owner(device_blocks, moments, kind) for kind in by]
    return pl.concat(parts)


def lifetime_histogram(blocks: pl.DataFrame) -> pl.DataFrame:
    """Table of `lifetimes` from blocks."""
    allocated = blocks.filter(pl.col("start_event").is_not_null(), pl.col("bytes") > 0)
    size, lived = allocated["bytes"].to_numpy(), allocated["lifetime_ns"].fill_null(0).to_numpy()
    low_bytes, high_bytes = _cell(size, _SIZE_EDGES)
    low_ns, high_ns = (pl.when("freed").then(pl.Series(edge)) for edge in _cell(lived, _TIME_EDGES))
    cells = allocated.select(
        "device", "op", "bytes", low_bytes=pl.Series(low_bytes), high_bytes=pl.Series(high_bytes), low_ns=low_ns,
        high_ns=high_ns,
    )  # fmt: skip
    key = ["device", "low_bytes", "high_bytes", "low_ns", "high_ns"]
    of_op = cells.group_by(*key, "op").agg(pl.len().alias("count"), pl.col("bytes").sum())
    ordered = of_op.sort("bytes", "op", descending=[True, False])
    by_cell = ordered.group_by(key, maintain_order=True).agg(pl.col("count", "bytes").sum(), pl.col("op").first())
    return schema.select(by_cell, LIFETIME_COLUMNS).sort("device", "low_bytes", "low_ns", nulls_last=True)


@trace_fact
def growth(trace: Trace) -> pl.DataFrame:
    """Growth of allocated memory per step.

    Columns device, source (events: of the allocator in the trace; metrics: the log of every step), steps, first_step,
    last_step, first_bytes, last_bytes, slope_bytes (per step: the median over all pairs of steps), low_bytes and
    high_bytes (its 99% confidence interval), spread_bytes (interquartile range of the steps with that growth removed);
    one row per device and source with at least 5 steps. Steady growth has low_bytes above 0. (Theil-Sen slope with
    Kendall's interval: robust to a quarter of outlier steps.) The first step of the log fills caches and is left out.
    On the host, blocks whose free the profiler cannot see, because a thread without a profiler makes it, are left out:
    unfreed allocations inside collectives, and unfreed blocks of a size of which another was allocated again at the
    same address without a free in between.
    """
    series: list[tuple[int | None, str, pl.Series, pl.Series]] = []
    if trace.allocations.height:
        usage = allocations.live(trace).filter(allocations.of_training(trace))
        usage = usage.with_columns(pl.col("live_bytes") - _unseen_frees(trace, usage["event"])).drop_nulls("step")
        ends = usage.group_by("device", "step").agg(pl.col("live_bytes").last()).sort("device", "step")
        for (device,), part in ends.group_by("device", maintain_order=True):
            series.append((device, "events", part["step"], part["live_bytes"]))
    if trace.metrics.height:
        logged = trace.metrics.filter(pl.col("name") == conventions.ALLOCATED_METRIC).drop_nulls().sort("step").slice(1)
        series.append((None, "metrics", logged["step"], logged["value"].cast(pl.Int64)))
    rows = [
        (device, source, *_slope(steps, used)) for device, source, steps, used in series if len(steps) >= LEAST_STEPS
    ]
    return pl.DataFrame(rows, schema=GROWTH_COLUMNS, orient="row")


def _unseen_frees(trace: Trace, event: pl.Series) -> pl.Series:
    """Return, for each event, the host bytes whose free the profiler could not see."""
    if trace.on_device:
        return pl.zeros(len(event), pl.Int64, eager=True)
    unfreed = allocations.blocks(trace).filter(~pl.col("freed"))
    # A backend such as gloo holds the tensors of a collective until one of its own threads drops them.
    proven_sizes = unfreed.filter(pl.col("end_event").is_not_null())["bytes"].unique()
    is_lost = allocations.in_collectives(trace, unfreed["start_ns"]) | unfreed["bytes"].is_in(proven_sizes.implode())
    lost = unfreed.filter(is_lost)
    return pl.Series(allocations.live_bytes_at(lost, event.to_numpy().astype(np.int64)))


def _slope(steps: pl.Series, used: pl.Series) -> tuple[int, int, int, int, int, float, float, float, float]:
    x, y = steps.to_numpy().astype(np.int64), used.to_numpy().astype(np.float64)
    if len(x) > _MOST_STEPS:
        picked = np.linspace(0, len(x) - 1, _MOST_STEPS).astype(np.int64)
        x, y = x[picked], y[picked]
    slope, low, high = theil_sen(x, y)
    lower, upper = np.percentile(y - slope * x, (25, 75))
    span = int(steps[0]), int(steps[-1]), int(used[0]), int(used[-1])
    return len(steps), *span, slope, low, high, float(upper - lower)


def theil_sen(x: npt.NDArray[np.int64], y: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the median slope over all pairs and the ends of its 99% confidence interval (Sen 1968).

    It equals `scipy.stats.theilslopes` (a test compares them), whose import alone takes 0.75 s of CPU in every check.

    >>> theil_sen(np.arange(8), np.array([0, 2, 4, 6, 90, 10, 12, 14.0]))[0]
    2.0
    """
    first, second = np.triu_indices(len(x), 1)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    n, pairs = len(x), len(slopes)
    reach = _DEVIATIONS * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(round((pairs - reach) / 2) - 1, 0)
    high = min(round((pairs + reach) / 2), pairs - 1)
    return float(np.median(slopes)), float(slopes[low]), float(slopes[high])


def change_by_category(categories: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    """Changes of categories of memory, columns CATEGORY_CHANGE_COLUMNS, the largest first; without those of 0.

    A change is positive where there is more than in the other.
    """
    return _difference(categories, other, "category", CATEGORY_CHANGE_COLUMNS)


def change_by_owner(owners: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    """Change of what each op requested, as `change_by_category`, columns OWNER_CHANGE_COLUMNS."""
    return _difference(owners, other, "op", OWNER_CHANGE_COLUMNS)


def _cell(values: Ints, edges: Ints) -> tuple[Ints, Ints]:
    """Edges between which each value lies."""
    place = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    return edges[place], edges[place + 1]


def _by_owner(blocks: pl.DataFrame, moments: pl.DataFrame, owner_kind: str) -> pl.DataFrame:
    owner = pl.col(owner_kind).fill_null(_NO_OWNER[owner_kind])
    owned = blocks.with_columns(owner=pl.when(owner == "").then(pl.lit(_ROOT)).otherwise(owner))
    events = moments["event"].to_numpy().astype(np.int64)
    bytes_of = {name: live_bytes_at(part, events) for (name,), part in owned.group_by("owner", maintain_order=True)}
    largest = sorted(bytes_of, key=lambda name: -int(bytes_of[name].max(initial=0)))
    by_owner = {str(name): bytes_of[name] for name in largest[:_MOST_OWNERS]}
    if largest[_MOST_OWNERS:]:
        by_owner[OTHERS] = np.sum([bytes_of[name] for name in largest[_MOST_OWNERS:]], axis=0)
    live = moments["live_bytes"].to_numpy().astype(np.int64)
    rest = live - (np.sum(list(by_owner.values()), axis=0) if by_owner else 0)
    if rest.any() or not by_owner:
        by_owner = {EARLIER: rest, **by_owner}
    parts = [
        moments.with_columns(owner_kind=pl.lit(owner_kind), owner=pl.lit(name), bytes=pl.Series(values, dtype=pl.Int64))
        for name, values in by_owner.items()
    ]
    return pl.concat(parts).pipe(schema.select, OWNER_COLUMNS)


def _difference(table: pl.DataFrame, other: pl.DataFrame, key: str, columns: schema.ColumnTypes) -> pl.DataFrame:
    sums, other = (_sums(rows, key) for rows in (table, other))
    renamed = other.rename({"bytes": "against_bytes", "count": "against_count"})
    joined = sums.join(renamed, on=key, how="full", coalesce=True).with_columns(pl.col(pl.Int64).fill_null(0))
    changed = joined.with_columns(change_bytes=pl.col("bytes") - pl.col("against_bytes"))
    changed = changed.filter(pl.col("change_bytes") != 0).sort(
        pl.col("change_bytes").abs(), key, descending=[True, False]
    )
    return schema.conform(changed, columns)


def _sums(rows: pl.DataFrame, key: str) -> pl.DataFrame:
    """Return count and bytes by owner; of a run, on the trace and device with the highest peak."""
    if rows.height and "window" in rows.columns:
        top = rows.sort("peak_bytes", descending=True, nulls_last=True, maintain_order=True)
        place = ["window", "rank", "device"]
        rows = rows.join(top.select(place).head(1), on=place, nulls_equal=True)
    filled = rows.with_columns(pl.col(key).fill_null(_UNATTRIBUTED))
    return filled.group_by(key).agg(pl.col("bytes", "count").sum().cast(pl.Int64))
