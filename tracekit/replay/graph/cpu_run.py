"""A CPU run as nodes and edges: the host computes, and waits for collectives that other threads run.

Such a trace records no waits. A host pause in which a collective ends is taken as a wait for it, from its issue on,
unless the host loads data or saves meanwhile; the time after the collective's end is the host's own.
"""

import numpy as np
import polars as pl

from tracekit.analysis.parallelism import pipeline_actions
from tracekit.analysis.time import host_state
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace
from tracekit.replay.graph import host_time
from tracekit.replay.graph.nodes import HOST, WORK, TraceGraph, edge_table, gap_series, number_nodes

_LEAST_WAIT_NS = 200_000
"""A wait for a complete message takes less, on a busy host too; not from the trace."""
_BUSY = [host_state.HOST_STATES.index(state) for state in (host_state.DATA, host_state.CHECKPOINT)]


_WORK_COLUMNS = (
    "ref", "lane", "kind", "name", "step", "phase", "unit", "span", "start_ns", "end_ns", "launch", "previous",
    "is_message",
)  # fmt: skip


def build(trace: Trace) -> TraceGraph:
    """Return nodes and edges of a CPU run."""
    host = _host(trace)
    calls = _collectives(trace, host)
    first_call = len(host)
    start, end = host["start_ns"].to_numpy(), host["end_ns"].to_numpy()
    reach = np.maximum.accumulate(np.concatenate((start[:1], end)))[:-1] if first_call else start
    paused = np.maximum(start, reach)
    gap_ns = host_time.time_by_state(trace, reach, paused)
    awaited, until = _awaited_collectives(calls, reach, paused)
    waited = _waiting_ns(trace, reach, awaited, until)
    gap_ns = np.maximum(gap_ns - waited, 0)
    waits = np.flatnonzero(awaited >= 0)
    lag = (paused - until)[waits]
    own_ns = np.maximum(end - paused, 0)
    woken = _wake_up_ns(calls, start)
    nodes = host.with_columns(
        pl.Series("chain", np.arange(first_call, dtype=np.int64) - 1),
        pl.Series("chain_ns", gap_ns.sum(axis=1)),
        pl.Series("own_ns", own_ns),
        *gap_series(gap_ns),
        what=pl.lit(HOST, pl.Int8),
    )
    work = calls.drop("is_message").with_columns(
        pl.when(pl.col("previous") >= 0).then(pl.col("previous") + first_call).otherwise(-1).alias("chain"),
        pl.Series("chain_ns", woken),
        pl.Series("launch_ns", woken),
        (pl.col("end_ns") - pl.col("start_ns")).alias("own_ns"),
        what=pl.lit(WORK, pl.Int8),
    )
    edges = edge_table(waits, awaited[waits] + first_call, "sync", inferred=True, lag_ns=lag)
    return TraceGraph(number_nodes(pl.concat([nodes, work], how="diagonal_relaxed")), edges)


def _host(trace: Trace) -> pl.DataFrame:
    """Return the compute, and the issue calls of collectives, in order."""
    compute = trace.activities.filter(pl.col("kind") != "communication").select(
        pl.col("id").alias("ref"), "lane", "kind", "name", "step", "phase", "unit", "span", "start_ns",
        (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"), pl.lit(-1, pl.Int64).alias("call"),
    )  # fmt: skip
    issues = (
        trace.activities.filter(pl.col("kind") == "communication")
        .select(pl.col("id").alias("call"), "launch_id")
        .join(trace.ops, left_on="launch_id", right_on="id")
        .select(
            pl.lit(None, pl.Int64).alias("ref"), "lane", pl.lit(None, pl.String).alias("kind"), "name", "step", "phase",
            "unit",
            "span", "start_ns", pl.col("start_ns").alias("end_ns"), "call",
        )
    )  # fmt: skip
    return pl.concat([compute, issues]).sort("start_ns", "end_ns", maintain_order=True)


def _collectives(trace: Trace, host: pl.DataFrame) -> pl.DataFrame:
    """Return the collectives by lane and start, each with its issue call (launch, -1: unknown) and predecessor.

    A thread that runs them one after the other is a lane. Sends and receives that overlap wait for their peers only.
    """
    issues = host.select(pl.int_range(pl.len()).cast(pl.Int64).alias("launch"), "call").filter(pl.col("call") >= 0)
    is_message = pl.col("op").is_in(pipeline_actions.POINT_TO_POINT)
    messages = trace.collectives.select("activity_id", is_message.alias("is_message"))
    calls = (
        trace.activities.filter(pl.col("kind") == "communication")
        .join(issues, left_on="id", right_on="call", how="left", maintain_order="left")
        .join(messages, left_on="id", right_on="activity_id", how="left", maintain_order="left")
        .sort("lane", "start_ns", "id")
        .with_columns(pl.col("is_message").fill_null(value=False))
        .with_columns((pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"), pl.col("id").alias("ref"))
    )
    overlaps = (pl.col("start_ns") < pl.col("end_ns").shift(1).over("lane")).any().over("lane")
    return calls.with_columns(
        pl.col("launch").fill_null(-1),
        pl.when((pl.col("lane") == pl.col("lane").shift(1)) & ~overlaps)
        .then(pl.int_range(pl.len()).cast(pl.Int64) - 1)
        .otherwise(-1)
        .fill_null(-1)
        .alias("previous"),
    ).select(*_WORK_COLUMNS)


def _awaited_collectives(calls: pl.DataFrame, from_ns: Ints, to_ns: Ints) -> tuple[Ints, Ints]:
    """Return the collective whose end is the last within each pause of the host (-1: none), and that end.

    A send or receive of gloo ends where the host waits for it, so a short wait shows that it was complete before.
    """
    ends = calls["end_ns"].to_numpy()
    order = np.argsort(ends, kind="stable")
    last = np.searchsorted(ends[order], to_ns, side="right") - 1
    if not len(order):
        return np.full(len(to_ns), -1, np.int64), to_ns
    row = order[np.maximum(last, 0)]
    least_ns = np.where(calls["is_message"].to_numpy()[row], _LEAST_WAIT_NS, 0)
    is_awaited = (last >= 0) & (to_ns > from_ns) & (ends[row] > from_ns + least_ns)
    return np.where(is_awaited, row, -1), np.where(is_awaited, ends[row], to_ns)


def _wake_up_ns(calls: pl.DataFrame, issued_ns: Ints) -> Ints:
    """Time that each collective's thread took to start it after its issue and its predecessor's end, in ns."""
    launch, previous = calls["launch"].to_numpy(), calls["previous"].to_numpy()
    start, end = calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy()
    if not len(start):
        return start
    could = np.where(launch >= 0, issued_ns[np.maximum(launch, 0)] if len(issued_ns) else start, start.min())
    could = np.where(previous >= 0, np.maximum(could, end[np.maximum(previous, 0)]), could)
    is_known = (launch >= 0) | (previous >= 0)
    return np.asarray(np.where(is_known, np.maximum(start - could, 0), 0), np.int64)


def _waiting_ns(trace: Trace, from_ns: Ints, awaited: Ints, until: Ints) -> Ints:
    """Return, by host state, the part of each pause that was waiting."""
    rows = np.flatnonzero(awaited >= 0)
    waiting = np.zeros((len(from_ns), host_time.STATE_COUNT), np.int64)
    waiting[rows] = host_time.time_by_state(trace, from_ns[rows], until[rows])
    waiting[:, _BUSY] = 0
    return waiting
