"""Perfetto files as input: what tracekit exported comes back whole; files of others are read by their categories."""

import gzip
import io
import json
import time
import zlib
from collections import Counter
from pathlib import Path
from random import Random

import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal

import tracekit
from tests.fuzz import mutations
from tests.support import cli_runner, drawn_traces, kineto_files, perfetto_files
from tests.support.perfetto_reader import schema as perfetto_schema
from tests.support.selection import others_in_accuracy
from tests.unit.report.test_export import ops
from tracekit.errors import BadTraceError
from tracekit.ingest import discovery, headers
from tracekit.ingest.files import File
from tracekit.ingest.readers.perfetto.format import PerfettoTraces
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.report.export import perfetto
from tracekit.report.export.perfetto import Clock

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces"
OTHERS = ROOT.parent / "shared" / "traces"


def exported(run: Run, path: Path, **how) -> Path:
    data = io.BytesIO()
    perfetto.write(run, data, **how)
    path.write_bytes(data.getvalue())
    return path


def assert_same(there: Trace, back: Trace) -> None:
    assert (back.rank, back.window, dict(back.header)) == (there.rank, there.window, dict(there.header))
    for name in schema.TABLES:
        assert_frame_equal(getattr(back, name), getattr(there, name))


def assert_comes_back(run: Run, path: Path, **how) -> Run:
    back = tracekit.load(exported(run, path, **how), cache=False)
    assert [(s.rank, s.window) for s in back.sources] == [(s.rank, s.window) for s in run.sources]
    for there, found in zip(run.traces(), back.traces(), strict=True):
        assert_same(there, found)
    assert_frame_equal(back.data_quality, run.data_quality)
    assert back.manifest == run.manifest
    return back


# What tracekit exported ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param("demo-fsdp2", marks=pytest.mark.accuracy), "faults/gil-save", "faults/healthy-fsdp2"]
)
def test_all_tables_of_all_ranks_of_an_export_come_back(tmp_path, name):
    assert_comes_back(tracekit.load(SAMPLES / name, cache=False), tmp_path / "run.pftrace")


@pytest.mark.parametrize("name", ["hta_event_sync", "hta_cpu_gloo", "hta_pair_of_128", "tracelens_mi300_resnet_ddp"])
def test_all_tables_of_runs_of_others_come_back(tmp_path, name):
    if not (OTHERS / name).exists():
        pytest.skip("no traces of other projects next to this checkout")
    assert_comes_back(tracekit.load(OTHERS / name, cache=False), tmp_path / "run.pftrace")


def test_commands_print_of_an_export_what_they_print_of_the_run(tmp_path):
    run, copy = SAMPLES / "faults" / "healthy-fsdp2", tmp_path / "run.pftrace.gz"
    assert cli_runner.tracekit("export", run, "--out", copy).returncode == 0
    for command in (
        ("check", "--format", "json"),
        ("summary", "--format", "json"),
        ("kernels", "--of", "host", "--format", "json"),
    ):
        printed = [cli_runner.tracekit(command[0], path, *command[1:]) for path in (run, copy)]
        assert printed[0].returncode == printed[1].returncode
        there, back = (_without_paths(json.loads(each.stdout)) for each in printed)
        assert back == there


def _without_paths(value):
    if isinstance(value, dict):
        return {key: _without_paths(each) for key, each in value.items() if key not in ("inputs", "path", "run")}
    return [_without_paths(each) for each in value] if isinstance(value, list) else value


def drawn(rank: int = 0, window: int = 0, start_ns: int = 1_000_000) -> Trace:
    slices = ops(
        ("launch", 0, 1), ("", 3, 3), ("crossing", 4, 9), ("later", 6, 12), ("名 <b>\x00", 12, 13), ("end", 14, 15)
    )
    slices = slices.with_columns(
        pl.col("start_ns") + start_ns,
        kind=pl.lit("cpu_op"),
        parent_id=pl.Series([None, None, None, 2, None, None], dtype=pl.Int64),
        shapes=pl.Series(["[[2, 3], []]", None, None, None, "", None]),
        name=pl.when(pl.col("id") == 4).then(None).otherwise("name"),
    )
    return drawn_traces.trace(
        "step ..0001111.\ncompute a.bbb.b..c\ncomm .xx.y.....",
        rank=rank,
        window=window,
        start_ns=start_ns,
        columns={"c": {"step": 1, "bytes": 1 << 40}, "b": {"launch_id": None, "unit": ""}},
        ops=slices,
        collectives=pl.DataFrame(
            {
                "activity_id": [4, 5], "op": ["all_to_all", None], "splits": [[1, 2, 1 << 40], None],
                "row_bytes": [None, 4],
            }
        ),
        groups=pl.DataFrame({"group": ["0"], "ranks": [[0, 7]], "backend": ["nccl"]}),
        allocations=pl.DataFrame({"at_ns": [start_ns + 3], "device": [0], "delta_bytes": [-512], "address": [1 << 62]}),
        syncs=pl.DataFrame({"call_id": [0], "kind": ["stream"], "start_ns": [start_ns], "dur_ns": [4]}),
        metrics=pl.DataFrame({"step": [0, 1], "name": ["loss", "loss"], "value": [1.5, float("inf")]}),
        io_calls=pl.DataFrame({"name": ["read"], "kind": ["read"], "start_ns": [start_ns + 1], "dur_ns": [2]}),
        checkpoints=pl.DataFrame(
            {
                "checkpoint": ["a", "a"], "operation": ["save", "save"], "stage": ["write", "total"],
                "start_ns": [start_ns + 2, None], "dur_ns": [3, None], "blocking": [True, False],
                "durable": [None, True],
            }
        ),
    )  # fmt: skip


def test_missing_names_lists_and_rows_without_times_come_back(tmp_path):
    run = drawn_traces.run(drawn())
    back = assert_comes_back(run, tmp_path / "run.pftrace")
    assert back.trace(0).collectives["splits"].to_list() == [[1, 2, 1 << 40], None]


def test_windows_and_clocks_that_drift_come_back_to_the_nanosecond(tmp_path):
    traces = [drawn(rank, window, 10**18 + window * 10**9) for window in (0, 1) for rank in (0, 1)]
    clocks = {(0, 1): Clock(-(10**15), -3e-4, 10**18), (1, 1): Clock(77, 0.01, 5), (1, 0): Clock(-(1 << 61))}
    assert_comes_back(drawn_traces.run(*traces), tmp_path / "run.pftrace", clocks_by_trace=clocks)


def test_lanes_whose_role_is_damaged_get_that_of_their_work(tmp_path):
    run = tracekit.load(kineto_files.write(tmp_path / "rank0.json", kineto_files.trace(0)), cache=False)
    content = exported(run, tmp_path / "run.pftrace").read_bytes()
    (tmp_path / "run.pftrace").write_bytes(content.replace(b"\x04role", b"\x04rule"))
    back = tracekit.load(tmp_path / "run.pftrace", cache=False)
    assert_frame_equal(back.trace(0).lanes, run.trace(0).lanes)
    assert cli_runner.tracekit("check", tmp_path / "run.pftrace").returncode == 0


def test_slices_that_lack_their_lane_are_left_out_and_counted(tmp_path):
    run = tracekit.load(kineto_files.write(tmp_path / "rank0.json", kineto_files.trace(0)), cache=False)
    content = exported(run, tmp_path / "run.pftrace").read_bytes()
    (tmp_path / "run.pftrace").write_bytes(content.replace(b"\x04lane", b"\x04lone"))
    back = tracekit.load(tmp_path / "run.pftrace", cache=False).trace(0)
    tables = ("ops", "activities", "lanes")
    left_out = sum(getattr(run.trace(0), name).height - getattr(back, name).height for name in tables)
    assert left_out > run.trace(0).lanes.height
    messages = back.data_quality.filter(pl.col("kind") == "damaged_events")["message"].to_list()
    assert messages == [f"{left_out} rows of the Perfetto file lack their lane, time or value and were left out."]
    assert cli_runner.tracekit("check", tmp_path / "run.pftrace", "--fail-on", "never").returncode == 0


@pytest.mark.parametrize(
    "damaged",
    others_in_accuracy(
        [b"[1, null]", b"[0, -1.5]", b"", b"nonsense", b'{"a": 1}', b"[9" + b"9" * 19 + b"]"],
        [b"[0, -1.5]", b"nonsense", b"[9" + b"9" * 19 + b"]"],
    ),
)
def test_ranks_of_a_group_that_are_no_integers_leave_it_out(damaged, tmp_path):
    run = tracekit.load(kineto_files.write(tmp_path / "rank0.json", kineto_files.trace(0)), cache=False)
    trace = run.trace(0)
    groups = schema.GROUPS.conform(
        pl.DataFrame({"group": ["7"], "description": ["dp"], "ranks": [[0, 1234567, 7654321]]})
    )
    exported(drawn_traces.run(trace.replace(groups=groups)), tmp_path / "run.pftrace")
    content = perfetto_schema.Trace.FromString((tmp_path / "run.pftrace").read_bytes())
    texts = [text for packet in content.packet for text in packet.interned_data.debug_annotation_string_values]
    (ranks,) = (text for text in texts if b"1234567" in text.str)
    ranks.str = damaged
    (tmp_path / "run.pftrace").write_bytes(content.SerializeToString())
    back = tracekit.load(tmp_path / "run.pftrace", cache=False).trace(0)
    assert back.groups.is_empty()
    assert "damaged_events" in back.data_quality["kind"]
    assert cli_runner.tracekit("check", tmp_path / "run.pftrace", "--fail-on", "never").returncode == 0


@pytest.mark.parametrize("step", [-(1 << 63), (1 << 63) - 1, 1 << 60])
def test_a_step_beyond_all_bounds_counts_as_none(step, tmp_path):
    run = tracekit.load(kineto_files.write(tmp_path / "rank0.json", kineto_files.trace(0)), cache=False)
    trace = run.trace(0)
    changed = drawn_traces.run(trace.replace(activities=trace.activities.with_columns(step=pl.lit(step))))
    back = tracekit.load(exported(changed, tmp_path / "run.pftrace"), cache=False).trace(0)
    assert back.activities["step"].null_count() == trace.activities.height > 0
    assert cli_runner.tracekit("check", tmp_path / "run.pftrace", "--fail-on", "never").returncode == 0


def test_an_export_of_one_step_refers_to_nothing_that_it_lacks(tmp_path):
    back = tracekit.load(exported(drawn_traces.run(drawn()), tmp_path / "run.pftrace", step=0), cache=False)
    trace = back.trace(0)
    assert trace.steps["step"].to_list() == [0]
    assert trace.activities["name"].to_list() == ["b", "x", "y"]
    assert trace.ops["id"].to_list() == list(range(trace.ops.height))
    assert set(trace.ops["parent_id"].drop_nulls()) <= set(trace.ops["id"])
    assert set(trace.activities["launch_id"].drop_nulls()) <= set(trace.ops["id"])
    assert trace.data_quality["kind"].to_list() == ["part_of_run"]


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: pa.compress(data, codec="zstd", asbytes=True)])
@pytest.mark.parametrize("name", ["run.pftrace.gz", "run.bin"])
def test_a_packed_file_is_recognized_by_its_content(tmp_path, pack, name):
    path = exported(drawn_traces.run(drawn()), tmp_path / "plain")
    (tmp_path / name).write_bytes(pack(path.read_bytes()))
    assert_same(drawn(), tracekit.load(tmp_path / name, cache=False).trace(0))


def test_packets_that_are_compressed_in_packets_are_read(tmp_path):
    schema_of_files = perfetto_files.schema
    there = schema_of_files.Trace.FromString(exported(drawn_traces.run(drawn()), tmp_path / "plain").read_bytes())
    packed, rest = schema_of_files.Trace(), schema_of_files.Trace()
    rest.packet.extend(there.packet[2:])
    packed.packet.extend(there.packet[:2])
    packed.packet.add().compressed_packets = zlib.compress(rest.SerializeToString())
    (tmp_path / "run.pftrace").write_bytes(packed.SerializeToString())
    assert_same(drawn(), tracekit.load(tmp_path / "run.pftrace", cache=False).trace(0))


# Files of others -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interned", [False, True])
def test_slices_in_categories_of_the_profiler_are_read_as_from_its_own_file(tmp_path, interned):
    content = kineto_files.trace(0, steps=3)
    op = {"External id": 3, "Input Dims": [[8, 16], []], "Input type": ["float", "Scalar"]}
    content["traceEvents"].append(kineto_files.slice_("cpu_op", "aten::mm", 110, 20, tid=1, **op))
    there = tracekit.load(kineto_files.write(tmp_path / "rank0.json", content), cache=False).trace(0)
    data = perfetto_files.of_kineto(content["traceEvents"], kineto_files.BASE_NS, interned=interned)
    (tmp_path / "run.perfetto-trace").write_bytes(data)
    back = tracekit.load(tmp_path / "run.perfetto-trace", cache=False).trace(0)
    assert there.activities.height == 6
    for name in ("steps", "activities", "collectives", "ops"):
        assert_frame_equal(getattr(back, name), getattr(there, name))
    assert back.ops["shapes"].drop_nulls().to_list() == there.ops["shapes"].drop_nulls().to_list() != []


def test_a_large_trace_of_another_project_is_read_as_from_its_own_file(tmp_path):
    source = OTHERS / "hta_nccl_args_a100" / "nccl_data.json.gz"
    if not source.exists():
        pytest.skip("no traces of other projects next to this checkout")
    content = json.loads(gzip.decompress(source.read_bytes()), parse_float=lambda text: round(float(text) * 8) / 8)
    events = [e | {"tid": hash(str(e["tid"])) % 10**6} for e in content["traceEvents"] if e["ph"] == "X"]
    events = [e | {"args": {k: v for k, v in e["args"].items() if not isinstance(v, dict)}} for e in events]
    counted = Counter(e["cat"] for e in events)
    (tmp_path / "run.pftrace").write_bytes(perfetto_files.of_kineto(events, 0, interned=True))
    back = tracekit.load(tmp_path / "run.pftrace", cache=False).trace(0)
    assert back.ops.filter(kind="cpu_op").height == counted["cpu_op"]
    assert back.ops.filter(kind="runtime").height == counted["cuda_runtime"]
    kinds = counted["kernel"] + counted["gpu_memcpy"] + counted["gpu_memset"]
    assert back.activities.height == kinds
    assert back.collectives.height == 21


def test_processes_named_after_ranks_are_traces(tmp_path):
    parts = [
        perfetto_files.schema.Trace.FromString(
            perfetto_files.of_kineto(kineto_files.trace(rank)["traceEvents"], 10**18, process=f"python rank {rank}")
        )
        for rank in (2, 5)
    ]
    for packet in parts[1].packet:  # another sequence, on tracks of its own
        packet.trusted_packet_sequence_id = 8
        for part in ("track_event", "track_descriptor"):
            if packet.HasField(part):
                field = "track_uuid" if part == "track_event" else "uuid"
                setattr(getattr(packet, part), field, getattr(getattr(packet, part), field) + 1000)
    (tmp_path / "run.pftrace").write_bytes(b"".join(part.SerializeToString() for part in parts))
    run = tracekit.load(tmp_path / "run.pftrace", cache=False)
    assert run.ranks == (2, 5)
    assert [trace.activities.height for trace in run.traces()] == [4, 4]


@pytest.mark.parametrize(
    ("category", "said"),
    [
        ("android", "this is a Perfetto trace without PyTorch events (1 slices; its categories: 'android'); record"),
        ("stack", "this is a Perfetto trace without PyTorch events (1 slices; its categories: 'stack'); record"),
    ],
)
def test_a_file_without_events_of_pytorch_is_named(tmp_path, category, said):
    slice_ = kineto_files.slice_(category, "frame", 1, 2, tid=1)
    (tmp_path / "other.pftrace").write_bytes(perfetto_files.of_kineto([slice_], 0))
    done = cli_runner.tracekit("check", tmp_path / "other.pftrace")
    assert done.returncode == 2
    assert said in done.stderr


def test_an_export_of_an_earlier_version_is_named(tmp_path):
    slices = [kineto_files.slice_(name, name, 1, 2, tid=i) for i, name in enumerate(("step", "compute", "cpu_op"))]
    (tmp_path / "old.pftrace").write_bytes(perfetto_files.of_kineto(slices, 0))
    with pytest.raises(BadTraceError, match="exported by an earlier version of tracekit"):
        tracekit.load(tmp_path / "old.pftrace", cache=False)


# Damaged and hostile files -------------------------------------------------------------------------------------------


def test_a_truncated_export_is_read_as_far_as_possible_and_says_so(tmp_path):
    run = tracekit.load(SAMPLES / "faults" / "healthy-fsdp2", cache=False)
    data = exported(run, tmp_path / "run.pftrace").read_bytes()
    header = PerfettoTraces().traces(str(tmp_path / "run.pftrace"), b"")
    cut = header[0].part[0] + int(header[0].part[1] * 0.9)
    (tmp_path / "cut.pftrace").write_bytes(data[:cut])
    back = tracekit.load(tmp_path / "cut.pftrace", cache=False)
    kinds = set(back.trace(0).data_quality["kind"])
    assert kinds & {"truncated", "unmatched_pairs"}


def test_damaged_files_end_in_an_error_or_a_trace_in_time_that_grows_with_their_size(tmp_path):
    random = Random(0)
    data = exported(drawn_traces.run(drawn()), tmp_path / "run.pftrace").read_bytes()
    other = perfetto_files.of_kineto(kineto_files.trace(0)["traceEvents"], 10**18, interned=True)
    path = tmp_path / "damaged.pftrace"
    read = 0
    for i in range(150):
        damaged = (data if i % 2 else other)[: random.choice((None, random.randrange(len(other))))]
        for _ in range(random.choice((0, 1, 5, 40))):
            damaged = mutations.text(damaged, random)
        path.write_bytes(damaged)
        try:
            tracekit.load(path, cache=False).trace(0).tables  # noqa: B018
            read += 1
        except (BadTraceError, KeyError):  # another rank
            continue
    assert read > 20


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\x04\x08\x01\x10\x02",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" * 3,
        b"\x0a\xff" * 100_000,
        b"\x0a\x80" * 100_000,
        b"\x0a\x0d\x5a\x0b" + b"\x22\x09" * 4 + b"\x00" * 99,
        b"\x0a\x06\x40\x01\x50\x01\x58\x01" * 50_000,
        b"\x0a\x08\x40\x01\x5a\x04\x48\x02\x58\x01" * 50_000,
        b"\x0a\x10\x50\x01\x40\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x5a\x02\x48\x01" * 20_000,
    ],
)
def test_hostile_bytes_are_refused_at_once(tmp_path, data):
    path = tmp_path / "hostile.pftrace"
    path.write_bytes(data)
    began_s = time.process_time()
    with pytest.raises(BadTraceError, match="Perfetto"):
        headers.read(File(str(path), len(data)), cache=False)
    assert time.process_time() - began_s < 20
    assert discovery


def test_an_export_whose_rank_is_beyond_all_ranks_is_that_of_rank_0(tmp_path):
    trace = drawn_traces.trace("compute  .aa..").replace(rank=1 << 31)
    run = tracekit.load(exported(drawn_traces.run(trace), tmp_path / "run.pftrace"), cache=False)
    assert tuple(run.ranks) == (0,)
