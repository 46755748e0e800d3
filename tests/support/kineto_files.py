"""Small Kineto files, written as recorders write them: what folders of traces are made of in tests."""

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec

BASE_NS = 1_790_000_000_000_000_000
STEP_US = 1_000.0


def trace(
    rank: int | None = 0,
    world_size: int | None = 2,
    *,
    start_us: float = 100.0,
    steps: int = 2,
    on_device: bool = True,
    last: bool = False,
    **header: object,
) -> dict[str, object]:
    """Return a trace of a few steps: in each a kernel and a collective that all ranks leave together.

    Without `rank` it states none. `last` writes the header's keys after the events.
    """
    events: list[dict[str, object]] = []
    for step in range(steps):
        at = start_us + step * STEP_US
        events.append(slice_("user_annotation", f"ProfilerStep#{step}", at, STEP_US, tid=1))
        for i, (name, offset, duration) in enumerate(
            (("gemm", 50, 300), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 400, 200))
        ):
            correlation = 10 * step + i + 1
            if on_device:
                launch = slice_("cuda_runtime", "cudaLaunchKernel", at + offset - 20, 5, tid=1, correlation=correlation)
                kernel = slice_(
                    "kernel", name, at + offset, duration, tid=7 + i, device=0, stream=7 + i, correlation=correlation
                )
                events += [launch, kernel]
            else:
                events.append(slice_("cpu_op", "aten::mm", at + offset, duration, tid=1))
    info = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size}} if rank is not None else {}
    keys = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, **info, **header}
    return {"traceEvents": events, **keys} if last else {**keys, "traceEvents": events}


def slice_(category: str, name: str, at_us: float, dur_us: float, *, tid: int, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": at_us, "dur": dur_us, "args": args}


def memory_event(at_us: float, *, address: int, delta: int, allocated: int, reserved: int) -> dict[str, object]:
    """Return an event of the allocator of GPU 0: sizes in bytes, of this call and in all after it."""
    args = {"Device Type": 1, "Device Id": 0, "Addr": address, "Bytes": delta}
    args |= {"Total Allocated": allocated, "Total Reserved": reserved}
    place = {"cat": "cpu_instant_event", "s": "t", "pid": 1, "tid": 1, "ts": at_us}
    return {"ph": "i", "name": "[memory]", **place, "args": args}


def read_recording(path: Path) -> dict[str, Any]:
    """The document of a recorded trace, by msgspec: json takes three times as long."""
    document: dict[str, Any] = msgspec.json.decode(gzip.decompress(path.read_bytes()))
    return document


def write_recording(path: Path, document: dict[str, Any]) -> None:
    """Write the document of a recorded trace, gzipped or not as its name says."""
    data = msgspec.json.encode(document)
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


def write(path: Path, content: dict[str, object], *, indent: int | None = None) -> Path:
    """Write a trace as its name says: gzipped or not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(content, indent=indent).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path
