"""Distance of calls from the roofline, and the figure of it."""

import math

import polars as pl
import pytest

from tests.support.drawn_kernels import H100, Kernel, run
from tracekit.analysis.host import ops
from tracekit.report import charts

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


def test_names_from_traces_are_escaped_in_the_figure():
    made = run(Kernel("aten::mm", 278, PRODUCT.shapes, BF16), device=H100)
    rows = ops.rooflines(made).to_dicts()
    rows[0]["name"] = "<img src=x onerror=alert(1)>"
    figure = charts.roofline(pl.DataFrame(rows), made.table(ops.roofs))
    assert "<img" not in figure.to_json()
