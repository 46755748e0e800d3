"""What the collectives of a rank transfer: parameters and their gradients, or activations and theirs."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import trace_columns
from tracekit.model import columns, nesting, schema
from tracekit.model.memoize import memoize
from tracekit.model.nesting import Flags
from tracekit.model.trace import Trace

PARAMETERS, ACTIVATIONS, OTHER = "parameters", "activations", "other"
COLUMNS = schema.columns("activity_id purpose is_forward", purpose=pl.String, is_forward=pl.Boolean)
_MODULE = "forward"
"""FSDP1's span around the forward of the module itself; those in its other spans transfer parameters or gradients."""
_ACCUMULATES = r"AccumulateGrad$"


@memoize
def purposes(trace: Trace) -> pl.DataFrame:
    """Return what each collective transfers. Columns activity_id, purpose, is_forward; one row per collective.

    parameters: in a span of FSDP, or called while autograd accumulates a gradient, where the hooks of DDP, Megatron-LM
    and DeepSpeed run. activations: between two ops of one forward, or in another node of autograd. other: outside of
    both, such as gradients reduced after the backward. null: the trace links no backward op to its forward op, so where
    forward ends is unknown.
    """
    host = _called(trace)
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
    found = host.with_columns(purpose.alias("purpose"), in_forward.fill_null(value=False).alias("is_forward"))
    return schema.conform(found.select(*COLUMNS), COLUMNS)


def _called(trace: Trace) -> pl.DataFrame:
    """Return the collectives with phase, span, and where each was called.

    Columns accumulates (while a gradient is accumulated) and between_forward_ops (null where no op is known to be of a
    forward).
    """
    of = trace.activities.select("id", "launch_id", "start_ns", "phase", "span")
    calls = trace.collectives.select("activity_id").join(
        of, left_on="activity_id", right_on="id", maintain_order="left"
    )
    starts = trace.ops.select(launch_id="id", called_ns="start_ns")
    at_ns = pl.coalesce("called_ns", "start_ns").alias("called_ns")
    placed = calls.join(starts, on="launch_id", how="left", maintain_order="left").with_columns(at_ns)
    return placed.with_columns(
        pl.Series("accumulates", _accumulates(trace, placed["launch_id"])),
        _between_forward_ops(trace, placed["called_ns"]),
    )


def _accumulates(trace: Trace, launch_ids: pl.Series) -> Flags:
    """Return which ops run while autograd accumulates a gradient."""
    marked = trace_columns.is_named(trace, _ACCUMULATES)
    if not marked.any():
        return np.zeros(len(launch_ids), bool)
    ids = trace.ops["id"].to_numpy()
    parent, flags = np.full(ids.max() + 1, -1, np.int64), np.zeros(ids.max() + 1, bool)
    parent[ids], flags[ids] = trace_columns.parent_ids(trace), marked
    at = columns.filled(launch_ids, -1)
    return np.asarray((at >= 0) & (nesting.nearest(parent, flags)[at] >= 0))


def _between_forward_ops(trace: Trace, called_ns: pl.Series) -> pl.Series:
    """Return which times lie between two ops of one forward: ops with a gradient, and no backward op between."""
    name = "between_forward_ops"
    with_gradient = trace.ops["forward_id"].drop_nulls().unique()
    is_forward = pl.col("id").is_in(with_gradient.implode())
    is_backward = pl.col("phase").eq_missing(conventions.BACKWARD)
    marks = trace.ops.filter(is_forward | is_backward).select("start_ns", is_forward=is_forward & ~is_backward)
    if not marks["is_forward"].any():
        return pl.Series(name, [None] * len(called_ns), pl.Boolean)
    marks = marks.sort("start_ns")
    after = np.searchsorted(marks["start_ns"].to_numpy(), called_ns.to_numpy(), side="right")
    forward = np.concatenate(([False], marks["is_forward"].to_numpy(), [False]))
    return pl.Series(name, forward[after] & forward[after + 1])
