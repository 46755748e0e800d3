"""Distance of calls from the roofline, and the figure of it."""

import itertools
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekit
from tests.support import drawn_traces
from tests.support.drawn_kernels import H100, Kernel, run
from tracekit.analysis.host import ops
from tracekit.model import nesting, schema
from tracekit.report import charts

SAMPLE = Path(__file__).parents[3] / "sample_traces" / "demo-fsdp2"


def slices(*rows: tuple[str, str, int, int, int]) -> pl.DataFrame:
    """Return an ops table of (name, kind, lane, start_ns, end_ns), each inside the one that encloses it."""
    table = (
        pl.DataFrame(rows, schema=["name", "kind", "lane", "start_ns", "end_ns"], orient="row")
        .sort("lane", "start_ns", "end_ns", descending=[False, False, True], maintain_order=True)
        .with_row_index("id")
    )
    parent = nesting.parents(table["lane"].to_numpy(), table["start_ns"].to_numpy(), table["end_ns"].to_numpy())
    return schema.OPS.conform(
        table.with_columns(pl.Series("parent_id", parent), dur_ns=pl.col("end_ns") - pl.col("start_ns"))
    )


def test_self_time_excludes_nested_slices_of_any_kind():
    # time    0 1 2 3 4 5 6 7 8 9
    # linear  # # # # # # # # # .      9, by itself 9 - 5 - 2
    # mm      . # # # # # . . . .      5, by itself 5 - 1
    # launch  . . # . . . . . . .      1
    # add     . . . . . . # # . .      2
    table = slices(
        ("linear", "cpu_op", 0, 0, 9),
        ("mm", "cpu_op", 0, 1, 6),
        ("launch", "runtime", 0, 2, 3),
        ("add", "cpu_op", 0, 6, 8),
    )
    assert dict(zip(table["name"], ops.self_times(table), strict=True)) == {"linear": 2, "mm": 4, "launch": 1, "add": 2}


SPANS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=25)


@settings(deadline=None)
@given(SPANS)
def test_self_times_equal_a_mask_per_nanosecond(spans):
    table = slices(*((f"s{i}", "cpu_op", lane, start, start + dur) for i, (lane, start, dur) in enumerate(spans)))
    parents = table["parent_id"].to_list()
    for row, found in zip(table.iter_rows(named=True), ops.self_times(table), strict=True):
        mask = np.zeros(50, bool)
        mask[row["start_ns"] : row["start_ns"] + row["dur_ns"]] = True
        for child, parent in zip(table.iter_rows(named=True), parents, strict=True):
            if parent == row["id"]:
                mask[child["start_ns"] : child["start_ns"] + child["dur_ns"]] = False
        assert found == mask.sum()


def test_device_time_counts_only_for_the_innermost_op_around_the_launch():
    table = slices(
        ("aten::linear", "cpu_op", 9, 0, 9),
        ("aten::mm", "cpu_op", 9, 1, 6),
        ("cudaLaunchKernel", "runtime", 9, 2, 3),
        ("cudaLaunchKernel", "runtime", 9, 7, 8),
    )
    launches = table.filter(pl.col("kind") == "runtime")["id"]
    activities = pl.DataFrame({"name": ["gemm", "bias"], "kind": "compute", "dur_ns": [70, 5], "start_ns": [3, 80]})
    activities = activities.with_columns(launch_id=launches, lane=pl.lit(0))
    run = drawn_traces.run(drawn_traces.trace("compute a", activities=activities, ops=table))
    found = {row["name"]: row for row in ops.ops(run).to_dicts()}
    assert {name: row["device_ns"] for name, row in found.items()} == {"aten::mm": 70, "aten::linear": 5}
    assert found["aten::mm"]["self_ratio"] == 4 / 9


def test_a_cpu_run_has_no_device_time():
    run = drawn_traces.run(
        drawn_traces.trace("compute aa", on_device=False, ops=slices(("aten::mm", "cpu_op", 0, 0, 2)))
    )
    assert ops.ops(run)["device_ns"].to_list() == [None]


def test_selected_kinds_have_separate_rows():
    table = slices(("x", "cpu_op", 0, 0, 2), ("x", "python", 1, 0, 7))
    run = drawn_traces.run(drawn_traces.trace("compute aa", ops=table))
    assert ops.ops(run).select("name", "kind").rows() == [("x", "cpu_op")]
    both = ops.ops(run, kinds=ops.KINDS)
    assert both.select("name", "kind").rows() == [("x", "python"), ("x", "cpu_op")]
    assert both["self_ratio"].to_list() == pytest.approx([7 / 9, 2 / 9])


@pytest.mark.parametrize("by", [("name",), ("shapes", "phase"), ("unit", "span", "step", "thread", "rank")])
def test_self_ratios_of_a_recorded_run_sum_to_one_by_any_key(by):
    run = tracekit.load(SAMPLE)
    found = ops.ops(run, by=by, kinds=ops.KINDS)
    whole = pl.concat([each.ops for each in run.traces()])
    assert (found["count"].sum(), found["total_ns"].sum()) == (whole.height, whole["dur_ns"].sum())
    assert found["self_ratio"].sum() == pytest.approx(1)


def test_shapes_are_those_that_the_profiler_recorded():
    run = tracekit.load(SAMPLE)
    found = ops.ops(run, by=("name", "shapes")).filter(pl.col("name") == "aten::mm")
    assert found.height > 1
    assert found["shapes"].str.json_decode(pl.List(pl.List(pl.Int64))).list.len().to_list() == [2] * found.height


BF16 = "c10::BFloat16"
PRODUCT = Kernel("aten::mm", 278, [[4096, 4096], [4096, 4096]], BF16)  # 137.4 GFLOP at half of 989 TFLOP/s
ADDITION = Kernel("aten::add", 60, [[4096, 4096], [4096, 4096]], BF16)  # 100.7 MB at half of 3.35 TB/s
UNKNOWN = Kernel("aten::mm", 500)


def test_calls_are_ordered_by_their_time_above_the_roofline():
    product, addition = ops.rooflines(run(ADDITION, UNKNOWN, PRODUCT, device=H100)).to_dicts()
    assert (product["name"], product["count"], product["work_ns"]) == ("aten::mm", 2, 2 * 278_000)
    assert product["flops_per_byte"] == pytest.approx(2 * 4096**3 / (3 * 4096**2 * 2))
    assert product["roofline_ratio"] == pytest.approx(0.5, abs=0.001)
    assert product["above_ns"] == pytest.approx(278_000, rel=0.001)
    assert (addition["name"], addition["flops_per_byte"], addition["tflops_per_s"]) == ("aten::add", None, None)
    assert addition["above_ns"] == pytest.approx(2 * (60_000 - 3 * 4096**2 * 2 / 3.35e3), rel=0.001)


def test_there_is_no_roofline_of_an_unknown_device():
    unknown = run(PRODUCT, device="a device")
    assert ops.rooflines(unknown).is_empty()
    assert unknown.table(ops.roofs).is_empty()


def test_calls_are_drawn_at_their_intensity_and_rate_below_the_roofs():
    made = run(ADDITION, PRODUCT, device=H100)
    figure = charts.roofline(ops.rooflines(made), made.table(ops.roofs))
    markers = {trace.name: trace for trace in figure.data if trace.mode == "markers"}
    product, addition = markers["products"], markers["without products"]
    assert product.x[0] == pytest.approx(4096 / 3)
    assert product.y[0] == pytest.approx(2 * 4096**3 / 278e-6)
    assert addition.x[0] == charts.WITHOUT_PRODUCTS
    assert addition.y[0] == pytest.approx(0.25 * 3 * 4096**2 * 2 / 60e-6)
    assert product.marker.size[0] / addition.marker.size[0] == pytest.approx(math.sqrt(278 / 60))
    roofs = [trace for trace in figure.data if trace.mode == "lines"]
    assert [roof.y[-1] for roof in roofs] == [67e12, 494e12, 989e12, 1979e12]
    assert all(roof.y[0] == pytest.approx(3.35e12 * roof.x[0]) for roof in roofs)
    low, high = (10**each for each in figure.layout.xaxis.range)
    assert low < 0.25 < 4096 / 3 < high


def test_names_of_close_roofs_do_not_overlap():
    # So slow that many powers of ten are drawn: peaks a factor of two apart are less than a name apart.
    made = run(Kernel("aten::mm", 3_000_000_000, [[64, 64], [64, 64]], BF16), device=H100)
    layout = charts.roofline(ops.rooflines(made), made.table(ops.roofs)).layout
    power_px = (layout.height - layout.margin.t - 60) / (layout.yaxis.range[1] - layout.yaxis.range[0])
    roof_names = [annotation for annotation in layout.annotations if annotation.xref == "paper"]
    assert [name.text for name in roof_names] == ["fp32/fp64", "tf32", "bf16/fp16", "fp8/int8"]
    heights_px = [power_px * name.y + name.yshift for name in roof_names]
    assert all(upper - lower >= roof_names[0].font.size for lower, upper in itertools.pairwise(heights_px))
    assert roof_names[0].yshift == 0  # no name is close below it


def test_names_from_traces_are_escaped_in_the_figure():
    made = run(Kernel("aten::mm", 278, PRODUCT.shapes, BF16), device=H100)
    rows = ops.rooflines(made).to_dicts()
    rows[0]["name"] = "<img src=x onerror=alert(1)>"
    figure = charts.roofline(pl.DataFrame(rows), made.table(ops.roofs))
    assert "<img" not in figure.to_json()
