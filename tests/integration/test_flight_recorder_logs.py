"""Dumps of torch's flight recorder of jobs that run: drawn in torch's format, since durations need NCCL and GPUs."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import tracekit
from tests.support import cli_runner, flight_records
from tests.support.flight_records import BEGAN_NS, GROUP, SECOND_NS
from tracekit.errors import InputError
from tracekit.ingest.readers.flight_recorder import FlightRecorderDumps
from tracekit.model import schema
from tracekit.rules import engine
from tracekit.rules.rule import Severity

RECORDINGS = Path(__file__).parents[1] / "recordings"
RANKS, CALLS = 4, 40
INTERVAL_NS, TRANSFER_MS, LATE_MS = 50_000_000, 8.0, 6.0


def entries(rank: int, late_rank: int | None) -> list[dict[str, Any]]:
    """Calls of a rank; on each, all but the late rank wait for it."""
    duration_ms = TRANSFER_MS + (LATE_MS if late_rank not in (None, rank) else 0.0)
    return [
        flight_records.entry(
            "all_reduce", seq, size=(1 << 20,), dtype="BFloat16", created_ns=BEGAN_NS + seq * INTERVAL_NS
        )
        | {"duration_ms": duration_ms}
        for seq in range(1, CALLS + 1)
    ]


def write(folder: Path, late_rank: int | None = None, *, as_json: bool = False, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(RANKS):
        calls = [{**entry, **changes} for entry in entries(rank, late_rank)]
        dump = flight_records.dump(calls, groups={GROUP: list(range(RANKS))})
        data = json.dumps(dump).encode() if as_json else pickle.dumps(dump)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
    return folder


@pytest.mark.parametrize("as_json", [False, True])
def test_each_collective_has_the_duration_bytes_and_group_of_its_entry(tmp_path: Path, as_json: bool) -> None:
    run = tracekit.load(str(write(tmp_path, as_json=as_json)), cache=False)
    assert run.ranks == (0, 1, 2, 3)
    trace = run.trace(2)
    assert trace.activities["dur_ns"].to_list() == [round(TRANSFER_MS * 1e6)] * CALLS
    assert trace.activities["start_ns"].to_list() == [BEGAN_NS + seq * INTERVAL_NS for seq in range(1, CALLS + 1)]
    calls = trace.collectives
    assert calls["op"].unique().to_list() == ["all_reduce"]
    assert calls["seq"].to_list() == list(range(1, CALLS + 1))
    assert calls["sent_bytes"].unique().to_list() == calls["received_bytes"].unique().to_list() == [2 << 20]
    assert trace.groups.select("group", "ranks").rows() == [(GROUP[0], [0, 1, 2, 3])]
    assert {schema.COLLECTIVES_ONLY, schema.WRITE_TIMES} <= set(trace.data_quality["kind"])


@pytest.mark.parametrize("late_rank", [None, 0, 3])
def test_a_late_rank_is_named_with_what_the_others_wait(tmp_path: Path, late_rank: int | None) -> None:
    report = engine.check(tracekit.load(str(write(tmp_path, late_rank)), cache=False))
    warnings = [finding for finding in report.findings if finding.severity > Severity.INFO]
    if late_rank is None:
        assert warnings == []
        return
    assert [(finding.code, finding.ranks) for finding in warnings] == [("RANK001", (late_rank,))]
    assert warnings[0].cost_ns == pytest.approx(LATE_MS * 1e6 * CALLS, rel=0.01)


def test_kernels_of_a_group_follow_one_another(tmp_path: Path) -> None:
    """The host calls all at once: each kernel waits for the one before."""
    calls = [{**entry, "time_created_ns": BEGAN_NS} for entry in entries(0, None)]
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(flight_records.dump(calls, groups={GROUP: [0, 1]})))
    starts_ns = tracekit.load(str(path), cache=False).trace(0).activities["start_ns"]
    assert starts_ns.diff().drop_nulls().unique().to_list() == [round(TRANSFER_MS * 1e6)]


def test_messages_have_their_peers_as_ranks_of_the_job(tmp_path: Path) -> None:
    group = ("7", "pipeline")
    calls = [
        flight_records.entry("send 0->1", 1, group=group, is_p2p=True, created_ns=BEGAN_NS),
        flight_records.entry("recv 0<-1", 2, group=group, is_p2p=True, created_ns=BEGAN_NS + SECOND_NS),
    ]
    for call in calls:
        call["duration_ms"] = 1.0
    path = tmp_path / "nccl_trace_rank_2"
    path.write_bytes(pickle.dumps(flight_records.dump(calls, groups={GROUP: [0, 1, 2, 3, 4, 5], group: [2, 5]})))
    messages = tracekit.load(str(path), cache=False).trace(2).collectives
    assert messages.select("op", "peer").rows() == [("send", 5), ("recv", 5)]


def test_calls_without_a_duration_are_counted(tmp_path: Path) -> None:
    calls = entries(0, None)
    calls[-1] |= {"state": "started", "time_discovered_completed_ns": None, "retired": False}
    for value, call in zip((None, "9", -1.0, 1e300, True, float("nan"), [8.0]), calls, strict=False):
        call["duration_ms"] = value
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(flight_records.dump(calls, groups={GROUP: [0]})))
    trace = tracekit.load(str(path), cache=False).trace(0)
    assert trace.activities.height == CALLS - 8
    lost = trace.data_quality.filter(kind="dropped_events")["affected_ratio"].to_list()
    assert lost == [pytest.approx(8 / CALLS)]


def test_dumps_without_durations_are_named_with_what_to_do(tmp_path: Path) -> None:
    folder = write(tmp_path, duration_ms=None)
    done = cli_runner.in_a_process("check", folder)
    assert done.returncode == 2
    message = cli_runner.only_line(done)
    assert "TORCH_NCCL_ENABLE_TIMING=1" in message
    assert "tracekit hang" in message
    with pytest.raises(InputError, match="tracekit hang"):
        tracekit.load(str(RECORDINGS / "hangs_nccl" / "endless_loop"), cache=False)


def test_a_folder_of_dumps_of_a_hang_is_named() -> None:
    """tracekit's own dumps are of jobs that hang."""
    with pytest.raises(InputError, match="tracekit hang"):
        tracekit.load(str(RECORDINGS / "hangs" / "running"), cache=False)


def test_dumps_beside_traces_change_no_answer(tmp_path: Path) -> None:
    """A run whose dumps of a hang lie beside its traces is judged by its traces."""
    sample = RECORDINGS.parents[1] / "sample_traces" / "faults" / "slow-rank"
    of_traces = engine.check(tracekit.load(str(sample), cache=False)).findings
    for trace in sample.rglob("*.json*"):
        (tmp_path / trace.relative_to(sample)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / trace.relative_to(sample)).write_bytes(trace.read_bytes())
    write(tmp_path, duration_ms=None)
    of_both = engine.check(tracekit.load(str(tmp_path), cache=False)).findings
    assert [f.id for f in of_both if f.code != "DATA001"] == [f.id for f in of_traces if f.code != "DATA001"]
    assert {f.severity.name for f in of_both if f.code == "DATA001" and "flight recorder" in f.message} == {"INFO"}


def test_a_file_that_is_no_dump_is_not_taken_for_one() -> None:
    reader = FlightRecorderDumps()
    assert not reader.sniff(b'{"traceEvents": []}', "nccl_trace_rank_0")
    assert not reader.has_name("rank00000.json")
    assert reader.has_name("comm_lib_trace_rank_12")
