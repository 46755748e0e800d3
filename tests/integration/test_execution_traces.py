"""Execution traces that PyTorch recorded: joined to the profiler's trace of the same process by record functions."""

import gzip
import json
import re
import shutil
import tarfile

import fsspec
import polars as pl
import pytest

import tracekit
from tests.support import cli_runner
from tests.support.cli_runner import ROOT
from tracekit.analysis.compute import flops
from tracekit.errors import BadTraceError
from tracekit.ingest.readers import execution_trace

RECORDED = ROOT / "tests" / "recordings" / "execution_traces"
WITH, WITHOUT = RECORDED / "with_shapes", RECORDED / "without_shapes"
INPUTS = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
FRACTION = re.compile(r"-?\d+(\.\d*(e-?\d+)?|e-?\d+)")


def load(path):
    return tracekit.load(path, cache=False)


def plain(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def write(path, content):
    path.write_bytes(gzip.compress(json.dumps(content).encode()))


def without_inputs(trace):
    for event in trace["traceEvents"]:
        for key in INPUTS:
            event.get("args", {}).pop(key, None)
    return trace


@pytest.fixture
def copied(tmp_path):
    """The recording without shapes."""
    shutil.copytree(WITHOUT, tmp_path / "run")
    return tmp_path / "run"


def calls(trace):
    return trace.ops.filter(pl.col("kind").is_in(["cpu_op", "annotation"])).sort("start_ns", "id")


def numbers_left_out(arguments):
    """Return arguments without fractions, of which an execution trace has fewer digits."""
    return [FRACTION.sub("#", row) for row in arguments]


@pytest.mark.parametrize(
    "path", sorted(RECORDED.glob("*/*.et.json.gz")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_every_node_is_read(path):
    nodes = plain(path)["nodes"]
    found = execution_trace.load(str(path))
    assert (found.node_count, found.is_truncated) == (len(nodes), False)
    records = {a["value"] for node in nodes for a in node["attrs"] if a["name"] == "rf_id"} - {0}
    assert set(found.nodes) == records


def test_inputs_are_those_that_record_shapes_gives(tmp_path):
    write(tmp_path / "rank0.pt.trace.json.gz", without_inputs(plain(WITH / "rank0.pt.trace.json.gz")))
    expected = load(WITH / "rank0.pt.trace.json.gz").trace(0)
    assert load(tmp_path).trace(0).ops["shapes"].null_count() == expected.ops.height
    shutil.copy(WITH / "rank0.et.json.gz", tmp_path)
    joined = load(tmp_path).trace(0)
    of, wanted = calls(joined), calls(expected)
    described = wanted["shapes"].is_not_null()
    assert described.sum() > 200
    for column in ("name", "shapes", "dtypes", "strides"):
        assert of.filter(described)[column].to_list() == wanted.filter(described)[column].to_list()
    assert numbers_left_out(of.filter(described)["arguments"]) == numbers_left_out(
        wanted.filter(described)["arguments"]
    )
    assert joined.collectives.equals(expected.collectives)
    assert expected.collectives["sent_bytes"].null_count() < expected.collectives.height
    assert joined.groups.equals(expected.groups)
    assert joined.data_quality.equals(expected.data_quality)


def test_a_run_without_shapes_has_the_operations_of_the_run_with_shapes():
    with_shapes, joined = load(WITH), load(WITHOUT)
    expected = with_shapes.table(flops.products).drop("start_ns", strict=False)
    assert expected["flops"].sum() > 1e6
    assert joined.table(flops.flops)["flops"].to_list() == with_shapes.table(flops.flops)["flops"].to_list()
    assert joined.table(flops.products).drop("start_ns", strict=False).equals(expected)


def test_on_a_gpu_a_run_without_shapes_has_the_shapes_and_operations_of_the_run_with_shapes():
    expected, joined = load(RECORDED / "cuda_with_shapes"), load(RECORDED / "cuda_without_shapes")
    wanted, ops = (run.trace(0).ops.sort("start_ns", "id") for run in (expected, joined))
    assert wanted["shapes"].drop_nulls().len() > 2500
    for column in ("name", "shapes", "strides"):
        assert ops[column].to_list() == wanted[column].to_list()
    # An empty list of tensors has no type in an execution trace.
    differs = ops["dtypes"].ne_missing(wanted["dtypes"])
    assert ops.filter(differs)["name"].unique().to_list() == ["aten::_fused_adamw_"]
    for fact in (flops.flops, flops.products):
        assert expected.table(fact)["flops"].sum() > 1e11
        assert (
            joined.table(fact)
            .drop("start_ns", strict=False)
            .equals(expected.table(fact).drop("start_ns", strict=False))
        )


def test_groups_of_an_old_trace_come_from_the_execution_trace(tmp_path):
    old = plain(WITHOUT / "rank0.pt.trace.json.gz")
    del old["distributedInfo"]["pg_config"]
    write(tmp_path / "rank0.pt.trace.json.gz", old)
    shutil.copy(WITHOUT / "rank0.et.json.gz", tmp_path)
    groups = load(tmp_path).trace(0).groups
    assert groups.select("group", "description", "ranks").rows() == [("0", "default_pg", [0, 1]), ("1", "tp", [0, 1])]


def test_the_first_schema_is_read_too(copied):
    path = copied / "rank0.et.json.gz"
    expected = load(copied).trace(0).ops
    new = plain(path)
    for node in new["nodes"]:
        inputs, attributes = node.pop("inputs"), {a["name"]: a["value"] for a in node.pop("attrs")}
        node |= {"inputs": inputs["values"], "input_shapes": inputs["shapes"], "input_types": inputs["types"]}
        node |= {"rf_id": attributes["rf_id"]}
    write(path, new | {"schema": "1.0.1"})
    assert load(copied).trace(0).ops.drop("strides").equals(expected.drop("strides"))


def test_a_file_that_another_tool_wrote_again_is_recognized(copied):
    path = copied / "rank0.et.json.gz"
    expected = load(copied).trace(0).ops
    document = plain(path)
    write(path, {"nodes": document.pop("nodes"), **document})
    path.rename(copied / "linked_rank0.json.gz")
    assert load(copied).data_quality.is_empty()
    assert load(copied).trace(0).ops.equals(expected)


def test_an_execution_trace_alone_is_named(tmp_path):
    shutil.copy(WITHOUT / "rank0.et.json.gz", tmp_path / "anything.json")
    for path in (tmp_path, tmp_path / "anything.json"):
        ended = cli_runner.tracekit("check", path)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr.count("\n") == 1
        assert f"{tmp_path / 'anything.json'}: this is an execution trace of PyTorch" in ended.stderr
        assert "put the profiler's trace of the same process into its folder" in ended.stderr


def test_both_files_can_be_named(copied):
    run = load([copied / "rank0.pt.trace.json.gz", copied / "rank0.et.json.gz"])
    assert run.trace(0).ops["shapes"].null_count() < run.trace(0).ops.height


@pytest.mark.parametrize("named", ["rank0.pt.trace.json.gz", "rank[0].pt.trace*"])
def test_a_named_trace_file_is_joined_with_the_execution_trace_next_to_it(copied, named):
    expected = load(copied).trace(0).ops
    run = load(copied / named)
    assert [source.rank for source in run.sources] == [0]
    assert run.trace(0).ops.equals(expected)
    assert "unmatched_companion" not in run.data_quality["kind"].to_list()


def test_damaged_or_foreign_execution_traces_next_to_a_named_trace_do_not_hide_its_errors(copied):
    (copied / "rank0.et.json.gz").write_bytes(b"{")
    assert load(copied / "rank0.pt.trace.json.gz").trace(0).ops.height
    (copied / "rank0.pt.trace.json.gz").write_bytes(b"{")
    with pytest.raises(BadTraceError, match=r"rank0\.pt\.trace\.json\.gz"):
        load(copied / "rank0.pt.trace.json.gz")


def merge(folder, path):
    """Write the traces of a folder into one file whose events state their rank."""
    events = [
        event | {"args": event.get("args", {}) | {"rank": rank}}
        for rank in (0, 1)
        for event in plain(folder / f"rank{rank}.pt.trace.json.gz")["traceEvents"]
    ]
    write(path, {"traceEvents": events})


def test_each_rank_of_a_merged_file_is_joined_with_its_execution_trace(copied):
    expected = [load(copied).trace(rank) for rank in (0, 1)]
    assert all(any(trace.ops["shapes"]) for trace in expected)
    merge(copied, copied / "merged.json.gz")
    for rank in (0, 1):
        (copied / f"rank{rank}.pt.trace.json.gz").unlink()
        (copied / f"rank{rank}.et.json.gz").rename(copied / f"of{rank}.et.json.gz")  # joined by process id
    for path in (copied, copied / "merged.json.gz"):
        run = load(path)
        assert run.data_quality.filter(kind="unmatched_companion").is_empty()
        for rank in (0, 1):
            found, wanted = run.trace(rank), expected[rank]
            assert any(found.ops["shapes"])
            for column in ("name", "shapes", "strides"):
                assert found.ops[column].to_list() == wanted.ops[column].to_list()
            columns = ["group", "description", "backend"]  # a merged file does not state how many ranks there are
            assert found.groups.select(columns).equals(wanted.groups.select(columns))
    (copied / "of1.et.json.gz").unlink()
    run = load(copied)
    assert any(run.trace(0).ops["shapes"])
    assert not any(run.trace(1).ops["shapes"])


def test_an_execution_trace_of_a_trace_without_record_ids_is_reported(copied, tmp_path):
    run = load(copied)
    exported = tmp_path / "exported" / "run.pftrace"
    exported.parent.mkdir()
    cli_runner.tracekit("export", copied, "--out", exported)
    shutil.copy(copied / "rank0.et.json.gz", exported.parent)
    issues = load(exported.parent).data_quality.filter(kind="unmatched_companion")
    assert issues["message"].str.contains("no ids of record functions").to_list() == [True]
    assert load(exported.parent).trace(0).ops.equals(run.trace(0).ops)


def test_an_execution_trace_of_another_process_is_left_out(copied):
    for rank in (0, 1):
        (copied / f"rank{rank}.et.json.gz").unlink()
    shutil.copy(WITH / "rank0.et.json.gz", copied)
    run = load(copied)
    assert run.data_quality["kind"].to_list() == ["unmatched_companion"]
    assert "no trace is of this process" in run.data_quality["message"][0]
    assert run.trace(0).ops["shapes"].null_count() == run.trace(0).ops.height


def with_process(path, process):
    text = gzip.decompress(path.read_bytes()).decode()
    text = re.sub(r'"pid": \d+', f'"pid": {process}', text)
    path.write_bytes(gzip.compress(text.encode()))


def test_equal_process_ids_on_two_machines_are_separated_by_name(copied):
    for path in copied.iterdir():
        with_process(path, 7)
    expected = load(WITHOUT)
    for rank in (0, 1):
        assert load(copied).trace(rank).ops["shapes"].to_list() == expected.trace(rank).ops["shapes"].to_list()
    (copied / "rank1.et.json.gz").rename(copied / "other.json.gz")
    assert "ranks 0, 1 have this process id" in load(copied).data_quality["message"][0]


def test_a_trace_without_record_functions_gets_no_shapes_and_says_so(copied):
    old = plain(copied / "rank0.pt.trace.json.gz")
    for event in old["traceEvents"]:
        event.get("args", {}).pop("Record function id", None)
    write(copied / "rank0.pt.trace.json.gz", old)
    trace = load(copied).trace(0)
    assert trace.ops["shapes"].null_count() == trace.ops.height
    assert "have no record function ids" in trace.data_quality.filter(kind="unmatched_companion")["message"][0]


def test_a_truncated_execution_trace_is_read_to_its_end(copied):
    path = copied / "rank0.et.json.gz"
    text = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(text[: len(text) // 2]))
    trace = load(copied).trace(0)
    assert 0 < trace.ops["shapes"].null_count() < trace.ops.height
    assert trace.data_quality["kind"].to_list() == ["bad_companion", "unmatched_companion"]
    path.write_bytes(gzip.compress(text[:800]))
    trace = load(copied).trace(0)
    assert trace.ops["shapes"].null_count() == trace.ops.height
    assert trace.data_quality["kind"].to_list() == ["bad_companion"]


@pytest.mark.parametrize(
    "nodes",
    [
        '{"name": 1, "attrs": [{"name": "rf_id", "value": [' + "[" * 5000 + "]" * 5000 + "]}]}",
        '{"name": "a", "inputs": {"values": 3}, "attrs": [{"name": "rf_id", "value": "x"}]}',
        '{"name": "a", "attrs": 5}',
        '{"name": "a", "rf_id": 99999999999999999999999999}',
        "5",
    ],
)
def test_malformed_nodes_never_lose_the_trace(copied, nodes):
    process = plain(copied / "rank0.et.json.gz")["pid"]
    text = f'{{"schema": "1.1.1", "pid": {process}, "nodes": [{nodes}]}}'
    (copied / "rank0.et.json.gz").write_bytes(gzip.compress(text.encode()))
    trace = load(copied).trace(0)
    assert trace.ops.height > 100
    assert set(trace.data_quality["kind"]) <= {"bad_companion", "unmatched_companion"}
    assert not trace.data_quality.is_empty()


def test_a_file_that_unpacks_to_too_much_is_left_out(copied):
    (copied / "rank0.et.json.gz").write_bytes(gzip.compress(b'{"schema": "1.1.1", "nodes": [' + b" " * (80 << 20)))
    with pytest.raises(BadTraceError, match="far more bytes"):
        execution_trace.load(str(copied / "rank0.et.json.gz"))
    assert load(copied).trace(0).data_quality["kind"].to_list() == ["bad_companion"]


def test_an_execution_trace_that_comes_later_is_not_missed_by_the_cache(copied, monkeypatch):
    monkeypatch.setenv("TRACEKIT_CACHE_DIR", str(copied.parent / "cache"))
    absent = copied.parent / "rank0.et.json.gz"
    shutil.move(copied / absent.name, absent)
    assert tracekit.load(copied).trace(0).ops["shapes"].null_count() == tracekit.load(copied).trace(0).ops.height
    shutil.move(absent, copied / absent.name)
    for _ in range(2):
        ops = tracekit.load(copied).trace(0).ops
        assert ops["shapes"].null_count() < ops.height


def test_archives_and_remote_folders_have_execution_traces_too(copied):
    expected = load(copied).trace(1).ops["shapes"].to_list()
    assert any(expected)
    with tarfile.open(copied.parent / "run.tar", "w") as archive:
        archive.add(copied, "run")
    assert load(copied.parent / "run.tar").trace(1).ops["shapes"].to_list() == expected
    memory = fsspec.filesystem("memory")
    memory.put(f"{copied}/", "memory://traced/run/", recursive=True)
    try:
        assert load("memory://traced/run").trace(1).ops["shapes"].to_list() == expected
    finally:
        memory.rm("memory://traced", recursive=True)
