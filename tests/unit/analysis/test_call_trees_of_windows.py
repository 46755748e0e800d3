"""The host time of a part of a trace by call path, against one moment after the other."""

import random
import re
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekit
from tests.support import drawn_traces
from tests.unit.analysis.test_ops import slices
from tracekit.analysis.host import call_trees, ops
from tracekit.model import schema
from tracekit.model.trace import Trace
from tracekit.report import charts, timeline
from tracekit.sync import alignment

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "sample_traces" / "demo-fsdp2"
STACKS = ROOT.parent / "shared" / "traces" / "tracelens_h100_memory_stacks"
LANES = ("thread 75 (python_2)", "thread 80 (pt_autograd_0)")
SLICES = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.integers(0, 40), st.integers(0, 20)), max_size=25
)


def host(table: pl.DataFrame) -> Trace:
    lanes = pl.DataFrame({"lane": [0, 1], "name": LANES, "device": [None, None]})
    return Trace(0, 0, "drawn", ops=table, activities=schema.ACTIVITIES.empty(), lanes=schema.LANES.conform(lanes))


def thread_kinds(trace: Trace) -> dict[int, str]:
    found = {lane: re.search(r"\((.+?)(?:_\d+)?\)$", name or "") for lane, name in trace.lanes["lane", "name"].rows()}
    return {lane: match[1] if match else "thread" for lane, match in found.items()}


def by_path(tree: pl.DataFrame) -> dict[tuple[str, ...], tuple[int, int, int, int | None]]:
    values = tree.select("count", "self_ns", "total_ns", "longest_id").rows()
    return dict(zip(call_trees.stacks(tree), values, strict=True))


def by_brute_force(table: pl.DataFrame, window, threads, lane=None):
    """Go through the slices in Python: their paths by their parents, self time by what no child covers."""
    begin, end = window
    rows = {row["id"]: row for row in table.iter_rows(named=True)}
    children: dict[int, list[int]] = {}
    for row in rows.values():
        children.setdefault(row["parent_id"], []).append(row["id"])

    def path(of):
        above = path(rows[of["parent_id"]]) if of["parent_id"] in rows else (threads[of["lane"]],)
        return (*above, re.sub(r"^ProfilerStep#\d+$", "ProfilerStep", of["name"]))

    def cut(of):
        return max(of["start_ns"], begin), min(of["start_ns"] + of["dur_ns"], end)

    count, own, longest = Counter(), Counter(), {}
    for number, row in rows.items():
        past = row["start_ns"] + row["dur_ns"]
        is_inside = row["start_ns"] < end and (past > begin or row["start_ns"] >= begin)
        if not is_inside or lane not in (None, row["lane"]):
            continue
        first, last = cut(row)
        reached, covered = first, 0
        for start, stop in sorted(cut(rows[child]) for child in children.get(number, ())):
            covered += max(0, stop - max(start, reached))
            reached = max(reached, stop)
        stack = path(row)
        count[stack] += 1
        own[stack] += last - first - covered
        if stack not in longest or last - first > longest[stack][0]:
            longest[stack] = (last - first, number)
    paths = {stack[:depth] for stack in count for depth in range(1, len(stack) + 1)}
    return {
        stack: (
            count[stack],
            own[stack],
            sum(ns for other, ns in own.items() if other[: len(stack)] == stack),
            longest[stack][1] if stack in longest else None,
        )
        for stack in paths
    }


@settings(deadline=None, max_examples=150)
@given(SLICES, st.integers(-3, 50), st.integers(1, 40), st.sampled_from([None, 0, 1]))
def test_times_are_those_of_brute_force(rows, begin, length, lane):
    table = slices(*((name, "cpu_op", on, start, start + dur) for name, on, start, dur in rows))
    window = (begin, begin + length)
    tree = call_trees.of_window(host(table), window, lane)
    assert by_path(tree) == by_brute_force(table, window, {0: "python", 1: "pt_autograd"}, lane)


def test_repeated_calls_are_one_frame_that_leads_to_the_longest():
    # time    0 1 2 3 4 5 6 7 8 9
    # mm      . # # # . # # # # #   the window ends at 8: 3 and 3 of it
    # launch  . . # . . . # # . .
    table = slices(
        ("mm", "cpu_op", 0, 1, 4),
        ("launch", "runtime", 0, 2, 3),
        ("mm", "cpu_op", 0, 5, 10),
        ("launch", "runtime", 0, 6, 8),
    )
    tree = call_trees.of_window(host(table), (0, 8))
    assert by_path(tree) == {
        ("python",): (0, 0, 6, None),
        ("python", "mm"): (2, 3, 6, 0),
        ("python", "mm", "launch"): (2, 3, 3, 3),
    }
    assert call_trees.search(tree, "MM") == (1, 6)
    assert call_trees.search(tree, "n") == (2, 6)  # python contains launch, whose time counts once
    assert call_trees.search(tree, "nothing") == (0, 0)
    figure = charts.icicle(tree, "host time", search="launch").data[0]
    colours = dict(zip(figure.labels, figure.marker.colors, strict=True))
    assert colours["mm"] == colours["python"] != colours["launch"]
    below = tree.filter(name="mm")["node"][0]
    assert charts.icicle(tree, "host time", node=below).data[0].level == str(below)


def test_the_whole_of_a_recorded_run_is_its_host_time_and_parts_are_those_of_brute_force():
    run = tracekit.load(SAMPLE)
    trace = run.trace(0)
    whole = (trace.ops["start_ns"].min(), int((trace.ops["start_ns"] + trace.ops["dur_ns"]).max()) + 1)
    tree = call_trees.of_window(trace, whole)
    assert tree["self_ns"].sum() == ops.self_times(trace.ops).sum()
    columns = ["name", "count", "self_ns", "total_ns"]
    everything = call_trees.call_tree(run, call_trees.HOST, ranks=[0])
    assert tree.select(columns).sort(columns).equals(everything.select(columns).sort(columns))
    kinds = thread_kinds(trace)
    random.seed(11)
    for _ in range(2):
        begin = random.randrange(*whole)
        window = (begin, begin + (whole[1] - whole[0]) // 20)
        touching = trace.ops.filter(pl.col("start_ns") < window[1], pl.col("start_ns") + pl.col("dur_ns") >= window[0])
        found, expected = by_path(call_trees.of_window(trace, window)), by_brute_force(touching, window, kinds)
        assert len(expected) > 10
        assert found == expected


def test_a_window_on_the_runs_clock_is_moved_to_that_of_the_trace():
    traces = [host(slices(("step", "annotation", 0, 10, 20))), host(slices(("step", "annotation", 0, 10, 20)))]
    run = drawn_traces.run(traces[0])
    scene = timeline.open_scene(run)
    offsets = scene.offsets.with_columns(offset_ns=pl.lit(100, pl.Int64))
    moved = timeline.Scene(**{**vars(scene), "offsets": offsets})
    times = pl.DataFrame({"window": [0], "rank": [0], "at_ns_": [10]})
    assert alignment.on_run_clock(times, offsets, ("at_ns_",))["at_ns_"].to_list() == [110]
    assert by_path(timeline.call_paths(run, moved, 0, (115, 130)))["python", "step"] == (1, 5, 5, 0)
    assert timeline.call_paths(run, moved, 0, (15, 30)).is_empty()


@pytest.mark.accuracy
@pytest.mark.skipif(not STACKS.exists(), reason="shared traces are not here")
def test_python_frames_of_a_public_run_are_those_of_brute_force():
    run = tracekit.load(STACKS)
    trace = run.trace(run.ranks[0])
    python = trace.ops.filter(kind="python")
    assert python.height
    busiest = python.group_by("lane").len().sort("len")["lane"][-1]
    of_lane = trace.ops.filter(lane=busiest)
    first, last = of_lane["start_ns"].min(), of_lane["start_ns"].max()
    window = (first + (last - first) // 2, first + (last - first) * 51 // 100)
    touching = of_lane.filter(pl.col("start_ns") < window[1], pl.col("start_ns") + pl.col("dur_ns") >= window[0])
    expected = by_brute_force(touching, window, thread_kinds(trace))
    assert len(expected) > 10
    assert by_path(call_trees.of_window(trace, window, busiest)) == expected
