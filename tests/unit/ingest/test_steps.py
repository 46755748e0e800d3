"""Steps of traces without ProfilerStep marks: by the optimizer."""

import json
from pathlib import Path

import pytest

from tests.support.kineto_files import slice_
from tracekit.ingest.readers.kineto import reader
from tracekit.model.trace import Trace


def read(folder: Path, *slices: tuple[str, float, float]) -> Trace:
    """Read a trace of host slices, each a name, a start and a duration in µs."""
    kinds = {True: "user_annotation", False: "cpu_op"}
    events = [
        {"ph": "X", "cat": kinds[name.startswith("Optimizer")], "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur}
        for name, ts, dur in slices
    ]
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return reader.read(str(path), rank=0)


BACKWARD = "autograd::engine::evaluate_function: MulBackward0"


def test_a_step_ends_where_the_optimizers_does(tmp_path: Path) -> None:
    steps = [("aten::mul", 10 * n, 2.0) for n in range(3)] + [(BACKWARD, 10 * n + 3, 2.0) for n in range(3)]
    ends = [("Optimizer.step#SGD.step", 10.0 * n + 6, 1.0) for n in range(3)]
    trace = read(tmp_path, *steps, *ends, ("aten::add", 30, 1.0))
    assert trace.steps["step"].to_list() == [0, 1, 2]
    assert trace.steps["host_end_ns"].to_list() == [7_000, 17_000, 27_000]
    assert trace.steps["host_start_ns"].to_list() == [0, 7_000, 17_000]
    of_last = trace.ops.filter(trace.ops["name"] == "aten::add")["step"].to_list()
    assert of_last == [None]  # a step whose end is not there is none
    assert trace.data_quality["kind"].to_list() == ["steps_from_optimizer"]


def test_several_optimizers_with_no_backward_between_end_one_step(tmp_path: Path) -> None:
    slices = []
    for n in range(2):
        slices += [
            (BACKWARD, 20.0 * n, 2.0),
            ("aten::mul", 20.0 * n, 1.0),
            ("Optimizer.step#Muon.step", 20.0 * n + 4, 1.0),
        ]
        slices += [("Optimizer.step#AdamW.step", 20.0 * n + 6, 3.0)]
    assert read(tmp_path, *slices).steps["host_end_ns"].to_list() == [9_000, 29_000]


def test_without_backward_ops_every_optimizer_step_ends_one(tmp_path: Path) -> None:
    slices = [("aten::mul", 0.0, 1.0), ("Optimizer.step#SGD.step", 2.0, 1.0)]
    slices += [("aten::mul", 7.0, 1.0), ("Optimizer.step#SGD.step", 9.0, 1.0)]
    assert read(tmp_path, *slices).steps["step"].to_list() == [0, 1]


@pytest.mark.parametrize("name", ["ProfilerStep#4", "ProfilerStep#12"])
def test_profiler_marks_take_precedence(tmp_path: Path, name: str) -> None:
    trace = read(tmp_path, ("aten::mul", 1.0, 1.0), (name, 0.0, 30.0), ("Optimizer.step#SGD.step", 2.0, 1.0))
    assert trace.steps["step"].to_list() == [int(name.partition("#")[2])]
    assert trace.data_quality.is_empty()


@pytest.mark.parametrize("category", ["gpu_memcpy", "gpu_memset"])
def test_marked_steps_of_nothing_but_copies_have_device_windows(tmp_path: Path, category: str) -> None:
    # time µs  0     10     20     30
    # host     step 3|step 4|
    # copies     mmmmm  mmmmm
    events = []
    for number in (3, 4):
        at = 10.0 * (number - 3)
        events += [slice_("user_annotation", f"ProfilerStep#{number}", at, 10.0, tid=1)]
        events += [slice_("cuda_runtime", "cudaMemcpyAsync", at + 1, 1.0, tid=1, correlation=number)]
        events += [slice_(category, "Memcpy", at + 2, 5.0, tid=7, device=0, stream=7, correlation=number)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    steps = reader.read(str(path), rank=0).steps
    assert steps.select("step", "start_ns", "end_ns").rows() == [(3, 2_000, 12_000), (4, 12_000, 17_000)]
