"""The stages of a save on 2 real ranks, each slowed in turn: the log must name the stage and the rank."""

import functools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from tests.support import process_group
from tracekit import conventions
from tracekit.analysis.checkpoint import saves, stalls
from tracekit.capture import record_save
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.model.trace import Trace

DELAY_S = 1.5  # longer than a busy machine pauses a rank
SLOW_RANK = 1
Log = dict[str, dict[str, Any]]


def save(fault: str, folder: Path) -> Log:
    """Save two tensors a rank with `fault` on one of them; return this rank's log, by stage."""
    rank = dist.get_rank()
    writer, planner = FileSystemWriter(folder / fault), DefaultSavePlanner()
    state = {f"rank{rank}.weight{index}": torch.full((256, 256), float(index)) for index in range(2)}
    fsync = os.fsync
    if rank == SLOW_RANK:
        plant(fault, writer)
    try:
        with record_save(folder / "log" / fault, writer, planner, checkpoint=fault, step=1):
            if fault == "slow plan" and rank == SLOW_RANK:
                time.sleep(DELAY_S)
            dcp.save(state, storage_writer=writer, planner=planner)
    finally:
        os.fsync = fsync
    log = folder / "log" / fault / conventions.rank_file(rank, conventions.CHECKPOINT_LOG_SUFFIX)
    return {row["stage"]: row for row in map(json.loads, log.read_text().splitlines())}


def plant(fault: str, writer: FileSystemWriter) -> None:
    fsync, create_stream = os.fsync, writer.fs.create_stream

    def slow_fsync(descriptor: int) -> None:
        time.sleep(DELAY_S)
        fsync(descriptor)

    @contextmanager
    def create_slow_stream(*arguments: Any) -> Iterator[Any]:
        time.sleep(DELAY_S)
        with create_stream(*arguments) as stream:
            yield stream

    if fault == "slow fsync":
        os.fsync = slow_fsync  # type: ignore[assignment]
    if fault == "slow write":
        writer.fs.create_stream = create_slow_stream  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Log]]:
    folder = Path(tempfile.mkdtemp(dir=tmp_path_factory.mktemp("checkpoints")))
    faults = ("no fault", "slow plan", "slow fsync", "slow write")
    outcomes = process_group.run_cases(2, {fault: functools.partial(save, fault, folder) for fault in faults})
    logs = {fault: outcome.results() for fault, outcome in outcomes.items()}
    for fault in faults:
        sizes = [path.stat().st_size for path in (folder / fault).iterdir()]
        assert sum(log["total"]["bytes"] for log in logs[fault]) == sum(sizes)
        assert sum(log["total"]["files"] for log in logs[fault]) == len(sizes)
    return logs


def longest(log: Log) -> str:
    return max((stage for stage in log if stage != conventions.TOTAL), key=lambda stage: log[stage]["dur_ns"])


@pytest.mark.parametrize(
    ("fault", "stage"),
    [("slow plan", conventions.PLAN), ("slow fsync", conventions.FSYNC), ("slow write", conventions.WRITE)],
)
def test_the_slowed_stage_dominates_on_its_rank_and_the_other_waits(
    logs: dict[str, list[Log]], fault: str, stage: str
) -> None:
    fast, slow = logs[fault]
    assert longest(slow) == stage
    assert slow[stage]["dur_ns"] >= DELAY_S * 0.99e9
    assert longest(fast) == conventions.WAIT
    assert fast[conventions.WAIT]["dur_ns"] >= DELAY_S * 0.5e9


FAULTS = ("no fault", "slow plan", "slow fsync", "slow write")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_stages_are_parts_of_the_time_blocked(logs: dict[str, list[Log]], fault: str) -> None:
    for log in logs[fault]:
        assert parts_ns(log) <= log["total"]["dur_ns"]


@pytest.mark.accuracy  # a busy machine may pause a rank between two stages
@pytest.mark.parametrize("fault", FAULTS)
def test_the_stages_sum_to_the_time_blocked(logs: dict[str, list[Log]], fault: str) -> None:
    for log in logs[fault]:
        assert parts_ns(log) >= 0.97 * log["total"]["dur_ns"]
    for clocks in run_of(logs[fault]).table(saves.by_rank).iter_rows(named=True):
        assert clocks["stages_ns"] >= 0.97 * clocks["blocked_ns"]


def parts_ns(log: Log) -> int:
    return sum(row["dur_ns"] for stage, row in log.items() if stage != conventions.TOTAL)


def test_only_the_coordinator_finishes(logs: dict[str, list[Log]]) -> None:
    coordinator, other = logs["no fault"]
    assert coordinator[conventions.FINISH]["files"] == 1
    assert conventions.FINISH not in other
    assert (coordinator["fsync"]["files"], other["fsync"]["files"]) == (2, 1)


def run_of(logs: list[Log]) -> Run:
    """Return a run of which nothing but the log is known."""
    traces = [
        Trace(rank, 0, "log", checkpoints=schema.CHECKPOINTS.conform(pl.DataFrame(list(log.values()), strict=False)))
        for rank, log in enumerate(logs)
    ]
    return Run("log", [Source(trace.rank, 0, "log", 0, lambda trace=trace: trace) for trace in traces])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("slow plan", stalls.PLAN), ("slow fsync", stalls.STRAGGLER), ("slow write", stalls.STRAGGLER)],
)
def test_the_stall_class_is_reported_with_the_rank(logs: dict[str, list[Log]], fault: str, kind: str) -> None:
    run = run_of(logs[fault])
    (row,) = run.table(stalls.dominant).iter_rows(named=True)
    assert (row["kind"], row["rank"]) == (kind, SLOW_RANK)
    assert row["dur_ns"] >= DELAY_S * 0.9e9
    parts = run.table(stalls.parts)
    assert DELAY_S * 0.9e9 <= parts["dur_ns"].sum() <= row["whole_ns"]


def test_a_blocking_save_has_equal_blocked_and_written_time(logs: dict[str, list[Log]]) -> None:
    for clocks in run_of(logs["no fault"]).table(saves.by_rank).iter_rows(named=True):
        assert clocks["blocked_ns"] == clocks["written_ns"]
        assert clocks["stages_ns"] <= clocks["blocked_ns"]
        assert clocks["storage_bytes_per_s"] > 0
