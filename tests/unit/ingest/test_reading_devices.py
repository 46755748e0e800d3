"""What runs where: devices of every vendor, CPU-only traces, graphs, and what is a collective."""

import json

import polars as pl
import pytest

from tests.support.kineto_files import slice_
from tracekit.ingest.readers.kineto import reader
from tracekit.ingest.readers.normalize import collectives, communication_kernels


def read(folder, *events, **header):
    path = folder / "trace.json"
    path.write_text(json.dumps({**header, "traceEvents": events}))
    return reader.read(str(path), rank=0)


def kernel(name, at_us, dur_us=10.0, *, stream=7, category="kernel", **args):
    return slice_(category, name, at_us, dur_us, tid=stream, device=0, stream=stream, **args)


def step(at_us=0.0, dur_us=1000.0, number=3):
    return slice_("user_annotation", f"ProfilerStep#{number}", at_us, dur_us, tid=1)


# Devices --------------------------------------------------------------------------------------------------------------

DEVICES = {
    "CUDA": ("cuda_runtime", "cudaLaunchKernel", "kernel", "gpu_memcpy", "gpu_memset"),
    "CUDA driver": ("cuda_driver", "cuLaunchKernelEx", "kernel", "gpu_memcpy", "gpu_memset"),
    "CUDA before 2022": ("Runtime", "cudaLaunchKernel", "Kernel", "Memcpy", "Memset"),
    "ROCm": ("cuda_runtime", "hipLaunchKernel", "kernel", "gpu_memcpy", "gpu_memset"),
    "HIP": ("hip_runtime", "hipExtModuleLaunchKernel", "kernel", "gpu_memcpy", "gpu_memset"),
    "XPU": ("xpu_runtime", "urEnqueueKernelLaunch", "kernel", "gpu_memcpy", "gpu_memset"),
    "MTIA": ("mtia_runtime", "runtimeLaunch", "mtia_ccp_events", "gpu_memcpy", "gpu_memset"),
    "MUSA": ("musa_runtime", "musaLaunchKernel", "kernel", "gpu_memcpy", "gpu_memset"),
    "MLU driver": ("mlu_driver", "cnInvokeKernel", "kernel", "gpu_memcpy", "gpu_memset"),
    "a device of one's own": ("privateuse1_runtime", "launch", "concurrent_kernel", "gpu_memcpy", "gpu_memset"),
}


@pytest.mark.parametrize("device", DEVICES)
def test_work_of_every_device_is_linked_to_its_launch(tmp_path, device):
    runtime, launch, *categories = DEVICES[device]
    # time µs  0        20        40        60
    # host     mm(launch copy set)
    # stream 7 ........ kernel    copy      set
    events = [step(), slice_("cpu_op" if device != "CUDA before 2022" else "Operator", "aten::mm", 1, 20, tid=1)]
    for i, category in enumerate(categories):
        events += [slice_(runtime, launch, 2 + 5 * i, 2, tid=1, correlation=40 + i)]
        events += [kernel(f"work {i}", 20 * (i + 1), category=category, correlation=40 + i, bytes=64)]
    trace = read(tmp_path, *events)
    assert trace.on_device
    linked = trace.activities.join(trace.ops, left_on="launch_id", right_on="id", suffix="_of_launch")
    assert linked.select("kind", "name_of_launch", "start_ns_of_launch", "step").rows() == [
        ("compute", launch, 2_000, 3),
        ("memcpy", launch, 7_000, 3),
        ("memset", launch, 12_000, 3),
    ]
    assert trace.activities["bytes"].to_list() == [64] * 3
    assert trace.lanes.filter(pl.col("device") == 0).select("stream", "role").rows() == [(7, "compute")]
    assert trace.data_quality.is_empty()


def test_a_kernels_grid_and_block_are_read_in_every_form(tmp_path):
    given = [
        {"grid": [4096, 1, 2], "block": [256, 1, 1]},
        {"grid": "[8, 1, 1]", "block": [32]},
        {"grid": [], "block": None},
        {"grid": {"x": 2}, "block": "none"},
        {},
    ]
    trace = read(tmp_path, *(kernel("k", 20 * i, **args) for i, args in enumerate(given)))
    assert trace.activities["grid"].to_list() == ["4096x1x2", "8x1x1", None, "2", None]
    assert trace.activities["block"].to_list() == ["256x1x1", "32", None, None, None]
    odd = [kernel("k", 20 * i, **args) for i, args in enumerate(given)]
    odd[0]["ts"] = 1_700_000_000_000_000.123  # times that must be read as text
    assert read(tmp_path, *odd).activities.sort("id")["grid"].drop_nulls().sort().to_list() == [
        "2",
        "4096x1x2",
        "8x1x1",
    ]


def test_the_stream_may_stand_in_the_ids_of_process_and_thread_alone(tmp_path):
    places = [(0, 7), ("0", "stream 7"), (1, "stream 20 (default)"), ("GPU", "")]
    events = [
        {"ph": "X", "cat": "kernel", "name": "k", "pid": pid, "tid": tid, "ts": i, "dur": 1}
        for i, (pid, tid) in enumerate(places)
    ]
    trace = read(tmp_path, *events)
    placed = trace.activities.join(trace.lanes, on="lane", maintain_order="left")
    assert placed.select("device", "stream").rows() == [(0, 7), (0, 7), (1, 20), (0, 0)]


def test_a_trace_without_device_work_measures_threads(tmp_path):
    # time µs   0 2 4 6 8 10 12 14
    # thread 1  [linear...  ][wait ]        compute 0-8, the c10d op inside takes 2
    # thread 1  . mm . c10d
    # thread 9  . . gloo. . . .             a collective, with an op of its own inside
    events = [
        slice_("cpu_op", "aten::linear", 0, 8, tid=1),
        slice_("cpu_op", "aten::mm", 1, 2, tid=1),
        slice_("cpu_op", "c10d::allreduce_", 4, 2, tid=1),
        slice_("cpu_op", "autograd::engine::evaluate_function: X", 9, 4, tid=1),
        slice_("user_annotation", "gloo:all_reduce", 4, 6, tid=9),
        slice_("cpu_op", "aten::add_", 5, 1, tid=9),
    ]
    trace = read(tmp_path, *events)
    assert not trace.on_device
    assert trace.activities.select("name", "kind", "start_ns", "dur_ns").rows() == [
        ("aten::linear", "compute", 0, 4_000),
        ("gloo:all_reduce", "communication", 4_000, 6_000),
        ("aten::linear", "compute", 6_000, 2_000),
    ]
    assert trace.lanes.select("tid", "role").rows() == [("1", "compute"), ("9", "communication")]


def test_device_annotations_are_not_work(tmp_path):
    trace = read(tmp_path, kernel("gemm", 5), kernel("forward", 0, 500.0, category="gpu_user_annotation"))
    assert trace.activities["name"].to_list() == ["gemm"]
    assert trace.activities["dur_ns"].sum() == 10_000


def test_overlapping_slices_on_a_stream_are_all_read(tmp_path):
    trace = read(tmp_path, kernel("a", 0, 10), kernel("b", 4, 10), kernel("c", 4, 2), kernel("c", 4, 2))
    assert trace.activities.select("name", "start_ns", "dur_ns").rows() == [
        ("a", 0, 10_000), ("b", 4_000, 10_000), ("c", 4_000, 2_000), ("c", 4_000, 2_000)
    ]  # fmt: skip


def test_one_graph_launch_owns_all_its_kernels(tmp_path):
    # A replayed graph: kernels of one launch, the collective among them without arguments.
    work = [
        kernel("gemm", 20, correlation=9),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", 40, correlation=9),
    ]
    work += [kernel("gemm", 60, correlation=9), kernel("Memset (Device)", 80, category="gpu_memset", correlation=9)]
    trace = read(tmp_path, step(), slice_("cuda_runtime", "cudaGraphLaunch", 5, 10, tid=1, correlation=9), *work)
    launch = trace.ops.filter(pl.col("name") == "cudaGraphLaunch")["id"].item()
    assert trace.activities["launch_id"].to_list() == [launch] * 4
    assert trace.activities["kind"].to_list() == ["compute", "communication", "compute", "memset"]
    assert trace.activities["step"].to_list() == [3] * 4
    row = trace.collectives.row(0, named=True)
    assert (row["op"], row["dtype"], row["sent_bytes"], row["group"]) == ("reduce_scatter", "BFloat16", None, None)


@pytest.mark.parametrize("correlation", [0, None, "none", 77])
def test_work_that_names_no_known_launch_has_none(tmp_path, correlation):
    launch = slice_("cuda_runtime", "cudaLaunchKernel", 5, 10, tid=1, correlation=0)
    trace = read(tmp_path, step(), launch, kernel("gemm", 20, correlation=correlation))
    assert trace.activities.select("launch_id", "step").rows() == [(None, None)]


# Collectives by name --------------------------------------------------------------------------------------------------

KERNELS = {  # name of a kernel: op, dtype if the name states it
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": ("all_reduce", "Float"),
    "ncclKernel_AllReduce_TREE_LL_Sum___nv_bfloat16(ncclWorkElem)": ("all_reduce", "BFloat16"),
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": ("send_recv", None),
    "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)": ("all_gather", None),
    "ncclKernel_ReduceScatter_RING_LL_Sum_half(ncclWorkElem)": ("reduce_scatter", "Half"),
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": ("all_reduce", "Float"),
    "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)": ("all_reduce", "Half"),
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": ("reduce_scatter", "BFloat16"),
    "ncclDevKernel_AllGather_RING_LL(ncclDevComm*, unsigned long, ncclWork*)": ("all_gather", None),
    "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)": ("broadcast", None),
    "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": ("reduce", "Float"),
    "ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)": ("send_recv", None),
    "ncclDevKernel_AllReduce_PreMulSum_bf16_RING_LL(x)": ("all_reduce", "BFloat16"),
    "ncclSymDevKernel_AllReduce_AGxLL_R_Sum_f32(x)": ("all_reduce", "Float"),
    "ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)": (None, None),
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": (None, None),
    "rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)": (None, None),
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(x)": ("all_reduce", None),
    "mscclpp_all_reduce": ("all_reduce", None),
}  # fmt: skip
COMPUTE = (
    "hipSync_dma_kernel",
    "Cijk_Ailk_Bljk_SB_MT128x128x16",
    "void at::native::reduce_kernel<512, 1>(x)",
    "void at::native::vectorized_gather_kernel<16, long>(x)",
    "void cub::DeviceReduceSingleTileKernel<x>(ncclThing)",
    "triton_red_fused_broadcast_sum_0",
    "sendrecv_free_gemm",
    "void at::native::indexSelectLargeIndex<float>(ncclFake)",
    "scatter_gather_elementwise_kernel",
)


@pytest.mark.parametrize("name", KERNELS)
def test_a_collective_is_known_by_the_name_of_its_kernel(tmp_path, name):
    trace = read(tmp_path, kernel(name, 5))
    assert communication_kernels.kind_of(name) == "communication"
    assert trace.activities["kind"].to_list() == ["communication"]
    assert trace.collectives.select("op", "dtype").rows() == [KERNELS[name]]


@pytest.mark.parametrize("name", COMPUTE)
def test_words_of_collectives_in_kernel_names_do_not_make_a_collective(tmp_path, name):
    trace = read(tmp_path, kernel(name, 5))
    assert trace.activities["kind"].to_list() == ["compute"]
    assert trace.collectives.is_empty()


def test_the_op_of_a_generic_kernel_comes_from_its_arguments(tmp_path):
    args = {"Collective name": "_allgather_base", "In msg nelems": 10, "Out msg nelems": 40, "dtype": "BFloat16"}
    trace = read(tmp_path, kernel("ncclDevKernel_Generic(ncclDevComm*)", 5, **args, **{"Group size": 4}))
    row = trace.collectives.row(0, named=True)
    assert (row["op"], row["sent_bytes"], row["received_bytes"], row["group_size"]) == ("all_gather", 20, 80, 4)


OPS = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "all_to_allv": "all_to_all", "all_to_all": "all_to_all",
    "alltoall_base": "all_to_all", "broadcast": "broadcast", "reduce": "reduce", "gather": "gather",
    "scatter": "scatter", "send": "send", "recv": "recv", "barrier": "barrier", "c10d::alltoall_base_": "all_to_all",
    "c10d::recv_any_source_": "recv", "gloo:all_reduce": "all_reduce", "mpi:_all_to_all": "all_to_all", "wait": None,
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_one_name_however_it_is_written(name):
    assert collectives.op_of(name) == OPS[name]


@pytest.mark.parametrize("backend", ["mpi", "ucc", "gloo", "custom", "yafsdp_comm"])
def test_on_the_host_an_annotation_says_what_a_backend_of_any_name_runs(tmp_path, backend):
    trace = read(
        tmp_path,
        slice_("cpu_op", "aten::mm", 0, 5, tid=1),
        slice_("user_annotation", f"{backend}:reduce_scatter", 2, 6, tid=2),
        slice_("user_annotation", "loss:backward", 0, 9, tid=1),
        slice_("user_annotation", "nccl:all_reduce", 0, 1, tid=1),  # it only launches, the kernel runs it
    )
    assert trace.activities.select("name", "kind").rows() == [
        ("aten::mm", "compute"),
        (f"{backend}:reduce_scatter", "communication"),
    ]
    assert trace.collectives["op"].to_list() == ["reduce_scatter"]


def test_on_a_device_kernels_that_such_a_slice_launched_are_the_collective(tmp_path):
    # custom:all_gather launches a kernel of unknown name; nccl is recognized by its kernel; copies are copies.
    def launched(name, at, correlation, category="kernel"):
        launch = slice_("cuda_runtime", "cudaLaunchKernel", at, 1, tid=1, correlation=correlation)
        return launch, kernel(name, at + 50, 5, correlation=correlation, category=category)

    trace = read(
        tmp_path,
        slice_("user_annotation", "custom:all_gather", 10, 20, tid=1),
        *launched("put_to_peers", 12, 1),
        *launched("Memcpy DtoD", 18, 2, "gpu_memcpy"),
        slice_("user_annotation", "custom:all_reduce", 40, 20, tid=1),
        *launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 42, 3),
        *launched("cast_before", 48, 4),
        *launched("gemm", 90, 5),
    )
    assert dict(trace.activities.select("name", "kind").rows()) == {
        "put_to_peers": "communication",
        "Memcpy DtoD": "memcpy",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)": "communication",
        "cast_before": "compute",
        "gemm": "compute",
    }
    assert trace.collectives["op"].to_list() == ["all_gather", "all_reduce"]


def test_an_asynchronous_collective_s_open_slice_does_not_claim_the_kernels_of_ops_inside(tmp_path):
    # time µs  10                                60
    # host     hccl:all_to_all ..................
    #             aten::mm(launch)  launch
    # device                 work        send
    trace = read(
        tmp_path,
        slice_("user_annotation", "hccl:all_to_all", 10, 50, tid=1),
        slice_("cpu_op", "aten::mm", 12, 10, tid=1),
        slice_("mtia_runtime", "runtimeLaunch", 14, 2, tid=1, correlation=1),
        kernel("work", 30, 5, correlation=1, category="mtia_ccp_events"),
        slice_("mtia_runtime", "runtimeLaunch", 40, 2, tid=1, correlation=2),
        kernel("send", 50, 5, correlation=2, category="mtia_ccp_events"),
        kernel("dma_request", 70, 5, category="mtia_ccp_events"),
    )
    assert dict(trace.activities.select("name", "kind").rows()) == {
        "work": "compute",
        "send": "communication",
        "dma_request": "memcpy",
    }


@pytest.mark.parametrize(
    "op", ["symm_mem::exchange", "_c10d_functional::wait", "record_param_comms", "vllm::all_reduce"]
)
def test_an_undecided_kernel_communicates_if_the_op_that_launched_it_does(tmp_path, op):
    trace = read(
        tmp_path,
        slice_("cpu_op", op, 10, 20, tid=1),
        slice_("cuda_runtime", "cudaLaunchKernel", 12, 2, tid=1, correlation=1),
        slice_("cuda_runtime", "cudaLaunchKernel", 16, 2, tid=1, correlation=2),
        kernel("allreduce_norm_fused", 30, 5, correlation=1),
        kernel("cast", 40, 5, correlation=2),
    )
    assert trace.activities["kind"].to_list() == ["communication", "compute"]
    assert "undecided_communication" not in trace.data_quality["kind"].to_list()


def test_an_undecided_kernel_communicates_on_a_stream_that_only_communicates(tmp_path):
    trace = read(
        tmp_path,
        kernel("gemm", 0, 90),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 0, 10, stream=20),
        kernel("my_comm_kernel", 20, 10, stream=20),
        kernel("my_comm_kernel", 100, 10),
    )
    assert trace.activities.filter(name="my_comm_kernel").select("lane", "kind").rows() == [
        (1, "communication"),
        (0, "compute"),
    ]


def test_undecided_kernels_are_a_data_quality_issue_with_their_share_of_the_time(tmp_path):
    trace = read(tmp_path, kernel("gemm", 0, 75), kernel("combine_bias", 100, 25), kernel("combine_bias", 200, 0))
    assert trace.activities["kind"].to_list() == ["compute"] * 3
    (row,) = trace.data_quality.filter(kind="undecided_communication").rows(named=True)
    assert row["affected_ratio"] == 0.25
    assert row["message"] == (
        "2 kernels are named like communication, but nothing shows that they communicate: combine_bias. "
        "They count as compute."
    )


@pytest.mark.parametrize(("step", "is_sampled"), [(1, False), (2, False), (3, True)])
def test_a_trace_without_most_of_the_numbered_ops_is_sampled(tmp_path, step, is_sampled):
    ops = [slice_("cpu_op", "aten::add", 10 * at, 5, tid=1, **{"External id": 7 + step * at}) for at in range(1000)]
    found = read(tmp_path, *ops, kernel("add", 0, 5)).data_quality.filter(kind="sampled")
    assert found.height == is_sampled
    if is_sampled:
        assert found["affected_ratio"][0] == pytest.approx(2 / 3, abs=0.001)


def numbered_ops(numbers, *, thread=1, at_us=0.0, category="cpu_op", key="External id"):
    return [
        slice_(category, "aten::add", at_us + 10 * place, 5, tid=thread, **{key: number})
        for place, number in enumerate(numbers)
    ]


@pytest.mark.parametrize("odd_numbers", [(10**9,), (5_000, 6_000, 7_000, 8_000, 2**62), (-7, 3)])
def test_few_numbers_far_from_all_others_do_not_make_a_trace_sampled(tmp_path, odd_numbers):
    numbers = [*range(20_000, 20_500), *odd_numbers, *range(20_500, 21_000)]
    assert read(tmp_path, *numbered_ops(numbers), kernel("add", 0, 5)).data_quality.filter(kind="sampled").is_empty()


def test_an_odd_number_of_a_call_does_not_make_a_trace_sampled(tmp_path):
    calls = numbered_ops([*range(1, 600), 10**9], category="cuda_runtime", key="correlation")
    assert read(tmp_path, *calls, kernel("add", 0, 5)).data_quality.filter(kind="sampled").is_empty()


@pytest.mark.parametrize(
    ("thread", "at_us", "is_sampled"),
    [(2, 20_000, False), (1, 5, False), (1, 20_000, True)],
    ids=["another thread's counter", "two counters of a thread", "the middle is missing"],
)
def test_numbers_of_two_counters_do_not_make_a_trace_sampled(tmp_path, thread, at_us, is_sampled):
    ops = numbered_ops(range(1, 601)) + numbered_ops(range(70_001, 70_601), thread=thread, at_us=at_us)
    assert read(tmp_path, *ops, kernel("add", 0, 5)).data_quality.filter(kind="sampled").height == is_sampled


def test_a_trace_filtered_to_bursts_is_sampled_even_with_an_odd_number(tmp_path):
    numbers = [first + place for first in range(1, 100_000, 2_000) for place in range(40)]
    (row,) = (
        read(tmp_path, *numbered_ops([*numbers, 10**9]), kernel("add", 0, 5))
        .data_quality.filter(kind="sampled")
        .rows(named=True)
    )
    assert row["affected_ratio"] == pytest.approx(0.98, abs=0.001)


@pytest.mark.parametrize(
    ("numbers", "count", "is_said"), [({}, 100, True), ({}, 99, False), ({"External id": 7}, 100, False)]
)
def test_ops_without_numbers_do_not_show_whether_others_are_missing(tmp_path, numbers, count, is_said):
    ops = [slice_("cpu_op", "aten::add", 10 * at, 5, tid=1, **numbers) for at in range(count)]
    kinds = read(tmp_path, *ops, kernel("add", 0, 5)).data_quality["kind"].to_list()
    assert ("unnumbered_ops" in kinds) == is_said


# Roles ----------------------------------------------------------------------------------------------------------------


def test_the_role_of_a_lane_is_the_work_with_most_time_on_it_whatever_its_name(tmp_path):
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
    trace = read(
        tmp_path,
        *(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": s, "args": {"name": f"stream {s} nccl"}}
            for s in (7, 20)
        ),
        *(kernel("gemm", 10.0 * i, 2.0) for i in range(10)),
        kernel(nccl, 200, 19.0),  # many short ones outweigh the longest
        kernel(nccl, 300, 5.0, stream=20),
        kernel("add", 310, 4.999, stream=20),
        kernel("Memcpy HtoD", 0, 3.0, stream=22, category="gpu_memcpy"),
        kernel("Memset", 0, 1.0, stream=22, category="gpu_memset"),
        kernel("Memset", 0, 1.0, stream=23, category="gpu_memset"),
    )
    roles = trace.lanes.filter(pl.col("stream").is_not_null()).select("stream", "role").rows()
    assert roles == [(7, "compute"), (20, "communication"), (22, "memcpy"), (23, "memset")]


def test_threads_that_only_launch_are_of_the_host(tmp_path):
    trace = read(tmp_path, slice_("cpu_op", "aten::mm", 0, 5, tid=1), kernel("gemm", 3))
    assert trace.lanes.select("tid", "role").rows() == [("1", "host"), ("7", "compute")]
