"""Who owns each time on the path: a rank's kernel, collective, host operator or idle device, by name and unit."""

from collections.abc import Iterable

import numpy as np
import polars as pl

from tracekit.analysis.compute import call_paths, kernels
from tracekit.analysis.time import host_state
from tracekit.model import nesting, schema, sweep_line
from tracekit.model.intervals import Spans
from tracekit.model.run import Run
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace
from tracekit.replay.graph.critical_path.walk import LAUNCH, RecordedTimes, Span
from tracekit.replay.graph.nodes import HOST, WORK
from tracekit.sync import alignment

HOST_KIND, IDLE, UNRECORDED = "host", "idle", "unrecorded"
"""Kinds of parts other than those of activities: the host of a rank, an idle device, time before the recording."""
UNEXPLAINED, GAP, LAUNCH_LATENCY, STALL, BEFORE = (
    "unexplained idle time",
    "gap between kernels",
    "launch latency",
    "device stall",
    "before the recording",
)
"""Names of parts of the kinds IDLE and UNRECORDED."""
PARTS = schema.columns(
    "rank kind name operator module unit phase state lane start_ns dur_ns",
    **dict.fromkeys(("operator", "module", "state"), pl.String),
)
OWNER = ("rank", "kind", "name", "operator", "module", "unit", "phase", "state", "lane")
_USUAL_GAP_NS = 20_000
"""A device that is idle for longer between a wait's end and its work is idle for a reason that the trace lacks."""
_PLACED = schema.columns("rank what kind name unit phase lane ref other_ref other_lane start_ns end_ns", what=pl.String)
_NODE = ("rank", "kind", "name", "unit", "phase", "lane", "ref")
_ON_HOST, _AT_WORK, _IDLE = "host", "work", "idle"
PYTHON = "Python"
"""The name of host time in which the trace records no slice."""
PIECES = schema.columns(
    "of start_ns end_ns name operator module unit phase state lane",
    **dict.fromkeys(("operator", "module", "state"), pl.String),
)
_STEP_MARK = "ProfilerStep#"
_COLUMNS = ("unit", "phase")


def parts(run: Run, times: RecordedTimes, spans: list[Span]) -> pl.DataFrame:
    """Return the spans of a path with their owners, on the run's clock. Columns PARTS; one row per part, in time order.

    kind is that of an activity (compute, communication, memcpy, memset), host, idle or unrecorded. name is the kernel,
    the innermost slice of the host's thread, or why a device was idle; operator the innermost framework op around the
    launch or on the host; module its torch.nn.Module, where modules are known; state that of the host
    (`host_state.HOST_STATES`). Neighbours have different owners.
    """
    window, origin_ns = times.graph.window, times.graph.origin_ns
    placed_spans = _place_spans(times, spans).with_columns(pl.col("start_ns", "end_ns") + origin_ns)
    tables = [placed_spans.filter(pl.col("what") == _IDLE)]
    for (rank,), of_rank in placed_spans.filter(pl.col("what") != _IDLE).group_by("rank", maintain_order=True):
        trace = run.trace(int(str(rank)), window)
        (operator,) = kernels.launching_op_columns(trace, ("name",)) if trace.on_device else (trace.activities["name"],)
        activities = trace.activities.select(ref="id", operator=operator, module=call_paths.activity_modules(trace))
        work = of_rank.filter(pl.col("what") == _AT_WORK)
        tables.append(work.join(activities, on="ref", how="left", maintain_order="left"))
        tables.append(_host_parts(trace, of_rank.filter(pl.col("what") == _ON_HOST), run.offsets))
    rows = [table.with_columns(dur_ns=pl.col("end_ns") - pl.col("start_ns")) for table in tables]
    all_parts = pl.concat([schema.conform(table, PARTS) for table in rows]).sort("start_ns")
    return merge_parts(all_parts, OWNER)


def merge_parts(table: pl.DataFrame, by: tuple[str, ...]) -> pl.DataFrame:
    """Return parts in which consecutive ones of one owner are joined; other columns are those of the first."""
    owner = pl.struct(by)
    number = owner.ne_missing(owner.shift(1)).cum_sum()
    first_columns = [name for name in table.columns if name != "dur_ns"]
    grouped = table.group_by(number.alias("_number"), maintain_order=True)
    return grouped.agg(pl.col(first_columns).first(), pl.col("dur_ns").sum()).select(table.columns)


def activity_modules(run: Run, window: int, ranks: Iterable[int]) -> pl.DataFrame:
    """Return the torch.nn.Module of each activity of ranks. Columns rank, ref (its id), is_activity (true), module."""
    columns = {"rank": pl.Int64, "ref": pl.Int64, "is_activity": pl.Boolean, "module": pl.String}
    parts = [pl.DataFrame(schema=columns)]
    for rank in ranks:
        trace = run.trace(rank, window)
        modules = trace.activities.select(ref="id", module=call_paths.activity_modules(trace)).drop_nulls("module")
        parts.append(
            modules.select(pl.lit(rank, pl.Int64).alias("rank"), "ref", is_activity=pl.lit(True), module="module")
        )
    return pl.concat(parts)


def host_pieces(trace: Trace, spans: Spans, lane: Ints, other_lane: Ints) -> pl.DataFrame:
    """Return spans of a rank's host, on the trace's clock, divided by what the host does in them.

    A span belongs to the thread `lane`; where the trace records nothing on it, to `other_lane` (-1: none). Columns
    PIECES: of (the span's index), start_ns, end_ns, name (the innermost slice, or PYTHON), operator (the innermost
    framework op), module, unit, phase, state (of `host_state.HOST_STATES`) and lane. The pieces of a span cover it
    exactly.
    """
    ops = trace.ops
    start, parent = ops["start_ns"].to_numpy(), ops["parent_id"].fill_null(-1).to_numpy()
    end = start + ops["dur_ns"].to_numpy()
    on_thread = np.isin(ops["lane"].to_numpy(), np.union1d(lane, other_lane))
    pieces = sweep_line.pieces(spans, start[on_thread], end[on_thread])
    row = _innermost(ops, end, parent, lane[pieces.span], pieces.start_ns)
    of_other = _innermost(ops, end, parent, other_lane[pieces.span], pieces.start_ns)
    row = np.where(row >= 0, row, of_other)
    is_op = (ops["kind"] == "cpu_op").to_numpy()
    operator = sweep_line.at(nesting.nearest(parent, is_op), row, -1)
    table = pl.DataFrame({"of": pieces.span, "start_ns": pieces.start_ns, "end_ns": pieces.end_ns})
    states = pl.Series(host_state.HOST_STATES)
    return table.with_columns(
        _gather_rows(ops["name"], row).fill_null(PYTHON).alias("name"),
        _gather_rows(ops["name"], operator).alias("operator"),
        _gather_rows(call_paths.op_modules(trace), row).alias("module"),
        *(_gather_rows(ops[name], row).alias(name) for name in _COLUMNS),
        states.gather(host_state.state_at(trace, pieces.start_ns)).alias("state"),
        _gather_rows(ops["lane"], row).fill_null(pl.Series(lane[pieces.span])).alias("lane"),
    ).pipe(schema.select, PIECES)


def _place_spans(times: RecordedTimes, spans: list[Span]) -> pl.DataFrame:
    """Return the spans with the node that each belongs to. Columns _PLACED; `what` is host, work or idle."""
    node, row, wait, start, end = (np.array(column, np.int64) for column in zip(*spans, strict=True))
    awaited = np.where(wait >= 0, times.waits.awaited[np.maximum(wait, 0)], -1)
    other = np.where((awaited >= 0) & (awaited < times.graph.count), awaited, row)
    table = times.graph.frame.rows(row)
    is_host = (table["what"] == HOST).to_numpy() & (node >= 0)
    computes = np.where(is_host, table["kind"].is_not_null().to_numpy(), (table["what"] == WORK).to_numpy())
    works = (wait < 0) & (node >= 0) & computes
    what = np.where(works, _AT_WORK, np.where(is_host, _ON_HOST, _IDLE))
    before = times.graph.frame.rows(other)
    with_nodes = table.select(_NODE).with_columns(
        pl.Series("what", what, pl.String),
        before["ref"].alias("other_ref"),
        before["lane"].alias("other_lane"),
        pl.Series("start_ns", start),
        pl.Series("end_ns", end),
    )
    idle_kind = pl.Series(np.where(node < 0, UNRECORDED, IDLE))
    # Why the device of each span is idle: one of the names above.
    length_ns = end - start
    kind = np.where(wait >= 0, times.waits.kind[np.maximum(wait, 0)], "")
    stall_ns = table["stall_ns"].to_numpy()
    usual = np.where(kind == LAUNCH, LAUNCH_LATENCY, GAP)
    is_usual = (length_ns <= _USUAL_GAP_NS) | (not times.graph.on_device)
    idle_names = np.where(is_usual, usual, UNEXPLAINED)
    idle_names = np.where((stall_ns > 0) & (2 * stall_ns >= length_ns), STALL, idle_names)
    idle_name = pl.Series(np.where(node < 0, BEFORE, idle_names))
    is_idle = pl.col("what") == _IDLE
    placed_spans = with_nodes.with_columns(
        pl.when(is_idle).then(idle_kind).otherwise("kind").alias("kind"),
        pl.when(is_idle).then(idle_name).otherwise("name").alias("name"),
        pl.when(~is_idle).then("unit").alias("unit"),
        pl.when(~is_idle).then("phase").alias("phase"),
    )
    return schema.select(placed_spans, _PLACED)


def _host_parts(trace: Trace, host: pl.DataFrame, offsets: pl.DataFrame) -> pl.DataFrame:
    """Return spans of a rank's host divided by what its threads do."""
    if host.is_empty():
        return host
    moved = alignment.on_trace_clock(host.with_columns(window=pl.lit(trace.window, pl.Int64)), offsets, ("start_ns",))
    start, shift = moved["start_ns"].to_numpy(), (host["start_ns"] - moved["start_ns"]).to_numpy()
    spans = np.stack((start, start + (host["end_ns"] - host["start_ns"]).to_numpy()), axis=1)
    lane, other = (_lane(trace, host, *names) for names in (("lane", "ref"), ("other_lane", "other_ref")))
    pieces = host_pieces(trace, spans, lane, other)
    back = pl.Series(shift[pieces["of"].to_numpy()])
    return pieces.with_columns(
        pl.col("start_ns", "end_ns") + back, rank=pl.lit(trace.rank, pl.Int64), kind=pl.lit(HOST_KIND)
    )


def _lane(trace: Trace, host: pl.DataFrame, lane: str, ref: str) -> Ints:
    """Return the thread of each span: that of its node, which on a device run is a call (`ref`)."""
    if not trace.on_device:
        return host[lane].fill_null(-1).to_numpy()
    calls = trace.ops.select(pl.col("id").alias(ref), pl.col("lane").alias("call_lane"))
    joined = host.join(calls, on=ref, how="left", maintain_order="left")
    return joined["call_lane"].fill_null(-1).to_numpy()


def _innermost(ops: pl.DataFrame, end: Ints, parent: Ints, lane: Ints, at_ns: Ints) -> Ints:
    """Return the row in ops of the innermost slice on each lane at each time, step marks aside; -1 for none."""
    row = np.full(len(at_ns), -1, np.int64)
    lanes, start = ops["lane"].to_numpy(), ops["start_ns"].to_numpy()
    for lane_number in np.unique(lane):
        of_lane, is_on_lane = np.flatnonzero(lanes == lane_number), lane == lane_number
        order = of_lane[nesting.order(lanes[of_lane], start[of_lane], end[of_lane])]
        last = np.searchsorted(start[order], at_ns[is_on_lane], side="right") - 1
        row[is_on_lane] = sweep_line.at(order, last, -1)
    ended = np.flatnonzero((row >= 0) & (end[np.maximum(row, 0)] <= at_ns))
    while len(ended):
        row[ended] = parent[row[ended]]
        above = row[ended]
        ended = ended[(above >= 0) & (end[np.maximum(above, 0)] <= at_ns[ended])]
    is_named = ~ops["name"].str.starts_with(_STEP_MARK).to_numpy()
    return sweep_line.at(nesting.nearest(parent, is_named), row, -1)


def _gather_rows(values: pl.Series, row: Ints) -> pl.Series:
    index = pl.Series(row)
    return values.gather(index.set(index < 0, None))
