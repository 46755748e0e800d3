"""OS and MPI calls of Nsight Systems exports, recorded by nsys: those of the tables by plain SQL, and what they do."""

import sqlite3
from collections import Counter

import polars as pl
import pytest

import tracekit
from tests.support.cli_runner import ROOT
from tests.support.cli_runner import tracekit as command
from tracekit.analysis.host import host_stalls
from tracekit.analysis.time import breakdown
from tracekit.ingest.decompression import Blocks
from tracekit.ingest.readers.nsight import mpi_calls
from tracekit.rules.engine import check

RECORDINGS = ROOT / "tests" / "recordings" / "nsight"
VERSIONS = ("2022.4", "2023.4")
STEPS = 3
KIB = 1 << 10


@pytest.fixture(scope="module", params=VERSIONS)
def exported(request, tmp_path_factory):
    """Return the export of a recording of two MPI ranks, and its version."""
    path = tmp_path_factory.mktemp("mpi") / "job.sqlite"
    path.write_bytes(b"".join(Blocks(str(RECORDINGS / f"mpi_2ranks_{request.param}.sqlite.zst"))))
    return path, request.param


def sql(path, query):
    connection = sqlite3.connect(path)
    rows = connection.execute(query).fetchall()
    connection.close()
    return rows


def load(path):
    return tracekit.load(path, cache=False)


def of_processes(run, table):
    """Return a table of all ranks with the process of each row."""
    parts = []
    for source in run.sources:
        trace = source.read()
        process = int(trace.lanes.filter(trace.lanes["device"].is_null())["pid"].first())
        parts.append(table(trace).with_columns(process=pl.lit(process)))
    return pl.concat(parts)


def calls_by_sql(path, where=""):
    """Return process, name, start since 1970 and duration of OS calls."""
    return sql(
        path,
        "SELECT (globalTid >> 24) & 0xFFFFFF, value, start + utcEpochNs, end - start FROM OSRT_API "
        f"JOIN StringIds ON id = nameId JOIN TARGET_INFO_SESSION_START_TIME WHERE eventClass = 27 {where}",
    )


def test_os_calls_are_ops_of_their_own_kind(exported):
    path, _ = exported
    run = load(path)
    found = of_processes(run, lambda trace: trace.ops.filter(kind="os_call"))
    rows = calls_by_sql(path)
    assert len(rows) > 100
    assert sorted(found.select("process", "name", "start_ns", "dur_ns").rows()) == sorted(rows)
    assert {"read", "pwrite64", "fsync"} <= set(found["name"])
    inside = found.filter(pl.col("name") == "fsync", pl.col("step").is_not_null())
    assert inside["step"].to_list() == [0, 1, 2] * 2


def test_calls_that_only_files_have_are_io_calls_without_file_and_bytes(exported):
    path, _ = exported
    found = of_processes(load(path), host_stalls.io_calls)
    names = "'open', 'open64', 'openat', 'openat64', 'creat', 'fopen', 'fopen64', 'pread', 'pread64', 'pwrite', "
    names += "'pwrite64', 'fsync', 'fdatasync', 'ftruncate', 'msync', 'flock'"
    rows = calls_by_sql(path, f"AND value IN ({names})")
    assert sorted(found.select("process", "name", "start_ns", "dur_ns").rows()) == sorted(rows)
    assert found["file"].null_count() == found["bytes"].null_count() == found.height
    kinds = dict(found.select("name", "kind").unique().rows())
    assert (kinds["pwrite64"], kinds["fsync"], kinds["open64"]) == ("write", "sync", "metadata")
    assert Counter(found.filter(name="pwrite64")["step"].to_list()) == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize(
    ("name", "is_file"),
    [
        ("pread64", True), ("preadv2", True), ("preadv64v2", True), ("openat64", True), ("sync_file_range", True),
        ("fopen64", True), ("posix_fallocate64", True), ("read", False), ("write", False), ("close", False),
        ("fread", False), ("openlog", False), ("recv", False), ("pthread_cond_wait", False), ("sendfile", False),
        ("poll", False), ("process_vm_readv", False),
    ],
)  # fmt: skip
def test_which_calls_are_of_files_only(name, is_file):
    assert (mpi_calls._FILE_CALL.match(name) is not None) == is_file


# What mpi.c sends: a message of 2,048 doubles, of which each rank has half where parts are exchanged.
HALF, WHOLE = 8 * KIB, 16 * KIB
SENT = {
    "MPI_Bcast": ("broadcast", WHOLE, WHOLE), "MPI_Allgather": ("all_gather", HALF, WHOLE),
    "MPI_Allreduce": ("all_reduce", WHOLE, WHOLE), "MPI_Reduce_scatter_block": ("reduce_scatter", WHOLE, HALF),
    "MPI_Alltoall": ("all_to_all", WHOLE, WHOLE), "MPI_Send": ("send", WHOLE, WHOLE),
    "MPI_Recv": ("recv", WHOLE, WHOLE), "MPI_Barrier": ("barrier", None, None), "MPI_Waitall": (None, None, None),
}  # fmt: skip
STARTS = ("MPI_Irecv", "MPI_Isend", "MPI_Init", "MPI_Finalize")
MPI_TABLES = ("MPI_P2P_EVENTS", "MPI_COLLECTIVES_EVENTS", "MPI_START_WAIT_EVENTS", "MPI_OTHER_EVENTS")


def mpi_by_sql(path, version):
    """Return process, name, start since 1970 and duration of MPI calls; MPI_Waitall has a row for each request."""
    tables = MPI_TABLES if version == "2023.4" else ("NVTX_EVENTS",)
    rows = " UNION ".join(
        "SELECT (globalTid >> 24) & 0xFFFFFF, value, start + utcEpochNs, end - start "
        f"FROM {table} JOIN StringIds ON id = textId JOIN TARGET_INFO_SESSION_START_TIME WHERE value LIKE 'MPI_%'"
        for table in tables
    )
    return [row for row in sql(path, rows) if row[3] is not None]


def test_mpi_calls_are_annotations_and_those_that_block_are_communication(exported):
    path, version = exported
    run = load(path)
    rows = mpi_by_sql(path, version)
    assert run.ranks == (0, 1)
    found = of_processes(run, lambda trace: trace.ops.filter(pl.col("name").str.starts_with("MPI_")))
    assert found["kind"].unique().to_list() == ["annotation"]
    assert sorted(found.select("process", "name", "start_ns", "dur_ns").rows()) == sorted(rows)
    work = of_processes(run, lambda trace: trace.activities)
    blocking = [row for row in rows if row[1] not in STARTS]
    assert sorted(work.select("process", "name", "start_ns", "dur_ns").rows()) == sorted(blocking)
    assert set(work["kind"]) == {"communication"}
    assert Counter(work["step"].to_list()) == dict.fromkeys(range(STEPS), len(blocking) // STEPS)


def test_operations_bytes_peers_and_communicators_are_those_of_the_program(exported):
    path, version = exported
    run = load(path)
    for rank in (0, 1):
        trace = run.trace(rank)
        rows = trace.activities.join(trace.collectives, left_on="id", right_on="activity_id").sort("start_ns")
        assert rows.height == STEPS * (len(SENT) - 1 + 1)  # a send or a receive, two barriers
        for row in rows.iter_rows(named=True):
            op, sent, received = SENT[row["name"]]
            assert row["op"] == op
            if version == "2022.4":  # ranges without arguments
                assert row["sent_bytes"] is row["group"] is row["peer"] is None
                continue
            assert (row["sent_bytes"], row["received_bytes"]) == (sent, received)
            assert row["peer"] == (1 - rank if op in ("send", "recv") else None)
        barriers = rows.filter(op="barrier").select("group", "group_size").rows()
        if version == "2023.4":
            assert barriers == [(f"MPI_COMM[1]{rank}.0", 1), ("MPI_COMM_WORLD", 2)] * STEPS
            assert ("MPI_COMM_WORLD", [0, 1]) in trace.groups.select("group", "ranks").rows()


def test_the_communication_of_each_step_is_that_by_brute_force(exported):
    path, version = exported
    run = load(path)
    found = run.table(breakdown.by_step).sort("rank", "step")
    process_of = {source.rank: int(source.read().lanes["pid"].first()) for source in run.sources}
    assert found.select("rank", "step").rows() == [(rank, step) for rank in (0, 1) for step in range(STEPS)]
    for row in found.iter_rows(named=True):
        steps = run.trace(row["rank"]).steps.filter(step=row["step"])
        start, end = steps.select("start_ns", "end_ns").row(0)
        own = [
            call for call in mpi_by_sql(path, version) if call[0] == process_of[row["rank"]] and call[1] not in STARTS
        ]
        spent = sum(max(0, min(at + dur, end) - max(at, start)) for _, _, at, dur in own)  # calls do not overlap
        assert row["exposed_communication_ns"] == spent > 0
        assert row["duration_ns"] == end - start == spent + row["idle_ns"]


def test_compute_on_the_thread_that_calls_mpi_stays_compute(exported, tmp_path):
    """Operators of emit_nvtx run on the same thread as the blocking calls, which gloo's never do."""
    path, _ = exported
    copy = tmp_path / "job.sqlite"
    copy.write_bytes(path.read_bytes())
    connection = sqlite3.connect(copy)
    rows = connection.execute(
        "SELECT globalTid, start, end FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId "
        "WHERE coalesce(text, value) = 'forward'"
    ).fetchall()
    for thread, start, end in rows:
        text = "aten::mm, seq = 7, op_id = 12, sizes = [[2, 3], [3, 4]]"
        connection.execute(
            "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid) VALUES (?, ?, 59, ?, ?)",
            (start, end, text, thread),
        )
    connection.commit()
    connection.close()
    run = load(copy)
    for rank in (0, 1):
        trace = run.trace(rank)
        compute = trace.activities.filter(kind="compute")
        assert set(compute["name"]) == {"aten::mm"}
        inside = trace.ops.filter(pl.col("name").is_in(["MPI_Bcast", "MPI_Allgather"]), pl.col("step").is_not_null())
        ranges = trace.ops.filter(name="aten::mm")
        assert compute["dur_ns"].sum() == ranges["dur_ns"].sum() - inside["dur_ns"].sum()


def test_a_report_of_mpi_is_checked_and_its_saves_name_the_calls(exported):
    path, _ = exported
    done = command("summary", str(path), "--by", "file", "--no-cache")
    assert done.returncode == 0
    assert "pwrite" in done.stdout or "write" in done.stdout
    assert not [found for found in check(load(path)).findings if found.severity == "error"]


def test_calls_without_an_end_are_counted(exported, tmp_path):
    path, version = exported
    copy = tmp_path / "job.sqlite"
    copy.write_bytes(path.read_bytes())
    connection = sqlite3.connect(copy)
    table = "MPI_OTHER_EVENTS" if version == "2023.4" else "NVTX_EVENTS"
    text, thread = connection.execute(f"SELECT textId, globalTid FROM {table} WHERE textId IS NOT NULL").fetchone()
    connection.execute(f"DELETE FROM {table} WHERE textId = ? AND globalTid = ?", (text, thread))
    kind = ", eventType" if table == "NVTX_EVENTS" else ""
    connection.execute(
        f"INSERT INTO {table} (start, globalTid, textId{kind}) VALUES (5, ?, ?{', 59' if kind else ''})", (thread, text)
    )
    connection.commit()
    connection.close()
    kinds = [kind for trace in load(copy).traces() for kind in trace.data_quality["kind"].to_list()]
    assert kinds.count("unmatched_pairs") == 1
