"""Dumps of hung ranks are read whatever wrote them, and nothing in them is executed or fills the memory."""

import json
import os
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.flight_records import BEGAN_NS, GROUP, SECOND_NS, done, dump, entry
from tests.support.wording import Wording
from tracekit.errors import InputError
from tracekit.ingest import pickle_child, pickles
from tracekit.ingest.hang_dumps import flight_recorder, folder
from tracekit.ingest.hang_dumps.flight_recorder import BadDumpError
from tracekit.ingest.pickles import ManyPickles, PickleError
from tracekit.model.hang_dump import CallState

WORLD = {GROUP: [0, 1]}
FAULTHANDLER = """Timeout (0:00:03)!
Thread 0x00007ff2a27116c0 [pt_data] (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Thread 0x00007ff2c3a76b80 (most recent call first):
  File "/usr/lib/python3/site-packages/torch/utils/data/dataloader.py", line 1291 in _try_get_data
  File "/home/user/train.py", line 41 in main
"""
PY_SPY = """Process 4711: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 4711 (idle): "MainThread"
    wait (threading.py:331)
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    main (/home/user/train.py:41)
Thread 4720 (active): "pin memory"
    loop (torch/utils/data/_utils/pin_memory.py:50)
"""


def loaded(data: bytes) -> Any:
    with ManyPickles() as many:
        return flight_recorder.load(data, many)


def write(place: Path, name: str, value: Any) -> None:
    (place / name).write_bytes(pickle.dumps(value, protocol=2))


def test_a_pickle_and_the_json_of_the_same_calls_are_read_alike(tmp_path: Path) -> None:
    value = dump([*done(["all_reduce", "broadcast"]), entry("all_gather", 3, state="started")], groups=WORLD)
    write(tmp_path, "nccl_trace_rank_0", value)
    as_json = json.loads(json.dumps(value))
    for each in as_json["entries"]:  # torch's JSON has 0 where there is no time
        each["time_discovered_completed_ns"] = each["time_discovered_completed_ns"] or 0
    (tmp_path / "rank_1.json").write_text(json.dumps(as_json))
    first, second = folder.read(tmp_path).ranks.values()
    assert [c.state for c in first.calls] == [CallState.COMPLETED, CallState.COMPLETED, CallState.STARTED]
    assert [(c.op, c.seq, c.group, c.input_sizes, c.frames) for c in first.calls] == [
        (c.op, c.seq, c.group, c.input_sizes, c.frames) for c in second.calls
    ]
    assert first.groups == {"0": ("default_pg", (0, 1))}


def test_a_retired_call_of_gloo_is_complete_and_one_of_nccl_has_timed_out() -> None:
    calls = {}
    for backend in ("gloo", "nccl"):
        retired = {**entry("all_reduce", 1, state="scheduled", backend=backend), "retired": True}
        calls[backend] = flight_recorder.parse(dump([retired], groups=WORLD), rank=0, path="x").calls[0]
    assert not calls["gloo"].is_pending
    assert calls["nccl"].is_pending


def test_a_group_of_a_name_alone_has_no_description() -> None:
    of_name_alone = {**entry("all_reduce", 1, state="started"), "process_group": "default_pg"}
    (call,) = flight_recorder.parse(dump([of_name_alone], groups=WORLD), rank=0, path="x").calls
    assert (call.group, call.description) == ("default_pg", "")


def test_numbers_as_text_and_the_fields_of_older_versions_are_read() -> None:
    old = {"version": "1.5", "entries": [{
        "process_group": ["0", "default"], "seq_id": "7", "profiling_name": "nccl:all_reduce", "state": "started",
        "input_sizes": [[4, 4]], "output_sizes": [[4, 4]], "input_dtypes": "float32", "time_created_us": 1_700_000,
    }]}  # fmt: skip
    (call,) = flight_recorder.parse(old, rank=0, path="x").calls
    assert (call.seq, call.input_dtypes, call.input_numel, call.created_ns) == (7, ("float32",), 16, 1_700_000_000)


def test_coalesced_calls_have_the_state_of_the_entry_that_closes_them() -> None:
    parts = [
        entry("send 0->1", 4, state="scheduled", is_p2p=True),
        entry("recv 0<-1", 4, state="scheduled", is_p2p=True),
    ]
    closing = {**entry("coalesced", 4, is_p2p=True), "input_sizes": [], "output_sizes": []}
    calls = flight_recorder.parse(dump([*parts, closing], groups=WORLD), rank=0, path="x").calls
    assert [(c.op, c.state, [(p.op, p.source, p.target) for p in c.parts]) for c in calls] == [
        ("coalesced", CallState.COMPLETED, [("send", 0, 1), ("recv", 1, 0)])
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"state": "lost"}, "unknown state 'lost'"),
        ({"collective_seq_id": "many"}, "is no integer"),
        ({"collective_seq_id": 1 << 80}, "is no integer"),
        ({"input_sizes": [["a"]]}, "is no integer"),
        ({"input_sizes": [[1] * (1 << 20)]}, "sizes of tensors"),
        ({"process_group": 3}, "damaged entry"),
        ({"profiling_name": None, "state": None}, "unknown state None"),
    ],
)
def test_a_damaged_entry_is_named(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadDumpError, match=problem):
        flight_recorder.parse(
            dump([{**entry("all_reduce", 1, state="started"), **change}], groups=WORLD), rank=0, path="x"
        )


def test_numbers_of_ranks_beyond_any_job_are_left_out() -> None:
    content = dump([entry("all_reduce", 1, state="started")], groups=WORLD)
    content["tracekit"] = {"rank": 1 << 62, "world_size": 1 << 62, "dead_ranks": [1, 1 << 62]}
    parsed = flight_recorder.parse(content, rank=0, path="x")
    assert (parsed.rank, parsed.world_size, parsed.dead_ranks) == (0, None, (1,))


def test_a_list_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    value = dump([{**entry("all_reduce", 1), "collective_seq_id": loop}], groups=WORLD)
    with pytest.raises(BadDumpError, match="Circular reference"):
        flight_recorder.parse(loaded(pickle.dumps(value, protocol=2)), rank=0, path="x")


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/attacked",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    data = pickle.dumps({"version": "2.10", "entries": [], "x": Attack()}, protocol=2)
    assert "REDUCE" in {opcode.name for opcode, _, _ in pickletools.genops(data)}
    (tmp_path / "nccl_trace_rank_0").write_bytes(data)
    with pytest.raises(InputError, match="could run code"):
        folder.read(tmp_path)


def test_a_truncated_dump_is_left_out_and_said(tmp_path: Path, wording: Wording) -> None:
    whole = pickle.dumps(dump(done(["all_reduce"] * 50), groups=WORLD), protocol=2)
    (tmp_path / "nccl_trace_rank_0").write_bytes(whole)
    (tmp_path / "nccl_trace_rank_1").write_bytes(whole[: len(whole) // 2])
    dumps = folder.read(tmp_path)
    assert list(dumps.ranks) == [0]
    wording(*dumps.notes)


def doubling() -> list[Any]:
    value: list[Any] = []
    for _ in range(40):
        value = [value, value]
    return value


BOMBS = {
    "memory": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".", "more than 256 MiB of memory"),
    "json": (pickle.dumps(doubling(), protocol=2), "MiB when it is written out"),
    "cut": (pickle.dumps(doubling(), protocol=2)[:9], "is truncated or damaged"),
    "code": (b"\x80\x02cos\nsystem\n.", "would import os.system and could run code when unpickled: refused"),
}  # fmt: skip


def test_one_child_reads_all_dumps_of_a_folder_and_none_spoils_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pickle.dumps(dump(done(["all_reduce"]), groups=WORLD), protocol=2)
    for number, (data, _) in enumerate(BOMBS.values()):
        (tmp_path / f"nccl_trace_rank_{2 * number}").write_bytes(whole)
        (tmp_path / f"nccl_trace_rank_{2 * number + 1}").write_bytes(data)
    started: list[str] = []
    start = pickles._start
    monkeypatch.setattr(pickles, "_start", lambda kind: started.append(kind) or start(kind))
    dumps = folder.read(tmp_path)
    assert list(dumps.ranks) == [2 * number for number in range(len(BOMBS))]
    assert len(dumps.notes) == len(BOMBS)
    for note, (_, reason) in zip(dumps.notes, BOMBS.values(), strict=True):
        assert note.endswith("it is left out")
        assert reason in note
        assert "\n" not in note
    assert started == [pickle_child.MANY]


def test_a_pickle_after_the_child_was_ended_is_read_by_another() -> None:
    whole = pickle.dumps([1, 2], protocol=2)
    with ManyPickles() as many:
        assert many.read(pickle_child.PLAIN, whole)[0] == b"[1, 2]\n"
        child = many._child
        assert child is not None
        child.kill()
        child.wait()
        with pytest.raises(PickleError):
            many.read(pickle_child.PLAIN, whole)
        assert many.read(pickle_child.PLAIN, whole)[0] == b"[1, 2]\n"


@given(st.data())
def test_a_changed_byte_gives_a_dump_or_a_message_but_no_other_error(data: st.DataObject) -> None:
    raw = bytearray(pickle.dumps(dump(done(["all_reduce", "broadcast"]), groups=WORLD), protocol=2))
    raw[data.draw(st.integers(1, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        value = loaded(bytes(raw))
        if flight_recorder.is_dump(value):
            flight_recorder.parse(value, rank=0, path="x")
    except BadDumpError:
        pass


def test_a_missing_folder_an_empty_one_and_one_without_dumps_have_messages_of_their_own(
    tmp_path: Path, wording: Wording
) -> None:
    with pytest.raises(InputError, match="no such folder"):
        folder.read(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(InputError, match="is a file"):
        folder.read(tmp_path / "notes.txt")
    with wording.raises(InputError):
        folder.read(tmp_path)


def test_a_fifo_and_files_of_other_kinds_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "nccl_trace_rank_0", dump(done(["all_reduce"]), groups=WORLD))
    os.mkfifo(tmp_path / "nccl_trace_rank_1")
    (tmp_path / "run.json").write_text('{"schema": "tracekit.run/1"}')
    (tmp_path / "data.bin").write_bytes(bytes(range(256)))
    assert folder.read(tmp_path) == folder.HangDumps(folder.read(tmp_path).ranks)


def test_of_several_dumps_of_a_rank_the_latest_is_used(tmp_path: Path, wording: Wording) -> None:
    write(tmp_path, "nccl_trace_rank_0", dump(done(["all_reduce"]), groups=WORLD))
    write(tmp_path, "later_rank_0", dump(done(["all_reduce"] * 3), groups=WORLD))
    os.utime(tmp_path / "nccl_trace_rank_0", ns=(BEGAN_NS, BEGAN_NS))
    dumps = folder.read(tmp_path)
    assert len(dumps.ranks[0].calls) == 3
    wording(*dumps.notes)


def test_a_dump_of_another_day_is_left_out_and_said(tmp_path: Path, wording: Wording) -> None:
    day_ns = 86_400 * SECOND_NS
    for rank in range(4):
        created_ns = BEGAN_NS - day_ns if rank == 3 else BEGAN_NS
        write(
            tmp_path,
            f"_dump_{rank}",
            dump(done(["all_reduce"] * 3, created_ns=created_ns), groups={GROUP: [0, 1, 2, 3]}),
        )
    dumps = folder.read(tmp_path)
    assert list(dumps.ranks) == [0, 1, 2]
    wording(*dumps.notes)


def test_stacks_of_faulthandler_and_py_spy_are_laid_next_to_dumps(tmp_path: Path) -> None:
    own = {"rank": 1, "pid": 4711}
    write(tmp_path, "nccl_trace_rank_0", dump(done(["all_reduce"]), groups=WORLD))
    (tmp_path / "b.json").write_text(json.dumps(dump(done(["all_reduce"]), groups=WORLD, tracekit=own)))
    (tmp_path / "rank0.stacks.txt").write_text(FAULTHANDLER)
    (tmp_path / "spy.txt").write_text(PY_SPY)
    ranks = folder.read(tmp_path).ranks
    assert ranks[0].main_thread is not None
    assert [str(frame) for frame in ranks[0].main_thread.frames] == [
        "_try_get_data (/usr/lib/python3/site-packages/torch/utils/data/dataloader.py:1291)",
        "main (/home/user/train.py:41)",
    ]
    assert ranks[1].main_thread is not None
    assert ranks[1].main_thread.frames[1].function == "all_reduce"


def test_py_spy_writes_the_same_stacks_as_json() -> None:
    frames = [{"name": "wait", "filename": "threading.py", "line": 331}]
    threads = [{"pid": 4711, "thread_name": "MainThread", "active": False, "frames": frames, "os_thread_id": 4711}]
    (thread,) = folder.parse_json(json.loads(json.dumps(threads)))
    assert thread.is_main
    assert [(frame.function, frame.line) for frame in thread.frames] == [("wait", 331)]
    assert folder.parse_json([1, 2]) == ()


@given(st.text(max_size=300))
def test_any_text_is_stacks_or_none(text: str) -> None:
    folder.parse_text(text)
    folder.parse_text("(most recent call first):" + text)


def test_unpickling_reads_what_torch_writes() -> None:
    value = dump(done(["all_reduce"]), groups=WORLD)
    as_json = json.loads(json.dumps(value))
    assert loaded(pickle.dumps(value, protocol=2)) == as_json
