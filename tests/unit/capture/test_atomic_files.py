import gzip
import json
import pickle
import resource
import tracemalloc
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


SECRET = "hf_" + "aB3" * 12


def test_a_trace_on_one_line_is_redacted_in_pieces(tmp_path: Path) -> None:
    """GIVEN a trace of one line, WHEN it is compressed, THEN no secret is left, and memory is a part of its size."""
    events = [{"ph": "X", "name": "a },{ b", "args": {"hf_token": SECRET}} for _ in range(20_000)]
    source, target = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    source.write_text(json.dumps({"traceEvents": events}))
    size_bytes = source.stat().st_size
    tracemalloc.start()
    atomic_files.compress(source, target)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    text = gzip.decompress(target.read_bytes())
    assert SECRET.encode() not in text
    redacted = json.loads(text)["traceEvents"]
    assert [(event["name"], event["args"]["hf_token"]) for event in redacted] == [
        (event["name"], "[redacted]") for event in events
    ]
    assert peak_bytes < size_bytes * 0.75


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_memory_snapshot_is_redacted(tmp_path: Path, protocol: int) -> None:
    """GIVEN a snapshot whose settings and annotations have secrets, THEN these are gone, and all else is unchanged."""
    path = tmp_path / "a.pickle"
    frames = [{"filename": "/home/me/train.py", "line": 3, "name": "forward"}]
    events = [{"action": "alloc", "addr": 1 << 40, "size": 512, "frames": frames, "user_metadata": f"token {SECRET}"}]
    snapshot = {"device_traces": [events], "allocator_settings": {"password": "hunter2", "note": "a" * 300}}
    path.write_bytes(pickle.dumps(snapshot, protocol))
    atomic_files.redact_pickle(path)
    assert pickle.loads(path.read_bytes()) == {
        "device_traces": [[{**events[0], "user_metadata": "token [redacted]"}]],
        "allocator_settings": {"password": "[redacted]", "note": "a" * 300},
    }
    assert [file.name for file in tmp_path.iterdir()] == ["a.pickle"]


def test_a_pickle_with_objects_is_not_redacted_but_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps({"path": tmp_path}))
    with pytest.raises(ValueError, match="objects"):
        atomic_files.redact_pickle(path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.pickle"]
