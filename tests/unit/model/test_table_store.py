"""Tables of facts are the same in memory and in Parquet parts."""

import inspect
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from tests.support import drawn_traces
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.model.source import Measured, Source, Threads
from tracekit.model.table_store import Collector, TableStore


def names(trace):
    return pl.DataFrame()


def times(trace):
    return pl.DataFrame()


def lanes(trace):
    return trace.lanes.select("lane", source_rank=pl.lit(trace.rank))


SCHEMAS = {
    names: {"name": pl.String, "rank": pl.Int64, "kind": pl.Categorical, "sizes": pl.List(pl.Int64)},
    times: {"start_ns": pl.Int64, "ratio": pl.Float64},
}
ROWS = {
    names: st.tuples(
        st.none() | st.text(max_size=20),
        st.integers(0, 3),
        st.none() | st.sampled_from(["compute", "communication"]),
        st.none() | st.lists(st.integers(0, 9), max_size=3),
    ),
    times: st.tuples(st.integers(-(2**62), 2**62), st.none() | st.floats(allow_nan=False)),
}
TABLES = st.lists(
    st.tuples(*(st.lists(ROWS[fact], max_size=5).map(lambda rows, f=fact: (f, rows)) for fact in SCHEMAS)),
    min_size=1,
    max_size=70,
)


def collected(measured, max_bytes):
    tables = TableStore(max_bytes)
    collector = Collector(tables, list(SCHEMAS))
    for rank, of_trace in enumerate(measured):
        collector.add((0, rank), [pl.DataFrame(rows, SCHEMAS[fact], orient="row") for fact, rows in of_trace])
    collector.finish(0.0)
    return tables


@settings(max_examples=30)
@given(TABLES, st.sampled_from([0, 500, 5000]))
def test_parts_in_files_are_the_tables_in_memory(measured, max_bytes):
    within, outside = collected(measured, 1 << 40), collected(measured, max_bytes)
    for fact in SCHEMAS:
        expected = [
            (0, rank, *(value for name, value in zip(SCHEMAS[fact], row, strict=True) if name != "rank"))
            for rank, of_trace in enumerate(measured)
            for row in dict(of_trace)[fact]
        ]
        assert within.get(fact).rows() == expected
        assert outside.get(fact).equals(within.get(fact))
        assert outside.scan(fact).select("rank").collect().equals(within.get(fact).select("rank"))
    assert max_bytes or not any(within.parts.get(fact) for fact in SCHEMAS)


def test_files_are_removed_with_the_tables():
    tables = collected([((names, [("a", 0, None, None)]), (times, [(1, 0.5)]))], 0)
    files = [*tables.parts[names], *tables.parts[times]]
    assert len(files) == 2
    assert all(path.exists() for path in files)
    del tables
    assert not any(path.exists() for path in files)


def test_a_file_that_is_not_written_yet_has_its_path_already():
    tables = TableStore(0)
    with ThreadPoolExecutor(4) as pool:  # pages of several people read tables of one run
        paths = list(pool.map(lambda _: tables.new_part(), range(100)))
    assert len(set(paths)) == 100
    assert len({path.parent for path in paths}) == 1


def test_a_table_from_files_is_read_again_only_when_nobody_uses_it():
    tables = collected([((names, []), (times, [(1, 0.5)] * 9))], 0)
    used = tables.get(times)
    assert tables.get(times) is used


def test_memory_for_facts_is_shared_by_all_passes():
    def source(rank):
        return Source(rank, 0, f"rank{rank}", 1, lambda: drawn_traces.trace("compute aa.b", rank=rank))

    run = Run("run", [source(rank) for rank in range(3)], fact_bytes=1000)

    def small(trace):
        return pl.DataFrame({"at": [trace.rank] * 30})

    def other(trace):
        return pl.DataFrame({"at": [trace.rank] * 30})

    run.measure([small])
    assert not run.parts(small)
    assert run.parts(other)  # the first one has taken 720 of 1,000 bytes
    assert run.table(small).equals(run.table(other))


def test_a_trace_without_tables_is_an_issue_and_the_others_stay():
    class Executor:
        def measure(self, sources, facts, loaded):
            from tracekit.errors import BadTraceError

            yield Measured(sources[0], error=BadTraceError("rank0: gone"))
            yield Measured(sources[1], [pl.DataFrame({"at": [1]})])

    run = Run("run", [Source(rank, 0, f"rank{rank}", 1, pytest.fail) for rank in (0, 1)], executor=Executor())
    assert run.table(lambda trace: pl.DataFrame()).rows() == [(0, 1, 1)]
    assert run.ranks == (1,)
    assert run.data_quality["message"].to_list() == ["rank0: gone"]


class Left(BaseException):
    """What a page raises that a person leaves."""


@pytest.mark.parametrize("max_bytes", [0, 1 << 20], ids=["files", "memory"])
def test_a_pass_that_was_left_continues_with_the_other_traces(max_bytes):
    reads = []

    def read(rank):
        reads.append(rank)
        return drawn_traces.trace("step 0000\ncompute .aa.", rank=rank)

    def leave(measured):
        if measured.source.rank == 3:
            raise Left

    sources = [Source(rank, 0, f"{rank}", 1, partial(read, rank)) for rank in range(6)]
    run = Run("r", sources, executor=Threads(1), fact_bytes=max_bytes, cache_bytes=0)
    whole = Run("r", sources, executor=Threads(1)).table(lanes)
    reads.clear()
    with pytest.raises(Left):
        run.measure((lanes,), leave)
    assert reads == [0, 1, 2, 3]
    assert_frame_equal(run.table(lanes), whole)
    assert reads == [0, 1, 2, 3, 4, 5]
    assert_frame_equal(run.table(lanes), whole)


def test_a_fact_that_reads_a_fact_is_two_frames_deeper():
    # Whoever reads a stack of facts, in an error or a profile, sees facts and nothing that only forwards.
    depths = []

    @run_fact
    def inner(run):
        depths.append(len(inspect.stack()))
        return pl.DataFrame()

    @run_fact
    def outer(run):
        depths.append(len(inspect.stack()))
        return run.table(inner)

    Run("run", []).table(outer)
    assert depths[1] - depths[0] == 2
