"""JSON results of rocprofv3: kernels, copies, calls and markers, by files with the published source's fields."""

import gzip
import json

import pytest

import tracekit
from tests.support import rocprofv3_files
from tests.support.rocprofv3_files import BASE_NS
from tracekit.analysis.time import breakdown
from tracekit.errors import BadTraceError
from tracekit.model import environment


def load(path):
    return tracekit.load(path, cache=False)


def write(folder, document, name="rank0_results.json"):
    (folder / name).write_text(json.dumps(document))
    return folder / name


def test_kernels_copies_and_calls_are_read(tmp_path):
    # µs        10 calls 24   40 copy 90   100 product 500   500 all-reduce 800     next at 1000
    run = load(write(tmp_path, rocprofv3_files.training()))
    trace = run.trace(0, 0)
    work = trace.activities.sort("start_ns")
    assert work["name"].to_list()[:3] == [
        "Memcpy MEMORY_COPY_HOST_TO_DEVICE", "Cijk_Ailk_Bljk_BBS_BH", "ncclDevKernel_Generic",
    ]  # fmt: skip
    assert work["kind"].to_list() == ["memcpy", "compute", "communication"] * 2
    assert work["start_ns"].to_list()[:3] == [BASE_NS + at for at in (40_000, 100_000, 500_000)]
    assert work["dur_ns"].to_list()[:3] == [50_000, 400_000, 300_000]
    assert work["bytes"].to_list()[:3] == [4096, None, None]
    assert work["grid"].to_list()[1:3] == ["64x1x1"] * 2
    assert work["block"].to_list()[1:3] == ["256x1x1"] * 2
    assert work["launch_id"].null_count() == 0
    assert set(trace.ops.filter(kind="runtime")["name"]) == {"hipMemcpyAsync", "hipLaunchKernel", "ncclAllReduce"}
    assert "step 1" in trace.ops.filter(kind="annotation")["name"].to_list()
    assert trace.lanes.drop_nulls("device")["stream"].to_list() == [0, 1]
    assert "MI300X" in str(environment.device_names(trace.header))


def test_the_parts_of_the_time_are_those_of_the_drawing(tmp_path):
    run = load(write(tmp_path, rocprofv3_files.training(steps=1)))
    (row,) = run.table(breakdown.by_rank).to_dicts()
    assert (row["duration_ns"], row["compute_ns"]) == (760_000, 400_000)
    assert row["exposed_communication_ns"] == 300_000
    assert row["idle_ns"] == 10_000


def test_ranks_are_those_of_the_names(tmp_path):
    for rank in range(2):
        write(tmp_path, rocprofv3_files.training(), f"rank{rank}_results.json")
    assert load(tmp_path).ranks == (0, 1)


def test_results_without_gpu_work_are_refused(tmp_path):
    calls = [rocprofv3_files.record(1, 1, 0, 5, 1)]
    with pytest.raises(BadTraceError, match="no kernel or copy"):
        load(write(tmp_path, rocprofv3_files.results(hip_api=calls)))


def test_results_of_several_processes_are_refused(tmp_path):
    document = rocprofv3_files.training()
    with pytest.raises(BadTraceError, match="2 processes"):
        load(write(tmp_path, {"rocprofiler-sdk-tool": document["rocprofiler-sdk-tool"] * 2}))


def test_a_cut_file_is_refused_and_a_packed_one_is_read(tmp_path):
    text = json.dumps(rocprofv3_files.training()).encode()
    packed = tmp_path / "a_results.json.gz"
    packed.write_bytes(gzip.compress(text))
    assert load(packed).trace(0, 0).activities.height == 6
    packed.write_bytes(gzip.compress(text[:-300]))
    with pytest.raises(BadTraceError, match="cannot be read"):
        load(packed)


def test_records_without_times_are_counted(tmp_path):
    document = rocprofv3_files.training()
    records = document["rocprofiler-sdk-tool"][0]["buffer_records"]
    records["kernel_dispatch"][0]["end_timestamp"] = None
    records["hip_api"][0]["start_timestamp"] = "x"
    trace = load(write(tmp_path, document)).trace(0, 0)
    assert trace.activities.height == 5
    assert any("2 records" in text for text in trace.data_quality.filter(kind="bad_times")["message"])


def test_a_kernel_whose_number_is_a_list_has_no_name(tmp_path):
    document = rocprofv3_files.training()
    tool = document["rocprofiler-sdk-tool"]
    tool = tool[0] if isinstance(tool, list) else tool
    tool["buffer_records"]["kernel_dispatch"][0]["dispatch_info"]["kernel_id"] = [[1]]
    tool["agents"][-1]["product_name"] = {"a": 1}
    names = load(write(tmp_path, document)).trace(0, 0).activities["name"].to_list()
    assert "kernel None" in names
