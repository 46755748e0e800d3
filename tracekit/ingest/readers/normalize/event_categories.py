"""Categories of the events that PyTorch's profilers and rocprofv3 write, and the kinds of work that they stand for."""

HOST_KINDS = ("cpu_op", "annotation", "runtime", "python", "overhead", "os_call")
DEVICE_KINDS = ("kernel", "memcpy", "memset", "collective")
FIRST_DEVICE, SYNC, UNUSED, UNKNOWN = 8, 15, 16, 24
CPU_OP, RUNTIME = 0, 2
KINDS = {
    "cpu_op": 0, "operator": 0, "user_annotation": 1, "python_function": 3, "overhead": 4,
    "runtime": 2, "cuda_runtime": 2, "cuda_driver": 2, "hip_runtime": 2, "hip_api": 2, "xpu_runtime": 2,
    "xpu_driver": 2, "mtia_runtime": 2, "glow_runtime": 2, "privateuse1_runtime": 2, "privateuse1_driver": 2,
    "kernel": 8, "concurrent_kernel": 8, "mtia_ccp_events": 8, "hpu_op": 8, "gpu_memcpy": 9, "memcpy": 9,
    "gpu_memset": 10, "memset": 10, "collective_comm": 11,
    "cuda_sync": 15, "trace": 16, "gpu_user_annotation": 16, "cuda_event": 16, "cuda_profiler_range": 16,
    "external_correlation": 16, "gpu_pm_counter": 16, "mtia_insight": 16, "cpu_instant_event": 16, "mtia_counters": 16,
    # Ascend's torch_npu: the queue of tasks, whose other thread makes the calls.
    "enqueue": 2, "dequeue": 2,
    # AMD's rocprofv3: source/include/rocprofiler-sdk/cxx/perfetto.hpp
    "hsa_api": 2, "rccl_api": 2, "marker_api": 1, "kernel_dispatch": 8, "memory_copy": 9,
}  # fmt: skip
"""The kind of each category in lower case: an index into HOST_KINDS, or FIRST_DEVICE and an index into DEVICE_KINDS."""


_CALL_SUFFIXES = ("_runtime", "_driver")
"""Ends of the categories of a device's calls: Kineto names them after the device, also those of vendors' versions."""


def kind_of(category: object) -> int:
    """Return the kind of a category as an event states it; UNKNOWN if no PyTorch profiler writes such a category."""
    if not isinstance(category, str):
        return UNKNOWN
    lower = category.lower()
    return KINDS.get(lower, RUNTIME if lower.endswith(_CALL_SUFFIXES) else UNKNOWN)


def is_known(category: str | None) -> bool:
    """Return whether PyTorch's profilers write events of this category."""
    return isinstance(category, str) and category.lower() in KINDS
