import os
import sys
import threading
import time
from pathlib import Path

from tracekit.capture.checkpoints import io_counters
from tracekit.capture.checkpoints.io_counters import WrittenFiles
from tracekit.capture.checkpoints.operation import ThreadSampler


def proc(folder: Path, *, dirty_kb: int, some_us: int, written: int, run_ns: int) -> str:
    (folder / "pressure").mkdir(parents=True)
    (folder / "self" / "task" / "7").mkdir(parents=True)
    (folder / "meminfo").write_text(
        f"MemTotal:  9 kB\nDirty:   {dirty_kb} kB\nWriteback:   4 kB\nWritebackTmp:  1 kB\n"
    )
    (folder / "pressure" / "io").write_text(
        f"some avg10=0.58 avg60=0.86 avg300=0.51 total={some_us}\nfull avg10=0.58 avg60=0.86 avg300=0.44 total=10\n"
    )
    (folder / "self" / "io").write_text(f"rchar: 1\nwchar: 2\nread_bytes: 5\nwrite_bytes: {written}\n")
    (folder / "self" / "task" / "7" / "schedstat").write_text(f"{run_ns} 30 1\n")
    return str(folder)


def test_levels_are_logged_before_and_after_and_counters_as_differences(tmp_path: Path) -> None:
    before = io_counters.read(7, proc(tmp_path / "1", dirty_kb=1, some_us=5, written=100, run_ns=1000))
    after = io_counters.read(7, proc(tmp_path / "2", dirty_kb=3, some_us=8, written=4196, run_ns=5000))
    assert before.until(after) == {
        "dirty_before_bytes": 1024,
        "dirty_after_bytes": 3072,
        "writeback_before_bytes": 4096,
        "writeback_after_bytes": 4096,
        "io_some_ns": 3000,
        "io_full_ns": 0,
        "cpu_ns": 4000,
        "run_delay_ns": 0,
        "storage_written_bytes": 4096,
        "storage_read_bytes": 0,
    }


def test_counters_that_the_system_lacks_are_none(tmp_path: Path) -> None:
    nothing = io_counters.read(7, str(tmp_path))
    assert set(nothing.until(nothing).values()) == {None}


def test_a_running_thread_does_not_count_as_waiting() -> None:
    thread = threading.get_native_id()
    before, end = io_counters.read(thread), time.thread_time_ns() + 20_000_000
    while time.thread_time_ns() < end:
        pass
    grown = before.until(io_counters.read(thread))
    if grown["cpu_ns"] is not None:  # a kernel may be built without it
        assert grown["cpu_ns"] >= 10_000_000


def test_only_a_sync_after_the_last_flush_makes_a_file_durable(tmp_path: Path) -> None:
    written = WrittenFiles()
    assert written.durable() is None
    with (tmp_path / "x").open("wb") as stream:
        file = written.open(stream)
        file.write()
        written.sync(stream.fileno())
        assert written.durable() is False  # the stream has not flushed the bytes
        file.flush()
        assert written.durable() is False
        written.sync(stream.fileno())
        assert written.durable() is True
        file.write()
        file.flush()
    with (tmp_path / "x").open("rb") as again:
        written.sync(again.fileno())
    assert written.durable() is True
    file.write()
    file.flush()
    written.sync(None)
    assert written.durable() is True
    written.open(object())
    assert written.durable() is None


def is_joining() -> bool:
    """Return whether the main thread waits for the end of another."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None and frame.f_code.co_name != "join":
        frame = frame.f_back
    return frame.f_code.co_name == "join"


def looked(work: str, steps: list[int]) -> bool:
    """Return whether a thread finds that training waited for it, which does `work` meanwhile."""
    found: list[bool] = []
    going = threading.Event()

    def save() -> None:
        looks = ThreadSampler(lambda: steps[-1])
        going.wait()
        while work != "training" and not is_joining():
            time.sleep(0.001)
        looks.sample()
        if work == "a step":
            steps.append(steps[-1] + 1)
        looks.sample()
        found.append(looks.is_blocked())

    thread = threading.Thread(target=save)
    thread.start()
    going.set()
    while work == "training" and thread.is_alive():
        os.getpid()
    thread.join()
    return found[0]


def test_a_save_blocks_training_only_if_it_waits_and_finishes_no_step() -> None:
    assert looked("nothing", [1]) is True
    assert looked("training", [1]) is False
    assert looked("a step", [1]) is False
    on_the_training_thread = ThreadSampler(lambda: None)
    on_the_training_thread.sample()
    assert on_the_training_thread.is_blocked() is True
