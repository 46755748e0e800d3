"""Tables that are built on first access."""

import polars as pl
import pytest

from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.source import LoadedTraces, Source, Threads
from tracekit.model.trace import LazyTrace, Trace

STEPS = schema.STEPS.empty()


def _lazy(made, *, deferred_bytes=0):
    def ops():
        made.append("ops")
        return schema.OPS.conform(pl.DataFrame({"id": [7]}))

    return LazyTrace.of(Trace(rank=0, window=0, path="", steps=STEPS), {"ops": ops}, deferred_bytes)


def test_a_table_is_built_on_first_access_and_then_retained():
    made = []
    trace = _lazy(made)
    assert trace.steps is STEPS
    assert made == []
    assert trace.ops["id"].to_list() == [7]
    assert trace.ops is trace.tables["ops"]
    assert made == ["ops"]


def test_unknown_attributes_raise_attribute_error():
    with pytest.raises(AttributeError, match="flavour"):
        _ = _lazy([]).flavour


def test_a_run_counts_the_memory_of_tables_not_yet_built():
    read = []

    def source(rank):
        def of_rank():
            read.append(rank)
            return _lazy([], deferred_bytes=1000)

        return Source(rank, 0, f"rank{rank}", 1, of_rank)

    run = Run("run", [source(0), source(1)], cache_bytes=1500)
    for rank in (0, 1, 1, 0):
        run.trace(rank)
    assert read == [0, 1, 0]  # both together exceed the cache


def test_a_trace_with_all_tables_built_defers_no_memory():
    trace = _lazy([], deferred_bytes=1000)
    assert trace.deferred_bytes == 1000
    assert len(trace.ops) == 1
    assert trace.deferred_bytes == 0


@pytest.mark.parametrize(("cache_bytes", "remaining"), [(1500, 0), (2000, 2)])
def test_a_pass_over_traces_retains_them_only_if_all_fit_in_memory(cache_bytes, remaining):
    sources = [Source(rank, 0, f"rank{rank}", 1, lambda: _lazy([], deferred_bytes=1000)) for rank in (0, 1)]
    loaded = LoadedTraces(cache_bytes)
    list(Threads(1).measure(sources, [lambda trace: trace.steps], loaded))
    assert len(loaded.traces) == remaining
