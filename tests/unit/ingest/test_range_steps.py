"""Steps of programs without PyTorch: which ranges mark them, and which are none."""

import json

import pytest

from tests.support.kineto_files import slice_
from tests.support.nsight_export import HOST, Export
from tracekit.analysis.parallelism import workload
from tracekit.analysis.parallelism.workload import Program
from tracekit.ingest.loader import load
from tracekit.model import environment

MAIN, OTHER = 1, 2
US_PER_KERNEL = 10


def recorded(folder, *ranges, kernels=40, kernel_name="stencil", header=(environment.RECORDS_ANY_PROGRAM,)):
    """Return the trace of kernels that are launched every 10 µs, with ranges (name, start, end, thread)."""
    events = []
    for number in range(kernels):
        at_us = number * US_PER_KERNEL
        events.append(slice_("cuda_runtime", "cudaLaunchKernel", at_us + 2, 3, tid=MAIN, correlation=number + 1))
        where = {"device": 0, "stream": 7, "correlation": number + 1}
        events.append(slice_("kernel", kernel_name, at_us + 6, 7, tid=7, **where))
    events += [slice_("user_annotation", name, start, end - start, tid=tid) for name, start, end, tid in ranges]
    document = dict.fromkeys(header, True) | {"schemaVersion": 1, "traceEvents": events}
    (folder / "trace.json").write_text(json.dumps(document))
    return load(folder, cache=False).trace(0)


def in_a_row(name, *, count=4, length=100, first=0, thread=MAIN):
    return [(name, first + i * 100, first + i * 100 + length - 1, thread) for i in range(count)]


@pytest.mark.parametrize("name", ["iteration", "timestep", "frame"])
def test_ranges_that_follow_one_another_through_the_recording_are_steps(name, tmp_path):
    trace = recorded(tmp_path, *in_a_row(name))
    assert trace.steps["step"].to_list() == [0, 1, 2, 3]
    assert trace.activities.group_by("step").len().sort("step").rows() == [(step, 10) for step in range(4)]
    assert "steps_from_ranges" in trace.data_quality["kind"]


def test_numbers_in_the_names_do_not_make_them_different(tmp_path):
    numbered = [(f"frame {i}", *times) for i, (_, *times) in enumerate(in_a_row("frame"))]
    assert recorded(tmp_path, *numbered).steps.height == 4


def test_ranges_inside_others_and_setup_before_them_do_not_matter(tmp_path):
    inner = [("apply", start + 10, end - 10, MAIN) for _, start, end, _ in in_a_row("iteration", count=3, first=100)]
    trace = recorded(tmp_path, ("setup", 0, 90, MAIN), *in_a_row("iteration", count=3, first=100), *inner)
    assert trace.steps["step"].to_list() == [0, 1, 2]


@pytest.mark.parametrize(
    "ranges",
    [
        pytest.param(in_a_row("half", count=2, length=200), id="two ranges"),
        pytest.param(in_a_row("part", count=4, length=60), id="a part of each iteration"),
        pytest.param(in_a_row("output", count=3, first=300, length=10), id="little of the recording"),
        pytest.param(in_a_row("request", thread=OTHER), id="another thread"),
        pytest.param([("run", 0, 400, MAIN), *in_a_row("iteration", length=98)], id="inside another range"),
        pytest.param([], id="no range"),
    ],
)
def test_other_ranges_are_no_steps(ranges, tmp_path):
    trace = recorded(tmp_path, *ranges)
    assert trace.steps["step"].to_list() == [None]
    assert "steps_from_ranges" not in trace.data_quality["kind"]


@pytest.mark.parametrize(
    "how", [{"header": ()}, {"kernel_name": "void at::native::vectorized_elementwise_kernel"}], ids=["kineto", "torch"]
)
def test_recordings_of_pytorch_keep_their_own_marks(how, tmp_path):
    assert "steps_from_ranges" not in recorded(tmp_path, *in_a_row("iteration"), **how).data_quality["kind"]


def test_an_export_that_states_no_version_is_of_any_program(tmp_path):
    path = tmp_path / "report.sqlite"
    export = Export(path, "2023.4")
    launch = {"nameId": export.text("cudaLaunchKernel_v7000"), "globalTid": HOST | 1, "correlationId": 7}
    export.insert("CUPTI_ACTIVITY_KIND_RUNTIME", start=120, end=130, **launch)
    of = {"globalPid": HOST, "deviceId": 0, "contextId": 1, "streamId": 20, "correlationId": 7}
    export.insert("CUPTI_ACTIVITY_KIND_KERNEL", start=200, end=900, **of, demangledName=export.text("stencil(float*)"))
    export.close()
    assert workload.program(load(path, cache=False)) is Program.OTHER
