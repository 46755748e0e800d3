"""Memory allocations: block lifetimes, usage over time, owners at the peak, allocation churn.

All from the profiler's `[memory]` events, which give block sizes, not request sizes. The device is null for host
memory.
"""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import trace_columns
from tracekit.model import columns, environment, intervals, nesting, schema, sweep_line
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Ints, distinct
from tracekit.model.trace import Trace

# Ops that allocate on behalf of another op, which is the owner.
_FOR_ANOTHER = (
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
    "aten::resize_", "aten::zeros", "aten::zeros_like", "aten::ones_like", "aten::full", "aten::full_like",
    "aten::new_zeros", "aten::empty_permuted", "aten::clone", "aten::to", "aten::_to_copy", "aten::contiguous",
)  # fmt: skip
_MOST_CLIMBS = 6

BLOCK_COLUMNS = schema.columns(
    "device address bytes start_ns end_ns lifetime_ns start_event end_event op step phase unit span op_id "
    "end_step freed",
    freed=pl.Boolean,
)
LIVE_COLUMNS = schema.columns(
    "device event at_ns step phase unit live_bytes reserved_bytes slack_bytes total", total=pl.Boolean
)
PEAK_COLUMNS = schema.columns(
    "device at_ns peak_bytes op phase unit module stack step count bytes peak_ratio", stack=pl.String
)
CHURN_COLUMNS = schema.columns("step device count bytes peak_bytes churn_ratio distinct_sizes")
NEW_SIZE_COLUMNS = schema.columns("step device start_ns dur_ns bytes phase unit")
DEVICE_PEAK_COLUMNS = schema.columns(
    "device peak_allocated_bytes peak_reserved_bytes memory_bytes headroom_bytes slack_bytes"
)
_OWNER = ("op", "phase", "unit", "module", "stack", "step")
_UNSPLIT_BYTES = 1 << 20
"""A device block may exceed its request by this much: the allocator does not split off less."""


@trace_fact
def blocks(trace: Trace) -> pl.DataFrame:
    """Blocks that were allocated or freed, each allocation matched with its free by address.

    Columns BLOCK_COLUMNS: start_event and end_event are rows of the allocations table, op requested it; one row per
    block. The start is null for a block from before the window, the end for one that outlives it. A block that ends
    unfreed was followed by another at its address: its free was not recorded. Old traces without addresses have none.
    """
    events = trace.allocations.with_row_index("event").filter(pl.col("address").is_not_null())
    matched = match_blocks(events)
    matched = matched.join(of_ops(trace, matched["op_id"]), on="op_id", how="left", maintain_order="left")
    return schema.select(matched, BLOCK_COLUMNS).sort("start_event", nulls_last=False, maintain_order=True)


def match_blocks(events: pl.DataFrame) -> pl.DataFrame:
    """Blocks of `events`, rows of the allocations table with their number as the column event.

    Columns as `blocks` without op, unordered.
    """
    # By address, then by time.
    ordered = events.sort("device", "address", "event")
    next_address = pl.col("address").shift(-1)  # null in the last row
    is_next = next_address.eq_missing(pl.col("address")) & pl.col("device").shift(-1).eq_missing(pl.col("device"))
    after = {name: pl.when(is_next).then(pl.col(name).shift(-1)) for name in ("event", "at_ns", "step")}
    ordered = ordered.with_columns(
        end_event=after["event"], end_ns=after["at_ns"], end_step=after["step"],
        taken=pl.col("delta_bytes") > 0,
        freed=is_next & (pl.col("delta_bytes").shift(-1) < 0),
        known=is_next.shift(1, fill_value=False) & (pl.col("delta_bytes").shift(1) > 0),
    )  # fmt: skip
    allocated = ordered.filter("taken").with_columns(start_event="event", start_ns="at_ns")
    before = ordered.filter(~pl.col("taken") & ~pl.col("known")).select(
        "device", "address", "delta_bytes", end_event="event", end_ns="at_ns", end_step="step", freed=pl.lit(value=True)
    )
    return pl.concat([allocated, before], how="diagonal").with_columns(
        bytes=pl.col("delta_bytes").abs(), lifetime_ns=pl.col("end_ns") - pl.col("start_ns")
    )


@trace_fact
@memoize
def live(trace: Trace) -> pl.DataFrame:
    """Bytes allocated after each event.

    Columns LIVE_COLUMNS: slack_bytes is reserved but not allocated; one row per event. Where the trace states totals
    (`total`), the first one is the base, and deltas reproduce the later ones; elsewhere memory from before the window
    is only known as far as it is freed in it. So it is on the host, where totals are sums of all events recorded so
    far. There a block was freed where its address is allocated again: threads without a profiler, such as gloo's,
    record no free.
    """
    events = trace.allocations.with_row_index("event")
    device = pl.col("device")
    stated = pl.col("allocated_bytes").is_not_null().all().over(device)
    before = pl.col("delta_bytes").shift(1).over("device", "address")
    is_reused = device.is_null() & pl.col("address").is_not_null() & (before > 0) & (pl.col("delta_bytes") > 0)
    freed_bytes = pl.when(is_reused).then(before).otherwise(0)
    balance = (pl.col("delta_bytes") - freed_bytes).cum_sum().over(device)
    base = (pl.col("allocated_bytes") - pl.col("delta_bytes")).first().over(device)
    earlier_bytes = (-balance.min().over(device)).clip(lower_bound=0)
    live_bytes = balance + pl.when(stated & device.is_not_null()).then(base).otherwise(earlier_bytes)
    # 0: the allocator does not count reserved bytes, as on the host.
    reserved = pl.when(pl.col("reserved_bytes") > 0).then("reserved_bytes")
    wide = events.with_columns(
        live_bytes=live_bytes, total=stated, reserved_bytes=reserved, slack_bytes=reserved - live_bytes
    )
    return schema.select(wide, LIVE_COLUMNS)


def live_bytes_at(blocks: pl.DataFrame, events: Ints) -> Ints:
    """Bytes of these blocks that are allocated after each of `events`, shape (n,).

    A block on the host ends where its address is allocated again, as in `live`.
    """
    ended = blocks.filter(pl.col("freed") | (pl.col("device").is_null() & pl.col("end_event").is_not_null()))
    return _bytes_until(blocks, "start_event", events) - _bytes_until(ended, "end_event", events)


def _bytes_until(blocks: pl.DataFrame, column: str, events: Ints) -> Ints:
    ordered = blocks.select(column, "bytes").sort(column)
    sums: Ints = np.concatenate((np.zeros(1, np.int64), np.cumsum(ordered["bytes"].to_numpy().astype(np.int64))))
    return sums[np.searchsorted(ordered[column].to_numpy(), events, side="right")]


@trace_fact
def at_peak(trace: Trace) -> pl.DataFrame:
    """Owners of memory at the peak.

    Columns device, at_ns, peak_bytes, op, phase, unit, module (innermost around the op, or around the forward op whose
    gradient it computes), stack (likewise the innermost code location outside torch; both only with recorded Python
    stacks), step, count, bytes, peak_ratio (of the peak); one row per device and owner, largest first. A row without an
    op is memory from before the window; its count is null where some of it never appears. The bytes of a device add up
    to its peak.
    """
    if trace.allocations.is_empty():
        return schema.empty(PEAK_COLUMNS)
    is_peak = pl.col("live_bytes") == pl.col("live_bytes").max().over("device")
    peaks = live(trace).filter(is_peak).unique("device", keep="first", maintain_order=True)
    moments = peaks.select("device", "event", "at_ns", "live_bytes")
    return schema.concat([_owners_at(trace, *row) for row in moments.iter_rows()], PEAK_COLUMNS)


@trace_fact
def peaks(trace: Trace) -> pl.DataFrame:
    """Return peak allocated and reserved memory, and the memory of the device.

    Columns device, peak_allocated_bytes, peak_reserved_bytes, memory_bytes (of the device), headroom_bytes (never
    reserved), slack_bytes (reserved but not allocated at the allocated peak); one row per device, null for the host.
    """
    if trace.allocations.is_empty():
        return schema.empty(DEVICE_PEAK_COLUMNS)
    usage = live(trace).group_by("device")
    top = usage.agg(
        peak_allocated_bytes=pl.col("live_bytes").max(),
        peak_reserved_bytes=pl.col("reserved_bytes").max(),
        slack_bytes=pl.col("slack_bytes").get(pl.col("live_bytes").arg_max()),
    )
    sizes = environment.device_numbers(trace.header, "totalGlobalMem")
    memory = pl.DataFrame(list(sizes.items()), schema={"device": pl.Int64, "memory_bytes": pl.Int64}, orient="row")
    wide = top.join(memory, on="device", how="left").with_columns(
        headroom_bytes=pl.col("memory_bytes") - pl.col("peak_reserved_bytes")
    )
    return schema.select(wide, DEVICE_PEAK_COLUMNS).sort("device")


@trace_fact
def churn(trace: Trace) -> pl.DataFrame:
    """Amount allocated in each step.

    Columns step, device, count and bytes (of allocations), peak_bytes (of the step), churn_ratio (bytes over peak),
    distinct_sizes; one row per step and device.
    """
    if trace.allocations.is_empty():
        return schema.empty(CHURN_COLUMNS)
    usage = live(trace).drop_nulls("step").group_by("step", "device").agg(peak_bytes=pl.col("live_bytes").max())
    allocated = trace.allocations.filter(pl.col("delta_bytes") > 0).drop_nulls("step")
    sums = allocated.group_by("step", "device").agg(
        count=pl.len(), bytes=pl.col("delta_bytes").sum(), distinct_sizes=pl.col("delta_bytes").n_unique()
    )
    wide = usage.join(sums, on=["step", "device"], how="left", nulls_equal=True)
    wide = wide.with_columns(pl.col("count", "bytes", "distinct_sizes").fill_null(0)).with_columns(
        churn_ratio=pl.when(pl.col("peak_bytes") > 0).then(pl.col("bytes") / pl.col("peak_bytes"))
    )
    return schema.select(wide, CHURN_COLUMNS).sort("step", "device")


@trace_fact
def new_sizes(trace: Trace) -> pl.DataFrame:
    """Allocations of at least 1 MiB whose size no earlier step of the trace allocated.

    Columns step, device, start_ns, dur_ns (0), bytes, phase, unit; one row per allocation. Only memory of the trace's
    work; allocations of saves and of the backend inside its collectives are left out, and so is the first step, where
    all sizes are new. On a device, sizes within 1 MiB of each other count as one: they may be of the same request.
    """
    if trace.allocations.is_empty():
        return schema.empty(NEW_SIZE_COLUMNS)
    large = trace.allocations.filter(
        of_training(trace), pl.col("delta_bytes") >= 1 << 20, pl.col("step").is_not_null(),
        pl.col("phase").ne_missing(conventions.CHECKPOINT),
    )  # fmt: skip
    requested = large.filter(~in_collectives(trace, large["at_ns"]))
    parts = [requested.clear()]
    for (device,), of_device in requested.group_by("device", maintain_order=True):
        sizes = of_device.group_by("delta_bytes").agg(first=pl.col("step").min()).sort("delta_bytes")
        # For each size in order, the first step with a size within `near_bytes` of it.
        near_bytes = 0 if device is None else _UNSPLIT_BYTES
        size, first = sizes["delta_bytes"].to_numpy(), sizes["first"].to_numpy()
        begin = np.searchsorted(size, size - near_bytes)
        past = np.searchsorted(size, size + near_bytes, side="right")
        near = sizes.with_columns(
            first=pl.Series([int(first[i:j].min()) for i, j in zip(begin, past, strict=True)], dtype=pl.Int64)
        )
        dated = of_device.join(near, on="delta_bytes", maintain_order="left")
        parts.append(
            dated.filter(pl.col("step") == pl.col("first"), pl.col("step") > pl.col("step").min()).drop("first")
        )
    new = pl.concat(parts).with_columns(start_ns="at_ns", dur_ns=pl.lit(0, pl.Int64), bytes="delta_bytes")
    return schema.select(new, NEW_SIZE_COLUMNS)


def in_collectives(trace: Trace, at_ns: pl.Series) -> pl.Series:
    """Mask of the times inside a collective call: the backend's own allocations."""
    calls = trace_columns.spans(trace)[trace_columns.is_named(trace, "^c10d::")]
    moments = np.stack((at_ns.to_numpy(), at_ns.to_numpy() + 1), axis=1)
    return pl.Series(intervals.coverage(moments, calls) > 0)


def of_training(trace: Trace) -> pl.Expr:
    """Filter for the memory of the trace's work: on devices, or on the host of a CPU run."""
    return pl.col("device").is_not_null() if trace.on_device else pl.col("device").is_null()


def of_ops(trace: Trace, op_ids: pl.Series) -> pl.DataFrame:
    """Return, for ops that allocated, the name of the requesting op: columns op_id, op."""
    ids = distinct(op_ids.drop_nulls().to_numpy())
    names, code = trace_columns.op_names(trace)
    is_for_another = np.isin(names, _FOR_ANOTHER)[code]
    # A step phase is not an owner; an op or an FSDP span is.
    is_dispatched = trace_columns.is_named(trace, r"^\w+::") & ~trace_columns.is_named(trace, "^tracekit::")
    row, above = columns.rows_of(trace.ops["id"].to_numpy(), ids), trace_columns.parent_rows(trace)
    for _ in range(_MOST_CLIMBS):
        climbing = np.flatnonzero((row >= 0) & is_for_another[row])
        climbing = climbing[above[row[climbing]] >= 0]
        climbing = climbing[is_dispatched[above[row[climbing]]]]
        if not len(climbing):
            break
        row[climbing] = above[row[climbing]]
    return pl.DataFrame([pl.Series("op_id", ids), columns.values_at(trace.ops["name"], row).alias("op")])


def code_locations(trace: Trace, op_ids: pl.Series) -> pl.DataFrame:
    """Return, for ops, the innermost module and code location around them: columns op_id, module, stack."""
    table = pl.DataFrame({"op_id": op_ids.drop_nulls().unique().sort()})
    if not trace_columns.is_kind(trace, "python").any():
        return table.with_columns(module=pl.lit(None, pl.String), stack=pl.lit(None, pl.String))
    ops, python = trace.ops.sort("id"), pl.col("kind") == "python"
    names = ops.filter(python)["name"].unique()
    name = names.str
    user = names.filter(name.contains(r"\.py\(\d+\): ") & ~name.contains("^(torch/|<)|/torch/"))
    modules = names.filter(name.starts_with(conventions.MODULE_PREFIX))
    marks = ops.select(
        module=python & pl.col("name").is_in(modules.implode()), stack=python & pl.col("name").is_in(user.implode())
    )
    ids = ops["id"].to_numpy()
    up, forward = (columns.rows_of(ids, columns.to_ints(ops[name], -1)) for name in ("parent_id", "forward_id"))
    rows = np.minimum(np.searchsorted(ids, table["op_id"].to_numpy()), len(ids) - 1)
    locations = {}
    for kind in ("module", "stack"):
        marked = nesting.nearest(up, marks[kind].to_numpy())
        around, before = (sweep_line.at(marked, start, -1) for start in (rows, forward[rows]))
        row = np.where(around >= 0, around, before)
        names_of_rows = ops["name"].gather(np.maximum(row, 0)).str.strip_prefix(conventions.MODULE_PREFIX)
        locations[kind] = pl.select(pl.when(pl.Series(row >= 0)).then(names_of_rows)).to_series()
    return table.with_columns(**locations)


def _owners_at(trace: Trace, device: int | None, event: int, at_ns: int, peak_bytes: int) -> pl.DataFrame:
    events = trace.allocations.with_row_index("event").filter(
        pl.col("device").eq_missing(pl.lit(device, pl.Int64)), pl.col("address").is_not_null()
    )
    last = events.filter(pl.col("event") <= event).group_by("address").last()
    first = events.filter(pl.col("event") > event).group_by("address").first()
    # A block freed later and never seen before was allocated before the window.
    earlier = first.filter(pl.col("delta_bytes") < 0).join(last, on="address", how="anti")
    owned = last.filter(pl.col("delta_bytes") > 0)
    owned = owned.join(of_ops(trace, owned["op_id"]), on="op_id", how="left")
    owned = owned.join(code_locations(trace, owned["op_id"]), on="op_id", how="left")
    by = owned.group_by(_OWNER).agg(count=pl.len(), bytes=pl.col("delta_bytes").sum())
    owned_bytes, earlier_bytes = int(owned["delta_bytes"].sum()), -int(earlier["delta_bytes"].sum())
    if peak_bytes > owned_bytes:
        count = earlier.height if owned_bytes + earlier_bytes == peak_bytes else None
        row = {"count": count, "bytes": peak_bytes - owned_bytes}
        by = pl.concat([by, pl.DataFrame([row], schema={"count": pl.UInt32, "bytes": pl.Int64})], how="diagonal")
    wide = by.with_columns(
        device=pl.lit(device, pl.Int64), at_ns=pl.lit(at_ns), peak_bytes=pl.lit(peak_bytes),
        peak_ratio=pl.col("bytes") / peak_bytes,
    )  # fmt: skip
    ordered = wide.sort("bytes", *_OWNER, descending=[True, *[False] * len(_OWNER)])
    return schema.select(ordered, PEAK_COLUMNS)
