"""Logs of NCCL Inspector, for tests: records with the fields and order of inspector.cc (NVIDIA/nccl, format v4.0).

The plugin needs NCCL and GPUs, so these files are made by the published source's field names, not by the plugin.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGAN_US = 1_748_030_377_000_000


@dataclass(frozen=True)
class Call:
    """A collective on one rank, times in µs since the job began."""

    start_us: int
    dur_us: int
    sequence: int
    function: str = "AllReduce"
    part_bytes: int = 64 << 20
    communicator: str = "0x7f8c496ae9f661"
    group_rank: int | None = None
    """The rank in the communicator; None for the global rank."""
    group_size: int | None = None


def record(call: Call, rank: int, world_size: int, *, verbose: bool = True, interval_us: int = 500) -> dict[str, Any]:
    """The record of a call; without `verbose` its only time is that of the next dump."""
    size = call.group_size or world_size
    end_us = BEGAN_US + call.start_us + call.dur_us
    whole_bytes = call.part_bytes * (1 if call.function == "AllReduce" else size)
    per_rank = 2 * (size - 1) / size if call.function == "AllReduce" else (size - 1) / size
    algorithm_gbs = whole_bytes / call.dur_us / 1000
    perf: dict[str, Any] = {
        "coll": call.function,
        "coll_sn": call.sequence,
        "coll_msg_size_bytes": call.part_bytes,
        "coll_exec_time_us": call.dur_us,
        "coll_timing_source": "kernel_gpu",
        "coll_algobw_gbs": round(algorithm_gbs, 6),
        "coll_busbw_gbs": round(algorithm_gbs * per_rank, 6),
    }
    if verbose:
        kernel = {
            "channel_id": 0,
            "kernel_start_ts": end_us - call.dur_us,
            "kernel_stop_ts": end_us,
            "kernel_record_ts": end_us,
        }
        perf["event_trace_ts"] = {
            "coll_start_ts": end_us - call.dur_us - 30,
            "coll_stop_ts": end_us - call.dur_us - 20,
            "kernel_events": [kernel],
        }
    return {
        "header": {
            "id": call.communicator,
            "rank": rank if call.group_rank is None else call.group_rank,
            "n_ranks": size,
            "nnodes": 1,
        },
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": end_us - end_us % interval_us + interval_us,
            "hostname": f"node{rank // 8}",
            "pid": 1000 + rank,
        },
        "coll_perf": perf,
    }


def write(
    folder: Path, calls_of_ranks: Sequence[Sequence[Call]], *, verbose: bool = True, interval_us: int = 500
) -> Path:
    """Write the log of each rank as the plugin names it, HOST-pidN.log, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, calls in enumerate(calls_of_ranks):
        records = [record(c, rank, len(calls_of_ranks), verbose=verbose, interval_us=interval_us) for c in calls]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in records)
        (folder / f"node{rank // 8}-pid{1000 + rank}.log").write_text(text)
    return folder


STEP_US, TRANSFER_US = 20_000, 3000


def job(ranks: int, calls: int, *, late_rank: int | None = None, late_us: int = 4000) -> list[list[Call]]:
    """An all-reduce every STEP_US, in which all ranks arrive within 40 µs but a late one, and leave together."""

    def arrival_us(rank: int, number: int) -> int:
        return number * STEP_US + 7 * ((rank * 5 + number * 3) % 6) + (late_us if rank == late_rank else 0)

    def end_us(number: int) -> int:
        return max(arrival_us(rank, number) for rank in range(ranks)) + TRANSFER_US

    return [
        [Call(start_us, end_us(n) - start_us, n) for n in range(calls) for start_us in [arrival_us(rank, n)]]
        for rank in range(ranks)
    ]


def job_of_groups(calls: int, *, slow_group: int | None = None, slow_from: int = 0) -> list[list[Call]]:
    """Eight ranks in two groups of four that reduce-scatter every 10 ms; an all-reduce of all after every fourth.

    Calls of the slow group take three times as long, from one of them on.
    """
    of_ranks: list[list[Call]] = []
    for rank in range(8):
        group, rank_calls = rank // 4, []
        for number in range(calls):
            dur_us = 6000 if group == slow_group and number >= slow_from else 2000
            start_us = number * 10_000 + 5 * ((rank + number) % 4)
            end_us = number * 10_000 + 20 + dur_us
            name = f"0x{group + 1:x}5c3e"
            shard = Call(start_us, end_us - start_us, number, "ReduceScatter", 16 << 20, name, rank % 4, 4)
            rank_calls.append(shard)
            if number % 4 == 3:
                rank_calls.append(Call(number * 10_000 + 8_000, 500, number // 4, part_bytes=1 << 20))
        of_ranks.append(rank_calls)
    return of_ranks
