"""Inputs that are large in one way each: `DIMENSIONS` names the ways. Not a test."""

import gzip
import json
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import (
    flight_records,
    kineto_files,
    nsight_export,
    perfetto_files,
    sample_snapshots,
    simulated_history,
)

Events = list[dict[str, Any]]
slice_ = kineto_files.slice_
TRACE_COMMANDS = (
    "check", "summary", "steps", "collectives", "contention", "stages", "axes", "streams", "clock", "kernels", "ops",
    "what-if", "critical path", "flame graph", "host flame graph", "Perfetto export", "page", "memory", "comparison",
    "comparison by operator", "query",
)  # fmt: skip


@dataclass(frozen=True)
class Dimension:
    """The first size, how files of a size are made, and the commands that read them."""

    first: int
    make: Callable[[Path, int], None]
    commands: tuple[str, ...] = TRACE_COMMANDS


def _trace(folder: Path, events: Events, rank: int = 0, world: int = 1, **header: Any) -> None:
    made = kineto_files.trace(rank, world, steps=0, **header)
    made["traceEvents"] = events
    (folder / f"rank{rank:05d}.pt.trace.json").write_text(json.dumps(made), encoding="utf-8")


def step(number: int, at: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return slice_("user_annotation", f"ProfilerStep#{number}", at, dur, tid=tid)


def launched(
    i: int,
    at: float,
    name: str = "gemm",
    *,
    dur: float = 4.0,
    stream: int = 7,
    tid: int = 1,
    lag: float = 3.0,
    **args: Any,
) -> Events:
    return [
        slice_("cpu_op", "aten::mm", at, 2.5, tid=tid, **{"External id": i}),
        slice_("cuda_runtime", "cudaLaunchKernel", at + 0.5, 1, tid=tid, correlation=i),
        slice_(
            "kernel",
            name,
            at + lag,
            dur,
            tid=stream,
            device=0,
            stream=stream,
            correlation=i,
            **{"External id": i},
            **args,
        ),
    ]


def collective_args(group: str, ranks: list[int], seq: int) -> dict[str, Any]:
    return {
        "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": len(ranks),
        "dtype": "Float", "Process Group Name": group, "Process Group Description": f"mesh_{group}",
        "Process Group Ranks": str(ranks), "Seq": seq,
    }  # fmt: skip


def one_step(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        events += launched(i + 1, 10.0 * i + 1)
    _trace(folder, events)


def steps(folder: Path, n: int) -> None:
    events: Events = []
    for i in range(n):
        events += [step(i, 10.0 * i, 10.0), *launched(i + 1, 10.0 * i + 1)]
    _trace(folder, events)


def ranks(folder: Path, n: int) -> None:
    for rank in range(n):
        events: Events = []
        for i in range(3):
            args = collective_args("0", list(range(n)), i)
            events += [
                step(i, 100.0 * i, 100.0),
                *launched(2 * i + 1, 100.0 * i + 1),
                *launched(2 * i + 2, 100.0 * i + 20, "ncclDevKernel_AllReduce_Sum", dur=50, stream=8, **args),
            ]
        _trace(folder, events, rank, n)


def threads(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        events += launched(i + 1, 10.0 * i + 1, tid=i + 100)
    _trace(folder, events)


def streams(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        events += launched(i + 1, 10.0 * i + 1, stream=i + 7)
    _trace(folder, events)


def streams_at_once(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        events += launched(i + 1, 10.0 * i + 1, stream=i + 7, dur=10.0 * n)
    _trace(folder, events)


def nested_ops(folder: Path, n: int) -> None:
    events = [step(0, 0, 2.0 * n + 10)]
    events += [slice_("cpu_op", f"aten::op{i % 7}", 1 + i * 0.5, 2.0 * n - i, tid=1) for i in range(n)]
    _trace(folder, [*events, *launched(1, 1.5 * n)])


def nested_python(folder: Path, n: int, name: str = "a.py({}): f") -> None:
    events = [step(0, 0, 2.0 * n + 10)]
    for i in range(n):
        ids = {"Python id": i + 1, "Python parent id": i or None}
        events.append(slice_("python_function", name.format(i), 1 + i * 0.5, 2.0 * n - i, tid=1, **ids))
    _trace(folder, [*events, *launched(1, 1.5 * n)])


def nested_modules(folder: Path, n: int) -> None:
    nested_python(folder, n, "nn.Module: Block_{}")


def nested_annotations(folder: Path, n: int) -> None:
    events = [step(0, 0, 2.0 * n + 10)]
    events += [slice_("user_annotation", f"part {i}", 1 + i * 0.5, 2.0 * n - i, tid=1) for i in range(n)]
    _trace(folder, [*events, *launched(1, 1.5 * n)])


def nested_begin_end(folder: Path, n: int) -> None:
    place = {"pid": 1, "tid": 1, "cat": "user_annotation"}
    events = [step(0, 0, 10.0 * n)]
    events += [{"ph": "B", "name": f"part {i}", "ts": i + 1.0, **place} for i in range(n)]
    events += [{"ph": "E", "ts": n + i + 2.0, **place} for i in range(n)]
    _trace(folder, [*events, *launched(1, 1.5 * n)])


def open_begins(folder: Path, n: int) -> None:
    place = {"pid": 1, "tid": 1, "cat": "user_annotation"}
    events = [step(0, 0, 10.0 * n)]
    events += [{"ph": "B", "name": f"part {i}", "ts": i + 1.0, **place} for i in range(n)]
    _trace(folder, [*events, *launched(1, 1.5 * n)])


def crossing_ops(folder: Path, n: int) -> None:
    events = [step(0, 0, 4.0 * n)]
    events += [slice_("cpu_op", "aten::mm", 1.0 + i, n, tid=1) for i in range(n)]
    _trace(folder, [*events, *launched(1, 1.5 * n)])


def crossing_kernels(folder: Path, n: int) -> None:
    events = [step(0, 0, 4.0 * n)]
    for i in range(n):
        events += launched(i + 1, 2.0 * i + 1, dur=n)
    _trace(folder, events)


def same_time(folder: Path, n: int) -> None:
    events = [step(0, 0, 1000)]
    for i in range(n):
        events += launched(i + 1, 10)
    _trace(folder, events)


def same_time_threads(folder: Path, n: int) -> None:
    events = [step(0, 0, 1000)]
    for i in range(n):
        events += launched(i + 1, 10, tid=100 + i, stream=7 + i)
    _trace(folder, events)


def zero_durations(folder: Path, n: int) -> None:
    events = [step(0, 0, 1000)]
    for i in range(n):
        events += launched(i + 1, 10 + (i % 100), dur=0)
    _trace(folder, events)


def names(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        events += launched(i + 1, 10.0 * i + 1, f"kernel_{i}_of_many")
        events[-3]["name"] = f"aten::op_{i}"
    _trace(folder, events)


def long_names(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * 50 + 10)]
    for i in range(50):
        events += launched(i + 1, 10.0 * i + 1, f"k{i}<" * (n // 4))
        events[-3]["name"] = "aten::" + "(" * n
    _trace(folder, events)


def annotation_names(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        events += [slice_("user_annotation", f"part {i}", 10.0 * i, 9, tid=1), *launched(i + 1, 10.0 * i + 1)]
    _trace(folder, events)


def correlations(folder: Path, n: int) -> None:
    """All launches and kernels have one number."""
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        events += launched(1, 10.0 * i + 1)
    _trace(folder, events)


def flows(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        events += launched(i + 1, 10.0 * i + 1)
        place = {"cat": "fwdbwd", "name": "fwdbwd", "pid": 1, "tid": 1}
        events += [
            {"ph": "s", "id": i % 7, "ts": 10.0 * i + 1, **place},
            {"ph": "f", "bp": "e", "id": i % 7, "ts": 10.0 * i + 2, **place},
        ]
    _trace(folder, events)


def sequence_numbers(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        events += launched(i + 1, 10.0 * i + 1, tid=1 + i % 2)
        events[-3]["args"] |= {"Sequence number": 5, "Fwd thread id": 0}
        if i % 2:
            events[-3]["name"] = "autograd::engine::evaluate_function: MmBackward0"
    _trace(folder, events)


def waits(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        events += launched(i + 1, 10.0 * i + 1, stream=7 + i % 2)
        events.append(slice_("cuda_runtime", "cudaStreamWaitEvent", 10.0 * i + 4, 1, tid=1, correlation=10**6 + i))
        events.append(
            slice_(
                "cuda_sync",
                "Stream Wait Event",
                10.0 * i + 5,
                2,
                tid=7 + i % 2,
                device=0,
                stream=7 + i % 2,
                wait_on_stream=8 - i % 2,
                wait_on_cuda_event_record_corr_id=1,
                wait_on_cuda_event_id=3,
                correlation=10**6 + i,
            )
        )
    _trace(folder, events)


def synchronizations(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        events += launched(i + 1, 10.0 * i + 1)
        events.append(slice_("cuda_runtime", "cudaDeviceSynchronize", 10.0 * i + 4, 5, tid=1, correlation=10**6 + i))
        events.append(
            slice_("cuda_sync", "Context Sync", 10.0 * i + 4, 5, tid=7, device=0, stream=-1, correlation=10**6 + i)
        )
    _trace(folder, events)


def copies(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        at = 10.0 * i
        events += launched(i + 1, at + 1)
        events.append(slice_("cuda_runtime", "cudaMemcpyAsync", at + 4, 1, tid=1, correlation=10**6 + i))
        events.append(
            slice_(
                "gpu_memcpy",
                "Memcpy DtoH (Device -> Pageable)",
                at + 6,
                3,
                tid=9,
                device=0,
                stream=9,
                correlation=10**6 + i,
                bytes=4096,
            )
        )
    _trace(folder, events)


def allocations(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10), *launched(1, 5)]
    for i in range(n):
        sizes = {"delta": 512, "allocated": 512 * (i + 1), "reserved": 1 << 30}
        events.append(kineto_files.memory_event(10.0 * i + 1, address=(1 << 40) + 512 * i, **sizes))
    _trace(folder, events)


def frees(folder: Path, n: int) -> None:
    events = [step(0, 0, 20.0 * n + 10), *launched(1, 5)]
    for i in range(2 * n):
        k = i if i < n else 2 * n - 1 - i
        args = {
            "Device Type": 1,
            "Device Id": 0,
            "Addr": (1 << 40) + 512 * k,
            "Bytes": 512 if i < n else -512,
            "Total Allocated": 512 * (k + 1),
            "Total Reserved": 1 << 30,
        }
        events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "s": "t",
                "name": "[memory]",
                "pid": 1,
                "tid": 1,
                "ts": 10.0 * i + 1,
                "args": args,
            }
        )
    _trace(folder, events)


def collectives(
    folder: Path, n: int, *, groups: int = 1, order: int = 1, seq: int = 1, name: str = "ncclDevKernel_AllReduce_Sum"
) -> None:
    for rank in (0, 1):
        events = [step(0, 0, 10.0 * n + 10)]
        for i in range(n):
            k = i if rank == 0 else i * order % n if order > 0 else n - 1 - i
            group = str(k % groups)
            events += launched(i + 1, 10.0 * i + 1, name, stream=8, **collective_args(group, [0, 1], k * seq))
        _trace(folder, events, rank, 2)


def groups(folder: Path, n: int) -> None:
    collectives(folder, n, groups=n)


def reversed_collectives(folder: Path, n: int) -> None:
    collectives(folder, n, order=-1)


def equal_collectives(folder: Path, n: int) -> None:
    collectives(folder, n, seq=0)


def rank_groups(folder: Path, n: int) -> None:
    """Many ranks, each in pairs of its own."""
    for rank in range(n):
        pair = [rank - rank % 2, rank - rank % 2 + 1]
        events = [step(0, 0, 110)]
        for i in range(5):
            events += launched(
                i + 1, 10.0 * i + 1, "ncclDevKernel_AllReduce_Sum", stream=8, **collective_args(str(rank // 2), pair, i)
            )
        _trace(folder, events, rank, n)


def sends(folder: Path, n: int) -> None:
    for rank in (0, 1):
        events = [step(0, 0, 10.0 * n + 10)]
        for i in range(n):
            args = {
                **collective_args("0", [0, 1], i),
                "Collective name": "send" if rank == 0 else "recv",
                "Src Rank": 0,
                "Dst Rank": 1,
            }
            events += launched(i + 1, 10.0 * i + 1, "ncclDevKernel_SendRecv", stream=8, **args)
        _trace(folder, events, rank, 2)


def pipeline(folder: Path, n: int) -> None:
    for rank in (0, 1):
        events = [step(0, 0, 20.0 * n + 10)]
        for i in range(n):
            for j, action in enumerate(("F", "B")):
                at = 10.0 * (2 * i + j) + 1
                events.append(slice_("user_annotation", f"PP:{rank}{action}{i}", at, 9, tid=1))
                events += launched(2 * i + j + 1, at + 0.2)
        _trace(folder, events, rank, 2)


def saves(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        events += [slice_("user_annotation", "dcp.save", 10.0 * i, 9, tid=1), *launched(i + 1, 10.0 * i + 1)]
    _trace(folder, events)


def cpu_only(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10)]
    for i in range(n):
        events.append(slice_("cpu_op", "aten::mm", 10.0 * i + 1, 5, tid=1))
        events.append(slice_("user_annotation", "gloo:all_reduce", 10.0 * i + 3, 5, tid=2 + i % 3))
    _trace(folder, events)


def windows(folder: Path, n: int) -> None:
    for i in range(n):
        place = folder / f"window{i:03d}"
        place.mkdir()
        _trace(
            place,
            [
                step(3 * i, 1000.0 * i, 100),
                *launched(1, 1000.0 * i + 5),
                step(3 * i + 1, 1000.0 * i + 100, 100),
                *launched(2, 1000.0 * i + 105),
            ],
        )


def merged(folder: Path, n: int) -> None:
    events: Events = []
    for rank in range(n):
        for i in range(3):
            made = [step(i, 100.0 * i, 100.0), *launched(2 * i + 1, 100.0 * i + 1)]
            events += [{**event, "pid": rank, "args": {**event["args"], "rank": rank}} for event in made]
    (folder / "merged.json").write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def counters(folder: Path, n: int) -> None:
    events = [step(0, 0, 10.0 * n + 10), *launched(1, 5)]
    events += [
        {"ph": "C", "name": f"counter {i % 50}", "pid": 1, "tid": 1, "ts": 10.0 * i, "args": {"value": i}}
        for i in range(n)
    ]
    _trace(folder, events)


def metadata(folder: Path, n: int) -> None:
    events = [step(0, 0, 100), *launched(1, 5)]
    events += [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": i, "ts": 0, "args": {"name": f"thread {i}"}}
        for i in range(n)
    ]
    _trace(folder, events)


def process_groups(folder: Path, n: int) -> None:
    config = [
        {"pg_name": str(i), "pg_desc": f"mesh_{i}", "backend_config": "cuda:nccl", "pg_size": 2, "ranks": [0, 1]}
        for i in range(n)
    ]
    info = {"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2, "pg_count": n, "pg_config": config}}
    _trace(folder, [step(0, 0, 100), *launched(1, 5)], **info)


def irrelevant_files(folder: Path, n: int) -> None:
    _trace(folder, [step(0, 0, 100), *launched(1, 5)])
    for i in range(n):
        place = folder / f"code{i % 50}"
        place.mkdir(exist_ok=True)
        (place / f"file{i}.json").write_text('{"learning_rate": 1}', encoding="utf-8")


def _lines(path: Path, lines: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def metrics_log(folder: Path, n: int) -> None:
    steps(folder, 20)
    _lines(
        folder / "rank00000.metrics.jsonl",
        ({"step": i, "step_time_ns": 10**7 + i % 1000, "loss": 1.0 / (i + 1)} for i in range(n)),
    )


def metric_names(folder: Path, n: int) -> None:
    steps(folder, 20)
    lines = (
        {"step": i, "step_time_ns": 10**7, **{f"metric {i * 20 + j}": j for j in range(20)}} for i in range(n // 20)
    )
    _lines(folder / "rank00000.metrics.jsonl", lines)


def equal_steps_of_log(folder: Path, n: int) -> None:
    steps(folder, 20)
    _lines(folder / "rank00000.metrics.jsonl", ({"step": i % 3, "step_time_ns": 10**7} for i in range(n)))


def checkpoint_log(folder: Path, n: int) -> None:
    steps(folder, 20)
    stages = ("plan", "stage", "serialize", "write", "fsync")
    _lines(
        folder / "rank00000.checkpoint.jsonl",
        (
            {
                "checkpoint": f"step-{i}",
                "operation": "save",
                "step": i,
                "stage": stage,
                "start_ns": kineto_files.BASE_NS + 10**6 * (5 * i + j),
                "dur_ns": 10**6,
                "bytes": 10**6,
                "files": 1,
                "path": f"p{i}",
                "blocking": j < 2,
                "rank": 0,
            }
            for i in range(n // 5)
            for j, stage in enumerate(stages)
        ),
    )


def overlapping_saves(folder: Path, n: int) -> None:
    steps(folder, 20)
    _lines(
        folder / "rank00000.checkpoint.jsonl",
        (
            {
                "checkpoint": "step-1",
                "operation": "save",
                "step": 1,
                "stage": "write",
                "start_ns": kineto_files.BASE_NS + i,
                "dur_ns": 10**9,
                "bytes": 10**6,
                "files": 1,
                "path": "p",
                "blocking": False,
                "rank": 0,
            }
            for i in range(n)
        ),
    )


def manifest(folder: Path, n: int) -> None:
    steps(folder, 20)
    document = {
        "schema_version": 1,
        "strategy": "ddp",
        "world_size": 1,
        "arguments": {f"argument_{i}": i for i in range(n)},
    }
    (folder / "run.json").write_text(json.dumps(document), encoding="utf-8")


def _snapshot(folder: Path, document: object) -> None:
    sample_snapshots.write(folder / "rank00000.memory.pickle", document)


def snapshot_allocations(folder: Path, n: int) -> None:
    """Blocks that are all in use when the history ends."""
    blocks = [(512, "active_allocated")] * n
    events = [sample_snapshots.event("segment_alloc", 1 << 40, 512 * n)]
    events += [
        sample_snapshots.event(
            "alloc", (1 << 40) + 512 * i, 512, at_us=i, frames=[sample_snapshots.frame(f"f{i % 100}", i % 7)]
        )
        for i in range(n)
    ]
    _snapshot(folder, sample_snapshots.document([sample_snapshots.segment(1 << 40, blocks)], events))


def snapshot_frees(folder: Path, n: int) -> None:
    """Blocks that are freed in the order of their allocation."""
    events = [sample_snapshots.event("segment_alloc", 1 << 40, 512 * n)]
    events += [sample_snapshots.event("alloc", (1 << 40) + 512 * i, 512, at_us=i) for i in range(n)]
    freed = range(0, n, 2)
    events += [sample_snapshots.event("free_completed", (1 << 40) + 512 * i, 512, at_us=n + i) for i in freed]
    blocks = [(512, "inactive" if i % 2 == 0 else "active_allocated") for i in range(n)]
    _snapshot(folder, sample_snapshots.document([sample_snapshots.segment(1 << 40, blocks)], events))


def snapshot_segments(folder: Path, n: int) -> None:
    segments = [sample_snapshots.segment((1 << 40) + (i << 21), [(1 << 21, "active_allocated")]) for i in range(n)]
    events = [
        sample_snapshots.event(action, (1 << 40) + (i << 21), 1 << 21, at_us=i)
        for i in range(n)
        for action in ("segment_alloc", "alloc")
    ]
    _snapshot(folder, sample_snapshots.document(segments, events))


def snapshot_frames(folder: Path, n: int) -> None:
    """Stacks that are all different."""
    events = [sample_snapshots.event("segment_alloc", 1 << 40, 512 * n)]
    events += [
        sample_snapshots.event(
            "alloc",
            (1 << 40) + 512 * i,
            512,
            at_us=i,
            frames=[sample_snapshots.frame(f"function_{i}_{j}", i) for j in range(10)],
        )
        for i in range(n)
    ]
    _snapshot(
        folder, sample_snapshots.document([sample_snapshots.segment(1 << 40, [(512, "active_allocated")] * n)], events)
    )


def hang_entries(folder: Path, n: int) -> None:
    for rank in (0, 1):
        entries = [flight_records.entry("all_reduce", i) for i in range(1, n - rank)]
        _dump(
            folder,
            rank,
            flight_records.dump(
                [*entries, flight_records.entry("all_reduce", n - rank, state="started")],
                groups={flight_records.GROUP: [0, 1]},
            ),
        )


def hang_groups(folder: Path, n: int) -> None:
    groups = {(str(i), f"group {i}"): [0, 1] for i in range(n)}
    for rank in (0, 1):
        entries = [
            flight_records.entry("all_reduce", 1, group=group, state="started" if rank else "completed")
            for group in groups
        ]
        _dump(folder, rank, flight_records.dump(entries, groups=groups))


def hang_ranks(folder: Path, n: int) -> None:
    for rank in range(n):
        entries = [flight_records.entry("all_reduce", i) for i in range(1, 20)]
        state = "started" if rank != 3 else "completed"
        _dump(
            folder,
            rank,
            flight_records.dump(
                [*entries, flight_records.entry("all_reduce", 20, state=state)],
                groups={flight_records.GROUP: list(range(n))},
            ),
        )


def hang_missing_ranks(folder: Path, n: int) -> None:
    """Two of many ranks left dumps."""
    for rank in range(2):
        entries = [flight_records.entry("all_reduce", 1, state="started")]
        document = flight_records.dump(entries, groups={flight_records.GROUP: list(range(n))})
        _dump(folder, rank, document)


def hang_pairs(folder: Path, n: int) -> None:
    """Ranks that wait for each other in a chain."""
    groups = {(str(i), f"pair {i}"): [i, i + 1] for i in range(n - 1)}
    for rank in range(n):
        own = [group for group, of in groups.items() if rank in of]
        entries = [flight_records.entry("all_reduce", 1, group=group, state="started") for group in own[-1:]]
        _dump(folder, rank, flight_records.dump(entries, groups=groups))


def _dump(folder: Path, rank: int, document: object) -> None:
    (folder / f"rank{rank:05d}.hang.json").write_text(json.dumps(document), encoding="utf-8")


def history(folder: Path, n: int) -> None:
    documents = []
    for i, document in enumerate(simulated_history.slower_from(n // 2, n)):
        documents.append(simulated_history.write(folder, {**document, "commit": f"c{i}"}))
    from tests.support import cli_runner

    cli_runner.tracekit("history", "add", *documents, "--db", folder / "runs.duckdb")


def perfetto_slices(folder: Path, n: int) -> None:
    events: Events = [step(0, 0, 10.0 * n)]
    for i in range(n):
        events += launched(i + 1, 10.0 * i + 1, f"kernel {i}")
    (folder / "run.pftrace").write_bytes(perfetto_files.of_kineto(events, kineto_files.BASE_NS))


def perfetto_nested(folder: Path, n: int) -> None:
    events = [slice_("cpu_op", "aten::mm", 1 + i, 2 * n - 2 * i, tid=1) for i in range(n)]
    (folder / "run.pftrace").write_bytes(perfetto_files.of_kineto([step(0, 0, 4.0 * n), *events], kineto_files.BASE_NS))


def nsight_kernels(folder: Path, n: int) -> None:
    export = nsight_export.Export(folder / "rank0.sqlite", "2023.4")
    of = {"globalPid": nsight_export.HOST | 1 << 24, "deviceId": 0, "contextId": 1}
    for i in range(n):
        when = {"start": 1000 * i, "end": 1000 * i + 900, "correlationId": i, "streamId": 7 + i % 3}
        export.insert("CUPTI_ACTIVITY_KIND_KERNEL", **when, **of, demangledName=export.text(f"gemm_{i}"))
    export.close()


def archive(folder: Path, n: int) -> None:
    with zipfile.ZipFile(folder / "run.zip", "w") as packed:
        for i in range(n):
            packed.writestr(f"code/file{i}.py", "x = 1")
        packed.writestr("rank00000.pt.trace.json", json.dumps(kineto_files.trace(0, 1)))


def gzip_members(folder: Path, n: int) -> None:
    text = json.dumps(kineto_files.trace(0, 1)).encode()
    parts = [text[at : at + 1] for at in range(len(text) - 1)] + [text[-1:]]
    (folder / "rank0.trace.json.gz").write_bytes(b"".join(map(gzip.compress, parts)) + gzip.compress(b"") * n)


def safetensors(folder: Path, n: int) -> None:
    header = {f"layer.{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(n)}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * n))


DIMENSIONS = {
    "metrics log": Dimension(8000, metrics_log, ("check", "watch", "steps", "scrub", "page")),
    "names of metrics": Dimension(8000, metric_names, ("check", "watch", "page")),
    "equal steps of the log": Dimension(8000, equal_steps_of_log, ("check", "watch")),
    "checkpoint log": Dimension(4000, checkpoint_log, ("check", "watch", "page", "scrub")),
    "overlapping saves": Dimension(4000, overlapping_saves, ("check", "watch")),
    "manifest": Dimension(8000, manifest, ("check", "comparison", "scrub")),
    "allocations of a snapshot": Dimension(
        4000, snapshot_allocations, ("memory", "check", "memory text", "replay", "memory difference")
    ),
    "frees of a snapshot": Dimension(4000, snapshot_frees, ("memory", "check", "replay")),
    "segments of a snapshot": Dimension(2000, snapshot_segments, ("memory", "check", "replay")),
    "stacks of a snapshot": Dimension(2000, snapshot_frames, ("memory", "check", "memory difference", "scrub")),
    "ranks without hang dumps": Dimension(4000, hang_missing_ranks, ("hang", "hang text")),
    "entries of hang dumps": Dimension(2000, hang_entries, ("hang", "hang text")),
    "groups of hang dumps": Dimension(500, hang_groups, ("hang", "hang text")),
    "ranks of hang dumps": Dimension(32, hang_ranks, ("hang", "hang text")),
    "chain of hung ranks": Dimension(32, hang_pairs, ("hang", "hang text")),
    "history": Dimension(40, history, ("history show", "history text")),
    "slices of Perfetto traces": Dimension(1000, perfetto_slices, ("check", "page", "scrub")),
    "nested slices of Perfetto traces": Dimension(2000, perfetto_nested, ("check", "page")),
    "kernels of Nsight exports": Dimension(2000, nsight_kernels, ("check", "page")),
    "files of an archive": Dimension(1000, archive, ("check",)),
    "gzip members": Dimension(4000, gzip_members, ("check", "scrub")),
    "tensors of safetensors": Dimension(2000, safetensors, ("verify",)),
    "one step": Dimension(4000, one_step),
    "steps": Dimension(500, steps),
    "ranks": Dimension(16, ranks),
    "threads": Dimension(500, threads),
    "streams": Dimension(500, streams),
    "streams at once": Dimension(500, streams_at_once),
    "nested ops": Dimension(2000, nested_ops),
    "nested Python functions": Dimension(2000, nested_python),
    "nested modules": Dimension(2000, nested_modules),
    "nested annotations": Dimension(2000, nested_annotations),
    "nested begins and ends": Dimension(2000, nested_begin_end),
    "open begins": Dimension(2000, open_begins),
    "crossing ops": Dimension(2000, crossing_ops),
    "crossing kernels": Dimension(2000, crossing_kernels),
    "same time": Dimension(2000, same_time),
    "same time on many threads": Dimension(500, same_time_threads),
    "zero durations": Dimension(2000, zero_durations),
    "names": Dimension(2000, names),
    "long names": Dimension(10000, long_names),
    "annotation names": Dimension(2000, annotation_names),
    "correlations": Dimension(2000, correlations),
    "flows": Dimension(2000, flows),
    "sequence numbers": Dimension(2000, sequence_numbers),
    "waits": Dimension(2000, waits),
    "synchronizations": Dimension(2000, synchronizations),
    "copies": Dimension(2000, copies),
    "allocations": Dimension(4000, allocations),
    "frees": Dimension(4000, frees),
    "collectives": Dimension(1000, collectives),
    "groups": Dimension(1000, groups),
    "reversed collectives": Dimension(1000, reversed_collectives),
    "equal collectives": Dimension(1000, equal_collectives),
    "groups of ranks": Dimension(16, rank_groups),
    "sends": Dimension(1000, sends),
    "pipeline": Dimension(500, pipeline),
    "saves": Dimension(1000, saves),
    "CPU only": Dimension(4000, cpu_only),
    "windows": Dimension(10, windows),
    "merged ranks": Dimension(16, merged),
    "counters": Dimension(8000, counters),
    "metadata": Dimension(8000, metadata),
    "process groups": Dimension(2000, process_groups),
    "irrelevant files": Dimension(1000, irrelevant_files, ("check", "scrub", "history add")),
}
