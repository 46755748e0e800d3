from tests.support import drawn_traces
from tracekit.analysis.time import breakdown
from tracekit.analysis.time.gaps import step_parts


def test_the_parts_of_a_step_sum_to_its_duration_by_name():
    trace = drawn_traces.trace("""
        step     0000011111
        compute  .aa..b.bb.
        comm     ...xx.....
    """)
    parts = step_parts(trace)
    assert parts.drop("device").rows() == [
        (0, "compute", "a", 2),
        (0, "gap", "a", 1),
        (0, "gap", "b", 2),
        (1, "compute", "b", 3),
        (1, "gap", "", 1),
        (1, "gap", "b", 1),
    ]
    durations = breakdown.by_step(trace)["duration_ns"]
    assert parts["dur_ns"].sum() == durations.sum()


def test_a_trace_without_work_has_no_parts():
    assert step_parts(drawn_traces.trace("step 000")).is_empty()
