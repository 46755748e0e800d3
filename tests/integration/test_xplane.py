"""XPlane profiles of XLA: work of GPUs and TPUs, steps and launches, by files written by the published proto."""

import gzip

import pytest

import tracekit
from tests.support import xplane_files
from tests.support.cli_runner import ROOT
from tests.support.xplane_files import BASE_NS, Event, plane, space
from tracekit.analysis.time import breakdown
from tracekit.errors import BadTraceError
from tracekit.ingest.readers.xplane import reader
from tracekit.rules import engine

MS = 1_000_000
CUT = ROOT / "tests" / "recordings" / "foreign" / "host.xplane.pb"


def load(path):
    return tracekit.load(path, cache=False)


def write(folder, content, name="host.xplane.pb"):
    (folder / name).write_bytes(content)
    return folder / name


def test_a_gpu_has_its_streams_launches_and_steps(tmp_path):
    # ms        0.1 launches   0.5 product 4.5   4.5 all-reduce 7.5 (4.6 copy 4.7)        next step at 10
    run = load(write(tmp_path, xplane_files.gpu()))
    trace = run.trace(0, 0)
    assert trace.steps["step"].to_list() == [0, 1, 2]
    work = trace.activities.filter(step=1).sort("start_ns")
    assert work["kind"].to_list() == ["compute", "communication", "memcpy"]
    assert work["start_ns"].to_list() == [BASE_NS + at for at in (10_500_000, 14_500_000, 14_600_000)]
    assert work["dur_ns"].to_list() == [4 * MS, 3 * MS, MS // 10]
    assert work["bytes"].to_list() == [None, None, 4096]
    assert work["launch_id"].null_count() == 0
    assert trace.lanes.filter(device=0)["stream"].to_list() == [13, 20]
    step = run.table(breakdown.by_step).filter(step=1).row(0, named=True)
    assert (step["duration_ns"], step["compute_ns"], step["idle_ns"]) == (10 * MS, 4 * MS, 3 * MS)
    assert step["exposed_communication_ns"] == 3 * MS


def test_each_tpu_is_a_rank_with_the_steps_that_it_states(tmp_path):
    # ms    0 start .01 fusion 3.01 fusion 6.01 all-reduce-done 8.01 idle 10
    run = load(write(tmp_path, xplane_files.tpu()))
    assert run.ranks == (0, 1)
    assert run.trace(1, 0).steps["step"].to_list() == [5, 6, 7]
    step = run.table(breakdown.by_step).filter(step=6, rank=0).row(0, named=True)
    assert (step["duration_ns"], step["compute_ns"]) == (10 * MS, 6 * MS)
    assert step["exposed_communication_ns"] == 2 * MS
    assert step["idle_ns"] == 2 * MS
    assert run.trace(0, 0).collectives["op"].to_list() == ["all_reduce"] * 3


def test_devices_of_several_hosts_are_ranks_of_one_job(tmp_path):
    folder = tmp_path / "plugins" / "profile" / "2026_11_30"
    folder.mkdir(parents=True)
    for host in (2, 10):
        write(folder, xplane_files.tpu(), name=f"worker-{host}.xplane.pb")
    run = load(folder)
    assert run.ranks == (0, 1, 2, 3)
    assert {rank: run.trace(rank, 0).path.rpartition("/")[2] for rank in run.ranks} == {
        0: "worker-2.xplane.pb", 1: "worker-2.xplane.pb", 2: "worker-10.xplane.pb", 3: "worker-10.xplane.pb",
    }  # fmt: skip
    assert set(run.data_quality.filter(kind="rank_guessed")["message"].str.contains("worker-")) == {True}
    for rank in run.ranks:
        step = run.table(breakdown.by_step).filter(step=6, rank=rank).row(0, named=True)
        assert (step["duration_ns"], step["compute_ns"]) == (10 * MS, 6 * MS)


def test_recordings_of_one_host_are_windows(tmp_path):
    for day in (1, 2):
        folder = tmp_path / f"2026_11_0{day}"
        folder.mkdir()
        other = space(plane("/host:metadata", {})) * day  # a copy of a file would be left out
        write(folder, xplane_files.tpu() + other, name="worker-2.xplane.pb")
    run = load(tmp_path)
    assert run.ranks == (0, 1)
    assert {source.window for source in run.sources} == {0, 1}


def test_operations_without_launches_are_no_lost_launches(tmp_path):
    report = engine.check(load(write(tmp_path, xplane_files.tpu())))
    assert "HOST001" in report.blind_spots
    assert "COMM001" not in report.blind_spots
    kinds = {kind for f in report.findings if f.code == "DATA001" for kind in f.evidence["kind"]}
    assert "compiled_program" in kinds
    assert "no_host_activity" not in kinds
    assert [f.cost_ns for f in report.findings if f.code == "COMM001"] == [2 * MS]


def test_a_host_alone_is_refused(tmp_path):
    host = space(plane("/host:CPU", {"python": [Event("step", 0, 100, {"step_num": 1})]}))
    with pytest.raises(BadTraceError, match="without a device"):
        load(write(tmp_path, host))


def test_a_device_of_another_kind_is_refused(tmp_path):
    other = space(plane("/device:CUSTOM:Megascale Trace", {"XLA Ops": [Event("send", 0, 100)]}))
    with pytest.raises(BadTraceError, match="Megascale"):
        load(write(tmp_path, other))


def test_a_cut_file_is_read_up_to_the_cut_or_refused():
    with pytest.raises(BadTraceError, match="ends early"):
        load(CUT)


def test_planes_before_a_cut_are_read(tmp_path):
    whole = xplane_files.gpu()
    trace = load(write(tmp_path, whole + b"\x0a\xff\x01" + b"x" * 20)).trace(0, 0)
    assert trace.activities.height == 9
    assert "truncated" in trace.data_quality["kind"]


def test_a_packed_profile_is_read(tmp_path):
    packed = write(tmp_path, gzip.compress(xplane_files.gpu(1)), "host.xplane.pb.gz")
    assert load(packed).trace(0, 0).activities.height == 3


def test_sums_of_many_events_are_no_events(tmp_path):
    counted = xplane_files.message((1, 1), (5, 12), (3, 10**9))
    line = xplane_files.message((1, 1), (2, "XLA Ops"), (3, BASE_NS), (4, counted))
    names = xplane_files.message((1, 1), (2, xplane_files.message((1, 1), (2, "fusion"))))
    content = space(xplane_files.message((2, "/device:TPU:0"), (3, line), (4, names)))
    with pytest.raises(BadTraceError, match="no device work"):
        load(write(tmp_path, content))


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("%all-reduce.12", "allreduce"),
        ("all-gather-done.1", "all_gather"),
        ("reduce-scatter.3", "reduce_scatter"),
        ("ragged-all-to-all.3", "all_to_all"),
        ("fusion.all-reduce", None),
        ("reduce.4", None),
    ],
)
def test_collectives_are_named_as_xla_names_them(name, op):
    match = reader._COLLECTIVE.match(name)
    assert (None if match is None else reader._COLLECTIVES[match[1]]) == op
