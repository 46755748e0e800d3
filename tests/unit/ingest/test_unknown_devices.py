"""Device work whose profiler writes no category that PyTorch's profilers write: read by structure, or not judged."""

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.support.selection import others_in_accuracy
from tracekit.ingest import loader
from tracekit.model.run import Run
from tracekit.report import text
from tracekit.rules import engine
from tracekit.rules.rule import Report, Severity

ROOT = Path(__file__).parents[3]
CASE = ROOT.parent / "shared" / "cases" / "npu_device"
SAMPLE = ROOT / "sample_traces" / "gpu" / "compiled" / "rank00000.pt.trace.json.gz"
Event = dict[str, Any]
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def loaded(events: Iterable[Event], folder: Path) -> Run:
    path = folder / "rank0.json"
    path.write_text(json.dumps({"traceEvents": list(events)}), encoding="utf-8")
    return loader.load(str(path), cache=False)


def quality(report: Report) -> set[str | None]:
    return {finding.subject for finding in report.findings if finding.code == "DATA001"}


# A small program ------------------------------------------------------------------------------------------------------
# time, µs      0   1   2   3   4   5   6   7   8   9   10
# host          op op op  op                                  four ops, each with a call inside
# stream 1              ###     ###                           kernels of 100 µs at 200, 500
# stream 2                          ###                       a copy of 50 µs at 800
# wait                                  ###                   EVENT_WAIT of 100 µs: no work


def slice_(name: str, start_us: int, dur_us: int, pid: int, tid: object, **more: Any) -> Event:
    return {"ph": "X", "name": name, "ts": start_us, "dur": dur_us, "pid": pid, "tid": tid, **more}


def arrow(number: int, tail: tuple[int, object, int], head: tuple[int, object, int]) -> list[Event]:
    ends = [("s", *tail), ("f", *head)]
    return [{"ph": p, "cat": "to_device", "name": "go", "id": number, "pid": pid, "tid": tid, "ts": ts}
            for p, pid, tid, ts in ends]  # fmt: skip


def named(pid: int, name: str = "", label: str = "", threads: dict[int, str] | None = None) -> list[Event]:
    events = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}] if name else []
    events += [{"ph": "M", "name": "process_labels", "pid": pid, "args": {"labels": label}}] if label else []
    return events + [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": called}}
        for tid, called in (threads or {}).items()
    ]


HOST = [slice_("aten::mm", 100 + 100 * number, 80, 77, 77, cat="cpu_op") for number in range(4)]
WORK = [
    slice_("gemm", 200, 100, 500, 1), slice_("gelu", 500, 100, 500, 1), slice_("MEMCPY_ASYNC", 800, 50, 500, 2),
    slice_("EVENT_WAIT", 900, 100, 500, 2),
]  # fmt: skip
ARROWS = [
    event
    for number, work in enumerate(WORK[:3])
    for event in arrow(number, (77, 77, 100 + 100 * number), (500, work["tid"], work["ts"]))
]


@pytest.mark.parametrize(
    "signs",
    [
        named(500, "python", "NPU"), named(500, "python", "XPU 3"), named(500, "/device:TPU:0"),
        named(500, "Gaudi Hardware"), named(500, "MTIA 1"), named(500, "x", "MLU 0"), named(500, "GPU 0"),
        named(500, threads={1: "Stream 1", 2: "stream 2 (copies)"}), ARROWS,
    ],
    ids=["label NPU", "label XPU", "TPU", "Gaudi", "MTIA", "MLU", "GPU 0", "streams", "arrows"],
)  # fmt: skip
def test_work_of_a_device_is_known_by_its_process_its_streams_or_arrows(signs, tmp_path):
    run = loaded([*HOST, *WORK, *signs], tmp_path)
    trace = run.trace(0)
    assert trace.on_device
    kinds = trace.activities.group_by("kind").agg(pl.col("dur_ns").sum()).sort("kind")
    assert kinds.rows() == [("compute", 200_000), ("memcpy", 50_000)]
    report = engine.check(run)
    assert "unknown_device" in quality(report)


def test_streams_with_the_largest_number_are_numbered_within_64_bits(tmp_path):
    work = [
        {**slice_("gemm", 200 + 100 * number, 50, 500, f"x{number}"), "args": {"stream": 2**63 - 1, "device": 0}}
        for number in range(3)
    ]
    run = loaded([*HOST, *work, *named(500, "python", "NPU")], tmp_path)
    streams = run.trace(0).lanes.filter(pl.col("device").is_not_null())["stream"]
    assert streams.n_unique() == len(streams)
    engine.check(run)


def test_arrows_say_which_operator_launched_the_work(tmp_path):
    trace = loaded([*HOST, *WORK, *ARROWS], tmp_path).trace(0)
    calls = [slice_("rtLaunch", 110 + 100 * number, 5, 78, 77) for number in range(3)]
    assert trace.activities["launch_id"].null_count() == 3  # operators issue it; the calls were not recorded
    arrows = [
        event
        for number, work in enumerate(WORK[:3])
        for event in arrow(number, (78, 77, calls[number]["ts"] + 1), (500, work["tid"], work["ts"]))
    ]
    with_calls = loaded([*HOST, *WORK, *calls, *arrows], tmp_path).trace(0)
    launches = with_calls.activities.join(with_calls.ops, left_on="launch_id", right_on="id", suffix="_call")
    assert launches.sort("start_ns")["start_ns_call"].to_list() == [110_000, 210_000, 310_000]
    assert set(launches["name_call"]) == {"rtLaunch"}


@pytest.mark.parametrize(
    ("summary", "names"),
    [
        ([slice_("Computing", 200, 100, 600, 0), slice_("Computing", 500, 100, 600, 0)], {0: "Computing"}),
        ([slice_("jit_step", 190, 700, 500, 9)], {1: "XLA Ops", 9: "XLA Modules"}),
    ],
    ids=["states", "spans around the work"],
)
def test_threads_that_sum_up_others_are_no_work(summary, names, tmp_path):
    labels = [*named(500, "x", "NPU", names), *named(600, "Overlap Analysis", "NPU", names)]
    trace = loaded([*HOST, *WORK[:2], *summary, *labels], tmp_path).trace(0)
    assert trace.activities["dur_ns"].to_list() == [100_000, 100_000]


def test_copies_inside_a_collective_are_part_of_it(tmp_path):
    outer = slice_("hcom_allReduce__101_0_1", 200, 400, 500, 8)
    inner = [slice_("Memcpy", 210, 50, 500, 9), slice_("Reduce_Inline", 300, 60, 500, 9)]
    labels = named(500, "Communication", "NPU", {8: "Group 0 Communication", 9: "Plane 0"})
    trace = loaded([*HOST, outer, *inner, *labels], tmp_path).trace(0)
    assert trace.activities.select("kind", "dur_ns").rows() == [("communication", 400_000)]


def test_work_of_a_process_that_nothing_tells_of_is_not_judged(tmp_path):
    run = loaded([*HOST, *WORK], tmp_path)
    report = engine.check(run)
    assert "no_device_activity" in quality(report)
    assert report.cannot_judge is not None
    assert {finding.code for finding in report.findings} == {"DATA001"}


def test_spans_of_other_tools_on_host_threads_are_no_device(tmp_path):
    spans = [slice_("request", 90 + 100 * number, 60, 77, 77, cat="app") for number in range(4)]
    logger = [slice_("write", 90 + 100 * number, 60, 79, 3, cat="app") for number in range(4)]
    report = engine.check(loaded([*HOST, *spans, *logger, *named(79, "logger", "CPU")], tmp_path))
    assert report.cannot_judge is None
    assert "unknown_kinds" in quality(report)


def test_functions_of_python_on_windows_have_paths_with_slashes(tmp_path):
    torch = "C:\\venv\\Lib\\site-packages\\torch\\serialization.py(3): save"
    names = ["C:\\train\\train.py(12): step", torch, "a\\b"]
    events = [slice_(name, 10, 5, 77, 77, cat="python_function") for name in names]
    called = set(loaded([*HOST, *events], tmp_path).trace(0).ops["name"])
    assert {
        "C:/train/train.py(12): step",
        "C:/venv/Lib/site-packages/torch/serialization.py(3): save",
        "a\\b",
    } <= called


# Recordings -----------------------------------------------------------------------------------------------------------


def without_categories(event: Event) -> Event:
    return {key: value for key, value in event.items() if key != "cat" or event["cat"] not in DEVICE}


def with_other_categories(event: Event) -> Event:
    return event | {"cat": "task"} if event.get("cat") in DEVICE else event


def without_arguments(event: Event) -> Event:
    return without_categories(event) | {"args": {}} if event.get("cat") in DEVICE else event


@pytest.mark.parametrize(
    "change",
    others_in_accuracy(
        [without_categories, with_other_categories, without_arguments], [with_other_categories, without_arguments]
    ),
)
def test_a_recording_without_categories_of_its_device_is_judged_as_before(change: Callable[[Event], Event], tmp_path):
    events = json.loads(gzip.decompress(SAMPLE.read_bytes()))["traceEvents"]
    (tmp_path / "intact").mkdir()
    intact = loaded(events, tmp_path / "intact")
    run = loaded(map(change, events), tmp_path)
    columns = ["lane", "name", "start_ns", "dur_ns", "launch_id", "step"]
    assert run.trace(0).activities.select(columns).equals(intact.trace(0).activities.select(columns))
    findings, expected = (
        [(f.code, f.severity, f.cost_ns) for f in engine.check(judged).findings if f.code != "DATA001"]
        for judged in (run, intact)
    )
    assert findings == expected


@pytest.mark.skipif(not CASE.exists(), reason="the shared cases are not here")
def test_an_npu_is_busy_as_long_as_its_own_profiler_says():
    run = loader.load(str(CASE), cache=False)
    (step,) = run.trace(0).steps.to_dicts()
    assert step["end_ns"] - step["start_ns"] == pytest.approx(11.27e6, rel=0.001)
    busy_ns = int(run.trace(0).activities["dur_ns"].sum())
    assert busy_ns == pytest.approx(1.79e6, rel=0.005)
    report = engine.check(run)
    assert "HOST003" not in {finding.code for finding in report.findings}
    assert report.findings[0].code == "HOST001"
    assert "CUDA" not in report.findings[0].fix
    assert run.trace(0).activities["launch_id"].null_count() <= 2


def with_device_properties(events: Iterable[Event], folder: Path, devices: list[Any]) -> Report:
    path = folder / "rank0.json"
    path.write_text(json.dumps({"deviceProperties": devices, "traceEvents": list(events)}), encoding="utf-8")
    return engine.check(loader.load(str(path), cache=False))


@pytest.mark.parametrize("category", [None, "mtia_ccp_events", "kernel", "zorblax_op"])
def test_a_device_without_recorded_launches_is_information(tmp_path: Path, category: str | None) -> None:
    # Kineto lists no devices where it was built for neither CUDA nor HIP.
    work = [event | ({"cat": category} if category else {}) for event in WORK]
    report = with_device_properties(HOST + work + named(500, "Zorblax accelerator"), tmp_path, [])
    assert "no_launch_calls" in quality(report)
    assert "no_host_activity" not in quality(report)
    assert not [finding for finding in report.findings if finding.severity > Severity.INFO]
    assert "HOST001" in report.blind_spots


def test_a_gpu_whose_launches_are_missing_stays_an_error(tmp_path: Path) -> None:
    work = [event | {"cat": "kernel"} for event in WORK]
    report = with_device_properties(HOST + work, tmp_path, [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}])
    assert "no_host_activity" in quality(report)
    shown = text.render(report, report.run)
    assert "No problems found" not in shown


def test_a_second_device_of_unknown_kind_was_not_queued_before_the_recording(tmp_path: Path) -> None:
    # time, µs      1   2   3   4   5   6
    # GPU 0         call### call### call###        kernels of 50 µs, launched
    # Zorblax 0         ###     ###     ###        work without launches meanwhile
    events: list[Event] = named(900, "Zorblax NPU 0")
    for number in range(1, 4):
        at_us, stated = 200 * number, {"correlation": number}
        events += [
            slice_("cudaLaunchKernel", at_us, 10, 77, 77, cat="cuda_runtime", args=stated),
            slice_("gemm", at_us + 50, 50, 0, 7, cat="kernel", args={"device": 0, "stream": 7, **stated}),
            slice_("zorb_op", at_us + 60, 50, 900, 1),
            slice_("zorb_copy", at_us + 120, 10, 900, 1),
        ]
    run = loaded(HOST + events, tmp_path)
    assert run.trace(0, 0).lanes["device"].drop_nulls().to_list() == [0, 1]
    report = engine.check(run)
    assert "unlaunched_device" in quality(report)
    assert not {"unlinked", "lost_launches"} & quality(report)
    assert "HOST001" not in report.blind_spots
