from tests.support import drawn_traces
from tracekit.analysis.time import breakdown


def test_the_parts_of_a_step_sum_to_its_duration():
    # compute 4 (aa, bb), communication 5 of which 1 hidden under b, copies 3 of which 2 exposed, idle 2
    trace = drawn_traces.trace("""
        step     000000000000
        compute  aabb........
        comm     ...xxxxx....
        copy     .......mmm..
    """)
    row = breakdown.by_step(trace).row(0, named=True)
    assert row["duration_ns"] == 12
    assert (row["compute_ns"], row["communication_ns"], row["overlapped_ns"]) == (4, 5, 1)
    assert (row["exposed_communication_ns"], row["exposed_copy_ns"], row["idle_ns"]) == (4, 2, 2)


def test_the_rank_row_spans_first_to_last_activity():
    trace = drawn_traces.trace("""
        step     0000111111
        compute  ..aa..bb..
        comm     ........x.
    """)
    row = breakdown.by_rank(trace).row(0, named=True)
    assert (row["step"], row["start_ns"], row["duration_ns"], row["idle_ns"]) == (None, 2, 7, 2)


def test_a_trace_without_work_has_no_rows():
    trace = drawn_traces.trace("step 000")
    assert breakdown.by_rank(trace).is_empty()
