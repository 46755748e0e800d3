"""Databases of Ascend PyTorch Profiler: operators, calls, tasks, collectives; files with the published columns."""

import gzip
import json
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import ascend_files, kineto_files
from tests.support.ascend_files import BASE_NS
from tracekit.analysis.time import breakdown
from tracekit.errors import BadTraceError
from tracekit.model import environment
from tracekit.rules import engine

CASE = Path(__file__).parents[4] / "shared" / "cases" / "npu_device" / "trace_view.json.gz"


def load(path):
    return tracekit.load(str(path), cache=False)


def written(folder, rank=0, **options):
    drawing = ascend_files.training(rank, **options)
    return ascend_files.write(folder / f"ascend_pytorch_profiler_{rank}.db", drawing)


def test_tasks_collectives_and_their_launches_are_read(tmp_path):
    # µs    40 copy 90   90 wait 100   100 product 500   500 all-reduce 800     next at 1000
    trace = load(written(tmp_path)).trace(0, 0)
    work = trace.activities.sort("start_ns")
    assert work["kind"].to_list() == ["memcpy", "compute", "communication"] * 2
    assert work["start_ns"].to_list()[:3] == [BASE_NS + at for at in (40_000, 100_000, 500_000)]
    assert work["dur_ns"].to_list()[:3] == [50_000, 400_000, 300_000]
    launches = trace.ops.filter(pl.col("kind") == "runtime", pl.col("name") != "Enqueue")
    assert launches["name"].to_list()[:3] == ["aclrtMemcpyAsync", "aclnnMm_MatMulV3", "hcom_allReduce_"]
    assert set(work["launch_id"]) == set(launches["id"])
    (product,) = trace.ops.filter(name="aten::mm").head(1).to_dicts()
    assert json.loads(product["shapes"]) == [[64, 32], [32, 16]]
    assert json.loads(product["dtypes"]) == ["c10::BFloat16", "c10::BFloat16"]
    assert trace.steps["step"].to_list() == [0, 1]
    assert set(work["step"]) == {0, 1}
    assert "Ascend910B3" in str(environment.device_names(trace.header))


def test_collectives_have_group_ranks_and_size(tmp_path):
    for rank in range(2):
        written(tmp_path, rank)
    run = load(tmp_path)
    assert run.ranks == (0, 1)
    collectives = run.trace(1).collectives
    assert set(collectives["op"]) == {"all_reduce"}
    assert set(collectives.select("sent_bytes", "received_bytes").rows()) == {(4096, 4096)}
    assert run.trace(1).groups["ranks"].to_list() == [[0, 1]]
    assert "missing_rank" not in set(run.data_quality["kind"])


def test_the_parts_of_the_time_are_those_of_the_drawing(tmp_path):
    (row,) = load(written(tmp_path, steps=1)).table(breakdown.by_rank).to_dicts()
    parts = {name: row[name] for name in ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")}
    assert parts == {
        "compute_ns": 400_000,
        "exposed_communication_ns": 300_000,
        "exposed_copy_ns": 50_000,
        "idle_ns": 10_000,
    }


def test_steps_are_those_of_the_table_if_no_operator_marks_them(tmp_path):
    trace = load(written(tmp_path, with_marks=False)).trace(0)
    assert trace.steps["step"].to_list() == [0, 1]
    assert trace.steps["host_start_ns"].to_list() == [BASE_NS, BASE_NS + 1_000_000]


def test_rows_with_odd_values_are_left_out_and_counted(tmp_path):
    drawing = ascend_files.training()
    tables = drawing.tables
    tables["TASK"][2]["endNs"] = "later"
    tables["COMMUNICATION_OP"][0]["startNs"] = None
    tables["PYTORCH_API"][1]["startNs"] = "-5"
    tables["CANN_API"][0]["name"] = 10**9
    tables["META_DATA"] = [{"name": "parallel_group_info", "value": '{"group0": {"global_ranks": ["x"]}}'}]
    run = load(ascend_files.write(tmp_path / "ascend_pytorch_profiler.db", drawing))
    trace = run.trace(0)
    assert trace.activities["kind"].to_list().count("compute") == 1
    assert any("3 rows" in message for message in trace.data_quality.filter(kind="bad_times")["message"])
    engine.check(run)


@pytest.mark.parametrize("rank", [-1, 1 << 40, "x"])
def test_a_rank_that_is_none_is_that_of_the_name(tmp_path, rank):
    drawing = ascend_files.training()
    drawing.tables["RANK_DEVICE_MAP"] = [{"rankId": rank, "deviceId": 0}]
    assert load(ascend_files.write(tmp_path / "ascend_pytorch_profiler_1.db", drawing)).ranks in {(0,), (1,)}


def test_a_database_without_events_or_that_is_cut_is_refused(tmp_path):
    empty = ascend_files.write(tmp_path / "ascend_pytorch_profiler_3.db", ascend_files.Drawing(0))
    with pytest.raises(BadTraceError, match="no operator and no task"):
        load(empty)
    whole = written(tmp_path)
    cut = tmp_path / "cut.db"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(BadTraceError, match="damaged"):
        load(cut)


def test_other_databases_in_a_folder_do_not_count_as_missing_traces(tmp_path):
    written(tmp_path)
    (tmp_path / "mlflow.db").write_bytes(b"SQLite format 3\0")
    assert load(tmp_path).ranks == (0,)


@pytest.mark.skipif(not CASE.exists(), reason="the case is not here")
class TestBesideTraceView:
    """A public trace_view.json, and its events in the tables of a database."""

    @pytest.fixture
    def folder(self, tmp_path):
        events = json.loads(gzip.decompress(CASE.read_bytes()))
        (tmp_path / "trace_view.json").write_text(json.dumps(events))
        ascend_files.write(tmp_path / "ascend_pytorch_profiler.db", _of_trace_view(events))
        return tmp_path

    def test_both_say_what_the_profiler_itself_says(self, folder):
        of_json, of_database = (
            load(folder / name).table(breakdown.by_rank).to_dicts()[0]
            for name in ("trace_view.json", "ascend_pytorch_profiler.db")
        )
        # The profiler's own Overlap Analysis: computing 1.79 ms, free 9.48 ms of 11.27 ms.
        for row in (of_json, of_database):
            assert row["compute_ns"] + row["exposed_copy_ns"] == pytest.approx(1_790_000, abs=10_000)
            assert row["idle_ns"] == pytest.approx(9_480_000, abs=20_000)

    def test_a_folder_with_both_has_the_events_once(self, folder):
        run = load(folder)
        assert len(run.ranks) == 1
        assert run.trace(run.ranks[0]).activities.height == load(folder / "trace_view.json").trace(0).activities.height


def _of_trace_view(events):
    """The operators, calls and tasks of a trace_view.json as rows of a database."""
    drawing = ascend_files.Drawing(0)
    tables, texts = drawing.tables, drawing.texts
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    calls, works = (
        {(event["tid"], event["ts"]): int(event["id"]) % (1 << 31) for event in arrows if event["ph"] == phase}
        for arrows in [[event for event in events if event.get("cat") == "HostToDevice"]]
        for phase in "sf"
    )
    for event in (event for event in events if event["ph"] == "X"):
        start_ns = int(event["ts"].replace(".", ""))
        span = {"startNs": start_ns, "endNs": start_ns + round(1000 * event["dur"])}
        place, name = (event["tid"], event["ts"]), {"name": texts[event["name"]]}
        thread = {"globalTid": ascend_files.thread(event["tid"])}
        if names[event["pid"]] == "CANN":
            tables["CANN_API"].append(span | name | thread | {"connectionId": calls.get(place)})
        elif names[event["pid"]] == "Ascend Hardware":
            row = {"deviceId": 0, "streamId": event["tid"], "connectionId": works.get(place)}
            task = {"globalTaskId": len(tables["TASK"])}
            tables["TASK"].append(span | row | task | {"taskType": texts[event["name"]]})
            if not event["name"].startswith(("EVENT", "NOTIFY", "MEMCPY")):
                tables["COMPUTE_TASK_INFO"].append(name | task)
        elif names[event["pid"]] == "Python":
            times = {key: str(at_ns) for key, at_ns in span.items()}
            kind = {"cpu_op": 50001}.get(event.get("cat"), 50002)
            tables["PYTORCH_API"].append(times | thread | name | {"type": kind})
    return drawing


def test_ranks_are_those_that_the_profiler_states_beside_trace_view(tmp_path):
    for place, rank in enumerate((1, 0)):
        folder = tmp_path / f"host_{4000 + place}_2026_ascend_pt"
        (folder / "ASCEND_PROFILER_OUTPUT").mkdir(parents=True)
        document = {**kineto_files.trace(rank, steps=2), "distributedInfo": {}}
        kineto_files.write(folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json", document)
        (folder / f"profiler_info_{rank}.json").write_text("{}")
        (folder / "profiler_metadata.json").write_text("{}")
    run = load(tmp_path)
    assert {source.rank: Path(source.path).parts[-3] for source in run.sources} == {
        0: "host_4001_2026_ascend_pt",
        1: "host_4000_2026_ascend_pt",
    }
    assert not {"rank_guessed", "not_a_trace"} & set(run.data_quality["kind"])


def test_a_description_alone_is_no_trace(tmp_path):
    (tmp_path / "profiler_info_0.json").write_text('{"config": {}}')
    with pytest.raises(BadTraceError):
        load(tmp_path)
