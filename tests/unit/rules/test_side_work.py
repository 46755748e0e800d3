"""Work that no gradient needs: where it stands in the step, what is not counted, and its cost."""

from dataclasses import replace

import polars as pl
import pytest

from tests.support import drawn_cpu_ops
from tests.support.drawn_cpu_ops import US, Op
from tests.support.rule_examples import TRAINING_OPS
from tracekit.analysis.compute import side_work
from tracekit.replay.graph.causes.device_time import SIDE_WORK
from tracekit.rules.side_work import SideWork

FORWARD, BACKWARD, UPDATE = TRAINING_OPS
HISTOGRAM = Op("aten::histc", 500)


def _rows(*ops):
    return side_work.side_work(drawn_cpu_ops.trace(ops))


def _on_device(trace, lag_us=50):
    """The trace as if its ops had launched kernels that run this much later."""
    device = {"lane": 1, "device": 0, "stream": 7, "name": "stream 7", "role": "compute"}
    lanes = pl.concat([trace.lanes, pl.DataFrame([device], trace.lanes.schema)])
    later = pl.col("start_ns") + lag_us * US
    kernels = trace.activities.with_columns(pl.lit(1, pl.Int64).alias("lane"), later)
    return replace(trace, lanes=lanes, activities=kernels, steps=trace.steps.with_columns(device=pl.lit(0, pl.Int64)))


def test_an_op_after_the_optimizer_leads_to_no_gradient():
    rows = _rows(*TRAINING_OPS, HISTOGRAM)
    assert rows["op"].to_list() == ["aten::histc"] * 4
    assert rows["place"].to_list() == [side_work.AFTER_UPDATE] * 4
    assert rows["saved_ns"].to_list() == [501 * US] * 4  # with the pause of Python before it
    assert rows["step"].to_list() == [0, 1, 2, 3]


def test_nor_does_one_between_the_loss_and_backward():
    rows = _rows(FORWARD, HISTOGRAM, BACKWARD, UPDATE)
    assert rows["place"].to_list() == [side_work.BEFORE_BACKWARD] * 4


@pytest.mark.parametrize(
    "ops",
    [
        (HISTOGRAM, *TRAINING_OPS),  # it may feed the loss
        (FORWARD, HISTOGRAM, FORWARD, BACKWARD, UPDATE),
        (FORWARD, BACKWARD, HISTOGRAM, UPDATE),  # gradients are clipped there
        (*TRAINING_OPS, Op("aten::lerp_", 500)),  # it may update weights
        (*TRAINING_OPS, Op("aten::copy_", 500)),
        (*TRAINING_OPS, Op("aten::_foreach_copy_", 500)),
        (*TRAINING_OPS, HISTOGRAM._replace(phase="data")),
        (*TRAINING_OPS, Op("c10d::allreduce_", 500)),
        (*TRAINING_OPS, Op("aten::cat", 500), Op("c10d::_allgather_base_", 50)),  # weights that ranks exchange
        (FORWARD._replace(is_needed=False), BACKWARD, UPDATE, HISTOGRAM),  # nothing says what backward needs
        (FORWARD, BACKWARD._replace(phase=None), UPDATE, HISTOGRAM),
    ],
)
def test_what_may_lead_to_a_gradient_or_to_weights_is_not_counted(ops):
    assert _rows(*ops).is_empty()


def test_the_python_between_two_such_ops_is_counted_whole():
    ops = [*TRAINING_OPS, HISTOGRAM, HISTOGRAM]
    rows = side_work.side_work(drawn_cpu_ops.trace(ops, pause_us=lambda _, number: 900 if number >= 3 else 1))
    assert rows["saved_ns"].to_list() == [500 * US, 1400 * US] * 4  # of the first one, it may be that of something else


def test_a_copy_into_new_memory_is_counted():
    rows = _rows(*TRAINING_OPS, Op("aten::new_empty", 2), Op("aten::copy_", 500))
    assert rows.filter(op="aten::copy_")["saved_ns"].to_list() == [501 * US] * 4


def test_work_before_the_next_loss_of_the_same_step_is_not_counted():
    """A second optimizer's loss may use it, such as the output of a teacher."""
    assert _rows(*TRAINING_OPS, HISTOGRAM, *TRAINING_OPS).is_empty()


def test_ops_of_a_thread_without_forward_are_not_counted():
    trace = drawn_cpu_ops.trace([*TRAINING_OPS, HISTOGRAM])
    is_histogram = pl.col("name") == HISTOGRAM.name
    lanes = pl.concat([trace.lanes, trace.lanes.with_columns(lane=pl.lit(1, pl.Int64))])
    moved = {
        name: getattr(trace, name).with_columns(lane=pl.when(is_histogram).then(1).otherwise("lane").cast(pl.Int64))
        for name in ("ops", "activities")
    }
    assert side_work.side_work(replace(trace, lanes=lanes, **moved)).is_empty()


def test_a_pipeline_copies_what_it_sends_between_the_passes():
    trace = drawn_cpu_ops.trace([FORWARD, HISTOGRAM, BACKWARD, UPDATE])
    sent = trace.activities.head(1).with_columns(name=pl.lit("gloo:send"), kind=pl.lit("communication"))
    sent = sent.with_columns(id=pl.lit(10_000, pl.Int64), launch_id=pl.lit(None, pl.Int64))
    assert side_work.side_work(replace(trace, activities=pl.concat([trace.activities, sent]))).is_empty()


def test_ops_that_another_fact_has_are_left_to_it():
    values = [Op("aten::sum", 500), Op("aten::item", 3, ())]
    assert _rows(*TRAINING_OPS, *values).is_empty()


def test_on_a_device_the_kernels_of_such_ops_are_counted():
    rows = side_work.side_work(_on_device(drawn_cpu_ops.trace([*TRAINING_OPS, HISTOGRAM])))
    assert rows["op"].to_list() == ["aten::histc"] * 4
    assert rows["saved_ns"].to_list() == [500 * US] * 4
    assert rows["device"].to_list() == [0] * 4


def test_the_finding_states_the_operator_and_its_time():
    [finding] = SideWork().check(drawn_cpu_ops.run([*TRAINING_OPS, HISTOGRAM]))
    assert finding.cost_ns == 501 * US
    assert finding.what_if.cause is SIDE_WORK
    assert "aten::histc" in finding.message


def test_work_below_the_threshold_is_not_reported():
    assert not list(SideWork().check(drawn_cpu_ops.run([*TRAINING_OPS, HISTOGRAM._replace(us=30)])))
