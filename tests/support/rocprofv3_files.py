"""JSON results of rocprofv3, for tests: records with the fields that rocprofiler-sdk's generateJSON.cpp writes.

rocprofv3 needs AMD GPUs, so these files are made by the published source's field names.
"""

from typing import Any

BASE_NS = 7_000_000_000_000
KINDS = (("NONE", ["NONE"]), ("HIP_RUNTIME_API", ["hipMemcpyAsync", "hipLaunchKernel", "hipDeviceSynchronize"]),
         ("MEMORY_COPY", ["MEMORY_COPY_NONE", "MEMORY_COPY_HOST_TO_DEVICE"]), ("KERNEL_DISPATCH", ["COMPLETE"]),
         ("MARKER_CORE_API", ["roctxRangePushA"]), ("RCCL_API", ["ncclAllReduce"]))  # fmt: skip
GPU, CPU = 11, 3
SYMBOLS = {1: "Cijk_Ailk_Bljk_BBS_BH", 2: "ncclDevKernel_Generic"}


def record(
    kind: int, operation: int, start_us: float, dur_us: float, correlation: int, **fields: Any
) -> dict[str, Any]:
    """A record, times in µs since BASE_NS."""
    start_ns = BASE_NS + round(start_us * 1000)
    return {
        "size": 96, "kind": kind, "operation": operation, "thread_id": 100,
        "correlation_id": {"internal": correlation, "external": 0, "ancestor": 0},
        "start_timestamp": start_ns, "end_timestamp": start_ns + round(dur_us * 1000), **fields,
    }  # fmt: skip


def kernel(kernel_id: int, start_us: float, dur_us: float, correlation: int, stream: int = 0) -> dict[str, Any]:
    """A dispatch of 64 work-groups of 256 work-items."""
    dispatch = {
        "size": 80, "agent_id": {"handle": GPU}, "queue_id": {"handle": 1}, "kernel_id": kernel_id,
        "dispatch_id": correlation, "private_segment_size": 0, "group_segment_size": 0,
        "workgroup_size": {"x": 256, "y": 1, "z": 1}, "grid_size": {"x": 64 * 256, "y": 1, "z": 1},
    }  # fmt: skip
    return record(3, 0, start_us, dur_us, correlation, dispatch_info=dispatch, stream_id={"handle": stream})


def results(**records: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of a process with a CPU and a GPU; `records` are its buffer records by kind."""
    agents = [
        {"size": 296, "id": {"handle": CPU}, "type": 1, "name": "AMD EPYC 9654", "cu_count": 0},
        {"size": 296, "id": {"handle": GPU}, "type": 2, "name": "gfx942", "product_name": "AMD Instinct MI300X",
         "cu_count": 304},
    ]  # fmt: skip
    symbols = [
        {"kernel_id": number, "kernel_name": f"{name}.kd", "formatted_kernel_name": name}
        for number, name in SYMBOLS.items()
    ]
    kinds = [{"kind": kind, "operations": operations} for kind, operations in KINDS]
    strings = {"callback_records": [], "buffer_records": kinds, "marker_api": [{"key": 90, "value": "step 1"}]}
    tool = {
        "metadata": {"pid": 100, "init_time": BASE_NS, "fini_time": BASE_NS + 10**9},
        "agents": agents,
        "counters": [],
        "strings": strings,
        "code_objects": [],
        "kernel_symbols": symbols,
        "callback_records": {"counter_collection": []},
        "buffer_records": {"kernel_dispatch": [], "hip_api": [], "memory_copy": [], **records},
    }
    return {"rocprofiler-sdk-tool": [tool]}


def training(steps: int = 2) -> dict[str, Any]:
    """Steps of 1 ms: a copy of 50 µs, a product of 400 µs, and an all-reduce of 300 µs on another stream."""
    kernels, calls, copies, markers, collectives = [], [], [], [], []
    for step in range(steps):
        at, first = 1000.0 * step, 10 * step + 1
        markers.append(record(4, 0, at, 950, 90 if step == 0 else 91 + step))
        calls += [record(1, operation, at + 10 + 5 * n, 4, first + n) for n, operation in enumerate((0, 1, 1))]
        collectives.append(record(5, 0, at + 19, 8, 0))
        copy = {"dst_agent_id": {"handle": GPU}, "src_agent_id": {"handle": CPU}, "stream_id": {"handle": 0}}
        copies.append(record(2, 1, at + 40, 50, first, bytes=4096, **copy))
        kernels += [kernel(1, at + 100, 400, first + 1), kernel(2, at + 500, 300, first + 2, stream=1)]
    return results(kernel_dispatch=kernels, hip_api=calls, memory_copy=copies, marker_api=markers, rccl_api=collectives)
