"""Small runs on disk as PyTorch's profiler writes them (made by hand here: two ranks, two streams, three steps)."""

import gzip
import json
import os
import time
from pathlib import Path

STEPS = (3, 4, 5)
STEP_US = 10_000
GOOD, HOSTILE, TRUNCATED = "good", "hostile", "truncated"
HOSTILE_NAME = (
    '<script>window.hacked=1</script><img src=x onerror="window.hacked=2"></script><b>bold</b> '
    "![pixel](http://192.0.2.1/x.png) [link](javascript:window.hacked=3) \u202egnp.exe"
)


def write_runs(folder: Path) -> None:
    """Write a good run, one full of hostile names, and one that cannot be read."""
    write_run(folder / GOOD, kernel="gemm_kernel<float, 128>")
    write_run(folder / HOSTILE, kernel=HOSTILE_NAME, communication_us=6000, thread=HOSTILE_NAME)
    (folder / TRUNCATED).mkdir()
    whole = gzip.compress(json.dumps(_trace(0, "gemm", 2000, "main")).encode())
    (folder / TRUNCATED / "rank00000.pt.trace.json.gz").write_bytes(whole[:40])


def write_run(
    folder: Path, *, kernel: str, communication_us: int = 4000, thread: str = "main", ranks: tuple[int, ...] = (0, 1)
) -> None:
    """Write a run whose steps spend `communication_us` in an all-reduce that nothing hides."""
    folder.mkdir()
    manifest = {"schema": "tracekit.run/1", "created_ns": 1_790_000_000_000_000_000, "strategy": "ddp"}
    manifest |= {"world_size": len(ranks), "model": {"name": "tiny"}}
    (folder / "run.json").write_text(json.dumps(manifest))
    for rank in ranks:
        trace = _trace(rank, kernel, communication_us, thread, world_size=len(ranks))
        (folder / f"rank{rank:05d}.pt.trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    for file in folder.iterdir():
        os.utime(file, (time.time() - 3600,) * 2)  # what changed a moment ago is taken as being recorded


def write_products(folder: Path) -> None:
    """Write a run of one rank on H100 whose step has a product of 16 bits at half of the peak, and an addition."""
    size, name = [4096, 4096], "NVIDIA H100 80GB HBM3"
    events = [{"cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0, "dur": 2000} | _HOST]
    for number, (op, at_us, dur_us) in enumerate((("aten::mm", 100, 278), ("aten::add", 600, 60)), start=1):
        inputs = {"Input Dims": [size, size], "Input type": ["c10::BFloat16"] * 2, "External id": number}
        events.append({"cat": "cpu_op", "name": op, "ts": at_us, "dur": 90, "args": inputs} | _HOST)
        events += _kernel(f"{op[6:]}_kernel", at_us + 110, dur_us, stream=7, correlation=number)
    trace = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": name}], "traceEvents": events}
    trace["distributedInfo"] = {"backend": "nccl", "rank": 0, "world_size": 1}
    folder.mkdir()
    (folder / "rank00000.pt.trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))


_HOST = {"pid": 100, "tid": 100, "ph": "X"}


def _trace(rank: int, kernel: str, communication_us: int, thread: str, *, world_size: int = 2) -> dict:
    events = [
        {"ph": "M", "name": "thread_name", "pid": 100, "tid": 100, "ts": 0, "args": {"name": thread}},
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}},
    ]
    for index, step in enumerate(STEPS):
        events += _step(step, index * STEP_US, kernel, communication_us, correlation=10 * index)
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": rank, "name": "a device"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "baseTimeNanoseconds": 1_790_000_000_000_000_000,
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "traceName": f"rank{rank}.json",
    }


def _step(step: int, at_us: int, kernel: str, communication_us: int, *, correlation: int) -> list[dict]:
    host = _HOST
    work_us = STEP_US - 1000 - communication_us
    return [
        host | {"cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": at_us, "dur": STEP_US},
        host | {"cat": "user_annotation", "name": "tracekit::forward", "ts": at_us + 10, "dur": 2000},
        host | {"cat": "cpu_op", "name": "aten::mm", "ts": at_us + 20, "dur": 100, "args": {"External id": step}},
        *_kernel(kernel, at_us + 200, work_us, stream=7, correlation=correlation + 1),
        *_kernel(
            "Memset (Device)", at_us + 200 + work_us, 100, stream=7, correlation=correlation + 2, cat="gpu_memset"
        ),
        *_kernel(
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            at_us + 400 + work_us,
            communication_us,
            stream=20,
            correlation=correlation + 3,
        ),
    ]


def _kernel(name: str, at_us: int, dur_us: int, *, stream: int, correlation: int, cat: str = "kernel") -> list[dict]:
    launch_us = at_us - 50 - correlation % 10
    launch = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "pid": 100,
        "tid": 100,
        "ts": launch_us,
        "dur": 5,
    }
    work = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": at_us, "dur": dur_us}
    args = {"correlation": correlation, "device": 0, "stream": stream}
    return [launch | {"args": {"correlation": correlation}}, work | {"args": args}]
