"""What a simulated rank did as a Kineto file, laid out as PyTorch's profiler does, and marked as simulated."""

import gzip
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from tracekit import conventions
from tracekit.simulate import topology
from tracekit.simulate.job import Job
from tracekit.simulate.program import AUTOGRAD_THREAD, COPY, MAIN_THREAD, Collective
from tracekit.simulate.recording import Activity, HostSlice, RankRecord
from tracekit.simulate.topology import Group, World

BASE_NS = 1_790_000_000_000_000_000
"""The Unix time at which every simulation starts."""
TRACE_SUFFIX = ".simulated" + conventions.TRACE_SUFFIX

_Event: TypeAlias = dict[str, Any]
_NAMED_RANKS = 30  # NCCL's arguments cut longer lists
_NCCL_NAMES = {
    "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base", "all_reduce": "allreduce",
    "broadcast": "broadcast", "all_to_all": "all_to_allv", "send": "send", "recv": "recv",
}  # fmt: skip
_PEERS = {"send": "Dst Rank", "recv": "Src Rank"}
_CUDA = 1
_NO_STREAM = -1
_SYNCS = {
    "cudaEventSynchronize": "Event Sync",
    "cudaStreamSynchronize": "Stream Sync",
    "cudaDeviceSynchronize": "Context Sync",
}
_CBIDS = {
    "cudaLaunchKernel": 211, "cudaLaunchKernelExC": 430, "cudaMemcpyAsync": 41, "cudaEventRecord": 135,
    "cudaStreamWaitEvent": 147, "cudaEventSynchronize": 137, "cudaStreamSynchronize": 131,
    "cudaDeviceSynchronize": 165, "cudaMalloc": 20, "cudaFree": 22,
}  # fmt: skip


def write(path: Path, job: Job, record: RankRecord) -> None:
    """Write one rank's trace, gzipped; the same job gives the same bytes."""
    world = topology.world(job)
    events = b",\n".join(map(msgspec.json.encode, _events(job, world, record)))
    head = msgspec.json.encode(_header(job, world, record.rank))
    data = head[:-1] + b',\n"traceEvents": [\n' + events + b'\n],\n"traceName": "simulated"}\n'
    replace_file(path, gzip.compress(data, 6, mtime=0))


def replace_file(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, and rename it when it is whole."""
    partial = path.with_name(path.name + conventions.PARTIAL_SUFFIX)
    partial.write_bytes(data)
    partial.rename(path)


def _header(job: Job, world: World, rank: int) -> Mapping[str, Any]:
    hardware = job.hardware
    device = {
        "id": rank % job.node,
        "name": hardware.device_name,
        "totalGlobalMem": hardware.memory_bytes,
        "numSms": hardware.multiprocessors,
    }
    listed = [
        {
            "pg_name": group.name,
            "pg_desc": group.description,
            "backend_config": "cuda:nccl",
            "pg_size": len(group.ranks),
            "ranks": list(group.ranks),
        }
        for group in (world.group(kind, rank) for kind in world.kinds())
    ]
    return {
        "schemaVersion": 1,
        "simulated": True,
        "simulator": "tracekit simulate",
        "deviceProperties": [device],
        "profile_memory": 1,
        "distributedInfo": {
            "backend": "nccl",
            "rank": rank,
            "world_size": job.gpus,
            "pg_count": len(listed),
            "pg_config": listed,
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS,
    }


def _events(job: Job, world: World, record: RankRecord) -> Iterator[_Event]:
    process, device = 1000 + record.rank, record.rank % job.node
    launches = {activity.correlation for activity in record.activities}
    for slice_ in sorted(record.slices, key=lambda s: (s.start_ns, -s.end_ns)):
        yield _host(slice_, process, world, record.rank)
        if slice_.correlation in launches:
            flow = {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": slice_.correlation}
            yield {**flow, "pid": process, "tid": slice_.thread, "ts": _us(slice_.start_ns)}
    for activity in record.activities:
        yield from _device(activity, job, device)
    yield from _waits(record, device)
    yield from _memory(record, process, device)
    yield from _names(record, process, device)


def _host(slice_: HostSlice, process: int, world: World, rank: int) -> _Event:
    args: dict[str, Any] = {"External id": slice_.id}
    if slice_.correlation:
        args |= {"cbid": _CBIDS[slice_.name], "correlation": slice_.correlation}
    if slice_.args:
        slice_args = dict(slice_.args)
        group = slice_args.pop("group", None)
        args |= slice_args if group is None else {**slice_args, **_group_args(world.group(str(group), rank))}
    return _slice(slice_.category, slice_.name, process, slice_.thread, (slice_.start_ns, slice_.end_ns), args)


def _device(activity: Activity, job: Job, device: int) -> Iterator[_Event]:
    kernel, correlation = activity.kernel, activity.correlation
    args: dict[str, Any] = {"External id": activity.owner, "device": device, "context": 1, "stream": kernel.stream}
    args["correlation"] = correlation
    if kernel.kind == COPY:
        args["bytes"] = kernel.bytes
    else:
        per_multiprocessor = kernel.blocks / job.hardware.multiprocessors
        args |= {"queued": 0, "grid": [kernel.blocks, 1, 1], "block": [256, 1, 1], "registers per thread": 64}
        args |= {"blocks per SM": round(per_multiprocessor, 6), "warps per SM": round(8 * per_multiprocessor, 6)}
    if kernel.collective is not None and activity.group is not None:
        args |= _collective_args(kernel.collective, activity.group, activity.number)
    category = "gpu_memcpy" if kernel.kind == COPY else "kernel"
    yield _slice(category, kernel.name, device, kernel.stream, (activity.start_ns, activity.end_ns), args)
    flow = {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": correlation, "bp": "e"}
    yield {**flow, "pid": device, "tid": kernel.stream, "ts": _us(activity.start_ns)}


def _collective_args(collective: Collective, group: Group, number: int) -> dict[str, Any]:
    sent, received = collective.splits or ((), ())
    peer = {} if collective.peer is None else {_PEERS[collective.op]: collective.peer}
    return {
        "Collective name": _NCCL_NAMES[collective.op],
        "dtype": collective.dtype,
        "In msg nelems": collective.sent,
        "Out msg nelems": collective.received,
        "In split size": str(list(sent)),
        "Out split size": str(list(received)),
        "Seq": number,
        **peer,
        **_group_args(group.parent or group),
    }


def _group_args(group: Group) -> dict[str, Any]:
    ranks = ", ".join(map(str, group.ranks[:_NAMED_RANKS]))
    return {
        "Group size": len(group.ranks),
        "Process Group Name": group.name,
        "Process Group Description": group.description,
        "Process Group Ranks": f"[{ranks}{', ...' if len(group.ranks) > _NAMED_RANKS else ''}]",
    }


def _waits(record: RankRecord, device: int) -> Iterator[_Event]:
    for wait in record.waits:
        args = {
            "External id": wait.owner,
            "cuda_sync_kind": "Stream Wait Event",
            "stream": wait.stream,
            "wait_on_stream": wait.on,
            "wait_on_cuda_event_record_corr_id": wait.awaited,
            "wait_on_cuda_event_id": wait.awaited,
            "correlation": wait.correlation,
            "device": device,
            "context": 1,
        }
        span = (wait.at_ns, wait.at_ns + 1)
        yield _slice("cuda_sync", "Stream Wait Event", device, wait.stream, span, args)
    for host in record.host_waits:
        name = _SYNCS[host.call]
        args = {"External id": host.owner, "cuda_sync_kind": name, "correlation": host.correlation}
        args |= {"stream": _NO_STREAM, "device": device, "context": 1}
        if name == "Event Sync":
            args |= {"wait_on_stream": host.stream, "wait_on_cuda_event_record_corr_id": host.awaited}
            args["wait_on_cuda_event_id"] = host.awaited
        elif host.stream is not None:
            args["stream"] = host.stream
        yield _slice("cuda_sync", name, device, _NO_STREAM, (host.start_ns, host.end_ns), args)


def _memory(record: RankRecord, process: int, device: int) -> Iterator[_Event]:
    for allocation in record.allocations:
        yield {
            "ph": "i",
            "cat": "cpu_instant_event",
            "s": "t",
            "name": "[memory]",
            "pid": process,
            "tid": allocation.thread,
            "ts": _us(allocation.at_ns),
            "args": {
                "Total Reserved": allocation.reserved_bytes,
                "Total Allocated": allocation.allocated_bytes,
                "Bytes": allocation.delta_bytes,
                "Addr": allocation.address,
                "Device Id": device,
                "Device Type": _CUDA,
            },
        }


def _names(record: RankRecord, process: int, device: int) -> Iterator[_Event]:
    metadata = {"ph": "M", "ts": 0, "tid": 0}
    for pid in (process, device):
        yield {**metadata, "name": "process_name", "pid": pid, "args": {"name": "python (simulated)"}}
    yield {**metadata, "name": "process_labels", "pid": device, "args": {"labels": f"GPU {device} (simulated)"}}
    threads = {MAIN_THREAD: "thread main", AUTOGRAD_THREAD: "thread pt_autograd_0"}
    for thread, name in threads.items():
        yield {**metadata, "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
    for stream in sorted({activity.kernel.stream for activity in record.activities}):
        yield {**metadata, "name": "thread_name", "pid": device, "tid": stream, "args": {"name": f"stream {stream}"}}


def _slice(category: str, name: str, pid: int, tid: int, span: tuple[int, int], args: Mapping[str, Any]) -> _Event:
    start_ns, end_ns = span
    event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid}
    return {**event, "ts": _us(start_ns), "dur": _us(end_ns - start_ns), "args": args}


def _us(ns: int) -> float:
    return ns / 1000
