"""Our numbers of operators compared with those of TraceLens' report on the same trace (docs/hta.md).

TraceLens is not on PyPI; the expected values are those of the report that its repository (AMD-AGI/TraceLens, MIT) has
for this trace: tests/traces/h100/google_owlv2-large-patch14-ensemble__1016001_perf_report_csvs, GEMM.csv, CONV_fwd.csv,
BinaryElementwise.csv, UnaryElementwise.csv, Normalization.csv, Reduce_fwd.csv and ops_summary.csv.
"""

import json
import math
from pathlib import Path

import pytest

import tracekit
from tracekit.analysis.host import ops

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "tracelens_h100_memory_stacks"
pytestmark = [
    pytest.mark.accuracy,  # what another project measures
    pytest.mark.skipif(not TRACE.is_dir(), reason="the downloaded traces are not in ../shared"),
]
_MIB = 2**20
# Columns GFLOPS, Data Moved (MB), Kernel Time (µs)_sum and TFLOPS/s_mean; "MB" are MiB.
PRODUCTS = {
    ("aten::bmm", "[[16, 5185, 64], [16, 64, 5185]]", 120): (55.0588928, 840.6953430175781, 130015.7, 50.8181),
    ("aten::bmm", "[[16, 5185, 5185], [16, 5185, 64]]", 120): (55.0588928, 840.6953430175781, 99311.41, 66.5296),
    ("aten::addmm", "[[1024], [5185, 1024], [1024, 1024], [], []]", 480): (10.87904256, 22.255859375, 10485.19, 498.14),
    ("aten::addmm", "[[1024], [5185, 4096], [4096, 1024], [], []]", 120): (43.50024192, 58.63671875, 7882.351, 662.29),
    ("aten::addmm", "[[4096], [5185, 1024], [1024, 4096], [], []]", 120): (43.51617024, 58.642578125, 7000.659, 745.95),
    ("aten::addmm", "[[768], [5, 768], [768, 768], [], []]", 240): (0.00590208, 1.14111328125, 1579.854, 0.89696),
    ("aten::addmm", "[[768], [5, 3072], [3072, 768], [], []]", 60): (0.0235968, 4.5380859375, 525.840, 2.69374),
    ("aten::addmm", "[[1024], [5184, 1024], [1024, 1024], [], []]", 20): (10.876944384, 22.251953125, 431.964, 503.86),
    ("aten::addmm", "[[3072], [5, 768], [768, 3072], [], []]", 60): (0.02360832, 4.54248046875, 422.846, 3.35202),
    ("aten::bmm", "[[12, 5, 64], [12, 64, 5]]", 60): (3.84e-05, 0.01522064208984375, 185.698, 0.012410),
    ("aten::bmm", "[[12, 5, 5], [12, 5, 64]]", 60): (3.84e-05, 0.01522064208984375, 167.424, 0.013764),
    ("aten::addmm", "[[1], [5184, 1024], [1024, 1], [], []]", 15): (0.010622016, 10.136842727661133, 118.271, 1.35036),
    ("aten::addmm", "[[768], [5184, 1024], [1024, 768], [], []]", 5): (8.157708288, 19.22021484375, 86.782, 470.020),
    ("aten::addmm", "[[4], [5184, 1024], [1024, 4], [], []]", 5): (0.042488064, 10.172370910644531, 56.543, 3.75748),
    ("aten::bmm", "[[1, 5184, 768], [1, 768, 1]]", 5): (0.007962624, 7.6051025390625, 23.615, 1.68626),
    ("aten::mm", "[[1, 768], [768, 1]]", 5): (1.536e-06, 0.0029315948486328125, 23.326, 0.00032934),
    ("aten::mm", "[[1, 768], [768, 768]]", 5): (0.001179648, 1.1279296875, 18.784, 0.314032),
    ("aten::mm", "[[1, 1024], [1024, 768]]", 5): (0.001572864, 1.50341796875, 17.918, 0.438990),
    ("aten::convolution", "[[1, 3, 1008, 1008], [1024, 3, 14, 14], [], [], [], [], [], [], []]", 5): (
        6.242697216, 17.08740234375, 1350.804, 23.10743,
    ),
}  # fmt: skip
# Columns Data Moved (MB) and TB/s_mean.
MEMORY_BOUND = {
    ("aten::mul", "[[1, 5185, 4096], [1, 5185, 4096]]", 120): (121.5234375, 2.92789),
    ("aten::add", "[[1, 5185, 1024], [1, 5185, 1024], []]", 245): (30.380859375, 3.37218),
    ("aten::add", "[[1, 5, 768], [1, 5, 768], []]", 125): (0.02197265625, 0.0153968),
    ("aten::add", "[[1, 12, 5, 5], [1, 1, 5, 5], []]", 120): (0.0011920928955078125, 0.000527996),
    ("aten::sigmoid", "[[1, 5185, 4096]]", 120): (81.015625, 2.55623),
    ("aten::copy_", "[[1, 16, 5185, 64], [1, 16, 5185, 64], []]", 360): (20.25390625, 1.53095),
    ("aten::copy_", "[[1, 5185, 16, 64], [1, 5185, 16, 64], []]", 120): (20.25390625, 1.36025),
    ("aten::mul", "[[1, 5185, 4096], []]", 120): (81.01563262939453, 2.76494),
    ("aten::mul", "[[1, 5185, 1024], []]", 120): (20.25391387939453, 2.72648),
}
# ops_summary.csv: Count and total_direct_kernel_time_sum in µs.
BY_OPERATOR = {
    "aten::_softmax": (180, 262538.216), "aten::bmm": (365, 229703.849), "aten::addmm": (1125, 28590.304),
    "aten::copy_": (830, 22153.834), "aten::mul": (555, 10195.417), "aten::native_layer_norm": (385, 4242.812),
    "aten::sigmoid": (185, 4102.414), "aten::add": (515, 2831.952), "aten::cudnn_convolution": (5, 1350.804),
    "aten::index_select": (15, 249.694), "aten::cat": (5, 219.806), "aten::gelu": (20, 176.769),
    "aten::div": (20, 98.878), "aten::linalg_vector_norm": (20, 72.383), "aten::mm": (15, 60.028),
    "aten::index": (5, 22.176), "aten::add_": (5, 22.144), "aten::argmax": (5, 18.527), "aten::where": (5, 14.657),
    "aten::masked_fill_": (10, 14.587), "aten::arange": (10, 13.280), "aten::fill_": (10, 12.992),
    "aten::lt": (5, 10.687), "aten::eq": (5, 10.048), "aten::gt": (5, 9.247), "aten::elu": (5, 8.479),
    "aten::exp": (5, 8.447), "aten::sub": (5, 7.040),
}  # fmt: skip


@pytest.fixture(scope="module")
def run():
    return tracekit.load(TRACE)


@pytest.fixture(scope="module")
def by_shapes(run):
    table = ops.ops(run, by=("name", "shapes"))
    return {(row["name"], row["shapes"], row["count"]): row for row in table.to_dicts()}


def bias(name, shapes):
    """Return the additions of a bias, which TraceLens counts and torch's counter does not."""
    if name != "aten::addmm":
        return 0
    _, left, right, *_ = json.loads(shapes)
    return left[0] * right[1]


@pytest.mark.parametrize("key", PRODUCTS, ids=lambda key: f"{key[0]} {key[1]}")
def test_products_have_the_operations_bytes_and_rates_of_tracelens(by_shapes, key):
    gflop, mib, kernel_us, tflops_per_s = PRODUCTS[key]
    name, shapes, count = key
    row = by_shapes[key]
    assert row["flops"] / count == pytest.approx(gflop * 1e9 - bias(name, shapes), rel=1e-9)
    assert row["bytes"] / count == pytest.approx(mib * _MIB, rel=1e-9)
    rate = tflops_per_s * row["flops"] / count / (gflop * 1e9)
    assert row["tflops_per_s"] == pytest.approx(rate, rel=5e-3)  # theirs is the mean of the calls' rates
    assert row["flops"] / row["tflops_per_s"] / 1e6 == pytest.approx(kernel_us, rel=2e-4)


@pytest.mark.parametrize("key", MEMORY_BOUND, ids=lambda key: f"{key[0]} {key[1]}")
def test_memory_bound_operators_have_the_bytes_and_rates_of_tracelens(by_shapes, key):
    mib, tbytes_per_s = MEMORY_BOUND[key]
    row = by_shapes[key]
    assert row["bytes"] / row["count"] == pytest.approx(mib * _MIB, rel=1e-6)
    assert row["tbytes_per_s"] == pytest.approx(tbytes_per_s, rel=0.015)


def test_a_norm_of_rows_writes_one_value_a_row_where_tracelens_counts_one(by_shapes):
    row = by_shapes["aten::linalg_vector_norm", "[[1, 5184, 768], [], [], [], []]", 5]
    theirs = 7.593751907348633 * _MIB  # "num_output_elems" 1, although it is over the last dimension
    assert row["bytes"] / row["count"] == pytest.approx(theirs + (5184 - 1) * 2, rel=1e-9)


def test_operators_have_the_device_time_of_tracelens(run):
    own = {row["name"]: row for row in ops.ops(run).to_dicts()}
    theirs = {name: time_us for name, (_, time_us) in BY_OPERATOR.items()}
    assert {name: own[name]["device_ns"] / 1e3 for name in theirs} == pytest.approx(theirs, rel=3e-4, abs=0.1)
    on_device = {name: row["device_ns"] for name, row in own.items() if row["device_ns"]}
    assert on_device.keys() == theirs.keys()
    assert math.isclose(sum(on_device.values()) / 1e3, sum(theirs.values()), rel_tol=1e-4)
