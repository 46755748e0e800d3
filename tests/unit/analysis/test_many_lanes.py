"""What is computed at once for all lanes equals its definition lane by lane, also in damaged exports."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import cli_runner, drawn_traces, kineto_files
from tracekit.analysis.communication import queueing
from tracekit.analysis.compute import call_paths, product_kernels
from tracekit.analysis.host import call_trees
from tracekit.analysis.time import launched_work
from tracekit.model import intervals, sweep_line

WORK = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12), st.integers(0, 6)), max_size=25)
DEEP = 3_000


def arrays(work):
    lane, start, dur = (np.array([row[i] for row in work], np.int64) for i in range(3))
    return lane, np.stack((start, start + dur), axis=1)


@given(WORK)
def test_time_covered_twice_is_where_another_group_runs_too(work):
    lane, spans = arrays(work)
    covered = intervals.coverage(spans, intervals.covered_twice(spans, lane))
    for i, (own, span) in enumerate(zip(lane, spans, strict=True)):
        assert covered[i] == intervals.coverage(span, spans[lane != own])[0]


@given(WORK)
def test_the_latest_start_elsewhere_is_of_an_earlier_row_of_another_lane(work):
    lane, spans = arrays(work)
    latest = queueing._latest_elsewhere(spans[:, 0], lane)
    before = queueing._before_on_lane(spans[:, 1], lane)
    for i, own in enumerate(lane):
        elsewhere = [row for row in range(i) if lane[row] != own]
        assert latest[i] == max(elsewhere, key=lambda row: (spans[row, 0], row), default=-1)
        assert before[i] == max((spans[row, 1] for row in range(i) if lane[row] == own), default=sweep_line.NEVER)


@given(WORK)
def test_the_neighbours_of_a_kernel_are_on_its_lane(work):
    lane, spans = arrays(work)
    plain = spans[:, 0].astype(np.uint64)
    together = launched_work._in_context(plain, pl.DataFrame({"lane": lane}))
    for own in np.unique(lane):
        rows = np.flatnonzero(lane == own)
        alone = launched_work._in_context(plain[rows], pl.DataFrame({"lane": lane[rows]}))
        assert (together[rows] == alone).all()


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    """Return the folder of a trace in which thousands of ops lie in each other."""
    trace = kineto_files.trace(0, 1, steps=1)
    inner = range(DEEP)
    trace["traceEvents"] += [
        kineto_files.slice_("cpu_op", f"aten::op{i}", 100 + i / 10, 900 - i / 5, tid=1) for i in inner
    ]
    folder = tmp_path_factory.mktemp("nested")
    kineto_files.write(folder / "rank00000.pt.trace.json", trace)
    return folder


def test_paths_of_calls_end_at_a_level(nested):
    done = cli_runner.tracekit("kernels", nested, "--of", "host", "--by", "path", "--format", "csv", "--no-cache")
    done = (
        done
        if done.returncode == 0
        else cli_runner.tracekit("compare", nested, nested, "--by", "operator,path", "--format", "csv", "--no-cache")
    )
    assert done.returncode == 0, done.stderr
    deepest = max(line.count(call_paths.SEPARATOR) for line in done.stdout.splitlines())
    assert deepest <= call_paths.MAX_LEVELS - 1


def test_stacks_of_a_flame_graph_end_at_a_frame_and_lose_no_time(nested, tmp_path):
    out = tmp_path / "host.folded"
    done = cli_runner.tracekit("kernels", "--by", "stack", nested, "--of", "host", "-o", out, "--no-cache")
    assert done.returncode == 0, done.stderr
    stacks = [line.rpartition(" ") for line in out.read_text().splitlines()]
    assert max(stack.count(";") + 1 for stack, _, _ in stacks) == call_trees.MAX_FRAMES
    assert sum(int(value) for stack, _, value in stacks if ";aten::op0" in stack) == pytest.approx(900_000, rel=0.01)


TRACE = drawn_traces.trace("compute aab.cc\ncomm ..xxx.")


def kernels_with(lanes: pl.DataFrame) -> list[int]:
    return product_kernels.with_calls(TRACE.replace(lanes=lanes))["activity_id"].to_list()


def test_kernels_on_lanes_that_are_not_described_are_of_no_device():
    assert kernels_with(TRACE.lanes.head(0)) == []


def test_lanes_that_are_described_twice_repeat_no_kernel():
    assert kernels_with(pl.concat([TRACE.lanes, TRACE.lanes])) == kernels_with(TRACE.lanes) == [0, 1, 2]
