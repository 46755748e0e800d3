"""The traces that a worker keeps in memory between its tasks."""

import polars as pl
import pytest

from tracekit.errors import BadTraceError
from tracekit.executors import worker_pool
from tracekit.model.source import Source
from tracekit.model.trace import LazyTrace, Trace

MIB = 1 << 20


def source(read, rank=0):
    def trace():
        read.append(rank)
        return LazyTrace.of(Trace(rank=rank, window=0, path=""), {"ops": pl.DataFrame}, deferred_bytes=MIB)

    return Source(rank, 0, f"rank{rank}", 1, trace)


@pytest.fixture
def loaded():
    worker_pool._loaded.traces.clear()
    yield worker_pool._loaded
    worker_pool._loaded.traces.clear()


@pytest.mark.parametrize(("share", "times_read"), [(1, 1), (64, 1), (65, 2)])
def test_a_trace_is_read_again_only_if_the_share_of_the_worker_does_not_fit(loaded, share, times_read):
    read = []
    of = source(read)
    for _ in range(2):
        assert isinstance(worker_pool.measure(of, [lambda trace: trace.steps], share), list)
    assert len(read) == times_read
    assert len(loaded.traces) == 2 - times_read


def test_a_trace_that_cannot_be_read_is_not_kept(loaded):
    def broken():
        raise BadTraceError("rank0: cut")

    outcome = worker_pool.measure(Source(0, 0, "rank0", 1, broken), [lambda trace: trace.steps], 1)
    assert str(outcome) == "rank0: cut"
    assert len(loaded.traces) == 0
