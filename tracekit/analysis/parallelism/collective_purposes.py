"""What the collectives of a rank transfer: parameters and their gradients, or activations and theirs."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import trace_columns
from tracekit.model import columns, nesting, schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.nesting import Flags, Ints
from tracekit.model.sweep_line import at, distinct
from tracekit.model.trace import Trace

PARAMETERS, ACTIVATIONS, OTHER = "parameters", "activations", "other"
COLUMNS = schema.columns("activity_id purpose is_forward", purpose=pl.String, is_forward=pl.Boolean)
_MODULE = "forward"
"""FSDP1's span around the forward of the module itself; those in its other spans transfer parameters or gradients."""
_ACCUMULATES = r"AccumulateGrad$"


@trace_fact
@memoize
def purposes(trace: Trace) -> pl.DataFrame:
    """Purpose of each collective. Columns activity_id, purpose, is_forward; one row per collective.

    parameters: in a span of FSDP, or called while autograd accumulates a gradient, where the hooks of DDP, Megatron-LM
    and DeepSpeed run. activations: between two ops of one forward, or in another node of autograd. other: outside of
    both, such as gradients reduced after the backward. null: the trace links no backward op to its forward op, so where
    forward ends is unknown, or it lacks the launch of a collective on a device, which may run long after its call.
    """
    host = _host_calls(trace)
    if host.is_empty():
        return schema.conform(host, COLUMNS)
    moves_parameters = pl.col("accumulates") | (pl.col("span") != _MODULE).fill_null(value=False)
    in_backward = pl.col("phase") == conventions.BACKWARD
    in_forward = (pl.col("phase") == conventions.FORWARD) | (pl.col("phase").is_null() & pl.col("between_forward_ops"))
    purpose = (
        pl.when(moves_parameters)
        .then(pl.lit(PARAMETERS))
        .when(in_forward | in_backward)
        .then(pl.lit(ACTIVATIONS))
        .when(pl.col("phase").is_not_null() | pl.col("between_forward_ops").is_not_null())
        .then(pl.lit(OTHER))
    )
    table = host.with_columns(purpose.alias("purpose"), in_forward.fill_null(value=False).alias("is_forward"))
    return schema.conform(table.select(*COLUMNS), COLUMNS)


def _host_calls(trace: Trace) -> pl.DataFrame:
    """Return the collectives with phase, span, and where each was called.

    Columns accumulates (while a gradient is accumulated) and between_forward_ops (null where no op is known to be of a
    forward, or the launch is not recorded).
    """
    row = columns.rows_of(trace.activities["id"].to_numpy(), trace.collectives["activity_id"].to_numpy())
    row = row[row >= 0]
    calls = trace.activities[["id", "lane", "phase", "span"]][row]
    call, start_ns = trace_columns.launch_rows(trace)[row], trace.activities["start_ns"].to_numpy()[row]
    called_ns = np.where(call >= 0, at(trace.ops["start_ns"].to_numpy(), call, 0), start_ns)
    accumulates = pl.Series("accumulates", _accumulates(trace, trace_columns.launch_ids(trace)[row]))
    device_lanes = trace.lanes["lane"].filter(trace.lanes["device"].is_not_null())
    is_call_known = pl.Series(call >= 0) | ~calls["lane"].is_in(device_lanes.implode())
    between = _between_forward_ops(trace, called_ns)
    masked = pl.select(pl.when(is_call_known).then(between).alias(between.name)).to_series()
    return calls.hstack([accumulates, masked]).rename({"id": "activity_id"})


def _accumulates(trace: Trace, launch_ids: Ints) -> Flags:
    """Mask of the ops, by id, that run while autograd accumulates a gradient; false for -1."""
    marked = trace_columns.is_named(trace, _ACCUMULATES)
    if not marked.any():
        return np.zeros(len(launch_ids), bool)
    ids = trace.ops["id"].to_numpy()
    parent, flags = np.full(ids.max() + 1, -1, np.int64), np.zeros(ids.max() + 1, bool)
    parent[ids], flags[ids] = trace_columns.parent_ids(trace), marked
    return np.asarray((launch_ids >= 0) & (nesting.nearest(parent, flags)[launch_ids] >= 0))


def _between_forward_ops(trace: Trace, called_ns: Ints) -> pl.Series:
    """Mask of the times between two ops of one forward: ops with a gradient, and no backward op between."""
    name = "between_forward_ops"
    with_gradient = columns.rows_of(trace.ops["id"].to_numpy(), distinct(columns.to_ints(trace.ops["forward_id"], -1)))
    is_forward = np.zeros(trace.ops.height, np.bool_)
    is_forward[with_gradient[with_gradient >= 0]] = True
    is_backward = trace_columns.is_phase(trace, conventions.BACKWARD)
    is_forward &= ~is_backward
    if not is_forward.any():
        return pl.Series(name, [None], pl.Boolean).new_from_index(0, len(called_ns))
    rows = np.flatnonzero(is_forward | is_backward)
    start_ns = trace.ops["start_ns"].to_numpy()[rows]
    order = np.argsort(start_ns, kind="stable")
    after = np.searchsorted(start_ns[order], called_ns, side="right")
    forward = np.concatenate(([False], is_forward[rows[order]], [False]))
    return pl.Series(name, forward[after] & forward[after + 1])
