"""Nsight Systems exports: equal to the Kineto trace of the same events, to plain SQL, and read whatever is wrong."""

import gzip
import shutil
import sqlite3
import struct
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import nsight_export, shared_findings
from tests.support.cli_runner import ROOT
from tests.support.cli_runner import tracekit as command
from tests.support.nsight_export import HOST, Export
from tracekit.analysis.time import breakdown
from tracekit.errors import BadTraceError
from tracekit.ingest.decompression import Blocks
from tracekit.rules.engine import check

SAMPLES = ROOT / "sample_traces" / "gpu"
RECORDINGS = ROOT / "tests" / "recordings" / "nsight"
VERSIONS = ("2022.4", "2023.4")
NAMES = ("compiled", "cuda-graphs", "slow-rank")
PID, OTHER_PID = 1234, 1235
COMMUNICATOR = 0x9D5C6B2F00000001
MIB = 1 << 20


def kineto(name, rank=0):
    return SAMPLES / name / f"rank{rank:05d}.pt.trace.json.gz"


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Return the exports of each sample's first rank, by name and version."""
    folder = tmp_path_factory.mktemp("nsight")
    made = {}
    for name in NAMES:
        for version in VERSIONS:
            made[name, version] = folder / f"{name}-{version}.sqlite"
            export = Export(made[name, version], version)
            nsight_export.of_kineto(export, kineto(name), PID)
            export.close()
    return made


def trace(path):
    (source,) = tracekit.load(path, cache=False).sources
    return source.read()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_an_export_has_the_work_steps_and_calls_of_the_kineto_trace_of_the_same_events(exports, name, version):
    found, expected = trace(exports[name, version]), trace(kineto(name))
    assert work(found).equals(work(expected))
    assert calls(found).equals(calls(expected))
    assert waits(found).equals(waits(expected))
    shown = [times(breakdown.by_step(each)) for each in (found, expected)]
    assert shown[0].equals(shown[1])
    assert shown[0].height
    assert found.collectives["op"].to_list() == expected.collectives["op"].to_list()
    assert found.header["deviceProperties"][0]["name"] == expected.header["deviceProperties"][0]["name"]


def work(of):
    """Return the activities with their streams, times from the first one on."""
    joined = of.activities.join(of.lanes.select("lane", "device", "stream"), on="lane")
    columns = (
        "name",
        "kind",
        "start_ns",
        "dur_ns",
        "bytes",
        "grid",
        "block",
        "device",
        "stream",
        "step",
        "unit",
        "phase",
    )
    return relative(joined.select(columns))


def calls(of):
    shown = of.ops.filter(pl.col("kind").is_in(["cpu_op", "annotation", "runtime"]))
    return relative(shown.select("name", "kind", "start_ns", "dur_ns", "step", "phase", "shapes"))


def waits(of):
    return relative(of.syncs.select("kind", "start_ns", "dur_ns", "device", "stream", "awaited_stream"))


def relative(table):
    zero = pl.col("start_ns") - pl.col("start_ns").min()
    return table.with_columns(zero).sort(table.columns, nulls_last=True)


def times(steps):
    return steps.select(column for column in steps.columns if column.endswith("_ns") and "start" not in column)


def test_two_files_give_the_straggler_that_the_kineto_traces_give(tmp_path):
    for rank in (0, 1):
        export = Export(tmp_path / f"rank{rank}.sqlite", "2023.4")
        nsight_export.of_kineto(export, kineto("slow-rank", rank), PID)
        export.close()
    found = {each.code: each for each in check(tracekit.load(tmp_path)).findings}
    expected = {each.code: each for each in shared_findings.findings(SAMPLES / "slow-rank")}
    for code in ("COMM001", "RANK001"):
        assert (found[code].ranks, found[code].cost_ns) == (expected[code].ranks, expected[code].cost_ns)


ENVIRONMENT = (
    "INSERT INTO TARGET_INFO_SYSTEM_ENV (globalVid, devStateName, name, nameEnum, value) "
    "VALUES (1, 'Local', 'DeviceEnvironment', 610, ?)"
)


@pytest.fixture(scope="module")
def report_of_two(tmp_path_factory):
    """Return a report of two processes on one device, as of torchrun under one nsys."""
    path = tmp_path_factory.mktemp("two") / "job.sqlite"
    export = Export(path, "2023.4")
    for rank, pid in ((0, PID), (1, OTHER_PID)):
        nsight_export.of_kineto(export, kineto("slow-rank", rank), pid)
    export.close()
    return path


def test_the_processes_of_a_report_are_ranks_in_the_order_of_their_devices(report_of_two):
    run = tracekit.load(report_of_two, cache=False)
    assert [source.rank for source in run.sources] == [0, 1]
    for rank in (0, 1):
        alone = trace(kineto("slow-rank", rank))
        assert work(run.sources[rank].read()).equals(work(alone))
    issues = run.table(lambda of: of.data_quality).filter(pl.col("kind") == "rank_guessed")
    assert issues["message"].str.contains(f"process {OTHER_PID} is rank 1").any()


def test_the_ranks_of_processes_are_those_of_their_first_nccl_communicator(report_of_two, tmp_path):
    path = shutil.copy(report_of_two, tmp_path)
    for pid, rank in ((PID, 5), (OTHER_PID, 3)):
        add_range(path, pid, "ncclCommInitRankConfig", rank=rank, ranks=8)
    run = tracekit.load(path, cache=False)
    assert [source.rank for source in run.sources] == [3, 5]
    assert work(run.sources[0].read()).equals(work(trace(kineto("slow-rank", 1))))
    kinds = run.table(lambda of: of.data_quality)["kind"]
    assert "rank_guessed" not in kinds.to_list()


def test_mpi_states_ranks(report_of_two, tmp_path):
    path = shutil.copy(report_of_two, tmp_path)
    rows = [(HOST | PID << 24 | 7, 1), (HOST | OTHER_PID << 24 | 9, 0)]
    execute(path, "INSERT INTO MPI_RANKS VALUES (?, ?)", rows)
    run = tracekit.load(path, cache=False)
    assert work(run.sources[0].read()).equals(work(trace(kineto("slow-rank", 1))))


def test_the_rank_of_mpi_is_that_of_the_whole_job_although_nccl_has_groups_of_a_part(report_of_two, tmp_path):
    path = shutil.copy(report_of_two, tmp_path)
    execute(path, "INSERT INTO MPI_RANKS VALUES (?, ?)", [(HOST | PID << 24 | 7, 6), (HOST | OTHER_PID << 24 | 9, 7)])
    for pid, rank in ((PID, 0), (OTHER_PID, 1)):
        add_range(path, pid, "ncclCommInitRankConfig", rank=rank, ranks=2)
    run = tracekit.load(path, cache=False)
    assert [source.rank for source in run.sources] == [6, 7]
    # The report has two of an unknown number of ranks.
    assert "distributedInfo" not in run.sources[0].read().header


def test_a_communicator_of_a_part_of_the_ranks_does_not_state_the_rank(exports, tmp_path):
    path = Path(shutil.copy(exports["compiled", "2023.4"], tmp_path / "profile.sqlite"))
    execute(path, ENVIRONMENT, [("RANK=5;WORLD_SIZE=8",)])
    add_range(path, PID, "ncclCommInitRankConfig", rank=1, ranks=4)
    (source,) = tracekit.load(path, cache=False).sources
    assert source.rank == 5
    assert source.read().header["distributedInfo"] == {"rank": 5, "world_size": 8}


@pytest.mark.parametrize(
    ("environment", "rank", "world_size"),
    [
        ("HOME=/root;RANK=3;WORLD_SIZE=8;LOCAL_RANK=1", 3, 8),
        ("SLURM_NTASKS=16;SLURM_PROCID=11", 11, 16),
        ("RANK=x;WORLD_SIZE=8", None, None),
        ("RANK=99999999999;WORLD_SIZE=-4", None, None),
    ],
)
def test_the_environment_of_one_process_states_its_rank(exports, tmp_path, environment, rank, world_size):
    path = Path(shutil.copy(exports["compiled", "2023.4"], tmp_path / "profile.sqlite"))
    execute(path, ENVIRONMENT, [(environment,)])
    run = tracekit.load(path, cache=False)
    assert run.sources[0].rank == (rank or 0)
    assert run.sources[0].read().header.get("distributedInfo", {}).get("world_size") == world_size
    shown = str(run.sources[0].read().header)
    assert "HOME" not in shown


def execute(path, statement, rows=((),)):
    connection = sqlite3.connect(path)
    connection.executemany(statement, rows)
    connection.commit()
    connection.close()


def add_range(path, pid, name, *, start=0, end=10, tid=1, rank=None, ranks=None, size=None, as_json=False):
    """Insert a range of NCCL with a payload, as bytes with a layout, or as JSON."""
    connection = sqlite3.connect(path)
    columns = {row[1] for row in connection.execute("PRAGMA table_info(NVTX_EVENTS)")}
    if "binaryData" not in columns:
        connection.execute("ALTER TABLE NVTX_EVENTS ADD COLUMN binaryData TEXT")
        connection.execute(
            "CREATE TABLE NVTX_PAYLOAD_SCHEMA_ENTRIES (domainId INTEGER, schemaId INTEGER, idx INTEGER, flags INTEGER, "
            "type INTEGER, name TEXT, description TEXT, arrayOrUnionDetail INTEGER, offset INTEGER)"
        )
        fields = [(0, 18, "NCCL communicator ID", None), (1, 5, "No. of ranks", 8), (2, 5, "Rank", 12)]
        fields += [(3, 22, "Message size [bytes]", 16), (4, 77, "Reduction operation", 24)]
        connection.executemany(
            "INSERT INTO NVTX_PAYLOAD_SCHEMA_ENTRIES VALUES (2, 40, ?, NULL, ?, ?, NULL, NULL, ?)", fields
        )
    payload = struct.pack("<QiiQ", COMMUNICATOR, ranks or 0, -1 if rank is None else rank, size or 0)
    binary = struct.pack("<IIIIQQ", 2, 0, 40, 0, len(payload), 32 + len(payload)) + payload
    json_text = f'{{"NCCL communicator ID": {COMMUNICATOR}, "Message size [bytes]": {size}}}' if as_json else None
    connection.execute(
        "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, jsonText, binaryData) "
        "VALUES (?, ?, 59, ?, ?, ?, ?)",
        (start, end, name, HOST | pid << 24 | tid, json_text, None if as_json else binary),
    )
    connection.commit()
    connection.close()


OPS = {
    "ncclAllReduce": ("all_reduce", 3 * MIB, 3 * MIB),
    "ncclAllGather": ("all_gather", 3 * MIB, 24 * MIB),
    "ncclReduceScatter": ("reduce_scatter", 24 * MIB, 3 * MIB),
    "ncclAlltoAll": ("all_to_all", 24 * MIB, 24 * MIB),
}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("name", sorted(OPS))
def test_sizes_and_groups_of_collectives_are_those_of_nccls_ranges(tmp_path, name, as_json):
    path = tmp_path / "nccl.sqlite"
    export = Export(path, "2023.4")
    thread = HOST | PID << 24 | 1
    kernel = f"ncclDevKernel_{name.removeprefix('nccl')}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    of = {"globalPid": HOST | PID << 24, "deviceId": 0, "contextId": 1, "streamId": 20, "correlationId": 7}
    launch = {"nameId": export.text("cudaLaunchKernelExC_v11060"), "globalTid": thread, "correlationId": 7}
    export.insert("CUPTI_ACTIVITY_KIND_RUNTIME", start=120, end=130, **launch)
    export.insert("CUPTI_ACTIVITY_KIND_KERNEL", start=200, end=900, **of, demangledName=export.text(kernel))
    export.close()
    add_range(path, PID, "ncclCommInitRank", rank=2, ranks=8)
    add_range(path, PID, name, start=100, end=150, size=3 * MIB, as_json=as_json)
    (source,) = tracekit.load(path, cache=False).sources
    row = source.read().collectives.row(0, named=True)
    assert source.rank == 2
    assert (row["op"], row["sent_bytes"], row["received_bytes"]) == OPS[name]
    assert (row["group"], row["group_size"]) == (f"{COMMUNICATOR:#x}", 8)


@pytest.mark.parametrize("version", VERSIONS)
def test_ranges_of_a_recording_by_nsight_systems_are_those_of_its_table(version, tmp_path):
    packed = RECORDINGS / f"gloo_2ranks_{version}.sqlite.zst"
    plain = tmp_path / "job.sqlite"
    plain.write_bytes(b"".join(Blocks(str(packed))))
    ranges = ranges_by_sql(plain)
    assert sum(map(len, ranges.values())) == 2 * 4 * 4
    for path in (packed, plain):
        run = tracekit.load(path, cache=False)
        assert [source.rank for source in run.sources] == [0, 1]
        for source, pid in zip(run.sources, sorted(ranges), strict=True):
            found = source.read()
            shown = found.ops.filter(pl.col("kind") == "annotation").select("name", "start_ns", "dur_ns", "step")
            assert sorted(shown.rows()) == sorted(ranges[pid])
            assert found.lanes["pid"].unique().to_list() == [str(pid)]


def ranges_by_sql(path):
    """Return name, start, duration and step of the ranges of each process, on the clock of the report."""
    connection = sqlite3.connect(path)
    (began,) = connection.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
    rows = connection.execute(
        "SELECT (e.globalTid >> 24) & 0xFFFFFF, value, start + ?, end - start, "
        "(SELECT replace(s.value, 'step ', '') FROM NVTX_EVENTS AS o JOIN StringIds AS s ON s.id = o.textId "
        "WHERE s.value LIKE 'step %' AND o.globalTid = e.globalTid AND e.start BETWEEN o.start AND o.end) "
        "FROM NVTX_EVENTS AS e JOIN StringIds ON id = textId WHERE eventType = 59",
        (began,),
    ).fetchall()
    connection.close()
    found = {}
    for pid, name, start, duration, step in rows:
        shown = f"ProfilerStep#{step}" if name.startswith("step ") else name
        found.setdefault(pid, []).append((shown, start, duration, int(step)))
    return found


def test_a_report_without_gpu_work_says_so():
    done = command("check", str(RECORDINGS / "gloo_2ranks_2023.4.sqlite.zst"), "--no-cache")
    assert "No compute, communication or copy was recorded" in done.stdout


def test_diagnostics_of_nsight_systems_are_findings(exports, tmp_path):
    path = shutil.copy(exports["compiled", "2023.4"], tmp_path)
    execute(path, "CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, text TEXT)")
    execute(path, "INSERT INTO DIAGNOSTIC_EVENT VALUES (1, ?, ?)", [(3, "Dropped 7 events.\n"), (1, "Started.")])
    messages = trace(path).data_quality["message"].to_list()
    assert "Nsight Systems reported: Dropped 7 events." in messages
    assert not any("Started" in message for message in messages)


def test_tables_with_other_columns_lose_only_what_these_state(exports, tmp_path):
    path = shutil.copy(exports["compiled", "2023.4"], tmp_path)
    for table in ("TARGET_INFO_GPU", "TARGET_INFO_SYSTEM_ENV", "META_DATA_EXPORT", "ThreadNames", "MPI_RANKS"):
        execute(path, f"DROP TABLE {table}")
        execute(path, f"CREATE TABLE {table} (other TEXT)")
    for table in ("NVTX_PAYLOAD_SCHEMA_ENTRIES", "DIAGNOSTIC_EVENT", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"):
        execute(path, f"CREATE TABLE {table} (other TEXT)")
    execute(path, "ALTER TABLE NVTX_EVENTS DROP COLUMN text")
    assert work(trace(path)).equals(work(trace(exports["compiled", "2023.4"])))


def test_a_range_without_an_end_is_counted(exports, tmp_path):
    path = shutil.copy(exports["compiled", "2023.4"], tmp_path)
    row = (5, HOST | PID << 24 | 1)
    execute(path, "INSERT INTO NVTX_EVENTS (start, eventType, text, globalTid) VALUES (?, 59, 'open', ?)", [row])
    assert "unmatched_pairs" in trace(path).data_quality["kind"].to_list()


def test_values_of_wrong_types_are_left_out_and_counted(exports, tmp_path):
    path = shutil.copy(exports["compiled", "2023.4"], tmp_path)
    whole = trace(path)
    for column, value in (
        ("start", "x"),
        ("end", b"\0"),
        ("end", -(1 << 63)),
        ("start", 1.5),
        ("start", (1 << 63) - 1),
    ):
        change = f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET {column} = ? WHERE rowid = (SELECT min(rowid) FROM "
        execute(path, change + "CUPTI_ACTIVITY_KIND_KERNEL WHERE typeof(start) = 'integer' AND start < 1 << 60 AND "
            "typeof(end) = 'integer' AND end > 0)", [(value,)])  # fmt: skip
    found = trace(path)
    assert found.activities.height == whole.activities.height - 5
    issues = found.data_quality.filter(pl.col("kind") == "bad_times")
    assert [message.split(": ")[1] for message in issues["message"]] == ["5 have no usable time."]


def test_views_and_virtual_tables_are_not_read(exports, tmp_path):
    path = shutil.copy(exports["compiled", "2023.4"], tmp_path)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start, i + 1 AS end, "
    execute(path, "DROP TABLE NVTX_EVENTS")
    execute(path, f"CREATE VIEW NVTX_EVENTS AS {endless} 59 AS eventType, 'x' AS text, {HOST} AS globalTid FROM n")
    found = trace(path)
    assert found.activities.height == trace(kineto("compiled")).activities.height
    assert not found.ops["name"].str.contains("^x$").any()


@pytest.mark.parametrize("part", ["header", "schema", "middle", "end"])
def test_damaged_files_are_one_line_or_fewer_events(exports, tmp_path, part):
    data = bytearray(exports["compiled", "2023.4"].read_bytes())
    at = {"header": 40, "schema": 4096, "middle": len(data) // 2, "end": len(data) - 6000}[part]
    data[at : at + 5000] = bytes(range(256)) * 19 + bytes(136)
    path = tmp_path / "rank0.sqlite"
    path.write_bytes(data)
    done = command("check", str(path), "--format", "json", "--no-cache", "--fail-on", "never")
    assert done.returncode in (0, 2), done.stderr
    assert done.returncode == 0 or done.stderr.count("\n") == 1


def test_pages_that_refer_to_each_other_end(exports, tmp_path):
    path = Path(shutil.copy(exports["slow-rank", "2023.4"], tmp_path / "rank0.sqlite"))
    connection = sqlite3.connect(path)
    (root,) = connection.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'CUPTI_ACTIVITY_KIND_KERNEL'"
    ).fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    data = bytearray(path.read_bytes())
    begin = (root - 1) * page_bytes
    assert data[begin] == 5, "the table must be so large that its root has children"
    (cells,) = struct.unpack_from(">H", data, begin + 3)
    children = [struct.unpack_from(">H", data, begin + 12 + 2 * i)[0] for i in range(cells)]
    for cell in children:
        struct.pack_into(">I", data, begin + cell, root)
    path.write_bytes(data)
    with pytest.raises(BadTraceError, match="export it again"):
        trace(path)


def test_compressed_exports_are_read(exports, tmp_path):
    path = tmp_path / "rank0.sqlite.gz"
    path.write_bytes(gzip.compress(exports["compiled", "2023.4"].read_bytes()))
    assert work(trace(path)).equals(work(trace(exports["compiled", "2023.4"])))


def test_exports_that_expand_too_far_are_refused(exports, tmp_path):
    path = tmp_path / "rank0.sqlite.gz"
    path.write_bytes(gzip.compress(exports["compiled", "2023.4"].read_bytes() + bytes(100 * MIB)))
    with pytest.raises(BadTraceError, match="far more bytes"):
        trace(path)


def test_other_databases_are_named_and_for_reports_the_command_that_exports_them(tmp_path):
    other = tmp_path / "notes.sqlite"
    execute(other, "CREATE TABLE notes (text TEXT)")
    report = tmp_path / "report.nsys-rep"
    report.write_bytes(b"NVIDIA")
    for path, said in ((other, "a SQLite database"), (report, "nsys export --type sqlite")):
        done = command("check", str(path))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert said in done.stderr


def test_a_report_without_any_event_says_what_to_record(tmp_path):
    path = tmp_path / "empty.sqlite"
    Export(path, "2023.4").close()
    done = command("check", str(path))
    assert done.returncode == 2
    assert "nsys profile --trace cuda,nvtx,osrt" in done.stderr
