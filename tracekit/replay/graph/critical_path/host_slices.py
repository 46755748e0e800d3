"""What the host of a rank does during given times: the innermost slice and operator on its threads."""

import numpy as np
import polars as pl

from tracekit.analysis.compute import call_paths
from tracekit.analysis.time import host_state
from tracekit.model import nesting, schema, sweep_line
from tracekit.model.intervals import Spans
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace

PYTHON = "Python"
"""The name of host time in which the trace records no slice."""
PIECES = schema.columns(
    "of start_ns end_ns name operator module unit phase state lane",
    **dict.fromkeys(("operator", "module", "state"), pl.String),
)
_STEP_MARK = "ProfilerStep#"
_COLUMNS = ("unit", "phase")


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
