"""Who issued each collective, by what is around the call that issued it."""

import polars as pl
import pytest

from tracekit.analysis.communication.issuers import issuers
from tracekit.model import schema
from tracekit.model.trace import Trace

MAIN, ENGINE, GLOO = 0, 1, 2

# time      0         10        20        30        40        50
# main      llllf.....................rr......oo...uu.....dd....     l linear, f FSDP, r Redistribute, o optimizer
# engine    ..........bbbb..............................             b backward of l, which accumulates a gradient
# gloo      ....c.......c..............c.......c....c......c         c the collective that each of them issued
SLICES = (
    ("aten::linear", "cpu_op", MAIN, 0, 4, None, {}),
    ("FSDP::all_gather (0)", "annotation", MAIN, 4, 6, None, {}),
    ("c10d::_allgather_base_", "cpu_op", MAIN, 4, 5, 1, {}),
    ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", "cpu_op", ENGINE, 10, 14, None,
     {"phase": "backward", "forward_id": 0}),
    ("c10d::allreduce_", "cpu_op", ENGINE, 12, 13, 3, {"phase": "backward"}),
    ("Redistribute", "cpu_op", MAIN, 26, 28, None, {}),
    ("c10d::allgather_into_tensor_coalesced_", "cpu_op", MAIN, 27, 28, 5, {}),
    ("Optimizer.step#AdamW.step", "annotation", MAIN, 35, 37, None, {"phase": "optimizer"}),
    ("c10d::allreduce_", "cpu_op", MAIN, 35, 36, 7, {"phase": "optimizer"}),
    ("src/train.py(12): log", "python", MAIN, 40, 42, None, {}),
    ("torch/distributed/c10d_logger.py(80): wrapper", "python", MAIN, 40, 42, 9, {}),
    ("c10d::allreduce_", "cpu_op", MAIN, 40, 41, 10, {}),
)  # fmt: skip
CALLS = {2: "fsdp", 4: "program", 6: "dtensor", 8: "optimizer", 11: "program"}


def drawn(*, left_out=(), more=()):
    rows = [
        {"id": i, "name": name, "kind": kind, "lane": lane, "start_ns": start, "dur_ns": end - start, "parent_id": up}
        | {"step": 0} | columns
        for i, (name, kind, lane, start, end, up, columns) in enumerate((*SLICES, *more))
        if i not in left_out
    ]  # fmt: skip
    calls = [
        {"id": i, "launch_id": i, "lane": GLOO, "kind": "communication", "start_ns": 5, "dur_ns": 1} for i in CALLS
    ]
    collectives = [{"activity_id": i, "op": "all_reduce"} for i in CALLS]
    return Trace(
        0, 0, "drawn",
        ops=schema.OPS.conform(pl.DataFrame(rows, infer_schema_length=None)),
        activities=schema.ACTIVITIES.conform(pl.DataFrame(calls)),
        collectives=schema.COLLECTIVES.conform(pl.DataFrame(collectives)),
    )  # fmt: skip


def by_call(trace):
    return {row["activity_id"]: row for row in issuers(trace).iter_rows(named=True)}


def test_the_wrapper_nearest_to_the_call_issued_it():
    rows = by_call(drawn())
    assert {call: row["issuer"] for call, row in rows.items()} == CALLS


def test_an_accumulated_gradient_is_reduced_by_ddp_where_ddp_left_marks():
    mark = ("DistributedDataParallel.forward", "annotation", MAIN, 0, 4, None, {})
    assert by_call(drawn(more=(mark,)))[4]["issuer"] == "ddp"


def test_a_call_in_forward_or_backward_is_in_the_model():
    longer = ("aten::linear", "cpu_op", MAIN, 43, 44, None, {"phase": "forward"})
    assert [row["in_model"] for row in by_call(drawn()).values()] == [False, True, False, False, False]
    # The forward pass then lasts until the end: a collective in it may be tensor parallelism.
    assert all(row["in_model"] for row in by_call(drawn(more=(longer,))).values())


def test_the_line_is_the_innermost_function_of_the_program():
    assert [row["line"] for row in by_call(drawn()).values()] == [None, None, None, None, "src/train.py(12): log"]


@pytest.mark.parametrize("left_out", [(2,), (11,)])
def test_a_collective_without_its_call_has_no_issuer(left_out):
    (call,) = left_out
    assert by_call(drawn(left_out=left_out))[call]["issuer"] is None


def test_without_a_known_forward_pass_no_collective_is_the_program_s():
    trace = drawn()
    unlinked = trace.replace(ops=trace.ops.with_columns(forward_id=pl.lit(None, pl.Int64)))
    assert by_call(unlinked)[11]["issuer"] is None
    assert by_call(unlinked)[6]["issuer"] == "dtensor"
