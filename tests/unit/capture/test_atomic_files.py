import gzip
import json
import resource
from pathlib import Path

import pytest

from tests.support.wording import Wording
from tracekit.capture import atomic_files, notices


def test_atomic_write_shows_a_file_only_when_it_is_complete(tmp_path: Path) -> None:
    final = tmp_path / "run" / "run.json"
    with atomic_files.atomic_write(final) as partial:
        partial.write_text("half")
        assert not final.exists()
    assert final.read_text() == "half"
    assert [path.name for path in final.parent.iterdir()] == ["run.json"]


def test_a_failed_write_keeps_the_previous_file(tmp_path: Path) -> None:
    final = tmp_path / "run.json"
    final.write_text("old")

    def fail_halfway() -> None:
        with atomic_files.atomic_write(final) as partial:
            partial.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_halfway()
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert final.read_text() == "old"


def test_appended_lines_follow_existing_ones(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    atomic_files.append_lines(log, [{"a": 1}])
    atomic_files.append_lines(log, [{"a": 2}, {"a": 3}])
    assert [json.loads(line)["a"] for line in log.read_text().splitlines()] == [1, 2, 3]


def test_a_full_disk_leaves_no_partial_line(tmp_path: Path, wording: Wording) -> None:
    log = tmp_path / "log.jsonl"
    atomic_files.append_lines(log, [{"a": 1}])
    whole = log.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, limits[1]))
    try:
        with wording.raises(OSError):
            atomic_files.append_lines(log, [{"a": 2}, {"a": 3}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert log.read_bytes() == whole


def test_compressing_removes_the_uncompressed_file(tmp_path: Path) -> None:
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    plain.write_bytes(b"{}" * 1000)
    atomic_files.compress(plain, packed)
    assert not plain.exists()
    assert gzip.decompress(packed.read_bytes()) == b"{}" * 1000


def test_a_failure_is_reported_in_one_line(capsys: pytest.CaptureFixture[str], wording: Wording) -> None:
    notices.report_failure("the trace was not written", OSError("no\nspace"))
    wording(capsys.readouterr().err)
