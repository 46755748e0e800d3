"""Who issued each collective: a wrapper (FSDP, DDP), the optimizer, DTensor, or the program's own code."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import trace_columns
from tracekit.model import columns, nesting, schema, sweep_line
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import Trace

FSDP, DDP, OPTIMIZER, DTENSOR, PROGRAM = "fsdp", "ddp", "optimizer", "dtensor", "program"
BATCHABLE = (FSDP, OPTIMIZER, DTENSOR, PROGRAM)
"""Issuers that can batch collectives with compute between them; of DDP, `backward_passes` knows which."""
COLUMNS = schema.columns("activity_id issuer line in_model", issuer=pl.String, line=pl.String, in_model=pl.Boolean)

# What is around the call that issued it: annotations, dispatcher ops, or Python frames where stacks were recorded.
_AROUND = {
    FSDP: r"^(?:Ya)?FSDP::|^FullyShardedDataParallel\.|torch/distributed/(?:fsdp|_composable/fsdp)/",
    DDP: r"^DistributedDataParallel\.forward|torch/nn/parallel/distributed\.py",
    OPTIMIZER: r"^Optimizer\.step#|torch/optim/|torch/distributed/optim/",
    DTENSOR: r"^Redistribute|^_c10d_functional(?:_autograd)?::|torch/distributed/(?:tensor|_tensor)/",
}
_REDUCER = r"^DistributedDataParallel\.|^torch\.distributed\.ddp\.reducer|^torch::distributed::reducer"
_ACCUMULATION = r"^autograd::engine::evaluate_function: torch::autograd::AccumulateGrad$"


@trace_fact
@memoize
def issuers(trace: Trace) -> pl.DataFrame:
    """Who issued each collective, by what was around the call that issued it.

    Columns activity_id, issuer (fsdp, ddp, optimizer, dtensor, program; null where the call or the pass is not known),
    line (the program's innermost Python function around it, such as "train.py(12): clip"; null without stacks) and
    in_model (whether it is part of the forward or backward pass, so that compute may need its result); one row per
    collective. An all-reduce that the accumulation of a gradient issues is DDP's where DDP left other marks. The
    wrapper nearest to the call counts.
    """
    ids = trace.collectives["activity_id"]
    activity = columns.rows_of(trace.activities["id"].to_numpy(), columns.to_ints(ids, -1))
    call = sweep_line.at(trace_columns.launch_rows(trace), activity, -1)
    parent = trace_columns.parent_rows(trace)
    pass_known, in_forward = _forward(trace, call)
    phase = sweep_line.at(_codes(trace), call, 0)
    nearest_depth = np.full(len(call), -1, np.int64)
    issuer = np.where((call >= 0) & pass_known, PROGRAM, "").astype(object)
    issuer[phase == _OPTIMIZER] = OPTIMIZER
    patterns = dict(_AROUND)
    if trace_columns.is_named(trace, _REDUCER).any():
        patterns[DDP] = f"{_AROUND[DDP]}|{_ACCUMULATION}"
    for name, pattern in patterns.items():
        around = sweep_line.at(nesting.nearest(parent, trace_columns.is_named(trace, pattern)), call, -1)
        is_nearer = around > nearest_depth  # of slices around one call, the inner one begins later: a later row
        issuer[is_nearer] = name
        nearest_depth = np.maximum(nearest_depth, around)
    line = sweep_line.at(nesting.nearest(parent, trace_columns.is_program_frame(trace)), call, -1)
    return pl.DataFrame([
        ids.alias("activity_id"),
        pl.Series("issuer", [name or None for name in issuer], pl.String),
        columns.rows_or_nulls(trace.ops.select(line="name"), line)["line"],
        pl.Series("in_model", in_forward | (phase == _BACKWARD), pl.Boolean),
    ])  # fmt: skip


_BACKWARD, _OPTIMIZER = 1, 2


def _codes(trace: Trace) -> Ints:
    """Phase of each op as a number: backward, optimizer, or 0."""
    backward, optimizer = (trace_columns.is_phase(trace, p) for p in (conventions.BACKWARD, conventions.OPTIMIZER))
    return np.where(backward, _BACKWARD, np.where(optimizer, _OPTIMIZER, 0)).astype(np.int64)


def _forward(trace: Trace, call: Ints) -> tuple[Flags, Flags]:
    """Whether the forward pass of a call's step is known, and whether the call lies in it.

    It lasts from the first to the last op of phase forward, or whose gradient backward computes.
    """
    linked = columns.rows_of(trace.ops["id"].to_numpy(), columns.to_ints(trace.ops["forward_id"], -1))
    marked = np.flatnonzero(trace_columns.is_phase(trace, conventions.FORWARD))
    forward = np.union1d(linked[linked >= 0], marked)
    # Numbers of steps may be any: the dense rank of each, -1 outside of steps.
    step = columns.to_ints(trace.ops["step"].rank("dense").cast(pl.Int64), 0) - 1
    start_ns = trace.ops["start_ns"].to_numpy()
    first_ns = np.full(step.max(initial=-1) + 2, np.iinfo(np.int64).max)
    last_ns = np.full(len(first_ns), np.iinfo(np.int64).min)
    np.minimum.at(first_ns, step[forward], start_ns[forward])  # -1, outside of steps, is the last place
    np.maximum.at(last_ns, step[forward], start_ns[forward])
    of_call, at_ns = sweep_line.at(step, call, -1), sweep_line.at(start_ns, call, 0)
    is_known = (call >= 0) & (last_ns[of_call] >= first_ns[of_call])
    return is_known, is_known & (first_ns[of_call] <= at_ns) & (at_ns <= last_ns[of_call])
