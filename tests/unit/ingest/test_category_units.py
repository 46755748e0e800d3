"""Categories of events whose times are in another unit than those of all others."""

import json

import pytest

from tests.support.kineto_files import slice_
from tracekit.ingest.readers.kineto import reader

EPOCH_US = 1_764_500_000_000_000.0
SINCE_BOOT_US = 4_000_000_000.0
KERNELS, NOTHING = ("kernel",), ()


def events(begin_us, scales):
    """Return five steps of a launch and a kernel of 50 µs; the times of categories in `scales` are multiplied."""
    made = []
    for number in range(5):
        at_us = begin_us + 100 * number
        made += [
            slice_("user_annotation", f"ProfilerStep#{number}", at_us, 90.0, tid=1),
            slice_("cpu_op", "aten::mm", at_us + 5, 20.0, tid=1),
            slice_("cuda_runtime", "cudaLaunchKernel", at_us + 10, 5.0, tid=1, correlation=number + 1),
            slice_("kernel", "gemm", at_us + 30, 50.0, tid=7, device=0, stream=7, correlation=number + 1),
        ]
    for event in made:
        scale = scales.get(event["cat"], 1)
        event["ts"], event["dur"] = event["ts"] * scale, event["dur"] * scale
    return made


def read(folder, made, **header):
    path = folder / "trace.json"
    path.write_text(json.dumps({**header, "traceEvents": made}))
    return reader.read(str(path), rank=0)


@pytest.mark.parametrize("begin_us", [EPOCH_US, SINCE_BOOT_US])
@pytest.mark.parametrize("scale", [1000, 1 / 1000], ids=["ns", "ms"])
@pytest.mark.parametrize("category", ["kernel", "user_annotation", "cuda_runtime"])
def test_a_category_in_another_unit_is_converted_with_a_remark(tmp_path, begin_us, scale, category):
    expected = read(tmp_path, events(begin_us, {}))
    trace = read(tmp_path, events(begin_us, {category: scale}))
    (issue,) = trace.data_quality.filter(kind="category_unit").rows(named=True)
    assert issue["affected_ratio"] == 0.25
    assert trace.steps["step"].to_list() == [0, 1, 2, 3, 4]
    for column in ("start_ns", "dur_ns"):
        difference_ns = (trace.activities[column] - expected.activities[column]).abs().max()
        assert difference_ns <= 1_000, column  # float64 has 16 digits


def test_kernels_and_copies_in_ns_are_both_converted(tmp_path):
    made = events(EPOCH_US, {})
    copies = [event | {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": event["ts"] + 60} for event in made[3::4]]
    for event in copies + made[3::4]:
        event["ts"], event["dur"] = event["ts"] * 1000, event["dur"] * 1000
    trace = read(tmp_path, made + copies)
    assert trace.activities["kind"].value_counts(sort=True)["count"].to_list() == [5, 5]


@pytest.mark.parametrize("row", [0, 3])
def test_a_single_time_in_ns_is_left_out(tmp_path, row):
    made = events(EPOCH_US, {})
    made[row]["ts"] *= 1000
    kinds = read(tmp_path, made).data_quality["kind"].to_list()
    assert "bad_times" in kinds
    assert "category_unit" not in kinds


@pytest.mark.parametrize("begin_us", [0.0, SINCE_BOOT_US])
def test_times_in_one_unit_are_as_they_are(tmp_path, begin_us):
    assert read(tmp_path, events(begin_us, {})).data_quality.filter(kind="category_unit").is_empty()


def test_device_work_at_wrong_times_is_not_missing(tmp_path):
    # No unit brings 10,000 times the time to that of the calls.
    issues = read(tmp_path, events(EPOCH_US, {"kernel": 1e12})).data_quality
    (issue,) = issues.filter(kind="device_times").rows(named=True)
    assert (issue["affected_ratio"], "no_device_activity" in issues["kind"].to_list()) == (1.0, False)
