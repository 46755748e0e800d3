"""A growing log: each line once, partial lines when complete, no damaged lines, replaced files from the start."""

import json
import os
from pathlib import Path

import pytest

from tests.support import sample_logs
from tracekit.cli.watch import rank_log
from tracekit.cli.watch.rank_log import LogTail


def read(log: LogTail) -> list[object]:
    found = [row.get("step") for row in log.read()]
    while log.is_behind:
        found += [row.get("step") for row in log.read()]
    return found


@pytest.fixture
def live(tmp_path: Path) -> Path:
    return sample_logs.path(tmp_path, live=True)


@pytest.fixture
def log(tmp_path: Path) -> LogTail:
    return LogTail(sample_logs.path(tmp_path), first_bytes=1 << 20)


def test_a_log_that_is_not_there_has_nothing_yet(log: LogTail) -> None:
    assert read(log) == []
    assert not log.starts


def test_each_line_is_read_once_as_the_file_grows(log: LogTail, live: Path) -> None:
    live.write_text('{"step":0}\n{"step":1}\n')
    assert read(log) == [0, 1]
    assert read(log) == []
    with live.open("a") as file:
        file.write('{"step":2}\n')
    assert read(log) == [2]


def test_a_torn_line_is_read_when_it_is_whole(log: LogTail, live: Path) -> None:
    live.write_text('{"step":0}\n{"st')
    assert read(log) == [0]
    with live.open("a") as file:
        file.write('ep":1}\n')
    assert read(log) == [1]
    assert log.bad_lines == 0


def test_a_log_that_gets_its_final_name_goes_on_where_it_was(log: LogTail, live: Path, tmp_path: Path) -> None:
    live.write_text('{"step":0}\n')
    assert read(log) == [0]
    assert not log.is_closed
    with live.open("a") as file:
        file.write('{"step":1}\n{"step":2}')  # its last line ended by nobody
    live.rename(sample_logs.path(tmp_path))
    assert read(log) == [1, 2]
    assert log.is_closed
    assert log.starts == 1


def test_a_longer_copy_in_its_place_is_not_read_again(log: LogTail, live: Path) -> None:
    live.write_text('{"step":0}\n')
    assert read(log) == [0]
    copy = live.with_suffix(".copy")
    copy.write_text('{"step":0}\n{"step":1}\n')
    copy.replace(live)
    assert read(log) == [1]


@pytest.mark.parametrize("new", ['{"step":7}\n', '{"step":7}\n{"step":8}\n{"step":9}\n{"step":10}\n'])
def test_a_truncated_or_replaced_file_is_read_from_the_start(log: LogTail, live: Path, new: str) -> None:
    live.write_text('{"step":0}\n{"step":1}\n')
    assert read(log) == [0, 1]
    live.write_text(new)
    assert read(log) == [json.loads(line)["step"] for line in new.splitlines()]
    assert log.starts == 2


def test_a_resumed_training_is_read_from_its_growing_file_though_the_old_one_is_there(tmp_path: Path) -> None:
    sample_logs.write(tmp_path, sample_logs.steady(5))
    sample_logs.write(tmp_path, sample_logs.steady(3), live=True)
    log = LogTail(sample_logs.path(tmp_path), first_bytes=1 << 20)
    assert read(log) == [0, 1, 2]
    assert not log.is_closed


def test_lines_that_are_no_objects_are_counted_and_left_out(log: LogTail, live: Path) -> None:
    bad = ["[1]", "nul", '{"step":', "\x00\x01", "[" * 100_000, '{"step":' + "9" * 5000 + "}", '"\\ud800"']
    live.write_text("\n".join(['{"step":0}', *bad, "", '{"step":1}', ""]))
    assert read(log) == [0, 1]
    assert log.bad_lines == len(bad)


def test_of_a_long_log_only_the_end_is_read_at_first(tmp_path: Path, live: Path) -> None:
    live.write_text("".join(f'{{"step":{n}}}\n' for n in range(1000)))
    log = LogTail(sample_logs.path(tmp_path), first_bytes=100)
    assert read(log) == list(range(993, 1000))
    assert log.skipped_beginning


def test_a_line_without_an_end_is_passed_over_in_bounded_memory(log: LogTail, live: Path, tmp_path: Path) -> None:
    log = LogTail(sample_logs.path(tmp_path), first_bytes=1 << 30)
    live.write_bytes(b'{"step":0}\n{"x":"' + b"a" * (3 * rank_log.CHUNK_BYTES) + b'"}\n{"step":1}\n')
    assert read(log) == [0, 1]
    assert log.bad_lines == 1


def test_more_than_a_chunk_is_read_whole(tmp_path: Path, live: Path) -> None:
    count = 2 * rank_log.CHUNK_BYTES // 50
    live.write_text("".join(f'{{"step":{n:<45}}}\n' for n in range(count)))
    log = LogTail(sample_logs.path(tmp_path), first_bytes=1 << 30)
    assert read(log) == list(range(count))


def test_a_pipe_with_the_name_of_a_log_does_not_block(log: LogTail, live: Path) -> None:
    os.mkfifo(live)
    assert read(log) == []
