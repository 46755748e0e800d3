"""Call trees, and the files that flame graph viewers read."""

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekit
from tests.support import cli_runner, drawn_traces, perfetto_reader
from tests.unit.analysis.test_ops import slices
from tracekit.analysis.compute import kernels
from tracekit.analysis.host import call_trees, ops
from tracekit.analysis.host.call_trees import DEVICE, HOST, UNLINKED
from tracekit.errors import ConfigError, InputError
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.report import charts
from tracekit.report.export import flame_graphs

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "sample_traces" / "demo-fsdp2"
OTHERS = ROOT.parent / "shared" / "traces"


def drawn() -> Run:
    # time    0 1 2 3 4 5 6 7 8 9      the kernel of each launch takes 5, 3 and 1; one launch was not recorded (2)
    # step    # # # # # # # # # .
    # mm      . # # # # . . . . .
    # launch  . . # . . . . . . .
    # mm      . . . . . # # # . .
    # launch  . . . . . . # # . .
    table = slices(
        ("ProfilerStep#7", "annotation", 0, 0, 9),
        ("mm", "cpu_op", 0, 1, 5),
        ("cudaLaunchKernel", "runtime", 0, 2, 3),
        ("mm", "cpu_op", 0, 5, 8),
        ("cudaLaunchKernel", "runtime", 0, 6, 8),
    )
    launches = table.filter(kind="runtime")["id"].to_list()
    work = pl.DataFrame(
        {
            "id": [0, 1, 2],
            "name": ["gemm", "gemm", "copy"],
            "kind": ["compute", "compute", "memcpy"],
            "start_ns": [3, 8, 12],
            "dur_ns": [5, 3, 2],
            "launch_id": [*launches, None],
            "device": [0, 0, 0],
            "lane": [1, 1, 1],
        }
    )
    lanes = pl.DataFrame({"lane": [0, 1], "name": ["thread 75 (python_2)", "stream 7"], "device": [None, 0]})
    trace = Trace(
        0, 0, "drawn", ops=table, activities=schema.ACTIVITIES.conform(work), lanes=schema.LANES.conform(lanes)
    )
    return drawn_traces.run(trace)


def by_stack(tree: pl.DataFrame, value: str = "self_ns") -> dict[tuple[str, ...], int]:
    return {stack: ns for stack, ns in zip(call_trees.stacks(tree), tree[value], strict=True) if ns}


def test_device_time_is_below_the_ops_around_the_launch():
    tree = call_trees.call_tree(drawn(), DEVICE)
    assert by_stack(tree) == {("ProfilerStep", "mm", "gemm"): 8, (UNLINKED, "copy"): 2}
    assert by_stack(tree, "total_ns")["ProfilerStep", "mm"] == 8
    assert tree.filter(name="gemm")["count"].to_list() == [2]


def test_host_time_is_the_self_time_below_the_kind_of_thread():
    tree = call_trees.call_tree(drawn(), HOST, by_rank=True)
    root = ("rank 0", "python", "ProfilerStep")
    assert by_stack(tree) == {root: 2, (*root, "mm"): 4, (*root, "mm", "cudaLaunchKernel"): 3}
    assert by_stack(tree, "total_ns")["rank 0",] == 9


def test_what_is_not_there_is_said(wording):
    with wording.raises(ConfigError):
        call_trees.call_tree(drawn(), "gpu")
    with wording.raises(InputError):
        call_trees.call_tree(drawn(), ranks=[5])
    with wording.raises(InputError):
        call_trees.call_tree(drawn(), step=3)


FRAMES = st.lists(st.tuples(st.integers(-1, 30), st.sampled_from("abc"), st.integers(0, 9)), max_size=40)


@settings(deadline=None)
@given(FRAMES)
def test_frames_with_equal_stacks_are_summed_as_by_brute_force(frames):
    parents = [min(parent, at - 1) for at, (parent, _, _) in enumerate(frames)]
    expected: Counter[tuple[str, ...]] = Counter()
    paths: list[tuple[str, ...]] = []
    for parent, (_, name, value) in zip(parents, frames, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), name))
        expected[paths[-1]] += value
    tree = call_trees._tree(
        pl.Series([name for _, name, _ in frames], dtype=pl.String),
        np.array(parents, np.int64),
        self_ns=np.array([value for _, _, value in frames], np.int64),
    )
    assert by_stack(tree) == {path: value for path, value in expected.items() if value}
    totals = call_trees._totals(tree["parent"].to_numpy(), tree["self_ns"].to_numpy())
    for stack, total in zip(call_trees.stacks(tree), totals, strict=True):
        assert total == sum(value for path, value in expected.items() if path[: len(stack)] == stack) > 0


def test_a_difference_has_the_times_of_both_sides():
    tree = call_trees.call_tree(drawn())
    halved = call_trees.difference(tree, tree.filter(pl.col("name") != "copy"), (1.0, 0.5))
    rows = dict(zip(call_trees.stacks(halved), halved.select("before_ns", "after_ns").rows(), strict=True))
    assert rows["ProfilerStep", "mm", "gemm"] == (8, 4)
    assert rows[UNLINKED, "copy"] == (2, 0)


def test_a_recorded_run_loses_no_time():
    run = tracekit.load(SAMPLE)
    tree = call_trees.call_tree(run, HOST)
    whole_ns = sum(ops.self_times(run.trace(rank).ops).sum() for rank in run.ranks)
    assert tree["self_ns"].sum() == tree.filter(parent=-1)["total_ns"].sum() == whole_ns
    first = call_trees.call_tree(run, HOST, ranks=[0])["self_ns"].sum()
    assert first == ops.self_times(run.trace(0).ops).sum()


@pytest.mark.skipif(not OTHERS.exists(), reason="shared traces are not here")
@pytest.mark.parametrize("name", ["tracelens_h100_memory_stacks", "hta_nccl_args_a100"])
def test_the_device_time_of_a_public_run_is_that_of_its_kernels(name: str):
    run = tracekit.load(OTHERS / name)
    tree = call_trees.call_tree(run, DEVICE)
    assert tree["self_ns"].sum() == kernels.kernels(run)["total_ns"].sum()
    longest = by_stack(tree)
    assert max(longest.values()) <= kernels.kernels(run)["total_ns"].max()


def written(write: flame_graphs.Writer, tree: pl.DataFrame) -> bytes:
    file = io.BytesIO()
    write(tree, file, "drawn · device time")
    return file.getvalue()


def test_collapsed_stacks_have_a_line_each_even_with_hostile_names():
    tree = call_trees.call_tree(drawn())
    assert (
        written(flame_graphs.collapsed_stacks, tree).decode()
        == "(launch not recorded);copy 2\nProfilerStep;mm;gemm 8\n"
    )
    hostile = tree.with_columns(pl.when(name="gemm").then(pl.lit("a;b\n9\x1b[2J")).otherwise("name").alias("name"))
    assert "ProfilerStep;mm;a,b,9,[2J 8\n" in written(flame_graphs.collapsed_stacks, hostile).decode()
    both = written(flame_graphs.collapsed_stacks, call_trees.difference(tree, tree, (1.0, 2.0))).decode()
    assert "ProfilerStep;mm;gemm 8 16\n" in both


def test_a_speedscope_file_has_each_stack_with_its_time():
    document = json.loads(written(flame_graphs.speedscope, call_trees.call_tree(drawn())))
    assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    (profile,) = document["profiles"]
    names = [frame["name"] for frame in document["shared"]["frames"]]
    found = {
        tuple(names[at] for at in sample): ns for sample, ns in zip(profile["samples"], profile["weights"], strict=True)
    }
    assert found == {("ProfilerStep", "mm", "gemm"): 8, (UNLINKED, "copy"): 2}
    assert (profile["startValue"], profile["endValue"], profile["unit"]) == (0, 10, "nanoseconds")


def test_a_perfetto_file_nests_a_slice_per_stack():
    found = perfetto_reader.read(written(flame_graphs.perfetto, call_trees.call_tree(drawn())))
    shown = {slice_.name: (slice_.start_ns, slice_.start_ns + slice_.dur_ns) for slice_ in found.slices}
    assert shown == {"ProfilerStep": (0, 8), "mm": (0, 8), "gemm": (0, 8), UNLINKED: (8, 10), "copy": (8, 10)}


def test_an_icicle_of_two_trees_is_as_wide_as_one_side_and_coloured_by_change():
    tree = call_trees.TREE
    before = pl.DataFrame([(0, -1, "a", 1, 40, 40), (1, -1, "b", 1, 60, 60)], tree, orient="row")
    after = pl.DataFrame([(0, -1, "a", 1, 80, 80), (1, -1, "c", 1, 20, 20)], tree, orient="row")
    changed = call_trees.difference(before, after)
    figure = charts.difference_icicle(changed, "device time").data[0]
    assert dict(zip(figure.labels, figure.values, strict=True)) == {"device time": 100, "a": 80, "c": 20}
    assert figure.customdata[list(figure.labels).index("a")] == "40 ns → 80 ns (+40 ns, +100.0%)"
    colours = dict(zip(figure.labels, figure.marker.colors, strict=True))
    assert colours["a"] == colours["c"]  # twice as long, and new: both in full
    gone = charts.difference_icicle(changed, "device time", is_before=True).data[0]
    assert dict(zip(gone.labels, gone.values, strict=True)) == {"device time": 100, "a": 40, "b": 60}
    by_name = dict(zip(gone.labels, gone.marker.colors, strict=True))
    assert by_name["b"] not in (by_name["a"], colours["a"])
    assert charts.difference_icicle(changed.clear(), "nothing").data == ()


def test_an_icicle_starts_where_the_time_is_divided():
    figure = charts.icicle(call_trees.call_tree(drawn()), "device time")
    (shown,) = figure.data
    assert shown.level == "all"
    assert dict(zip(shown.labels, shown.values, strict=True))["gemm"] == 8
    alone = charts.icicle(call_trees.call_tree(drawn(), HOST), "host time").data[0]
    assert alone.labels[alone.ids.index(alone.level)] == "ProfilerStep"


def test_the_command_writes_the_format_of_the_ending_and_names_wrong_options(tmp_path: Path):
    done = cli_runner.tracekit("kernels", "--by", "stack", SAMPLE, "--of", "host", "--out", tmp_path / "host.folded")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "host.folded").read_text().splitlines()
    whole_ns = call_trees.call_tree(tracekit.load(SAMPLE), HOST)["self_ns"].sum()
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == whole_ns
    for options, message in (
        (("--out", tmp_path / "host.svg"), "use the ending of a format"),
        (("--out", tmp_path / "a.json", "--against", SAMPLE), "only .folded files have two values"),
        (("--out", tmp_path / "a.json"), "no work of the device"),
        (("--out", tmp_path / "a.json", "--ranks", "x"), "expected ranks and ranges"),
    ):
        failed = cli_runner.tracekit("kernels", "--by", "stack", SAMPLE, *options)
        assert failed.returncode == 2
        assert message in cli_runner.only_line(failed)
