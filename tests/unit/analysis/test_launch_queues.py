import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.analysis.host import launch_delay
from tracekit.model import schema
from tracekit.model.trace import Trace

LAUNCHES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=20)


def launched(rows: list[tuple[int, int, int]], dur_ns: int = 5) -> Trace:
    """Return a trace of launches on one stream: start of the call, its duration, time from its start to the kernel."""
    calls = pl.DataFrame(
        [(at, "cudaLaunchKernel", "runtime", 0, call, took) for at, (call, took, _) in enumerate(rows)],
        schema=["id", "name", "kind", "lane", "start_ns", "dur_ns"],
        orient="row",
    )
    work = pl.DataFrame(
        [(at, at, 1, "gemm", "compute", call + later, dur_ns) for at, (call, _, later) in enumerate(rows)],
        schema=["id", "launch_id", "lane", "name", "kind", "start_ns", "dur_ns"],
        orient="row",
    )
    lanes = pl.DataFrame({"lane": [0, 1], "device": [None, 0], "stream": [None, 7], "name": ["python", "stream 7"]})
    return Trace(
        0,
        0,
        "drawn",
        ops=schema.OPS.conform(calls),
        activities=schema.ACTIVITIES.conform(work),
        lanes=schema.LANES.conform(lanes),
    )


def test_a_queue_grows_with_launches_and_shrinks_with_starts():
    # calls    a b c                starts   . . . . A . B . . C      queued 1 2 3 3 2 2 1 1 1 0
    trace = launched([(0, 1, 4), (1, 1, 5), (2, 1, 7)])
    (row,) = launch_delay.launch_queues(trace).to_dicts()
    assert (row["stream"], row["activities"], row["launched"], row["queue_max"]) == (7, 3, 3, 3)
    assert row["queue_mean"] == pytest.approx((1 + 2 + 3 + 3 + 2 + 2 + 1 + 1 + 1) / 9)
    assert (row["queue_p50"], row["empty_ns"], row["full_ns"]) == (2, 0, 0)
    assert (row["delay_p50_ns"], row["delay_p95_ns"]) == (4, 6)
    assert (row["short_ratio"], row["short_ns"]) == (1.0, 15)


@settings(deadline=None)
@given(LAUNCHES)
def test_queues_equal_a_count_per_nanosecond(rows: list[tuple[int, int, int]]):
    (row,) = launch_delay.launch_queues(launched(rows)).to_dicts()
    calls, starts = np.array([call for call, _, _ in rows]), np.array([call + later for call, _, later in rows])
    times = np.arange(calls.min(), max(calls.max(), starts.max()))
    queued = np.array([(calls <= at).sum() - (starts <= at).sum() for at in times])
    assert row["queue_mean"] == pytest.approx(queued.mean() if len(queued) else 0.0)
    assert row["empty_ns"] == (queued == 0).sum()
    assert row["queue_max"] >= queued.max(initial=0)


def test_a_full_queue_and_work_without_a_launch_are_counted():
    trace = launched([(0, 0, 10 + at) for at in range(1100)], dur_ns=20_000)
    unlinked = trace.activities.with_columns(pl.when(id=0).then("launch_id").alias("launch_id"))
    (row,) = launch_delay.launch_queues(trace).to_dicts()
    assert (row["queue_max"], row["full_ns"], row["short_ratio"]) == (1100, 10 + (1100 - 1024), 0.0)
    (row,) = launch_delay.launch_queues(trace.replace(activities=unlinked)).to_dicts()
    assert (row["activities"], row["launched"], row["queue_max"]) == (1100, 1, 1)


def test_a_cpu_run_has_no_queues():
    on_cpu = launched([(0, 1, 4)]).replace(lanes=schema.LANES.empty())
    assert launch_delay.launch_queues(on_cpu).is_empty()
