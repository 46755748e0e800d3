"""Device work with its launch times, which of it is the same, the gaps in it, and the preparation of collectives."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import breakdown, trace_columns
from tracekit.model import columns, intervals, schema, sweep_line
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import Trace

_SPANS_OF_COLLECTIVES = r"all_gather|unshard|reduce|post_backward|pre_forward|pre_backward"
_NO_PREPARATION = "copy_out"
_KEY = ("step", "phase", "span", "unit")
_FOUND = schema.columns("collective_id evidence")
_ADDED = schema.columns("collective_id evidence message_bytes overlapped_ns alone_ns sample", sample=pl.String)

_NEIGHBOURS = (1, 2, -1, -2)
_ODD = 0x9E3779B97F4A7C15

COMMUNICATION_COLUMNS = schema.columns("gap device step phase unit lane collective_id name op start_ns dur_ns")
COMPUTE_COLUMNS = schema.columns("gap device step phase unit lane activity_id name start_ns dur_ns")


@memoize
def work(trace: Trace, device: int | None) -> pl.DataFrame:
    """Activities of one device by start: columns of `schema.ACTIVITIES`, launched_ns, role, device.

    launched_ns is the end of the launching runtime call, at most the activity's start; on a CPU run, the start of the
    op that it is or that issued it; null where unknown. role is its lane's.
    """
    return on_device(trace, _all_work(trace), device)


@dataclass(frozen=True)
class WorkColumns:
    """Columns of `work` as arrays, in its order; launched_ns is NEVER where unknown."""

    id: Ints
    lane: Ints
    spans: Spans
    launched_ns: Ints
    computes: Flags
    communicates: Flags
    copies: Flags
    call: Ints
    """The row in ops of the call that launched the work; -1 where unknown."""

    @property
    def launched_or_start_ns(self) -> Ints:
        """Launch time of each piece of work; its start where that is unknown."""
        return np.where(self.launched_ns == sweep_line.NEVER, self.spans[:, 0], self.launched_ns)


@memoize
def work_columns(trace: Trace, device: int | None) -> WorkColumns:
    """Return columns of `work` as arrays: masks of them cost less than queries of the table."""
    table = work(trace, device)
    kind = table["kind"]
    return WorkColumns(
        table["id"].to_numpy(),
        table["lane"].to_numpy(),
        intervals.from_table(table),
        columns.to_ints(table["launched_ns"], sweep_line.NEVER),
        (kind == "compute").to_numpy(),
        (kind == "communication").to_numpy(),
        ((kind == "memcpy") | (kind == "memset")).to_numpy(),
        columns.rows_of(trace.ops["id"].to_numpy(), columns.to_ints(table["launch_id"], -1)),
    )


def on_device(trace: Trace, rows: pl.DataFrame, device: int | None) -> pl.DataFrame:
    """Rows of a table of the trace's work that are of one device, by its column device."""
    if breakdown.devices(trace) == (device,):
        return rows
    return rows.filter(pl.col("device").eq_missing(pl.lit(device, pl.Int64)))


@memoize
def _all_work(trace: Trace) -> pl.DataFrame:
    activities, lanes = trace.activities, trace.lanes
    lane = columns.rows_of(lanes["lane"].to_numpy(), activities["lane"].to_numpy())
    order = np.lexsort((activities["id"].to_numpy(), activities["start_ns"].to_numpy()))
    order = order[lane[order] >= 0]
    rows = activities[order].hstack(lanes.select("role", "device")[lane[order]])
    call = trace_columns.launch_rows(trace)[order]
    # On a device the launching call ends; on a CPU run work begins with the op that issued it.
    on_device = np.array([device is not None for device in lanes["device"].to_list()], np.bool_)[lane[order]]
    called, taken_ns = (sweep_line.at(trace.ops[name].to_numpy(), call, 0) for name in ("start_ns", "dur_ns"))
    launched_ns = np.minimum(called + np.where(on_device, taken_ns, 0), rows["start_ns"].to_numpy())
    return rows.hstack([pl.Series("launched_ns", launched_ns).set(pl.Series(call < 0), None)])


@memoize
def messages(trace: Trace) -> pl.DataFrame:
    """Messages of the collectives. Columns id (of the activity), op, group, group_size, dtype, message_bytes."""
    size = pl.max_horizontal("sent_bytes", "received_bytes").alias("message_bytes")
    return trace.collectives.select(
        pl.col("activity_id").alias("id"), "op", "group", "group_size", "dtype", size
    ).unique("id")


@memoize
def collectives(trace: Trace, device: int | None) -> pl.DataFrame:
    """Communication of one device: columns of `work` without bytes, and those of `messages`, by start."""
    all_work, moved = work(trace, device), messages(trace)
    call_columns = [name for name in all_work.columns if name != "bytes"]
    calls = columns.where(all_work[call_columns], work_columns(trace, device).communicates)
    row = columns.rows_of(moved["id"].to_numpy(), calls["id"].to_numpy())
    return calls.hstack(columns.rows_or_nulls(moved[[name for name in moved.columns if name != "id"]], row))


@memoize
def preparation(trace: Trace, device: int | None) -> pl.DataFrame:
    """Preparation of collectives: columns of `work`, collective_id, evidence, alone_ns, overlapped_ns.

    Preparation is work launched under the same FSDP span as the collective and before it (evidence span), or work
    directly before it on its communication lane (lane). overlapped_ns is the time in which other lanes computed.
    alone_ns is the median duration of the same kernel (name, grid, block; by message size where the grid is unknown)
    without concurrent compute, null where there is none. sample is its source: alone, or scaled from another grid by
    the number of blocks.
    """
    device_work = work(trace, device)
    is_call = columns.flags(device_work["kind"] == "communication")
    is_other = columns.flags(device_work["kind"] != "communication")
    other_work, calls = columns.where(device_work, is_other), columns.where(device_work, is_call)
    by_span = _under_span(other_work, calls)
    by_lane = _on_lane(other_work.join(by_span, on="id", how="anti") if by_span.height else other_work, calls)
    if by_span.is_empty() and by_lane.is_empty():
        return device_work.clear().hstack(schema.empty(_ADDED))
    prepared = pl.concat([by_span, by_lane]).sort("start_ns", "id")
    sizes = messages(trace).select(pl.col("id").alias("collective_id"), "message_bytes")
    prepared = prepared.join(sizes, on="collective_id", how="left", maintain_order="left")
    is_prepared = np.isin(device_work["id"].to_numpy(), prepared["id"].to_numpy())
    computes = columns.flags(device_work["kind"] == "compute") & ~is_prepared
    by = intervals.union(intervals.from_table(device_work)[computes])
    overlapped_ns = intervals.coverage(intervals.from_table(prepared), by)
    return _with_alone(prepared.with_columns(pl.Series("overlapped_ns", overlapped_ns, pl.Int64)))


@memoize
def kernel_ids(trace: Trace, device: int | None) -> npt.NDArray[np.uint64]:
    """Id for each row of a device's `work`, shape (n,); equal for the same work.

    Same work: name, grid, block, bytes, and input shapes of the launching op; without recorded shapes, the neighbouring
    kernels on its lane, two on either side. Work whose launch was lost is the same as none, and so is work with such a
    neighbour: its op may be another one, as forward and backward have kernels of one name. Work that was queued before
    the recording has neighbours that are whole.
    """
    device_work = work(trace, device)
    plain, has_shapes = _plain_ids(trace, device)
    ids = np.where(has_shapes, plain, _in_context(plain, device_work))
    is_lost = _lost_launches(device_work)
    if is_lost.any():
        is_unique = is_lost | (~has_shapes & _has_neighbour(is_lost, device_work))
        ids[is_unique] = device_work["id"].hash(seed=0).to_numpy()[is_unique]
    return ids


def kernel_ids_anywhere(trace: Trace, device: int | None) -> npt.NDArray[np.uint64]:
    """Return `kernel_ids` that do not depend on the neighbouring kernels, even without recorded shapes."""
    return _plain_ids(trace, device)[0]


@memoize
def _plain_ids(trace: Trace, device: int | None) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Id for each row of the work, from shapes where the launching op has them, and where it has."""
    device_work = work(trace, device)
    plain = device_work.select(pl.struct("name", "grid", "block", "bytes").hash(seed=0)).to_series().to_numpy()
    if trace.ops["shapes"].null_count() == trace.ops.height:
        return plain, np.zeros(len(plain), np.bool_)
    parent = sweep_line.at(trace_columns.parent_ids(trace), work_columns(trace, device).call, -1)
    row = columns.rows_of(trace.ops["id"].to_numpy(), parent)
    shapes = columns.rows_or_nulls(trace.ops.select("shapes"), row)["shapes"]
    has_shapes = shapes.is_not_null().to_numpy()
    return np.where(has_shapes, plain ^ shapes.hash(seed=0).to_numpy(), plain), has_shapes


def kernel_places(work: pl.DataFrame) -> npt.NDArray[np.uint64]:
    """Id for each row's place in the program, shape (n,): its name and those of its neighbours."""
    return _in_context(work.select(pl.col("name").hash(seed=0)).to_series().to_numpy(), work)


@memoize
def lost_launches(trace: Trace) -> Ints:
    """Ends of the calls that launched kernels of which no device work was recorded, in order.

    Empty where no work has a recorded launch: then calls and work have no numbers in common.
    """
    launch_ids = trace_columns.launch_ids(trace)
    if not trace.on_device or not (launch_ids >= 0).any():
        return np.empty(0, np.int64)
    calls = trace_columns.is_kind(trace, "runtime") & trace_columns.is_named(trace, _KERNEL_LAUNCH)
    is_lost = calls & ~np.isin(trace.ops["id"].to_numpy(), launch_ids)
    return np.sort(trace_columns.spans(trace)[is_lost, 1])


def known_until(trace: Trace, device: int | None, idle: Spans, ended_ns: Ints) -> Ints:
    """Time until which each idle span of a device is known to be idle: its end, unless kernels were lost.

    A kernel that was lost may have run from the end of its launch on, after the work that was launched before, and
    ahead of that which ends the span and was launched at `ended_ns` (NEVER where that is not known).
    """
    lost_ns = lost_launches(trace)
    if not len(lost_ns):
        return idle[:, 1]
    arrays = work_columns(trace, device)
    rows = np.flatnonzero(arrays.computes & (arrays.call >= 0))
    launched_ns = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(arrays.launched_ns[rows]))
    before_ns = launched_ns[np.searchsorted(arrays.spans[rows, 0], idle[:, 0], side="left")]
    first_ns = np.append(lost_ns, np.iinfo(np.int64).max)[np.searchsorted(lost_ns, before_ns, side="right")]
    until_ns = np.where(ended_ns == sweep_line.NEVER, idle[:, 1], ended_ns)
    return np.where(first_ns < until_ns, np.maximum(first_ns, idle[:, 0]), idle[:, 1])


@memoize
def communication_gaps(trace: Trace) -> pl.DataFrame:
    """Spans of a phase in which no collective runs although more of the phase follow.

    Columns COMMUNICATION_COLUMNS: gap (number in the trace), collective_id, name and op of the next collective, which
    ends the gap; one row per gap. A phase begins with the first activity launched in it; unknown phases and steps count
    as one each. Collectives of saves end no gap.
    """
    parts = [schema.empty(COMMUNICATION_COLUMNS)]
    for device in breakdown.devices(trace):
        device_work, arrays = work(trace, device), work_columns(trace, device)
        rows = np.flatnonzero(arrays.communicates)
        calls = device_work.select("device", "step", "phase", "unit", "lane", "name", collective_id="id")[rows]
        begun = device_work.group_by("step", "phase").agg(pl.col("start_ns").min())
        begun_ns = (
            calls.select("step", "phase")
            .join(begun, on=["step", "phase"], how="left", nulls_equal=True, maintain_order="left")["start_ns"]
            .to_numpy()
        )
        start, end = arrays.spans[rows, 0], arrays.spans[rows, 1]
        reached = np.concatenate((np.array([sweep_line.NEVER]), np.maximum.accumulate(end)))[: len(rows)]
        since = np.maximum(reached, begun_ns)
        is_save = columns.flags(calls["phase"] == conventions.CHECKPOINT)
        closing = np.flatnonzero((start > since) & ~is_save)
        row = columns.rows_of(trace.collectives["activity_id"].to_numpy(), arrays.id[rows[closing]])
        op = columns.rows_or_nulls(trace.collectives.select("op"), row)["op"]
        times = [pl.Series("start_ns", since[closing]), pl.Series("dur_ns", (start - since)[closing])]
        parts.append(calls[closing].hstack([op, *times]))
    return _number_gaps(parts, COMMUNICATION_COLUMNS)


@memoize
def compute_gaps(trace: Trace) -> pl.DataFrame:
    """Spans of each step's device window without compute.

    Columns COMPUTE_COLUMNS: gap (number in the trace), step of the window, phase to name of the compute that ends the
    gap (null at the end of the trace); one row per gap.
    """
    parts = [schema.empty(COMPUTE_COLUMNS)]
    for device in breakdown.devices(trace):
        windows = trace_columns.windows(trace).filter(pl.col("device").eq_missing(device))
        device_work, arrays = work(trace, device), work_columns(trace, device)
        rows = np.flatnonzero(arrays.computes)
        busy = intervals.union(arrays.spans[rows])
        steps: list[int | None] = []
        idle_spans: list[Spans] = [intervals.EMPTY]
        for step, start_ns, end_ns in windows.select("step", "start_ns", "end_ns").iter_rows():
            first, past = np.searchsorted(busy[:, 1], start_ns, side="right"), np.searchsorted(busy[:, 0], end_ns)
            idle_spans.append(intervals.gaps(busy[first:past], (start_ns, end_ns)))
            steps += [step] * len(idle_spans[-1])
        spans = np.concatenate(idle_spans)
        following = np.searchsorted(arrays.spans[rows, 0], spans[:, 1], side="left")
        row = np.concatenate((rows, np.array([-1])))[following]
        ended_by = device_work.select("phase", "unit", "lane", "name", activity_id="id")
        place = [pl.Series("step", steps, pl.Int64), pl.Series("device", [device] * len(spans), pl.Int64)]
        times = [pl.Series("start_ns", spans[:, 0]), pl.Series("dur_ns", spans[:, 1] - spans[:, 0])]
        parts.append(columns.rows_or_nulls(ended_by, row).hstack([*place, *times]))
    return _number_gaps(parts, COMPUTE_COLUMNS)


def _under_span(other_work: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    if other_work["span"].null_count() == other_work.height or calls["span"].null_count() == calls.height:
        return other_work.clear().hstack(schema.empty(_FOUND))
    both = pl.concat([other_work[[*_KEY, "launched_ns"]], calls[[*_KEY, "launched_ns"]]])
    names, code = trace_columns.distinct_names(both["span"])
    prepares = trace_columns.matches(names, _SPANS_OF_COLLECTIVES) & ~trace_columns.matches(names, _NO_PREPARATION)
    launched_ns = columns.to_ints(both["launched_ns"], sweep_line.NEVER)
    is_known = prepares[code] & (launched_ns != sweep_line.NEVER)
    _, key = np.unique(both.select(pl.struct(_KEY).hash(seed=0)).to_series().to_numpy(), return_inverse=True)
    (key, key_of_call), (at_ns, called_ns) = (
        np.split(values, [other_work.height]) for values in (np.where(is_known, key, -1), launched_ns)
    )
    # The next call is the last one in reverse; of those launched at once, the first.
    row = columns.last_rows(key_of_call[::-1], -called_ns[::-1], key, -at_ns)
    rows = np.flatnonzero(row >= 0)
    call = calls.height - 1 - row[rows]
    return other_work[rows].hstack([
        calls["id"][call].alias("collective_id"), pl.Series("evidence", ["span"]).new_from_index(0, len(rows))
    ])  # fmt: skip


def _on_lane(other_work: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    lane_work, following_calls = (
        columns.where(rows, columns.flags(rows["role"] == "communication")) for rows in (other_work, calls)
    )
    if lane_work.is_empty():
        return other_work.clear().hstack(schema.empty(_FOUND))
    both = pl.concat([lane_work, following_calls]).sort("lane", "start_ns", "id")
    following = pl.when(pl.col("kind") == "communication").then("id").backward_fill().over("lane")
    matched = both.with_columns(following.alias("collective_id"), pl.lit("lane").alias("evidence"))
    return matched.filter(pl.col("kind") != "communication").drop_nulls("collective_id")


def _with_alone(prepared: pl.DataFrame) -> pl.DataFrame:
    sized = pl.when(pl.col("grid").is_null()).then("message_bytes")
    grids = prepared.select("grid").drop_nulls().unique()
    blocks = [float(math.prod(map(int, grid.split("x")))) for grid in grids["grid"]]
    counted = grids.with_columns(pl.Series("_blocks", blocks, pl.Float64))
    keyed = prepared.with_columns(sized.alias("_size")).join(counted, on="grid", how="left", maintain_order="left")
    solo = keyed.filter(pl.col("overlapped_ns") <= ALONE_RATIO * pl.col("dur_ns"))
    key, like = ["name", "lane", "grid", "block", "_size"], ["name", "lane", "block"]
    same = solo.group_by(key).agg(pl.col("dur_ns").median().alias("same_ns"))
    each_ns = (pl.col("dur_ns") / pl.col("_blocks")).median().alias("block_ns")
    scaled = solo.filter(pl.col("_blocks") >= _MANY_BLOCKS).group_by(like).agg(each_ns)
    joined = keyed.join(same, on=key, how="left", nulls_equal=True, maintain_order="left").join(
        scaled, on=like, how="left", nulls_equal=True, maintain_order="left"
    )
    by_scale = pl.when(pl.col("_blocks") >= _MANY_BLOCKS).then(pl.col("block_ns") * pl.col("_blocks"))
    sample = pl.when(pl.col("same_ns").is_not_null()).then(pl.lit("alone")).when(by_scale.is_not_null())
    return joined.with_columns(
        pl.coalesce("same_ns", by_scale).round().cast(pl.Int64).alias("alone_ns"),
        sample.then(pl.lit("scaled")).alias("sample"),
    ).drop("_blocks", "_size", "same_ns", "block_ns")


_KERNEL_LAUNCH = r"^(cuda|hip|cu)(Graph|Module|Ext|Cooperative|Coop)?Launch"
ALONE_RATIO = 0.05
"""Work counts as alone if other work overlaps at most this share of its time."""
_MANY_BLOCKS = 1024  # several per SM: such a copy or cast is memory-bound, so its time scales with size


def _in_context(plain: npt.NDArray[np.uint64], work: pl.DataFrame) -> npt.NDArray[np.uint64]:
    """Return kernel hashes mixed with their neighbours', which separates GEMMs of one grid by position."""
    lane = work["lane"].to_numpy()
    order = np.argsort(lane, kind="stable")
    hashes, on = plain[order], lane[order]
    mixed = hashes.copy()
    for distance in _NEIGHBOURS:
        near = np.where(np.roll(on, distance) == on, np.roll(hashes, distance), np.uint64(0))
        near[slice(0, distance) if distance > 0 else slice(distance, None)] = 0
        mixed = mixed * np.uint64(_ODD) + near
    ids = np.empty_like(mixed)
    ids[order] = mixed
    return ids


def _lost_launches(work: pl.DataFrame) -> npt.NDArray[np.bool_]:
    """Flags of the work without a launch that follows launched work on its lane: its launch was recorded and lost."""
    if not work["launch_id"].null_count():
        return np.zeros(work.height, np.bool_)
    is_launched = pl.col("launch_id").is_not_null()
    is_lost = ~is_launched & (is_launched.cum_sum().over("lane") > 0)
    return work.select(is_lost).to_series().to_numpy()


def _has_neighbour(flags: npt.NDArray[np.bool_], work: pl.DataFrame) -> npt.NDArray[np.bool_]:
    """Flags of the rows of which a neighbour on their lane, as `_in_context` counts them, is flagged."""
    lane = work["lane"].to_numpy()
    order = np.argsort(lane, kind="stable")
    rows = np.flatnonzero(flags[order])
    near = (rows[:, None] - np.array(_NEIGHBOURS)).clip(0, len(order) - 1)
    near = near[lane[order[near]] == lane[order[rows]][:, None]]
    has_neighbour = np.zeros(len(flags), np.bool_)
    has_neighbour[order[near]] = True
    return has_neighbour


def _number_gaps(parts: list[pl.DataFrame], columns: schema.ColumnTypes) -> pl.DataFrame:
    table = pl.concat([schema.conform(part, columns) for part in parts]).sort("device", "start_ns")
    number = pl.Series("gap", np.arange(table.height), pl.Int64)
    return table.replace_column(table.get_column_index("gap"), number)
