import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from tests.support.wording import Wording
from tracekit import conventions
from tracekit.capture import record_load, record_save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KEYS = [
    *("checkpoint", "operation", "step", "stage", "start_ns", "dur_ns", "bytes", "files", "path", "blocking", "rank"),
    *("call", "worker", "process", "thread", "calls"),
]
OF_THE_WHOLE = [
    *("durable", "dirty_before_bytes", "dirty_after_bytes", "writeback_before_bytes", "writeback_after_bytes"),
    *("io_some_ns", "io_full_ns", "cpu_ns", "run_delay_ns", "storage_written_bytes", "storage_read_bytes"),
    "whole_bytes",
]
DELAY_S = 0.3


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {f"weight{index}": torch.randn(128, 64, generator=generator) for index in range(6)} | {"step": 7}


def save(run: Path, path: Path, *, threads: int = 1, **writer_options: Any) -> dict[str, dict[str, Any]]:
    """Save and return the log's rows by stage."""
    writer, planner = FileSystemWriter(path, thread_count=threads, **writer_options), DefaultSavePlanner()
    with record_save(run, writer, planner, checkpoint=path.name, step=7, rank=3):
        dcp.save(state(), storage_writer=writer, planner=planner, no_dist=True)
    return {row["stage"]: row for row in log(run) if row["checkpoint"] == path.name}


def log(run: Path) -> list[dict[str, Any]]:
    lines = (run / conventions.rank_file(3, conventions.CHECKPOINT_LOG_SUFFIX)).read_text().splitlines()
    return [json.loads(line) for line in lines]


def as_bytes(value: Any) -> bytes:
    return value.numpy().tobytes() if torch.is_tensor(value) else repr(value).encode()


def longest(rows: dict[str, dict[str, Any]]) -> str:
    return max((stage for stage in rows if stage != conventions.TOTAL), key=lambda stage: rows[stage]["dur_ns"])


def slowed(function: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(DELAY_S)
        return function(*args, **kwargs)

    return slow


def test_the_log_has_every_stage_with_the_documented_keys(tmp_path: Path) -> None:
    before_ns = time.time_ns()
    rows = save(tmp_path, tmp_path / "step-7")
    after_ns = time.time_ns()
    assert list(rows) == list(conventions.SAVE_STAGES)
    for stage, row in rows.items():
        assert list(row) == KEYS + (OF_THE_WHOLE if stage == conventions.TOTAL else [])
        assert (row["call"], row["worker"], row["process"]) == ("dcp.save", "main", os.getpid())
        assert (row["operation"], row["step"], row["rank"], row["blocking"]) == ("save", 7, 3, True)
        assert row["path"] == str(tmp_path / "step-7")
        assert before_ns <= row["start_ns"] <= row["start_ns"] + row["dur_ns"] <= after_ns


def test_bytes_and_files_are_those_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "step-7"
    rows = save(tmp_path, path, single_file_per_rank=False)
    shards = sorted(path.glob("*.distcp"))
    assert rows["write"]["bytes"] == sum(file.stat().st_size for file in shards)
    assert rows["write"]["files"] == len(shards) == 7
    assert rows["finish"]["bytes"] == (path / ".metadata").stat().st_size
    assert rows["total"]["bytes"] == sum(file.stat().st_size for file in path.iterdir())
    assert rows["fsync"]["files"] == rows["total"]["files"] == len(list(path.iterdir()))
    assert rows["stage"]["bytes"] >= 6 * 128 * 64 * 4


@pytest.fixture
def of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count time only while this process runs: on a busy machine it may pause between two stages."""
    began_ns = time.time_ns() - time.process_time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: began_ns + time.process_time_ns())


@pytest.mark.usefixtures("of_this_process")
@pytest.mark.parametrize("threads", [1, 3])
def test_the_stages_sum_to_the_total_and_no_more(tmp_path: Path, threads: int) -> None:
    rows = save(tmp_path, tmp_path / "step-7", threads=threads)
    parts_ns = sum(row["dur_ns"] for stage, row in rows.items() if stage != conventions.TOTAL)
    assert 0.97 * rows["total"]["dur_ns"] <= parts_ns <= rows["total"]["dur_ns"]
    assert all(row["dur_ns"] >= 0 for row in rows.values())


@pytest.mark.parametrize("threads", [1, 3])
def test_a_slow_sync_counts_as_fsync_for_metadata_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(os, "fsync", slowed(os.fsync))
    rows = save(tmp_path, tmp_path / "step-7", threads=threads)
    assert longest(rows) == "fsync"
    assert rows["fsync"]["dur_ns"] >= 2 * DELAY_S * 0.9e9
    assert rows["finish"]["dur_ns"] < DELAY_S * 1e9


def test_a_slow_disk_counts_as_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowStream:
        def __init__(self, raw: Any) -> None:
            self.raw = raw

        def flush(self) -> None:
            time.sleep(DELAY_S / 3)
            self.raw.flush()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.raw, name)

    writer = FileSystemWriter(tmp_path / "step-7")
    create_stream = writer.fs.create_stream

    @contextmanager
    def create_slow_stream(*args: Any) -> Iterator[Any]:
        with create_stream(*args) as raw:
            yield SlowStream(raw)

    monkeypatch.setattr(writer.fs, "create_stream", create_slow_stream)
    with record_save(tmp_path, writer, checkpoint="step-7", rank=3):
        dcp.save(state(), storage_writer=writer, no_dist=True)
    rows = {row["stage"]: row for row in log(tmp_path)}
    assert longest(rows) == "write"
    assert rows["write"]["dur_ns"] >= 6 * DELAY_S / 3 * 1e9
    assert rows["stage"]["bytes"] >= 6 * 128 * 64 * 4


def test_a_slow_copy_to_the_host_counts_as_stage(tmp_path: Path) -> None:
    planner = DefaultSavePlanner()
    planner.resolve_data = slowed(planner.resolve_data)  # type: ignore[method-assign]
    writer = FileSystemWriter(tmp_path / "step-7")
    with record_save(tmp_path, writer, planner, checkpoint="step-7", rank=3):
        dcp.save(state(), storage_writer=writer, planner=planner, no_dist=True)
    assert longest({row["stage"]: row for row in log(tmp_path)}) == "stage"


def test_the_fsync_of_another_thread_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncing, stop = threading.Event(), threading.Event()

    def sync_all_the_time() -> None:
        with (tmp_path / "other").open("wb") as other:
            while not stop.is_set():
                os.fsync(other.fileno())
                syncing.set()

    stranger = threading.Thread(target=sync_all_the_time)
    stranger.start()
    syncing.wait()
    try:
        rows = save(tmp_path, tmp_path / "step-7")
    finally:
        stop.set()
        stranger.join()
    assert rows["fsync"]["files"] == 2


def test_recording_does_not_change_the_saved_files(tmp_path: Path) -> None:
    save(tmp_path, tmp_path / "with")
    dcp.save(state(), checkpoint_id=tmp_path / "without", no_dist=True)
    loaded = []
    for name in ("with", "without"):
        empty = {key: torch.zeros_like(value) if torch.is_tensor(value) else 0 for key, value in state().items()}
        dcp.load(empty, checkpoint_id=tmp_path / name, no_dist=True)
        loaded.append(empty)
    for key, value in state().items():
        for found in loaded:
            assert as_bytes(found[key]) == as_bytes(value), key
    sizes = [{p.name: p.stat().st_size for p in (tmp_path / n).glob("*.distcp")} for n in ("with", "without")]
    assert sizes[0] == sizes[1]


def test_all_patches_are_removed_after_the_save(tmp_path: Path) -> None:
    fsync, sync = os.fsync, os.sync
    logger = logging.getLogger("c10d-NullHandler-dcp_logger")
    handlers = list(logger.handlers)
    writer, planner = FileSystemWriter(tmp_path / "step-7"), DefaultSavePlanner()
    with record_save(tmp_path, writer, planner, checkpoint="step-7", rank=3):
        assert os.fsync is not fsync
        assert "create_stream" in vars(writer.fs)
        dcp.save(state(), storage_writer=writer, planner=planner, no_dist=True)
    assert (os.fsync, os.sync) == (fsync, sync)
    assert "create_stream" not in vars(writer.fs)
    assert "resolve_data" not in vars(planner)
    assert logger.handlers == handlers


def test_a_failed_save_raises_its_own_error_and_is_not_logged(tmp_path: Path) -> None:
    fsync = os.fsync
    (tmp_path / "step-7" / "__0_0.distcp").mkdir(parents=True)
    with pytest.raises(dcp.api.CheckpointException, match="Is a directory"):
        save(tmp_path, tmp_path / "step-7")
    assert not list(tmp_path.glob("*.jsonl*"))
    assert os.fsync is fsync


def test_an_unwritable_log_does_not_stop_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    (tmp_path / conventions.rank_file(3, conventions.CHECKPOINT_LOG_SUFFIX)).mkdir()
    writer = FileSystemWriter(tmp_path / "step-7")
    with record_save(tmp_path, writer, checkpoint="step-7", rank=3):
        dcp.save(state(), storage_writer=writer, no_dist=True)
    wording(capsys.readouterr().err)


def test_each_save_adds_its_lines(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path, tmp_path / f"step-{number}")
    totals = [row["checkpoint"] for row in log(tmp_path) if row["stage"] == conventions.TOTAL]
    assert totals == ["step-1", "step-2"]


def test_os_sync_is_counted_apart_from_fsync(tmp_path: Path) -> None:
    # Streams in memory have no descriptor, so torch falls back to os.sync for the shard and for the metadata.
    writer, planner = FsspecWriter("memory://checkpoint"), DefaultSavePlanner()
    with record_save(tmp_path, writer, planner, checkpoint="memory", step=7, rank=3):
        dcp.save(state(), storage_writer=writer, planner=planner, no_dist=True)
    (synced,) = [row for row in log(tmp_path) if row["stage"] == conventions.FSYNC]
    assert (synced["files"], synced["calls"]) == (2, 2)
    assert save(tmp_path, tmp_path / "step-7")["fsync"]["calls"] is None


def test_a_load_logs_the_size_of_the_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "step-7"
    save(tmp_path / "run", path)
    some = {"weight0": torch.zeros(128, 64)}
    with record_load(tmp_path, path, checkpoint="step-7", rank=3):
        dcp.load(some, checkpoint_id=path, no_dist=True)
    (total,) = [row for row in log(tmp_path) if row["stage"] == conventions.TOTAL]
    shards = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert total["whole_bytes"] == shards > total["bytes"]
